"""How many repeats a margin needs, and the smallest drop that a number of them finds: before a run and after it.

Normal approximation: the drop's standard error at k repeats of n items is √(2 W (1 − ρ) / (n k)), with W the variance
of a score around its item's mean (``drop.within_variance``) and ρ the correlation of the backends at equal seeds
(``drop.seed_correlation``; 0 unless it was measured). A drop is told apart with the power asked for where it is (z of
the level + z of the power) standard errors.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from reports.accuracy.drop import Floats, smoothed_error

POWER = 0.9


def repeats_needed(
    within: float, items: int, drop: float, alpha: float, *, correlation: float = 0.0, power: float = POWER
) -> int:
    """Repeats per backend with which the bound at one-sided ``alpha`` stays under a margin of ``drop`` if the backends
    are equal, or a test at ``alpha`` finds a true ``drop``: it is the same number."""
    return repeats_for_error(standard_error(within, items, 1, correlation=correlation), 1, drop, alpha, power=power)


def standard_error(within: float, items: int, repeats: int, *, correlation: float = 0.0) -> float:
    """Of the drop, by the formula above."""
    return math.sqrt(2 * within * (1 - correlation) / (items * repeats))


def smallest_drop(error: float, alpha: float, *, power: float = POWER) -> float:
    """The smallest true drop that a test at one-sided ``alpha`` finds, at a standard error of ``error``."""
    return _reach(alpha, power) * error


def repeats_for_bound(
    baseline: Floats, candidate: Floats, weight: Floats, margin: float, alpha: float, *, power: float = POWER
) -> int:
    """As ``repeats_needed``, for the smoothed bound of drop.py, from the items' mean scores: it asks for more, as it
    takes no item for certain."""

    def enough(repeats: int) -> bool:
        return _reach(alpha, power) * smoothed_error(baseline, candidate, weight, repeats) <= margin

    high = 1
    while not enough(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def repeats_for_error(error: float, repeats: int, margin: float, alpha: float, *, power: float = POWER) -> int:
    """As ``repeats_needed``, from a standard error of the drop at ``repeats``: of the items' differences (t), say, in
    which the correlation at equal seeds is contained."""
    return max(1, math.ceil(repeats * (_reach(alpha, power) * error / margin) ** 2 - 1e-9))


def _reach(alpha: float, power: float) -> float:
    return float(np.sum(stats.norm.isf([alpha, 1 - power])))
