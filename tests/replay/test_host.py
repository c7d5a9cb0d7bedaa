"""What the client's host must hold, in words that name what was asked for."""

from __future__ import annotations

import resource

import pytest

from replay import host
from workloads.errors import UserError


def test_too_few_open_files_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (200, 200))
    with pytest.raises(UserError, match="100 streams need 228 open files; this host allows 200"):
        host.check_client(100, "streams")
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    (warning,) = host.check_client(64, "lanes")
    assert "200 open files may be too few for 64 lanes with subagents" in str(warning)
    (warning,) = host.check_client(64, "streams")
    assert "200 open files may be too few for 64 streams\n" in str(warning)
