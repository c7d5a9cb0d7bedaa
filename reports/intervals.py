"""Percentiles with intervals that resample sessions, jointly over all blocks.

Turns of one session are alike (one prefix, one neighbourhood in the server), so sessions are the independent pieces,
not requests. A replicate draws as many sessions as there are, with replacement, and takes *all* turns of a drawn
session in *every* block: what baseline and candidate have in common cancels in the replicate's ratio as it does in
the estimate's.

**The interval** is Student's t around the mean of the replicates, on the log scale for ratios and levels. A
percentile jumps from turn to turn, the mean of its replicates does not (bagging), and the error of that mean is the
infinitesimal jackknife's: variance = Σ_s c_s² − S/R · var(statistic), with c_s = cov(times that session s was drawn,
statistic) over R replicates (Efron, JASA 109, 2014; the second term removes the Monte Carlo share, Wager, Hastie and
Efron, JMLR 15, 2014). One session of 500 turns weighs more than twenty of 10, so degrees of freedom are h − 1 and the
error is scaled by h / (h − 1), as the jackknife would, with h the *effective* number of sessions: the smaller of (Σ
n)² / Σ n² over the sessions' turns n, and 3 (Σ c²)² / Σ c⁴ − 2 over their influences (the same for normal influences,
estimated without bias). Where a replicate is infinite (failures), plain percentiles of the replicates are used
instead.

**Coverage of the true candidate/baseline ratio of P90 interactivity by the 95 % interval**, in simulated experiments
with lengths log-normal around 45 turns, session effects, context dependence, and 5 % of session-by-block noise unless
said otherwise (tests/reports/experiments.py; `python -m tests.reports.experiments` prints this table):

    24 sessions, ratio 1.3                      95.2 %
    49 sessions, ratio 1.3                      95.2 %
    A against A, drift 1 %/min, 24 sessions     95.3 %
    A against A, drift 1 %/min, 49 sessions     95.5 %
    24 sessions, heavy tails                    95.8 %
    24 sessions, session-by-block noise 15 %    94.6 %
    24 sessions, no session-by-block noise      97.4 %
    12 sessions                                 96.4 %
    12 sessions, heavy tails                    97.5 %
    12 short sessions (about 6 turns)           95.5 %
    8 sessions                                  96.2 %

With the few sessions of the last rows it errs on the wide side. What it cannot see is a difference between blocks
that hits all sessions alike: that is what the noise floor is for. Drift that is not linear does not cancel wholly: at
1 % a minute compounding, ABBA in ten-minute blocks leaves a bias of 1 %.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LEVEL = 0.95
REPLICATES = 2000
FEWEST_BEYOND = 5
"""An interval of a percentile needs this many values of either backend beyond it, as expected: 50 turns for P90, 500
for P99. With fewer it is made of one or two turns, and says nothing."""


class Estimate(msgspec.Struct, frozen=True):
    """A figure with its 95 % interval, the requests (or pairs) and sessions behind it, and the reason for what is
    null."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    sessions: int
    reason: str = ""


def resample(sessions: int, replicates: int = REPLICATES, seed: int = 0) -> Floats:
    """How often each session is taken: row 0 is the sample itself (all 1), each further row one replicate of the
    bootstrap."""
    drawn = np.random.default_rng(seed).multinomial(sessions, np.full(sessions, 1 / sessions), size=replicates)
    return np.vstack([np.ones((1, sessions)), drawn])


