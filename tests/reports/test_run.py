"""Loading: torn and damaged files, blocks that are not judged, directories that are none."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from replay.records import CHUNK, Block
from reports.analysis import analyse
from reports.run import load
from tests.reports.make_run import BASELINE, CANDIDATE, make_run, request, write_block, write_frame
from workloads.errors import UserError


def small(path: Path, **options: object) -> Path:
    return make_run(path, sessions=4, turns=3, **options)  # type: ignore[arg-type]


def test_frames_keep_every_field_and_null(tmp_path: Path) -> None:
    write_frame(tmp_path, send=1, order=[BASELINE])
    record, pieces = request(cached_tokens=None, notes=["odd"])
    write_block(tmp_path, 1, BASELINE, [(record, pieces)])
    row = load(tmp_path).blocks[0].requests.row(0, named=True)
    stored = msgspec.structs.replace(record, chunk_count=len(pieces))
    told = {name: value for name, value in msgspec.structs.asdict(stored).items() if name in row}
    assert {name: row[name] for name in told} == told
    assert len(told) > 30


def test_torn_last_line_is_dropped_and_noted(tmp_path: Path) -> None:
    small(tmp_path)
    file = tmp_path / "blocks" / "02-candidate" / "w0.requests.jsonl"
    file.write_bytes(file.read_bytes()[:-40])
    run = load(tmp_path)
    assert [len(block.requests) for block in run.blocks] == [12, 11, 12, 12]
    assert any("torn last line (12)" in note and "02-candidate" in note for note in run.notes)
    found = analyse(tmp_path)
    assert found.pairs.count == 11
    assert found.blocks[1].unexplained == 1
    assert found.conclusion.outcome == "INCONCLUSIVE"


def test_whole_last_line_without_newline_counts(tmp_path: Path) -> None:
    small(tmp_path)
    file = tmp_path / "blocks" / "02-candidate" / "w0.requests.jsonl"
    file.write_bytes(file.read_bytes()[:-1])
    run = load(tmp_path)
    assert len(run.blocks[1].requests) == 12
    assert not run.notes


def test_damage_in_the_middle_is_an_error_with_its_place(tmp_path: Path) -> None:
    small(tmp_path)
    file = tmp_path / "blocks" / "01-baseline" / "w0.requests.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:3], b'{"request_id": 3}\n', *lines[4:]]))
    with pytest.raises(UserError, match=r"w0\.requests\.jsonl:4 is damaged"):
        load(tmp_path)


def test_rows_whose_chunks_are_not_in_the_file_are_dropped_and_noted(tmp_path: Path) -> None:
    small(tmp_path)
    file = tmp_path / "blocks" / "01-baseline" / "w0.chunks.bin"
    file.write_bytes(file.read_bytes()[: -CHUNK.itemsize - 5])
    run = load(tmp_path)
    assert len(run.blocks[0].requests) == 11
    assert any("chunks are not in the file" in note for note in run.notes)


def test_unfinished_and_interrupted_blocks_are_listed_not_judged(tmp_path: Path) -> None:
    small(tmp_path, order="ABBAB")
    blocks = tmp_path / "blocks"
    state = msgspec.json.decode((blocks / "05-candidate" / "block.json").read_bytes(), type=Block)
    (blocks / "05-candidate" / "block.json").write_bytes(
        msgspec.json.encode(msgspec.structs.replace(state, finished=False))
    )
    (blocks / "03-candidate.interrupted-1").mkdir()
    (blocks / "06-baseline").mkdir()
    found = analyse(tmp_path)
    assert [block.name for block in found.blocks] == ["01-baseline", "02-candidate", "03-candidate", "04-baseline"]
    assert {block.name: block.why for block in found.set_aside} == {
        "03-candidate.interrupted-1": "never started: no readable block.json",
        "05-candidate": "not finished",
        "06-baseline": "never started: no readable block.json",
    }


def test_not_a_run_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run directory"):
        load(tmp_path)
    with pytest.raises(UserError, match="not a run directory"):
        load(tmp_path / "missing")


def test_nothing_finished(tmp_path: Path) -> None:
    write_frame(tmp_path, send=1, order=[BASELINE, CANDIDATE])
    write_block(tmp_path, 1, BASELINE, [request()], finished=False)
    with pytest.raises(UserError, match="nothing to judge"):
        load(tmp_path)


def test_newer_schema(tmp_path: Path) -> None:
    small(tmp_path)
    file = tmp_path / "manifest.json"
    file.write_bytes(file.read_bytes().replace(b'"schema_version":1', b'"schema_version":99'))
    with pytest.raises(UserError, match="upgrade decodegate"):
        load(tmp_path)


def test_a_manifest_of_other_than_two_backends_is_refused(tmp_path: Path) -> None:
    small(tmp_path)
    file = tmp_path / "manifest.json"
    manifest = msgspec.json.decode(file.read_bytes())
    manifest["backends"] *= 2
    file.write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(UserError, match="names 4 backends, not the two"):
        load(tmp_path)


def test_changed_plan_is_known(tmp_path: Path) -> None:
    small(tmp_path)
    assert load(tmp_path).changed == []
    with (tmp_path / "plan.json").open("ab") as file:
        file.write(b"\n")
    assert load(tmp_path).changed == ["plan.json"]
    (tmp_path / "sessions.jsonl").unlink()
    assert load(tmp_path).changed == ["plan.json", "sessions.jsonl"]


def test_turn_recorded_twice_counts_once(tmp_path: Path) -> None:
    small(tmp_path)
    file = tmp_path / "blocks" / "01-baseline" / "w0.requests.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines, lines[0]]))
    found = analyse(tmp_path)
    assert (found.blocks[0].sent, found.blocks[0].recorded_twice) == (12, 1)
    accounted = next(gate for gate in found.gates if gate.id == "turns_accounted")
    assert (accounted.status, accounted.number) == ("fail", 1)
    assert accounted.explanation.startswith("01-baseline: 1 turn recorded more than once")
    assert found.conclusion.outcome == "INCONCLUSIVE"


@pytest.mark.parametrize("scale", ["0.0", "-2.0", "-0.0", "1e999", "NaN"])
def test_a_time_scale_that_no_clock_has_is_refused(tmp_path: Path, scale: str) -> None:
    small(tmp_path, time_scale=2.0)
    file = tmp_path / "manifest.json"
    file.write_bytes(file.read_bytes().replace(b'"time_scale":2.0', f'"time_scale":{scale}'.encode()))
    with pytest.raises(UserError, match=r"manifest\.json (has time_scale|is damaged)"):
        load(tmp_path)
