"""Does the sampler draw what the logprobs say (D3)? Tokens drawn at a temperature T and a top_p, against the
distribution that their own returned logprobs give.

At every position the k most probable tokens are known. Weights are p^(1/T), cut to the nucleus: the fewest most
probable tokens whose share reaches top_p. What the list leaves out weighs 1 − Σp at T = 1, and no more than
(1 − Σp) · p_k^(1/T − 1) below; a position is judged where the nucleus is the same at both ends of that, so that its
shares are known exactly. Whether it is judged depends on the distribution and not on the draw: it biases nothing. Above
T = 1 the list says too little.

**Rank 1**: how often the most probable token was drawn, less how often it should have been, in standard deviations.
**Surprisal**: −log of the drawn token's share, less the entropy, likewise. Given the distributions before it each draw
is independent of those before, wherever a reply ended; requests need seeds of their own. Both are two-sided. Rank 1 is
exact (a sum of unlike binomials) while few draws are unsure, normal from SURE on; surprisal, whose tail is long, has
its skewness taken into account (Pearson III).
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from scipy import stats

from reports.parity.divergences import Flags, Floats, Ids, Logprobs
from reports.parity.result import Finding

SURE = 400.0
"""Variance of the number of rank-1 draws from which on the normal distribution does."""
LEAST = 20.0
"""Variance that surprisal is judged from: below, a few rare draws decide."""
_EDGE = 1e-3
"""Of top_p: a draw this close to the nucleus' edge is not outside."""
_TIE = 1e-5
"""Logprobs no farther apart are those of tokens that may change places."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    rank_one: Finding
    """Statistic: z, positive where it was drawn too often."""
    surprisal: Finding
    """Statistic: z, positive where draws were too improbable."""
    outside: Finding
    """Statistic: the share of positions whose draw was outside of the nucleus; none is allowed."""


def calibration(
    drawn: Ids, drawn_logprob: Logprobs, ids: Ids, logprobs: Logprobs, temperature: float, top_p: float
) -> Calibration:
    """``drawn`` and its logprob [n], and the most probable tokens [n, k], logprobs before temperature and top_p.
    Takes some 1.5 KB of memory a position: 100,000 are plenty. Raises ValueError for temperature 0 (see ``greedy``) and
    top_p out of range."""
    if temperature <= 0 or not 0 < top_p <= 1:
        raise ValueError("needs a temperature above 0 and a top_p above 0, at most 1")
    if temperature > 1 or (temperature < 1 and top_p == 1):
        why = "above 1" if temperature > 1 else "below 1 with a top_p of 1"
        none = Finding(n=0, unit="positions", reason=f"At a temperature {why} the returned tokens say too little.")
        return Calibration(rank_one=none, surprisal=none, outside=none)
    shares, drawn_share, judged, outside = _distribution(drawn, drawn_logprob, ids, logprobs, temperature, top_p)
    return Calibration(
        rank_one=_rank_one(drawn[judged] == ids[judged, 0], shares[judged, 0]),
        surprisal=_surprisal(drawn_share[judged], shares[judged]),
        outside=_none_allowed(outside),
    )


def greedy(drawn_logprob: Logprobs, logprobs: Logprobs) -> Finding:
    """At temperature 0: the share of positions whose draw was not (one of) the most probable; none is allowed."""
    return _none_allowed(~(drawn_logprob >= logprobs[:, 0] - _TIE))


def _none_allowed(wrong: Flags) -> Finding:
    n = len(wrong)
    if not n:
        return Finding(n=0, unit="positions", limit=0.0, reason="No position was recorded.")
    share = float(wrong.mean())
    return Finding(n=n, unit="positions", statistic=share, floor=0.0, bound=share, limit=0.0, p=float(share == 0))


def _distribution(
    drawn: Ids, drawn_logprob: Logprobs, ids: Ids, logprobs: Logprobs, temperature: float, top_p: float
) -> tuple[Floats, Floats, Flags, Flags]:
    """Shares [n, k + 1], the last that of all tokens left out; the drawn token's; which positions can be judged; whose
    draw was outside of the nucleus."""
    top = logprobs[:, :1].astype(np.float64)
    weights = np.exp((logprobs - top) / temperature)  # of the most probable: 1
    left_out = np.maximum(1 - np.exp(logprobs.astype(np.float64)).sum(axis=1), 0) * np.exp(-top[:, 0])
    at_most = left_out * np.exp((logprobs[:, -1] - top[:, 0]) * (1 / temperature - 1))
    at_least = left_out if temperature == 1 else np.zeros_like(left_out)
    upto = weights.cumsum(axis=1)
    least, most = upto[:, -1] + at_least, upto[:, -1] + at_most
    inside = upto - weights < top_p * most[:, None]
    judged = np.isfinite(upto[:, -1]) & np.isfinite(drawn_logprob)
    if top_p < 1:
        same = (inside == (upto - weights < top_p * least[:, None])).all(axis=1)
        judged &= same & (upto[:, -1] >= top_p * most)
        bucket = np.zeros_like(left_out)
    else:
        bucket = left_out
    weights = np.column_stack([np.where(inside, weights, 0), bucket])
    whole = weights.sum(axis=1)
    place = ids == drawn[:, None]
    listed = place.any(axis=1)
    drawn_weight = np.exp((drawn_logprob - top[:, 0]) / temperature)
    drawn_share = np.where(listed | (top_p < 1), drawn_weight, bucket) / whole
    better = logprobs > (drawn_logprob + _TIE)[:, None]
    before = np.where(better, np.exp((logprobs - top) / temperature), 0).sum(axis=1)
    outside = (before > (top_p + _EDGE) * most) & np.isfinite(drawn_logprob)
    return weights / whole[:, None], drawn_share, judged, outside


def _rank_one(first: Flags, share: Floats) -> Finding:
    unsure = (share > 0) & (share < 1)
    variance = float((share * (1 - share)).sum())
    if variance == 0:
        return Finding(n=len(share), unit="positions", reason="No judged position had a choice.")
    others, expected = int((~first[unsure]).sum()), float((1 - share).sum())
    z = (expected - others) / math.sqrt(variance)
    if variance < SURE:
        chances = stats.poisson_binom(1 - share[unsure])
        p = min(1.0, 2 * float(min(chances.cdf(others), chances.sf(others - 1))))
    else:
        p = 2 * float(stats.norm.sf(abs(z)))
    return Finding(n=len(share), unit="positions", statistic=z, floor=0.0, p=p)


def _surprisal(drawn_share: Floats, shares: Floats) -> Finding:
    with np.errstate(divide="ignore", invalid="ignore"):
        each = np.where(shares > 0, -np.log(shares), 0.0)
        seen = -np.log(drawn_share)
    entropy = (shares * each).sum(axis=1)
    away = each - entropy[:, None]
    variance, third = (float((shares * away**power).sum()) for power in (2, 3))
    if variance < LEAST:
        reason = "The judged positions had too little choice."
        return Finding(n=len(shares), unit="positions", reason=reason)
    z = float((seen - entropy).sum()) / math.sqrt(variance)
    skewed = stats.pearson3(third / variance**1.5)
    p = min(1.0, 2 * float(min(skewed.cdf(z), skewed.sf(z))))
    return Finding(n=len(shares), unit="positions", statistic=z, floor=0.0, p=p)
