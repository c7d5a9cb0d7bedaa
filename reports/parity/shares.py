"""A share of requests that went wrong, of two arms: tool calls against their schema (D6), the same ids at the same seed
(D4). Fisher's exact test, one-sided, and Newcombe's (1998, method 10) upper bound of the difference."""

from __future__ import annotations

import math

from scipy import stats

from reports.parity.result import LEVEL, Finding, Unit


def shares(
    wrong: int, n: int, floor_wrong: int, floor_n: int, *, limit: float | None = None, unit: Unit = "requests"
) -> Finding:
    """``wrong`` of ``n`` of the candidate, and of the floor. The bound, of the difference, is held against
    ``limit``."""
    if not n or not floor_n:
        whose = "the candidate" if floor_n else "the floor"
        return Finding(n=n, unit=unit, limit=limit, reason=f"Nothing was recorded of {whose}.")
    share, floor = wrong / n, floor_wrong / floor_n
    reach = math.hypot(_wilson(wrong, n, 1) - share, floor - _wilson(floor_wrong, floor_n, -1))
    table = [[wrong, n - wrong], [floor_wrong, floor_n - floor_wrong]]
    return Finding(
        n=n,
        unit=unit,
        statistic=share,
        floor=floor,
        bound=share - floor + reach,
        limit=limit,
        p=float(stats.fisher_exact(table, alternative="greater").pvalue),
    )


def _wilson(count: int, n: int, side: int) -> float:
    """Bound of a share, upper with ``side`` 1 and lower with −1."""
    z = float(stats.norm.isf(1 - LEVEL))
    share = count / n
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (share + z * z / (2 * n) + side * half) / (1 + z * z / n)
