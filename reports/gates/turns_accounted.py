"""Every turn that was sent has its row, and every planned turn is accounted for."""

from __future__ import annotations

from reports.gates.gate import Evidence, Gate, passing


def judge(evidence: Evidence) -> Gate:
    """Per block |rows − turns sent by the workers' own count| and, where the plan has a fixed number of turns,
    |planned − sent − history − cut − not reached|; the sum over blocks of the larger must be 0. Unknown if a block
    tells neither."""
    off = [
        max((abs(count) for count in (block.unexplained, block.unrecorded) if count is not None), default=None)
        for block in evidence.blocks
    ]
    known = [count for count in off if count is not None]
    lost = sum(known)
    if lost:
        explanation = f"{lost} turns are neither sent, history, cut nor not reached: rows were lost, or counted twice."
    elif len(known) < len(off):
        explanation = "Not every block tells how many turns its workers sent."
    elif evidence.run.plan.end == "work":
        explanation = "planned = sent + history + cut + not reached, in every block."
    else:
        explanation = "As many rows as the workers sent turns, in every block; a timed plan has no fixed number."
    return Gate(
        id="turns_accounted",
        title="Every turn accounted for",
        status="fail" if lost else passing(True) if len(known) == len(off) else "unknown",
        number=lost if known else None,
        limit=0,
        unit="turns",
        explanation=explanation,
    )
