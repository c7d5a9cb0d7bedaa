"""The recorded sessions of the hand-out, whole: every one loads, and a comparison over them accounts for every turn."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from replay.plan import SessionFile, read_plan
from reports.analysis import analyse
from tests.integration.runs import blocks, experiment, records, run
from tests.shared import needs_shared
from workloads import formats
from workloads.trace import Notes

pytestmark = needs_shared


@pytest.mark.slow
def test_a_comparison_over_all_of_them_accounts_for_every_turn(recorded: Path, tmp_path: Path) -> None:
    """Pauses capped, contexts cut to what the emulated server holds, drafting so that it takes a minute."""
    turns = sum(len(stream.turns) for trace in formats.read(recorded, Notes()) for stream in trace.streams)
    described = experiment(
        workload={"path": str(recorded)},
        emulator={"draft_tokens": 7, "acceptance_length": 6},
        replay={"lanes": 39, "pause_cap_s": 1.0, "ramp_s": 10},
    )
    folder = run(described, tmp_path / "run")
    plan = read_plan(folder)
    assert plan.sessions == 39
    assert plan.lost["session with its first turn over a limit"] == 10
    in_plan = sum(plan.turns.values())
    assert in_plan + plan.lost["turns of a session with its first turn over a limit"] == turns
    assert in_plan == sum(len(s.turns) for session in SessionFile(folder / "sessions.jsonl") for s in session.streams)
    for path, block in blocks(folder):
        found = records(path)
        assert len(found) + (block.not_reached or 0) == plan.turns["send"]
        assert collections.Counter(record.status for record in found) == {"ok": plan.turns["send"]}
        assert all(record.input_tokens == record.asked_input for record in found)
    analysis = analyse(folder)
    accounted = next(gate for gate in analysis.gates if gate.id == "turns_accounted")
    assert accounted.status == "pass"
