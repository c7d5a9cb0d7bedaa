"""The gates of the replay: what its own report concludes, and that the path is proved."""

from __future__ import annotations

from pathlib import Path

import pytest

from reports.signoff.gates import replayed
from reports.signoff.gates.evidence import Evidence
from reports.signoff.parts import load
from reports.signoff.result import Gate
from tests.reports.make_run import make_run


def judged(run: Path) -> dict[str, Gate]:
    return {gate.id: gate for gate in replayed.judge(Evidence(load(run), [], []))}


@pytest.mark.parametrize(("ratio", "outcome"), [(1.3, "PASS"), (0.8, "FAIL")])
def test_a_slower_slow_tail_is_harm(ratio: float, outcome: str, tmp_path: Path) -> None:
    gate = judged(make_run(tmp_path / "run", ratio=ratio, specialised_share=0.97))["replayed"]
    assert gate.outcome == outcome
    assert gate.number == pytest.approx(ratio, rel=0.05)
    assert [reason[:44] for reason in gate.reasons] == ["The slow tail of users is slower on the cand"] * (ratio < 1)


def test_a_replay_that_concludes_nothing_is_no_pass(tmp_path: Path) -> None:
    gate = judged(make_run(tmp_path / "run", sessions=1, specialised_share=0.97))["replayed"]
    assert gate.outcome == "INCONCLUSIVE"
    assert gate.reasons


@pytest.mark.parametrize(
    ("share", "outcome", "number"), [(0.97, "PASS", 0.97), (0.4, "INCONCLUSIVE", 0.4), (None, "INCONCLUSIVE", None)]
)
def test_the_path_has_to_be_proved(share: float | None, outcome: str, number: float | None, tmp_path: Path) -> None:
    gate = judged(make_run(tmp_path / "run", specialised_share=share))["replay_path"]
    assert (gate.outcome, gate.number) == (outcome, number)
    assert bool(gate.reasons) == (outcome != "PASS")
