"""Tests of "the candidate is worse": one-sided p values against "both backends are alike", and Holm's adjustment.

None of them assumes a distribution: if the backends are alike, what each of them answered may be exchanged.

**stratified** (binary scores): within an item the right answers fall to either backend as by a draw, so that the
baseline's share of an item's right answers is hypergeometric, and their sum the convolution over items, which is
exact. Items that were always or never right add nothing. With one repeat it is McNemar's exact test.

**sign_flip** (any scores): an item's difference is as likely with the other sign. All 2^n signs are taken into account,
by convolution over differences that are rounded to 1/128 of the sum's standard deviation: a test that is exact.
"""

from __future__ import annotations

from functools import cache, reduce

import numpy as np
from scipy import stats

from reports.accuracy.drop import Floats

_STEPS = 128
"""In the standard deviation of a sum of signed differences."""


def stratified(baseline: Floats, candidate: Floats) -> float:
    """p of as many right answers of the baseline, or more. Scores of items x repeats, each 0 or 1."""
    repeats = baseline.shape[1]
    right = (baseline.sum(axis=1) + candidate.sum(axis=1)).round().astype(int)
    varied = right[(right > 0) & (right < 2 * repeats)]
    if not len(varied):
        return 1.0
    # of the baseline's sum, above the least that it can be
    chances = reduce(np.convolve, [_split(int(each), repeats) for each in np.sort(varied)])
    least = np.maximum(right - repeats, 0).sum()
    return min(1.0, float(chances[round(float(baseline.sum())) - least :].sum()))


@cache
def _split(right: int, repeats: int) -> Floats:
    """Chances that the baseline has max(0, right − repeats), ... of an item's ``right`` answers."""
    counts = np.arange(max(0, right - repeats), min(right, repeats) + 1)
    found: Floats = stats.hypergeom.pmf(counts, 2 * repeats, right, repeats)
    return found


def sign_flip(each: Floats) -> float:
    """p of as large a sum of the items' differences, or larger."""
    scale = float(np.sqrt((each**2).sum()))
    if scale == 0:
        return 1.0
    steps = np.rint(each / scale * _STEPS).astype(int)
    sizes = np.sort(np.abs(steps[steps != 0]))
    chances = np.ones(1)  # of the sum of those with a plus
    for size in sizes:
        grown = np.zeros(len(chances) + size)
        grown[size:] = chances
        grown[: len(chances)] += chances
        chances = grown / 2
    return min(1.0, float(chances[steps[steps > 0].sum() :].sum()))


def trend(each: Floats, context: Floats) -> float:
    """p of a drop that grows with ``context`` (per item, on the scale on which it is to be linear).

    The larger of two: of the slope, and of the drop weighted by the distance from the shortest context. The slope
    alone would take a candidate that is better on short contexts for one that is worse on long ones."""
    return max(sign_flip((context - context.mean()) * each), sign_flip((context - context.min()) * each))


def sign_test(drops: Floats) -> float:
    """p of as many strata with a drop, or more, by the binomial; those without a difference are left out."""
    worse, better = int((drops > 0).sum()), int((drops < 0).sum())
    return float(stats.binom.sf(worse - 1, worse + better, 0.5))


def mcnemar(lost: int, gained: int) -> float:
    """Exact two-sided p of items that changed from right to wrong (``lost``) and back (``gained``). For one answer per
    item; repeats of an item are not items."""
    changed = lost + gained
    return min(1.0, 2 * float(stats.binom.sf(max(lost, gained) - 1, changed, 0.5))) if changed else 1.0


def holm(ps: list[float], weights: list[float] | None = None) -> list[float]:
    """Adjusted p values (Holm 1979): those up to a level are rejected at this level for the whole family.

    With ``weights`` a test starts at its share of the level instead of an equal one; what rejected tests had passes
    to the others."""
    shares = weights or [1.0] * len(ps)
    remaining, largest, adjusted = sum(shares), 0.0, [1.0] * len(ps)
    for index in sorted(range(len(ps)), key=lambda index: ps[index] / shares[index]):
        largest = max(largest, min(1.0, ps[index] / shares[index] * remaining))
        adjusted[index] = largest
        remaining -= shares[index]
    return adjusted
