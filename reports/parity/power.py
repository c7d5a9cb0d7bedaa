"""How much has to be replayed to see a fault: before a run, and for the table of what a run could see.

One-sided levels throughout. All but the outliers' are normal approximations, as those of the design notes are; where
the tests that judge need more, the tests of this package say how much.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

POWER = 0.9


def units_for_outliers(fault: float, floor: float, *, alpha: float = 0.001, power: float = POWER) -> int:
    """The fewest positions (or steps) with which a fault that adds outliers at rate ``fault`` is told from a known rate
    ``floor`` by the exact Poisson test. Power is a saw-tooth in n: a few more may have slightly less."""

    def needed(events: int) -> float:
        return _mean(events, power) / (fault + floor)

    def rejects(events: int) -> bool:  # as few as ``events`` where so many units were replayed
        return needed(events) * floor <= _mean(events, alpha)

    high = 1
    while not rejects(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if rejects(middle) else (middle, high)
    return math.ceil(needed(high))


def _mean(events: int, chance: float) -> float:
    """Of a Poisson count that is ``events`` or more with this chance."""
    return float(stats.chi2.ppf(chance, 2 * events)) / 2


def prompts_for_divergence(
    fault: float, floor: float, tokens: int, *, alpha: float = 0.01, power: float = POWER
) -> int:
    """Prompts of ``tokens`` per arm with which the log-rank test tells a hazard of ``floor`` + ``fault`` per token from
    ``floor`` (Schoenfeld 1981; constant hazards)."""
    hazards = np.array([floor, floor + fault])
    divergences = 4 * (_reach(alpha, power) / math.log(hazards[1] / hazards[0])) ** 2
    return math.ceil(divergences / float((1 - np.exp(-tokens * hazards)).sum()))


def prompts_for_ratio(ratio: float, variation: float, *, alpha: float = 0.01, power: float = POWER) -> int:
    """Prompts per arm that tell a mean KL of ``ratio`` times the floor's from it; ``variation``: standard deviation
    between prompts by their mean, the same in both arms."""
    return math.ceil(2 * (_reach(alpha, power) * variation / (ratio - 1)) ** 2)


def requests_for_shares(share: float, floor: float, *, alpha: float = 0.01, power: float = POWER) -> int:
    """Requests per arm that tell a share of ``share`` from ``floor`` (two proportions, pooled under no difference)."""
    pooled = (share + floor) / 2
    alike = float(stats.norm.isf(alpha)) * math.sqrt(2 * pooled * (1 - pooled))
    apart = float(stats.norm.isf(1 - power)) * math.sqrt(share * (1 - share) + floor * (1 - floor))
    return math.ceil(((alike + apart) / (share - floor)) ** 2)


def requests_for_one(share: float, *, power: float = POWER) -> int:
    """Requests among which one that is hit, of ``share`` of all, is seen at all."""
    return math.ceil(math.log(1 - power) / math.log1p(-share))


def _reach(alpha: float, power: float) -> float:
    return float(np.sum(stats.norm.isf([alpha, 1 - power])))
