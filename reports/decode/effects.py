"""What windows say of a cell: levels, the ratio of the backends, and how much passes differ by anyway."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from scipy import stats

LEVEL = 0.95

FORMULAS = {
    "Level": "Geometric mean, exp(mean of log rate), over the windows with a result; the 95 % interval is Student's t "
    "over windows, on the log scale, as the ratio's: it stays above 0.",
    "Ratio": "exp(mean of log candidate − mean of log baseline) over windows, which is candidate's level / baseline's; "
    "the 95 % interval is Welch's, on the log scale.",
    "Noise floor": "What passes over the cells (each with its own start of the server, where the backend changes in "
    "between) differ by anyway: from the means of each pass of a backend, their pooled standard deviation on the log "
    "scale, times the t quantile of its degrees of freedom, times √(1 / passes + 1 / passes). No effect below it is "
    "called one.",
}


class Estimate(msgspec.Struct, frozen=True):
    """A figure with its 95 % interval, the windows behind it, and the reason for what is null."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    reason: str = ""


class Noise(msgspec.Struct, frozen=True):
    """As a share: 0.02 means that a ratio between 1/1.02 and 1.02 is no effect. Null: unknown."""

    relative: float | None
    degrees: int
    reason: str = ""


def level(values: list[float]) -> Estimate:
    """Geometric mean over windows, with the t interval of the log scale."""
    n = len(values)
    if not n:
        return Estimate(None, None, None, 0, "no window with a result")
    logs = np.log(values)
    value = math.exp(float(logs.mean()))
    if n == 1:
        return Estimate(value, None, None, 1, "no interval: one window")
    reach = _t(n - 1) * float(logs.std(ddof=1)) / math.sqrt(n)
    return Estimate(value, value * math.exp(-reach), value * math.exp(reach), n)


def ratio(baseline: list[float], candidate: list[float]) -> Estimate:
    """candidate / baseline with Welch's interval on the log scale."""
    n = min(len(baseline), len(candidate))
    if not n:
        return Estimate(None, None, None, 0, "a backend has no window with a result")
    ours, theirs = np.log(candidate), np.log(baseline)
    value = math.exp(float(ours.mean() - theirs.mean()))
    if n == 1:
        return Estimate(value, None, None, 1, "no interval: one window of a backend; raise decode.repeats")
    parts = [float(each.var(ddof=1)) / len(each) for each in (ours, theirs)]
    variance = sum(parts)
    if variance == 0:
        return Estimate(value, value, value, n)
    degrees = variance**2 / sum(
        part**2 / (len(each) - 1) for part, each in zip(parts, (ours, theirs), strict=True) if part
    )
    reach = _t(degrees) * math.sqrt(variance)
    return Estimate(value, value * math.exp(-reach), value * math.exp(reach), n)


def noise_floor(baseline: list[list[float]], candidate: list[list[float]]) -> Noise:
    """From the windows of each pass, of both backends. Unknown unless a backend has two passes."""
    sides = [np.array([np.log(windows).mean() for windows in passes if windows]) for passes in (baseline, candidate)]
    degrees = sum(max(len(side) - 1, 0) for side in sides)
    if degrees < 1 or not all(len(side) for side in sides):
        return Noise(None, 0, "needs two passes of a backend with results: raise decode.rounds")
    squares = sum(float(((side - side.mean()) ** 2).sum()) for side in sides)
    error = math.sqrt(squares / degrees * sum(1 / len(side) for side in sides))
    return Noise(math.expm1(_t(degrees) * error), degrees)


def _t(degrees: float) -> float:
    return float(stats.t.ppf((1 + LEVEL) / 2, degrees))
