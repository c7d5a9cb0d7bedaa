"""From a path to sessions: folders, lines, digests, repeated ids, and what is said of bad input."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.workloads.weka_sessions import call, session
from workloads.errors import UserError
from workloads.formats import detect, digesting, read
from workloads.trace import Notes


def _named(name: str) -> dict[str, Any]:
    return session(call(0, 25, [1, 2]), call(5, 40, [1, 2, 3, 4]), id=name)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    for _ in digesting(read(path, Notes()), digest):
        pass
    return digest.hexdigest()


def test_folder_file_and_lines_hold_the_same_sessions(tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    folder.mkdir()
    for name in ("b", "a", "c"):
        (folder / f"{name}.json").write_text(json.dumps(_named(name), indent=1))
    (folder / "LICENSE").write_text("not a session")
    lines = tmp_path / "all.jsonl"
    lines.write_text("\n\n".join(json.dumps(_named(name)) for name in "abc"), encoding="utf-8-sig")
    assert [trace.id for trace in read(folder, Notes())] == ["a", "b", "c"]
    assert list(read(folder, Notes())) == list(read(lines, Notes()))
    assert [trace.id for trace in read(folder / "b.json", Notes())] == ["b"]
    assert detect(folder) == detect(lines) == "weka"
    assert _digest(folder) == _digest(lines)


def test_digest_sees_every_change_of_content(tmp_path: Path) -> None:
    base = session(call(0, 25, [1, 2]), call(5, 40, [1, 2, 3, 4]))
    changed = [
        base,
        session(call(0, 25, [1, 2]), call(5, 40, [1, 2, 3, 5])),
        session(call(0, 25, [1, 2]), call(5.001, 40, [1, 2, 3, 4])),
        session(call(0, 25, [1, 2], out=11), call(5, 40, [1, 2, 3, 4])),
        base | {"id": "other"},
    ]
    digests = []
    for place, one in enumerate(changed):
        path = tmp_path / f"{place}.json"
        path.write_text(json.dumps(one))
        digests.append(_digest(path))
    assert len(set(digests)) == len(changed)


def test_repeated_session_ids_are_qualified(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    path.write_text("\n".join(json.dumps(_named(name)) for name in ("x", "x#2", "x", "x")))
    notes = Notes()
    ids = [trace.id for trace in read(path, notes)]
    assert ids == ["x", "x#2", "x#3", "x#4"]
    assert notes.counts == {"repeated session id qualified": 2}


def test_session_without_id_is_named_by_its_place(tmp_path: Path) -> None:
    nameless = _named("x")
    del nameless["id"]
    path = tmp_path / "all.jsonl"
    path.write_text(json.dumps(nameless) + "\n" + json.dumps(nameless))
    ids = [trace.id for trace in read(path, Notes())]
    assert len(set(ids)) == 2
    assert all("all" in name for name in ids)


def test_bad_lines_are_named_counted_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    good = json.dumps(_named("x"))
    wrong = json.dumps(_named("y")).replace('"in": 40', '"in": "forty"')
    path.write_text("\n".join([good, good[:50], wrong, '"text"', good[:-1]]))
    notes = Notes()
    assert [trace.id for trace in read(path, notes)] == ["x"]
    assert notes.counts == {"unreadable session skipped": 4}
    assert notes.first["unreadable session skipped"].startswith(f"{path}:2: ")
    path.write_text("\n".join([good, wrong]))
    notes = Notes()
    list(read(path, notes))
    assert (
        "all.jsonl:2: Expected `int | null`, got `str` - at `$.requests[1].in`"
        in notes.first["unreadable session skipped"]
    )


def test_deep_nesting_is_skipped_not_fatal(tmp_path: Path) -> None:
    deep = call(0, 10, [1])
    for _ in range(400):
        deep = {"t": 0.0, "type": "subagent", "requests": [deep]}
    path = tmp_path / "all.jsonl"
    path.write_text(json.dumps(_named("x")) + "\n" + json.dumps(session(deep, id="deep")))
    assert "x" in [trace.id for trace in read(path, Notes())]


def test_nothing_readable_is_the_users_to_mend(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    path.write_text(json.dumps(_named("y")).replace('"in": 40', '"in": "forty"'))
    with pytest.raises(UserError, match=r"no session could be read .*all\.jsonl:1: .*requests\[1\]\.in"):
        list(read(path, Notes()))
    with pytest.raises(UserError, match="does not exist"):
        list(read(tmp_path / "nowhere", Notes()))
    with pytest.raises(UserError, match=r"holds no \*\.json"):
        list(read(_folder(tmp_path / "empty"), Notes()))
    other = tmp_path / "other.jsonl"
    other.write_text('{"messages": []}\n')
    with pytest.raises(UserError, match="not a format that decodegate reads"):
        list(read(other, Notes()))
    with pytest.raises(UserError, match="unknown workload format 'weko': choose from weka"):
        list(read(path, Notes(), format="weko"))
    packed = tmp_path / "all.tar.xz"
    packed.write_bytes(b"\xfd7zXZ\x00")
    with pytest.raises(UserError, match="unpack it first"):
        list(read(packed, Notes()))


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_one_session_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """Ten times the sessions, about the same peak."""
    ids = list(range(20_000))
    line = json.dumps(session(*(call(10.0 * n, 200_000, ids) for n in range(5))))

    def peak(sessions: int) -> int:
        path = tmp_path / f"{sessions}.jsonl"
        path.write_text("\n".join([line] * sessions))
        tracemalloc.start()
        assert sum(1 for _ in read(path, Notes())) == sessions
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(20) < 1.3 * peak(2)
