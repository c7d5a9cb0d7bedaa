"""Lengths of paired answers (L1): Wilcoxon's signed-rank test of tokens, McNemar's exact test of stops at the limit.
Both are two-sided: answers that end early are as wrong as those that do not end."""

from __future__ import annotations

from scipy import stats

from reports.accuracy.harm import mcnemar
from reports.parity.divergences import Flags
from reports.parity.ratio import Ints
from reports.parity.result import Finding


def lengths(candidate: Ints, baseline: Ints, floor: Ints) -> Finding:
    """Tokens of the same prompts and seeds: the candidate's, the baseline's, and those of the baseline's second run.
    The statistic is the mean length by the baseline's first, the floor that of the second."""
    n, whole = len(baseline), float(baseline.sum())
    if not n or not whole:
        return Finding(n=n, unit="pairs", reason="The baseline answered nothing.")
    each = candidate - baseline
    return Finding(
        n=n,
        unit="pairs",
        statistic=float(candidate.sum()) / whole,
        floor=float(floor.sum()) / whole,
        p=float(stats.wilcoxon(each).pvalue) if each.any() else 1.0,
    )


def length_stops(candidate: Flags, baseline: Flags, floor: Flags) -> Finding:
    """Answers that stopped at the limit of tokens, as shares, of the same prompts and seeds as above."""
    n = len(baseline)
    if not n:
        return Finding(n=0, unit="pairs", reason="No answer was recorded.")
    more, fewer = int((candidate & ~baseline).sum()), int((~candidate & baseline).sum())
    return Finding(
        n=n, unit="pairs", statistic=float(candidate.mean()), floor=float(floor.mean()), p=mcnemar(more, fewer)
    )
