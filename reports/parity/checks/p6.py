"""P6: batch sizes, in step and with neighbours that join and leave: outliers at each."""

from __future__ import annotations

from evals.records import Case
from reports.parity.arms import Arms, smallest, strata
from reports.parity.result import Seen

CHECK = "P6"


def judge(arms: Arms) -> Seen:
    """Harm is a rate of outliers beyond the limit at one size. Rows of one prompt are no prompts of their own, so that
    their mean KL is told and decides nothing."""
    for pair in arms.pairs(CHECK):
        arms.tally(CHECK, pair)
    rows, measures = strata(arms, CHECK, "batch", _kind)
    sizes = [case.batch for case in arms.cases(CHECK).values()]
    said = f"{len(set(sizes)):,} batch sizes, up to {max(sizes):,}."
    return Seen(said=said, measures=measures, strata=rows, reproducer=smallest(arms, CHECK))


def _kind(case: Case) -> str:
    return f"{case.batch} with churn" if case.variant.startswith("churn") else str(case.batch)
