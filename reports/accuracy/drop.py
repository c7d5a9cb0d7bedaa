"""The drop: baseline's less candidate's mean score, over *these* items. Positive is worse.

Scores are arrays of items x repeats, from 0 to 1, in which both backends answered the same items with the same seeds.
``weight`` has one share per item, together 1: equal ones, or such that strata of unlike size count alike.

**The bound** that a margin is held against is the larger of two upper bounds. (1) Student's t on the items'
differences d = mean over repeats of baseline − candidate, n − 1 degrees of freedom. (2) The normal bound that adds each
item's own binomial variance p (1 − p) / k of both backends, with p = (sum of scores + 1/2) / (k + 1), so that an item
that was always answered right is not taken for certain. Where most items are at the ceiling, t alone passes a harmful
candidate too often: few items vary, and those at 1 say nothing of their variance. Scores between 0 and 1 vary no more
than binary ones with their mean (Bhatia and Davis, 2000), so (2) holds for them too, but wide: for them it is used
only where an item weighs more than one of T_ITEMS, as those of a stratum do of which few items are left: t, which takes
all items for draws of one kind, would let a drop in that stratum pass. The error rates of both are in
docs/error-rates.md.

**The interval** is Student's t on d: it takes items as drawn from a population (Miller, arXiv 2411.00640), is there for
description, and decides nothing.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]

LEVEL = 0.95
T_ITEMS = 100
"""Where no item weighs more than one of so many, t alone bounds a mean of scores that are not binary."""


class Drop(msgspec.Struct, frozen=True):
    """As shares of 1; ``low`` and ``high`` are null where items do not differ in d, or there is one."""

    baseline: float
    candidate: float
    value: float
    low: float | None
    high: float | None
    bound: float | None
    """Null where it cannot be had: one item, and scores that are not binary."""
    bound_t: float | None
    bound_stratified: float


def equal_weight(items: int) -> Floats:
    return np.full(items, 1 / items)


def t_alone(weight: Floats, *, binary: bool) -> bool:
    """Whether t by itself is the bound."""
    return not binary and float(weight.max()) <= 1 / T_ITEMS


def differences(baseline: Floats, candidate: Floats, weight: Floats) -> Floats:
    """Per item, baseline − candidate, scaled by its weight so that their plain mean is the drop."""
    found: Floats = (baseline.mean(axis=1) - candidate.mean(axis=1)) * weight * len(weight)
    return found


def smoothed_error(baseline: Floats, candidate: Floats, weight: Floats, repeats: float) -> float:
    """Standard error of the drop at ``repeats``, from the items' mean scores of both backends, smoothed as above."""
    rates = (np.array([baseline, candidate]) * repeats + 0.5) / (repeats + 1)
    return math.sqrt(float((weight**2 * rates * (1 - rates) / repeats).sum()))


def drop(baseline: Floats, candidate: Floats, weight: Floats, *, binary: bool, level: float = 0.05) -> Drop:
    """The drop with its interval, and its upper bound at the one-sided ``level``."""
    items, repeats = baseline.shape
    means = baseline.mean(axis=1), candidate.mean(axis=1)
    each = differences(baseline, candidate, weight)
    value = float(each.mean())
    stratified = value + float(stats.norm.isf(level)) * smoothed_error(*means, weight, repeats)
    error = t_error(each)
    by_t = None if error is None else value + float(stats.t.isf(level, items - 1)) * error
    reach = None if not error else float(stats.t.ppf((1 + LEVEL) / 2, items - 1)) * error
    return Drop(
        baseline=float(weight @ means[0]),
        candidate=float(weight @ means[1]),
        value=value,
        low=None if reach is None else value - reach,
        high=None if reach is None else value + reach,
        bound=None if by_t is None else by_t if t_alone(weight, binary=binary) else max(by_t, stratified),
        bound_t=by_t,
        bound_stratified=stratified,
    )


def t_error(each: Floats) -> float | None:
    """Standard error of the mean of the items' differences; null for a single item."""
    return float(each.std(ddof=1)) / math.sqrt(len(each)) if len(each) > 1 else None


def within_variance(scores: Floats) -> float | None:
    """Variance of one score around its item's mean, averaged over items; null for one repeat."""
    return float(scores.var(axis=1, ddof=1).mean()) if scores.shape[1] > 1 else None


def seed_correlation(baseline: Floats, candidate: Floats) -> float | None:
    """Of both backends' scores at the same item and seed, around their items' means; null where one never varies.

    Repeats needed go with 1 − this where the bound can use it (t). The same noise need not give the same answer: it is
    measured, never assumed."""
    mine, theirs = (scores - scores.mean(axis=1, keepdims=True) for scores in (baseline, candidate))
    size = math.sqrt(float((mine**2).sum()) * float((theirs**2).sum()))
    return float((mine * theirs).sum()) / size if size > 0 else None
