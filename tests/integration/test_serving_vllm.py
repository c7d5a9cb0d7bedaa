"""Real vLLM on the CPU through our own serving code: up with a real token, gone without a trace, refusals quoted."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from replay import serving
from replay.experiment import Backend
from tests.integration import vllm_cpu
from workloads.errors import UserError

pytestmark = vllm_cpu.needs_vllm


def backend(model: Path | str, **changes: Any) -> Backend:
    return Backend.model_validate({"serve": vllm_cpu.serve(model)} | changes)


def test_a_real_server_comes_up_and_goes(tiny_model: Path, tmp_path: Path) -> None:
    told: list[str] = []
    server = serving.start(
        backend(tiny_model, decode_backend="latency_specialized"),
        name="candidate",
        model="tiny",
        folder=tmp_path / "server",
        headers={},
        tell=lambda event: told.append(event.text),
    )
    try:
        with urllib.request.urlopen(f"{server.url}/v1/models", timeout=10) as reply:
            assert [each["id"] for each in json.load(reply)["data"]] == ["tiny"]
        guard = psutil.Process(server.guard.pid)
        pids = {guard.pid, *(process.pid for process in guard.children(recursive=True))}
        assert len(pids) >= 4  # guard, API server, engine, worker
        assert serving.died(server) is None
    finally:
        serving.stop(server, tell=lambda _: None)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    log = (tmp_path / "server" / "server.log").read_text()
    assert "'additional_config': {'decode_backend': 'latency_specialized'}" in log
    assert server.command.ready_s is not None
    assert any("candidate: starting for " in text for text in told)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"model": "/no/such/modle"}, "ended with status 1: there is no such model: .*'/no/such/modle'"),
        (
            {"play": ["--max-model-length", "10"]},
            "ended with status 2: .*unrecognized arguments: --max-model-length 10",
        ),
    ],
)
def test_a_refusal_is_quoted(tiny_model: Path, tmp_path: Path, wrong: dict[str, Any], told: str) -> None:
    given = backend(wrong.get("model", tiny_model))
    assert given.serve is not None
    assert isinstance(given.serve.command, list)
    given.serve.command.extend(wrong.get("play", []))
    with pytest.raises(UserError, match=told):
        serving.start(given, name="baseline", model="tiny", folder=tmp_path / "server", headers={}, tell=lambda _: None)
