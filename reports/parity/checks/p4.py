"""P4: short replies from many points of the traces: outliers while replies agree, at edges of blocks and between."""

from __future__ import annotations

from reports.parity.arms import Arms, rate, smallest, strata
from reports.parity.result import Seen

CHECK = "P4"


def judge(arms: Arms) -> Seen:
    """Harm is a rate of outliers beyond the limit, of all or of one kind of points."""
    measures = [rate("outliers", pair.name, arms.tally(CHECK, pair)) for pair in arms.pairs(CHECK)]
    rows, by_kind = strata(arms, CHECK, "points", lambda case: case.variant)
    n = max((each.found.n for each in measures), default=0)
    return Seen(
        said=f"{n:,} positions behind {len(arms.cases(CHECK)):,} points.",
        measures=[*measures, *by_kind],
        strata=rows,
        reproducer=smallest(arms, CHECK),
    )
