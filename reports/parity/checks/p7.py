"""P7: many replayed steps with churn. Steps count: an error that strikes one row of a step is one event, however many
rows share the step. At batch b a step has b positions, one of every row."""

from __future__ import annotations

import numpy as np

from reports.parity.arms import Arms, Tally, rate, smallest, strata
from reports.parity.compare import Pair
from reports.parity.result import Seen

CHECK = "P7"


def judge(arms: Arms) -> Seen:
    """Harm is a rate of outliers by step beyond the limit."""
    cases, tau = arms.cases(CHECK), arms.tau(CHECK)
    batch = np.ones(max(cases) + 1)
    for number, case in cases.items():
        batch[number] = case.batch

    def by_step(pair: Pair) -> tuple[int, int]:
        return int((pair.delta > tau).sum()), round(float((1 / batch[pair.case[pair.told]]).sum()))

    floor = by_step(arms.floor(CHECK))
    measures = []
    for pair in arms.pairs(CHECK):
        arms.tally(CHECK, pair)
        measures.append(rate("outliers by step", pair.name, Tally(*by_step(pair), *floor), unit="steps"))
    rows, _ = strata(arms, CHECK, "batch", lambda case: str(case.batch))
    n = max((each.found.n for each in measures), default=0)
    bound = max((each.found.bound or 0.0 for each in measures), default=0.0)
    said = f"{n:,} steps; errors in at most one of {1 / bound:,.0f}." if bound else "No step was compared."
    return Seen(said=said, measures=measures, strata=rows, reproducer=smallest(arms, CHECK))
