"""Was the sample large enough, and how large would it have to be? For a ratio of speeds by sessions, for an accuracy
floor by questions, with exact binomial bounds."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np
from scipy import stats


def sessions_needed(low: float, value: float, high: float, sessions: int, most: float) -> int:
    """Sessions at which a ratio's interval would decide, if ``value`` is the true ratio: leave out 1, or lie between
    1/``most`` and ``most``, whichever takes fewer. From ``sessions`` that gave ``low`` to ``high``.

    The width of the interval goes with 1/√sessions, on the log scale: n = sessions · (h / h')², where h is the
    interval's half-width and h' the larger of |log value| and log most − |log value|.
    """
    half, size = math.log(high / low) / 2, abs(math.log(value))
    return max(sessions + 1, math.ceil(sessions * (half / max(size, math.log(most) - size)) ** 2))


class FloorJudgement(msgspec.Struct, frozen=True):
    """``low`` and ``high`` are one-sided exact bounds on the true rate, each at the stated confidence."""

    outcome: Literal["PASS", "FAIL", "INCONCLUSIVE"]
    rate: float
    low: float
    high: float
    needed: int | None
    """Questions needed to decide with the stated power if the true rate is the observed one; null: no number would do
    (the observed rate is the floor itself, or more than a million)."""


def judge_floor(right: int, n: int, floor: float, *, confidence: float = 0.95, power: float = 0.8) -> FloorJudgement:
    """``right`` of ``n`` against a floor: PASS if the lower Clopper-Pearson bound reaches it, FAIL if the upper one
    stays below it, otherwise INCONCLUSIVE. Raises ValueError for counts or shares out of range."""
    if not 0 <= right <= n or n < 1 or not 0 < floor < 1 or not 0 < confidence < 1 or not 0 < power < 1:
        raise ValueError("needs 0 <= right <= n, n >= 1, and floor, confidence and power between 0 and 1")
    low, high = _lower(right, n, confidence), 1 - _lower(n - right, n, confidence)
    outcome: Literal["PASS", "FAIL", "INCONCLUSIVE"] = (
        "PASS" if low >= floor else "FAIL" if high < floor else "INCONCLUSIVE"
    )
    return FloorJudgement(
        outcome, right / n, low, high, questions_needed(right / n, floor, confidence=confidence, power=power)
    )


def questions_needed(rate: float, floor: float, *, confidence: float = 0.95, power: float = 0.8) -> int | None:
    """Smallest n at which a true ``rate`` is told from ``floor`` with probability ``power`` (exact binomial), or
    null."""
    if rate == floor:
        return None
    if rate < floor:  # telling that it is below is the mirror image of telling that it is above
        rate, floor = 1 - rate, 1 - floor

    def enough(n: int) -> bool:
        return _power(n, rate, floor, confidence) >= power

    high = 1
    while not enough(high):
        high *= 2
        if high > 1_000_000:
            return None
    low = high // 2
    while (
        high - low > 1
    ):  # power is a saw-tooth in n: bisection lands on a tooth, the short walk back on its first edge
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return next(n for n in range(max(1, int(high * 0.9)), high + 1) if enough(n))


def _lower(right: int, n: int, confidence: float) -> float:
    return float(stats.beta.ppf(1 - confidence, right, n - right + 1)) if right else 0.0


def _power(n: int, rate: float, floor: float, confidence: float) -> float:
    counts = np.arange(n + 1)
    # the fewest right answers whose lower bound reaches the floor: P(X >= k | floor) <= 1 - confidence
    passing = counts[stats.binom.sf(counts - 1, n, floor) <= 1 - confidence]
    return float(stats.binom.sf(passing[0] - 1, n, rate)) if len(passing) else 0.0
