"""Mean KL against the floor's (P1): how many times as far the candidate is from the baseline as the baseline from
itself, and whether that grows with the step (drift), with context (P5) or with the batch (P6).

Positions of one prompt are not independent: a prompt is one observation, its mean over positions. Both runs replayed
the same prompts, so that they are pairs. The test of a ratio r is Student's t on c − r f, the candidate's less r times
the floor's means; the bound is the largest r that it does not reject (Fieller 1954). If the candidate is like the
baseline at r, c and r f may be exchanged, c − r f is symmetric, and t keeps its level with few and skewed prompts too.
Where the candidate's prompts vary several times as much as the floor's, candidates at the limit pass more often than in
5 %: 10 to 17 % with 50 prompts, 8 to 14 % with 105 (simulated). Few prompts far from the baseline are for outliers.py.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt
from scipy import stats

from reports.accuracy.harm import holm, sign_flip, trend
from reports.parity.divergences import Floats
from reports.parity.result import LEVEL, Finding

LIMIT = 1.5
PER = 1_000
"""Steps in which ``drift`` tells growth."""

Ints = npt.NDArray[np.int64]


class Stratum(msgspec.Struct, frozen=True):
    """``holm_p`` of its ``found.p`` over all strata."""

    name: str
    found: Finding
    holm_p: float | None


def by_prompt(values: Floats, prompt: Ints) -> Floats:
    """Mean over the positions of each prompt, in ascending order of ``prompt``: its number at every position."""
    _, which = np.unique(prompt, return_inverse=True)
    found: Floats = np.bincount(which, values) / np.bincount(which)
    return found


def ratio(candidate: Floats, floor: Floats, limit: float = LIMIT) -> Finding:
    """Of the mean KL, from the prompts' means. ``p`` is of a ratio above 1."""
    n = len(candidate)
    reason = _unfit(candidate, floor)
    if reason:
        return Finding(n=n, unit="prompts", limit=limit, reason=reason)
    mean, floor_mean = float(candidate.mean()), float(floor.mean())
    bound = _fieller(candidate, floor)
    if mean == 0:
        reason = ""
    elif floor_mean == 0:
        reason = "The baseline repeats itself exactly: there is no ratio to its distance from itself."
    elif bound is None:
        reason = "Prompts differ too much in the floor to bound the ratio: replay more."
    return Finding(
        n=n,
        unit="prompts",
        statistic=mean / floor_mean if floor_mean else None if mean else 0.0,
        floor=1.0,
        bound=bound if mean else 0.0,
        limit=limit,
        p=_p(candidate - floor),
        p_limit=_p(candidate - limit * floor),
        reason=reason,
    )


def strata(candidate: Floats, floor: Floats, names: list[str], limit: float = LIMIT) -> list[Stratum]:
    """The ratio in each stratum (context, batch size), in order of first appearance. ``names``: each prompt's."""
    where = np.array(names)
    found = [(name, ratio(candidate[where == name], floor[where == name], limit)) for name in dict.fromkeys(names)]
    adjusted = iter(holm([each.p for _, each in found if each.p is not None]))
    return [Stratum(name, each, None if each.p is None else next(adjusted)) for name, each in found]


def context_trend(candidate: Floats, floor: Floats, context: Floats) -> Finding:
    """Does the distance beyond the floor grow with context? From the prompts' means and their contexts in tokens. The
    statistic is the growth of the mean KL per doubling of context, the floor that of the floor."""
    n, doublings = len(candidate), np.log2(context)
    reason = _unfit(candidate, floor) or ("All prompts have the same context." if np.ptp(doublings) == 0 else "")
    if reason:
        return Finding(n=n, unit="prompts", reason=reason)
    away = doublings - doublings.mean()
    growth, floor_growth = (float(away @ each / (away @ away)) for each in (candidate, floor))
    return Finding(n=n, unit="prompts", statistic=growth, floor=floor_growth, p=trend(candidate - floor, doublings))


def drift(candidate: Floats, floor: Floats, prompt: Ints, step: Ints) -> Finding:
    """Does the distance beyond the floor grow with the decode step? From KL per position of both, with each position's
    prompt and step in it. The statistic is the growth of KL per PER steps, as the mean over prompts.

    ``p`` is the larger of two by signs of the prompts' values: of the slope, and of the distance weighted by the step.
    The slope alone would take a candidate that is nearer at first for one that drifts."""
    if reason := _unfit(candidate, floor):
        return Finding(n=len(np.unique(prompt)), unit="prompts", reason=reason)
    _, which = np.unique(prompt, return_inverse=True)
    count = np.bincount(which)
    away = step - (np.bincount(which, step) / count)[which]
    spread = np.bincount(which, away**2)
    if not (spread > 0).any():
        return Finding(n=len(count), unit="prompts", reason="No prompt has more than one step.")
    slopes, floor_slopes = (
        np.bincount(which, away * each)[spread > 0] / spread[spread > 0] for each in (candidate, floor)
    )
    late = (np.bincount(which, step * (candidate - floor)) / count)[spread > 0]
    excess = slopes - floor_slopes
    reach = _reach(slopes) if len(slopes) > 1 else None
    return Finding(
        n=len(excess),
        unit="prompts",
        statistic=float(slopes.mean()) * PER,
        floor=float(floor_slopes.mean()) * PER,
        bound=None if reach is None else (float(slopes.mean()) + reach) * PER,
        p=max(sign_flip(excess), sign_flip(late)),
        reason="" if reach is not None else "One prompt with several steps has no bound.",
    )


def _unfit(candidate: Floats, floor: Floats) -> str:
    if len(candidate) != len(floor):
        raise ValueError("candidate and floor have to be of the same prompts")
    if len(candidate) < 2:
        return f"{len(candidate)} prompts cannot tell how far prompts differ."
    for name, each in (("candidate", candidate), ("floor", floor)):
        if broken := int((~np.isfinite(each)).sum()):
            return f"{broken:,} of {len(each):,} distances of the {name} are not finite: logprobs are NaN or missing."
    return ""


def _p(each: Floats) -> float:
    """Of a mean above 0, by t."""
    mean, error = float(each.mean()), float(each.std(ddof=1)) / math.sqrt(len(each))
    if error == 0:
        return float(mean <= 0)
    return float(stats.t.sf(mean / error, len(each) - 1))


def _reach(each: Floats) -> float:
    """Of the upper bound above the mean, by t."""
    return float(stats.t.isf(1 - LEVEL, len(each) - 1)) * float(each.std(ddof=1)) / math.sqrt(len(each))


def _fieller(candidate: Floats, floor: Floats) -> float | None:
    """Upper bound of the ratio of means; null where the floor's mean is not told from 0."""
    n = len(candidate)
    square = float(stats.t.isf(1 - LEVEL, n - 1)) ** 2 / n
    (var, both), (_, floor_var) = np.cov(candidate, floor)
    mean, floor_mean = candidate.mean(), floor.mean()
    a, b, c = floor_mean**2 - square * floor_var, mean * floor_mean - square * both, mean**2 - square * var
    return float((b + math.sqrt(max(b * b - a * c, 0.0))) / a) if a > 0 else None
