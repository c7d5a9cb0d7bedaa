"""Outliers (P2): positions whose forced token got a logprob farther from the baseline's than noise goes.

**Threshold**, from baseline against itself alone: what more than TARGET of its positions would exceed is noise. Where
the floor has so many positions that COUNTED of them may exceed it, it is the next largest difference. Where it has not,
the tail is extrapolated as a power law x^(−1/ξ) from its TAIL_SHARE largest differences, with ξ by Hill's estimator
(1975) at its upper 95 % bound. Tails that fall faster than a power law, as those of rounding noise do, stay below that.

**Two tests.** ``p`` counts only: given all outliers of both, the candidate's are binomial with its share of positions.
It is exact although the threshold came from the same floor: where that is the floor's (k + 1)-th largest difference,
the chance of c or more positions of the candidate above it is that of c or more among the k + c largest of both. It
needs a floor longer than the candidate's run. ``p_limit`` is Poisson's: outliers come more often than at the limit, by
default the larger of twice the floor's rate and TARGET. It is as good as the threshold.

**Bound**: exact upper Poisson bound of the candidate's rate. Without an outlier it is 3.0 / n (rule of three).

**Units.** A race hits a decode step, whatever number of rows shares it: count steps (``steps_hit``) if rows share them.
At batch 64 a fault that hits one row in 10,000 steps is one position in 640,000. A step of r rows has r chances to be
an outlier: its threshold needs a target of TARGET / r.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
from scipy import stats

from reports.parity.divergences import Flags, Floats
from reports.parity.result import LEVEL, Finding, Unit

TARGET = 1e-5
"""Rate of outliers that may be noise."""
COUNTED = 10
"""Outliers of the floor, at least, with which a threshold is counted and not extrapolated."""
TAIL_SHARE = 0.02
LEAST = 1_000
"""Positions of a floor that has a tail to extrapolate."""


class Threshold(msgspec.Struct, frozen=True, kw_only=True):
    """``tau`` and ``by`` are null where there is none; ``reason`` says why."""

    n: int
    """Positions of the floor."""
    tau: float | None
    by: Literal["counted", "extrapolated"] | None
    target: float
    floor_outliers: int
    """Positions of the floor above ``tau``; at most ``target`` of them, save those that are not finite."""
    reason: str = ""


def threshold(floor: Floats, target: float = TARGET) -> Threshold:
    """The difference beyond which a position is an outlier, from differences (>= 0) of baseline against itself, or of
    several pairs of runs that count as harmless, one after the other."""
    n, finite = len(floor), floor[np.isfinite(floor)]
    if n < LEAST:
        reason = f"{n:,} positions of the floor are too few to tell its tail: at least {LEAST:,} are needed."
        return Threshold(n=n, tau=None, by=None, target=target, floor_outliers=0, reason=reason)
    if len(finite) < (1 - target) * n:
        reason = f"{n - len(finite):,} of {n:,} positions of the floor have no finite logprob: the baseline is broken."
        return Threshold(n=n, tau=None, by=None, target=target, floor_outliers=n - len(finite), reason=reason)
    may_exceed = int(target * n + 1e-9)
    if counted := may_exceed >= COUNTED:
        tau = float(np.partition(finite, len(finite) - 1 - may_exceed)[-1 - may_exceed])
    else:
        tau = _extrapolated(finite, target)
    return Threshold(
        n=n,
        tau=tau,
        by="counted" if counted else "extrapolated",
        target=target,
        floor_outliers=int((floor > tau).sum()),
    )


def _extrapolated(floor: Floats, target: float) -> float:
    tail = max(int(TAIL_SHARE * len(floor)), COUNTED)
    largest = np.partition(floor, len(floor) - 1 - tail)[-1 - tail :]
    largest = np.sort(largest[largest > 0])[::-1]
    if len(largest) < 2:
        return float(floor.max())
    start, tail = largest[-1], len(largest) - 1
    index = float(np.log(largest[:-1] / start).mean()) * 2 * tail / float(stats.chi2.ppf(1 - LEVEL, 2 * tail))
    return float(max(floor.max(), start * (tail / len(floor) / target) ** index))


def steps_hit(outliers: Flags, step: npt.NDArray[np.int64]) -> tuple[int, int]:
    """Steps with an outlier, and all steps. ``step`` has each position's, numbered through the whole run."""
    return len(np.unique(step[outliers])), len(np.unique(step))


def rate_bound(events: int, n: int, level: float = LEVEL) -> float:
    """Exact upper bound of a Poisson rate: of ``events`` in ``n``, one-sided."""
    return float(stats.chi2.ppf(level, 2 * (events + 1))) / 2 / n


def outliers(
    events: int, n: int, floor_events: int, floor_n: int, *, limit: float | None = None, unit: Unit = "positions"
) -> Finding:
    """The candidate's outliers in ``n`` units against the floor's in ``floor_n``. ``limit``: rate that the candidate's
    bound has to stay within; without one, as above."""
    if not n or not floor_n:
        whose = "the candidate" if floor_n else "the floor"
        return Finding(n=n, unit=unit, reason=f"Nothing was recorded of {whose}.")
    floor_rate = floor_events / floor_n
    most = max(2 * floor_rate, TARGET) if limit is None else limit
    return Finding(
        n=n,
        unit=unit,
        statistic=events / n,
        floor=floor_rate,
        bound=rate_bound(events, n),
        limit=most,
        p=float(stats.binom.sf(events - 1, events + floor_events, n / (n + floor_n))),
        p_limit=float(stats.poisson.sf(events - 1, n * most)),
    )