def quantiles(values: Floats, session: Ints, weights: Floats, ps: list[float]) -> Floats:
    """The ``ps`` quantiles of ``values`` in every row of ``weights``: an array of len(ps) x len(weights).

    Each value counts as often as its ``session`` does; the quantile interpolates linearly at (N − 1) p of the N
    sorted values so counted. Infinite values are allowed. NaN where nothing is counted. No expanded copy is made:
    sorted values are looked up bucket by bucket, with √n buckets.
    """
    n = len(values)
    if not n:
        return np.full((len(ps), len(weights)), np.nan)
    order = np.argsort(values, kind="stable")
    sessions = weights.shape[1]
    width = max(1, int(np.sqrt(n)))
    buckets = -(-n // width)
    padded = buckets * width - n
    value = np.pad(values[order], (0, padded), mode="edge")
    owner = np.pad(session[order], (0, padded))
    members = np.bincount(np.arange(n) // width * sessions + owner[:n], minlength=buckets * sessions)
    through = np.cumsum(weights @ members.reshape(buckets, sessions).T, axis=1)  # counted up to each bucket's end
    total = through[:, -1]
    rows = np.arange(len(weights))[:, None]

    def at(rank: Floats) -> Floats:
        bucket = np.minimum((through <= rank[:, None]).sum(axis=1), buckets - 1)
        before = np.where(bucket > 0, through[rows[:, 0], bucket - 1], 0)
        place = bucket[:, None] * width + np.arange(width)
        counted = before[:, None] + np.cumsum(weights[rows, owner[place]], axis=1)
        found: Floats = value[np.minimum(bucket * width + (counted <= rank[:, None]).sum(axis=1), n - 1)]
        return found

    result = np.empty((len(ps), len(weights)))
    for row, p in enumerate(ps):
        rank = np.maximum(total - 1, 0) * p
        below = np.floor(rank)
        low, high = at(below), at(np.minimum(below + 1, np.maximum(total - 1, 0)))
        share = rank - below
        step = np.subtract(high, low, out=np.zeros_like(low), where=(high != low) & (share > 0))
        result[row] = np.where(total > 0, low + share * step, np.nan)
    return result


def estimate(statistic: Floats, weights: Floats, turns: Ints, *, log: bool = True) -> Estimate:
    """A statistic's value (its first element, from the sample) with an interval from its replicates (the others).

    ``turns`` counts the requests behind it by session. With ``log`` the interval is made on the log scale (ratios and
    positive levels), otherwise as it is (differences, shares).
    """
    n, sessions = int(turns.sum()), int((turns > 0).sum())
    value, replicates = float(statistic[0]), statistic[1:]
    if np.isnan(value):
        return Estimate(None, None, None, n, sessions, "nothing to compute it from")
    if np.isinf(value):
        return Estimate(
            None, None, None, n, sessions, "not reached: too many requests failed (each counts as infinite)"
        )
    if sessions < 2:
        return Estimate(value, None, None, n, sessions, "it needs at least two sessions")
    defined = ~np.isnan(replicates)
    replicates, drawn = replicates[defined], weights[1:][defined]
    if not np.isfinite(replicates).all():
        low, high = np.quantile(replicates, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="closest_observation")
        if low == high:
            return Estimate(value, None, None, n, sessions, "no variation between sessions to make one from")
        reason = "" if np.isfinite(high) else "upper end not reached: too many requests failed in resampled sessions"
        return Estimate(value, _finite(low), _finite(high), n, sessions, reason)
    log = log and bool((replicates > 0).all()) and value > 0
    ends = _student_t(np.log(replicates) if log else replicates, drawn, turns)
    if ends is None:
        return Estimate(value, None, None, n, sessions, "no variation between sessions to make one from")
    low, high = np.exp(ends) if log else ends
    return Estimate(value, float(min(low, value)), float(max(high, value)), n, sessions)


def carried(of: Estimate, p: float, values: int, least: float | None = None, most: float | None = None) -> Estimate:
    """``of``, the ``p`` quantile of ``values`` values, without its interval where so few cannot carry one
    (FEWEST_BEYOND), or where an end of it lies outside all values there are, ``least`` to ``most``."""
    if of.low is None and of.high is None:
        return of
    needed = round(FEWEST_BEYOND / (1 - p))
    if values < needed:
        reason = f"no interval: P{p * 100:g} needs {needed:,} turns of either backend, there are {values:,}"
    elif (least is not None and of.low is not None and of.low < least) or (
        most is not None and of.high is not None and of.high > most
    ):
        reason = "no interval: it would reach beyond every value measured"
    else:
        return of
    return Estimate(of.value, None, None, of.n, of.sessions, reason)


def inverse(of: Estimate) -> Estimate:
    """The rate that belongs to a time: value and ends inverted, ends swapped."""
    value, low, high = (1 / each if each else None for each in (of.value, of.high, of.low))
    return Estimate(value, low, high, of.n, of.sessions, of.reason)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _student_t(replicates: Floats, drawn: Floats, turns: Ints) -> tuple[float, float] | None:
    """None where the replicates vary no more than rounding and the drawing of replicates explain: no variation is no
    certainty, so there is no interval of no width."""
    count, sessions = drawn.shape
    centred = replicates - replicates.mean()
    influence = (drawn - 1).T @ centred / count
    squares = float((influence**2).sum())
    variance = squares - sessions / count * float((centred**2).mean())
    if variance <= 0 or np.ptp(replicates) <= 1e-12 * max(1.0, float(np.abs(replicates).max())):
        return None
    taking_part = int((turns > 0).sum())
    by_turns = turns.sum() ** 2 / (turns.astype(float) ** 2).sum()
    by_influence = 3 * squares**2 / float((influence**4).sum()) - 2
    # below 3 the t quantile explodes and coverage gains nothing (simulated)
    effective = min(max(3.0, min(by_turns, by_influence)), float(taking_part))
    error = np.sqrt(variance) * effective / (effective - 1)
    reach = float(stats.t.ppf((1 + LEVEL) / 2, effective - 1)) * error
    return float(replicates.mean() - reach), float(replicates.mean() + reach)


class Effect(msgspec.Struct, frozen=True):
    """The same percentile of both backends, computed on pairs, and what lies between them."""

    baseline: Estimate
    candidate: Estimate
    ratio: Estimate
    """candidate / baseline."""
    difference: Estimate
    """candidate − baseline."""
    blocks: list[float]
    """The percentile in each block, in measured order; empty where it is a rate and a block's time is 0."""


def effects(
    values: Floats,
    session: Ints,
    candidate: npt.NDArray[np.bool_],
    weights: Floats,
    ps: list[float],
    *,
    rate: bool = False,
) -> list[Effect]:
    """Compare two backends at each percentile of ``ps``.

    ``values[block, pair]`` are seconds; ``candidate[block]`` says whose block it is. Per block the percentile over
    its pairs; per backend the *arithmetic mean over its blocks, in time*: in an order such as A B B A a linear drift
    adds the same to both means and leaves their ratio alone, which a percentile pooled over blocks would not do (its
    tail is the slowest block). With ``rate`` that mean is inverted afterwards: P90 interactivity = 1 / mean over
    blocks of P90(seconds per token), and ratio candidate/baseline = mean of baseline / mean of candidate.
    """
    turns = np.bincount(session, minlength=weights.shape[1])
    fewest = len(session) * int(min(candidate.sum(), (~candidate).sum()))  # values of the backend with fewer blocks
    per_block = np.array([quantiles(block, session, weights, ps) for block in values])  # blocks x ps x replicates
    found = []
    for index in range(len(ps)):
        mine, theirs = per_block[candidate, index].mean(axis=0), per_block[~candidate, index].mean(axis=0)
        if rate:
            mine, theirs = _over(np.ones_like(mine), mine), _over(np.ones_like(theirs), theirs)
        blocks = per_block[:, index, 0]
        ratio = estimate(_over(mine, theirs), weights, turns)
        if ratio.value is None and theirs[0] == 0:
            ratio = msgspec.structs.replace(ratio, reason="the baseline's figure is 0: nothing can be divided by it")
        found.append(
            Effect(
                baseline=carried(estimate(theirs, weights, turns), ps[index], fewest, *_ends(values[~candidate], rate)),
                candidate=carried(estimate(mine, weights, turns), ps[index], fewest, *_ends(values[candidate], rate)),
                ratio=carried(ratio, ps[index], fewest),
                difference=carried(estimate(mine - theirs, weights, turns, log=False), ps[index], fewest),
                blocks=blocks.tolist() if not rate else (1 / blocks).tolist() if (blocks > 0).all() else [],
            )
        )
    return found


def _ends(values: Floats, rate: bool = False) -> tuple[float, float]:
    """The least and the largest value; of their inverses with ``rate``."""
    least, most = float(values.min()), float(values.max())
    return (1 / most if most > 0 else 0.0, 1 / least if least > 0 else np.inf) if rate else (least, most)


def _over(part: Floats, whole: Floats) -> Floats:
    """``part / whole``, NaN where ``whole`` is 0 (or no number)."""
    found: Floats = np.divide(part, whole, out=np.full(whole.shape, np.nan), where=whole > 0)
    return found


def level(blocks: list[tuple[Floats, Ints]], weights: Floats, ps: list[float]) -> list[Estimate]:
    """One backend's percentiles over all its requests: (values, session) of each block, failures infinite; the mean
    over blocks."""
    turns = np.bincount(np.concatenate([session for _, session in blocks]), minlength=weights.shape[1])
    per_block = np.array([quantiles(values, session, weights, ps) for values, session in blocks])
    everything = np.concatenate([values for values, _ in blocks])
    ends = _ends(everything) if len(everything) else ()
    return [
        carried(estimate(per_block[:, index].mean(axis=0), weights, turns), p, len(everything), *ends)
        for index, p in enumerate(ps)
    ]


class NoiseFloor(msgspec.Struct, frozen=True):
    """How large a difference between the backends block-to-block noise alone would make."""

    relative: float | None
    """As a share: 0.02 means that a ratio between 1/1.02 and 1.02 is not an effect. Null is unknown."""
    degrees: int
    drift_per_block: float | None
    """The linear trend over the order of blocks that was removed, as a share per block."""
    reason: str = ""


def noise_floor(blocks: list[float], candidate: npt.NDArray[np.bool_], position: Floats, multiple: float) -> NoiseFloor:
    """From each block's own percentile: least squares of its logarithm on backend and position; ``multiple`` times
    the standard error that the residuals give to the backend effect. Backend effect and linear order are fitted, so
    neither is taken for noise. Unknown without percentiles, with fewer than four blocks, or fewer than two of either
    backend (nothing is left to estimate noise from)."""
    ours, theirs = int(candidate.sum()), int((~candidate).sum())
    degrees = len(candidate) - 3
    if degrees < 1 or min(ours, theirs) < 2:
        return NoiseFloor(None, max(degrees, 0), None, "needs at least four blocks, two of each backend")
    if not blocks:
        return NoiseFloor(None, degrees, None, "no turn has a decode rate in every block")
    if not all(np.isfinite(blocks)) or min(blocks) <= 0:
        return NoiseFloor(None, degrees, None, "a block has no finite percentile")
    design = np.column_stack([np.ones(len(blocks)), candidate, position - position.mean()])
    coefficients, *_ = np.linalg.lstsq(design, np.log(blocks), rcond=None)
    residuals = np.log(blocks) - design @ coefficients
    error = np.sqrt(float(residuals @ residuals) / degrees * np.linalg.pinv(design.T @ design)[1, 1])
    return NoiseFloor(float(np.expm1(multiple * error)), degrees, float(np.expm1(coefficients[2])))
