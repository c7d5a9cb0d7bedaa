"""From a path to sessions: folders, lines, digests, repeated ids, and what is said of bad input."""

from __future__ import annotations

import hashlib
import json
import os
import socket
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


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty file"),
        (b" \n\n", "empty file"),
        (b'{"requests":' * 100_000, "nested too deeply to be read"),
        (b"\0" * 100, "not JSON: expecting value at byte 0"),
        (b"hello", "not JSON: expecting value at byte 0"),
        (b'{"requests": [], "block_size": 64', "not JSON: it ends too early at byte 33"),
        (b"{'requests': []}", "not JSON: expecting property name enclosed in double quotes at byte 1"),
        (b'{"t": NaN}', r"not JSON: NaN .* at byte 6"),
        (b'{"t": -Infinity}', r"not JSON: -Infinity .* at byte 6"),
        (b'{"t": Infinity}', r"not JSON: Infinity .* at byte 6"),
        (b'{"t": "\\ud800"}', r"not JSON: the lone surrogate \\ud800 at byte 7"),
        (b'{"t": "\\ud83d\\ude00\\udc00"}', r"not JSON: the lone surrogate \\udc00 at byte 19"),
        (b'{"t": "\\\\ud800", }', r"not JSON: (expecting|illegal trailing)"),
        (b'{"\xed\xa0\x80": 1}', "not JSON: a lone surrogate at byte 2"),
        (b'{"\xff": 1}', "not JSON: not UTF-8 at byte 2"),
        ('{"t": 1}'.encode("utf-16"), "looks like UTF-16: convert it to UTF-8"),
        ('{"t": 1}'.encode("utf-16-le"), "looks like UTF-16: convert it to UTF-8"),
        ('{"t": 1}'.encode("utf-16-be"), "looks like UTF-16: convert it to UTF-8"),
    ],
)
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_what_is_no_json_is_told_from_what_is_another_format(
    tmp_path: Path, data: bytes, said: str, suffix: str
) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"x\{suffix}(:1)?: {said}"):
        detect(path)
    if data.strip():
        with pytest.raises(UserError, match=rf"no session could be read .*x\{suffix}(:1)?: {said}"):
            list(read(path, Notes(), format="weka"))
        path = tmp_path / "all.jsonl"
        path.write_bytes(json.dumps(_named("x")).encode() + b"\n" + data)
        notes = Notes()
        assert [trace.id for trace in read(path, notes)] == ["x"]
        assert notes.counts == {"unreadable session skipped": 1}


@pytest.mark.timeout(20)
def test_only_regular_files_and_folders_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _folder(tmp_path / "sessions")
    (folder / "a.json").write_text(json.dumps(_named("a")))
    os.mkfifo(folder / "x.json")
    for path in (folder / "x.json", folder, Path("/dev/null")):
        with pytest.raises(UserError, match=r"(x\.json|/dev/null) is a FIFO, socket or device: only regular files"):
            detect(path)
    server = socket.socket(socket.AF_UNIX)
    try:
        monkeypatch.chdir(folder)  # the path of a socket is short
        server.bind("s.json")
        with pytest.raises(UserError, match=r"s\.json is a FIFO, socket or device"):
            detect(folder / "s.json")
    finally:
        server.close()


def test_the_session_with_two_origins_is_named(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    odd = session(call(0, 25, [1, 2]), call(1.7e12, 40, [1, 2, 3, 4]), id="odd")
    path.write_text(json.dumps(odd) + "\n" + json.dumps(_named("x")))
    notes = Notes()
    assert [trace.id for trace in read(path, notes)] == ["x"]
    assert notes.counts == {"session with two origins of time skipped": 1}
    first = notes.first["session with two origins of time skipped"]
    assert first.startswith(f"{path}:1: session 'odd': 1.7e+12 s comes next after 0 s")
    assert first.endswith("at `$.requests[1]`")


@pytest.mark.parametrize("key", ["block_size", "tool_tokens", "system_tokens", "id", "hash_ids"])
def test_numbers_of_any_size_can_be_digested(tmp_path: Path, key: str) -> None:
    path = tmp_path / "all.jsonl"
    odd = _named("y")
    if key == "hash_ids":
        odd["requests"][0][key] = [10**30]
    else:
        odd[key] = 10**30
    path.write_text(json.dumps(_named("x")) + "\n" + json.dumps(odd))
    notes = Notes()
    assert len(list(digesting(read(path, notes), hashlib.sha256()))) == (1 if key in ("block_size", "hash_ids") else 2)
    assert any(f"$.{key}" in first or f"].{key}" in first for first in notes.first.values()) or key == "id"


def test_a_prompt_that_no_memory_holds_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    rows = [call(10.0 * n, 25, [1, 2]) for n in range(4)] + [call(50, 1_000_000_000_000, [1, 2])]
    path.write_text(json.dumps(session(*rows)))
    notes = Notes()
    (trace,) = read(path, notes)
    assert len(trace.streams[0].turns) == 4
    assert notes.first["request that cannot be read skipped"].startswith(f"{path}:1 Expected `int` <= 100000000 - at")


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
