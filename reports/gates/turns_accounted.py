"""Every planned turn is accounted for."""

from __future__ import annotations

from reports.gates.gate import Evidence, Gate, passing


def judge(evidence: Evidence) -> Gate:
    """Planned − sent − history − cut − not reached, over all blocks; must be 0. A plan that runs for a time has no
    fixed number."""
    counts = [block.unexplained for block in evidence.blocks if block.unexplained is not None]
    lost = sum(abs(count) for count in counts)
    explanation = (
        "planned = sent + history + cut + not reached, in every block."
        if not lost
        else (f"{lost} turns are neither sent, history, cut nor not reached: rows were lost, or counted twice.")
    )
    if not counts:
        explanation = "The plan runs for a time, not for a number of turns; every turn that was sent has its status."
    return Gate(
        id="turns_accounted",
        title="Every turn accounted for",
        status=passing(lost == 0),
        number=lost if counts else None,
        limit=0,
        unit="turns",
        explanation=explanation,
    )
