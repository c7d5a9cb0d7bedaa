"""First divergence of free runs (P3): how long two runs of the same prompts and seeds emit the same tokens.

**Curve**: Kaplan and Meier's (1958), with log-log intervals from Greenwood's variance. A pair that stayed equal to its
end is censored there.

**Test**: the log-rank test, one-sided, "the candidate leaves the baseline earlier than the baseline leaves itself". As
both pairs of runs share a prompt (and the baseline's first run), they are exchanged prompt by prompt: every pair gets
its log-rank score, divergence less the cumulative hazard of all pairs at its end (Nelson and Aalen), so that the
candidate's scores sum to its observed less its expected divergences; if candidate and baseline are alike, a prompt's
difference of scores is as likely with the other sign. That is exact, with ties and few prompts too.

**Gap**: a greedy run diverges where noise is larger than the gap between the two most probable tokens. A divergence at
a gap that noise does not reach is a defect, even if it is the only one. Not for sampled runs: there the draw's noise
decides, and gaps say nothing.
"""

from __future__ import annotations

import warnings

import msgspec
import numpy as np
from scipy import stats

from reports.accuracy.harm import sign_flip
from reports.parity.divergences import Flags, Floats, Ids
from reports.parity.outliers import TARGET, Threshold, outliers, rate_bound, threshold
from reports.parity.ratio import Ints
from reports.parity.result import Finding


class Curve(msgspec.Struct, frozen=True):
    """After each number of equal tokens in ``steps`` at which pairs diverged: the share that had not, and its 95 %
    interval, null where there is none (none left)."""

    pairs: int
    diverged: int
    steps: list[int]
    survival: list[float]
    low: list[float | None]
    high: list[float | None]
    at_risk: list[int]


class BigGaps(msgspec.Struct, frozen=True):
    """``places``: of the divergences, by index, those at a gap above the threshold, the largest first."""

    places: list[int]
    found: Finding


def first_divergence(tokens: Ids, other: Ids) -> tuple[int, bool]:
    """Tokens that two runs share before they differ, and whether they do; a run that ends where the other goes on
    differs there."""
    common = min(len(tokens), len(other))
    unlike = np.flatnonzero(tokens[:common] != other[:common])
    return (int(unlike[0]), True) if len(unlike) else (common, len(tokens) != len(other))


def curve(steps: Ints, diverged: Flags) -> Curve:
    """Of pairs: equal tokens, and whether they then differed."""
    events = np.unique(steps[diverged])
    if not len(events):
        return Curve(len(steps), 0, [], [], [], [], [])
    found = stats.ecdf(stats.CensoredData(uncensored=steps[diverged], right=steps[~diverged])).sf
    with warnings.catch_warnings(action="ignore"):  # that there is none where none are left
        interval = found.confidence_interval(0.95, method="log-log")
    low, high = (
        [None if np.isnan(value) else float(value) for value in side.evaluate(events)]
        for side in (interval.low, interval.high)
    )
    return Curve(
        pairs=len(steps),
        diverged=int(diverged.sum()),
        steps=events.tolist(),
        survival=found.evaluate(events).tolist(),
        low=low,
        high=high,
        at_risk=(len(steps) - np.searchsorted(np.sort(steps), events)).tolist(),
    )


def log_rank(
    steps: Ints, diverged: Flags, floor_steps: Ints, floor_diverged: Flags, prompt: Ints | None = None
) -> Finding:
    """The candidate's pairs against the floor's, which are of the same prompts and seeds in the same order. The
    statistic is divergences per token, the bound that of a constant rate. ``prompt``: each pair's, where prompts have
    several. Raises ValueError for unlike lengths."""
    n = len(steps)
    if not n == len(diverged) == len(floor_steps) == len(floor_diverged):
        raise ValueError("candidate and floor have to be of the same pairs")
    tokens, floor_tokens = int((steps + diverged).sum()), int((floor_steps + floor_diverged).sum())
    if not tokens or not floor_tokens:
        return Finding(n=n, unit="pairs", reason="No token was emitted.")
    scores = _scores(np.concatenate([steps, floor_steps]), np.concatenate([diverged, floor_diverged]))
    which = np.arange(n) if prompt is None else np.unique(prompt, return_inverse=True)[1]
    each: Floats = np.bincount(which, scores[:n] - scores[n:]).astype(np.float64)
    events = int(diverged.sum())
    return Finding(
        n=n,
        unit="pairs",
        statistic=events / tokens,
        floor=int(floor_diverged.sum()) / floor_tokens,
        bound=rate_bound(events, tokens),
        p=sign_flip(each),
    )


def _scores(steps: Ints, diverged: Flags) -> Floats:
    at, which = np.unique(steps, return_inverse=True)
    at_risk = len(steps) - np.searchsorted(np.sort(steps), at)
    hazard = (np.bincount(which, diverged) / at_risk).cumsum()
    found: Floats = diverged - hazard[which]
    return found


def gap_threshold(shifts: Floats, floor_gaps: Floats, target: float = TARGET) -> Threshold:
    """The gap that noise does not reach, from greedy runs of baseline against itself: ``shifts``, by how much the gap
    differs between both runs at each position at which they still share all tokens; ``floor_gaps``, the first run's
    gaps where they diverged."""
    return threshold(np.concatenate([np.abs(shifts), floor_gaps]), target)


def big_gaps(gaps: Floats, positions: int, floor_gaps: Floats, floor_positions: int, tau: Threshold) -> BigGaps:
    """Divergences of candidate from baseline at gaps beyond ``tau``. ``gaps``: the baseline's, at each divergence, in
    ``positions`` compared up to there; the floor's likewise."""
    if tau.tau is None:
        return BigGaps([], Finding(n=positions, unit="positions", reason=tau.reason))
    places = np.flatnonzero(gaps > tau.tau)
    floor_events = int((floor_gaps > tau.tau).sum())
    found = outliers(len(places), positions, floor_events, floor_positions)
    return BigGaps(places[np.argsort(-gaps[places], kind="stable")].tolist(), found)
