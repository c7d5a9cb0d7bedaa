"""decodegate parity, as it is typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import decodegate
from evals.parity import harness
from evals.parity.plan import Wanted
from tests.integration import runs
from tests.reports.parity import made


def experiment(folder: Path) -> Path:
    emulator = {"emulator": {"time_scale": 1000}, "gpus": runs.GPUS}
    described = {"name": "own", "model": "emulated", "parity": {}, "backends": {"both": emulator}}
    described["backends"] |= {"baseline": {}, "candidate": {}}  # type: ignore[operator]
    path = folder / "x.yaml"
    path.write_text(yaml.safe_dump(described))
    return path


def test_flags_become_what_is_wanted_and_the_verdict_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {}
    there = tmp_path / "there"

    def measure(experiment: object, run: Path, tell: object, show: object, wanted: Wanted, **more: Any) -> None:
        given.update(run=run, wanted=wanted, **more)
        made.write(run, checks=["D7"])

    monkeypatch.setattr(harness, "measure", measure)
    words = ["parity", str(experiment(tmp_path)), "--run", str(there), "--budget", "quick", "--fault", "race:0.5"]
    code = decodegate.app([*words, "--checks", "p1,D3", "--resume"], exit_on_error=False, result_action="return_value")
    wanted = Wanted(budget="quick", checks=("P1", "D3"), fault="race:0.5")
    assert given == {"run": there, "wanted": wanted, "resume": True, "allow_unmatched": False}
    assert code == 2, "all other checks were not planned"
    told = capsys.readouterr().out
    assert "parity: INCONCLUSIVE" in told
    assert f"decodegate signoff {there}" in told


def test_an_interruption_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"

    def measure(*_: object, **__: object) -> None:
        (run / "parity").mkdir(parents=True)
        (run / "parity" / "manifest.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(harness, "measure", measure)
    monkeypatch.setattr("sys.argv", ["decodegate", "parity", str(experiment(tmp_path)), "--run", str(run)])
    with pytest.raises(SystemExit) as ended:
        decodegate.main()
    assert ended.value.code == 3
    assert f"--resume --run {run}" in capsys.readouterr().err


def test_a_dry_run_leaves_nothing_and_says_what_would_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["parity", str(experiment(tmp_path)), "--budget", "quick", "--checks", "P1", "--dry-run"]
    assert decodegate.app(words, exit_on_error=False, result_action="return_value") == 0
    said = capsys.readouterr().out
    assert "P1     Trace replay: 18 cases" in said
    assert "output tokens at most" in said
    assert "roughly" in said
    assert [path.name for path in tmp_path.iterdir()] == ["x.yaml"]
