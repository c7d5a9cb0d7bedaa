"""The sign-off of a run directory: what it says, that it is the same every time, and what it never holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jsonschema
import msgspec
import numpy as np
import pytest

import decodegate
from evals.records import Answer
from reports.signoff.cli import json_schema, signoff
from reports.signoff.document import inputs
from reports.signoff.document import signoff as judge
from tests.reports.signoff import sat
from workloads.errors import UserError

ROOT = Path(__file__).parents[3]
EXAMS = [sat.exam("aime25", 30, 4, 0.9), sat.exam("gpqa_diamond", 40, 4, 0.8), sat.exam("mrcr", 40, 4, 0.8)]
SECRET = "what the question was"


@pytest.fixture(scope="module")
def harmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evals whose candidate is far worse in GPQA-Diamond; no replay."""
    run = sat.write(tmp_path_factory.mktemp("runs") / "run", EXAMS, {"gpqa_diamond": np.full(40, 0.3)})
    private = run / "evals" / "private"
    private.mkdir()
    (private / "raw.jsonl").write_text(SECRET)
    return run


def test_harm_is_a_fail_whatever_else_is_missing(harmed: Path) -> None:
    found = judge(harmed)
    assert found.outcome == "FAIL"
    assert found.line.startswith(
        "FAIL: latency_specialized instead of auto, kimi-k3, on 8 x GB300 (tp8), vLLM 0.33.0; margins in points: "
        "AIME25 5, GPQA-Diamond 5, MRCR 5; measured 2026-12-01 by ada@lab with decodegate"
    ), found.line
    assert [reason.split(":")[0] for reason in found.reasons] == ["GPQA-Diamond"]
    assert [part.measured for part in found.parts] == [False, True, False]


def test_a_missing_part_is_inconclusive(tmp_path: Path) -> None:
    found = judge(sat.write(tmp_path / "run", EXAMS))
    assert found.outcome == "INCONCLUSIVE"
    assert any("no replay was measured: decodegate compare" in reason for reason in found.reasons)


def test_the_same_run_gives_the_same_bytes_wherever_it_lies(harmed: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / harmed.name
    shutil.copytree(harmed, moved)
    first, second = tmp_path / "first", tmp_path / "second"
    assert signoff(harmed, output=first) == signoff(moved, output=second) == 1
    for name in ("signoff.json", "signoff.md", "signoff.html"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_its_own_output_is_no_input(harmed: Path) -> None:
    before = inputs(harmed)
    signoff(harmed)
    assert inputs(harmed) == before
    assert "evals/plan.json" in before
    assert not any("private" in name for name in before)


def test_an_input_that_was_changed_shows(tmp_path: Path) -> None:
    run = sat.write(tmp_path / "run", EXAMS)
    before = judge(run)
    answers = run / "evals" / "candidate" / "aime25" / "r000.jsonl"
    lines = answers.read_bytes().splitlines(keepends=True)
    first = msgspec.json.decode(lines[0], type=Answer)
    turned = msgspec.structs.replace(first, score=1 - first.score, outcome="wrong" if first.score else "right")
    answers.write_bytes(b"".join([msgspec.json.encode(turned) + b"\n", *lines[1:]]))
    after = judge(run)
    changed = [name for name in before.inputs if before.inputs[name] != after.inputs[name]]
    assert changed == ["evals/candidate/aime25/r000.jsonl"]
    assert after.tasks[0].counts != before.tasks[0].counts


def test_the_json_has_the_published_schema(harmed: Path, tmp_path: Path) -> None:
    """docs/signoff.schema.json: decodegate schema signoff > docs/signoff.schema.json."""
    published = (ROOT / "docs" / "signoff.schema.json").read_text()
    assert published.strip() == json_schema().strip()
    signoff(harmed, output=tmp_path)
    validator = jsonschema.Draft202012Validator(json.loads(published))
    written = json.loads((tmp_path / "signoff.json").read_text())
    validator.validate(written)
    del written["outcome"]
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(written)


def test_nothing_private_is_shown(harmed: Path, tmp_path: Path) -> None:
    signoff(harmed, output=tmp_path)
    for file in tmp_path.iterdir():
        assert SECRET not in file.read_text(), file.name


@pytest.mark.parametrize(("harm", "code"), [(0.0, 2), (0.6, 1)])
def test_exit_codes(harm: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = sat.write(tmp_path / "run", EXAMS, {"aime25": np.full(30, 0.9 - harm)})
    assert ended(monkeypatch, "signoff", str(run)) == code


def test_errors_of_usage_and_data_are_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, "signoff", str(tmp_path / "none")) == 3
    assert "is not a run directory" in capsys.readouterr().err
    assert ended(monkeypatch, "signoff") == 3
    run = sat.write(tmp_path / "run", EXAMS)
    (run / "evals" / "candidate" / "mrcr" / "r001.jsonl").write_text("{\n{\n")
    assert ended(monkeypatch, "signoff", str(run)) == 3
    assert "r001.jsonl:1 is damaged" in capsys.readouterr().err


def ended(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    monkeypatch.setattr("sys.argv", ["decodegate", *words])
    with pytest.raises(SystemExit) as end:
        decodegate.main()
    return end.value.code


def test_an_unfinished_repeat_is_told(tmp_path: Path) -> None:
    run = sat.write(tmp_path / "run", EXAMS)
    (run / "evals" / "candidate" / "aime25" / "r003.json").unlink()
    found = judge(run)
    assert "Evals: candidate/aime25/r003.jsonl: not counted, the repeat has not ended." in found.deviations
    (aime,) = (gate for gate in found.gates if gate.id == "aime25")
    assert aime.outcome == "INCONCLUSIVE"
    assert "3 of 4 repeats" in aime.reasons[0]


def test_a_manifest_of_another_kind_is_no_replay(tmp_path: Path) -> None:
    run = sat.write(tmp_path / "run", EXAMS)
    (run / "manifest.json").write_text('{"kind": "decode"}')
    assert any("it is a run of decode, not of a replay" in reason for reason in judge(run).reasons)
    (run / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        judge(run)
