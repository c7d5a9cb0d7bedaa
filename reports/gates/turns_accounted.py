"""Every turn that was sent has its row, once and with times that can be, and every planned turn is accounted for."""

from __future__ import annotations

from reports.gates.gate import Evidence, Gate, passing


def judge(evidence: Evidence) -> Gate:
    """Per block |rows − turns sent by the workers' own count| and, where the plan has a fixed number of turns,
    |planned − sent − history − cut − not reached|; the larger must be 0. So must rows of a turn that has another, rows
    with impossible times, and rows that their chunks do not agree with. Unknown if a block tells neither count."""
    off = [
        max((abs(count) for count in (block.unexplained, block.unrecorded) if count is not None), default=None)
        for block in evidence.blocks
    ]
    known = [count for count in off if count is not None]
    found = [
        f"{block.name}: {count} {'turn' if count == 1 else 'turns'} {what}"
        for block, lost in zip(evidence.blocks, off, strict=True)
        for count, what in (
            (lost or 0, "neither sent, history, cut nor not reached: rows were lost, or counted twice"),
            (block.recorded_twice, "recorded more than once (the last record counts)"),
            (block.impossible, "with times in an impossible order (due, sent, first token, last token, end)"),
            (block.chunks_disagree, "whose chunk times or tokens are not those of the row"),
        )
        if count
    ]
    number = sum(known) + sum(each.recorded_twice + each.impossible + each.chunks_disagree for each in evidence.blocks)
    if found:
        explanation = "; ".join(found) + ". Turns with impossible times are left out of speed."
    elif len(known) < len(off):
        explanation = "Not every block tells how many turns its workers sent."
    elif evidence.run.plan.end == "work":
        explanation = "planned = sent + history + cut + not reached, in every block."
    else:
        explanation = "As many rows as the workers sent turns, in every block; a timed plan has no fixed number."
    return Gate(
        id="turns_accounted",
        title="Every turn accounted for",
        status="fail" if found else passing(True) if len(known) == len(off) else "unknown",
        number=number if known or found else None,
        limit=0,
        unit="turns",
        explanation=explanation,
    )
