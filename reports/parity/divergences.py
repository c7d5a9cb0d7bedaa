"""How far apart two runs are at each position of the same tokens: from the 20 most probable tokens of each.

**KL**, Σ p log(p / q) of the first run from the second, over the tokens that both lists hold, with all others merged
into one. Merging can only lose divergence (data processing inequality), so it is a lower bound of that over the whole
vocabulary; the floor has to be measured in the same way. Each term is taken as p log(p / q) − p + q: together the same
where both sum to 1, and none is negative, so that rounding does not make small divergences negative ones.

Lists are ids int32 [n, k] and logprobs float32 [n, k], the most probable first. A list with fewer than k tokens is
filled up with id −1 and logprob −inf. Work goes in slices of positions, so that memory does not grow with n beyond the
result.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Logprobs = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Ids = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_SLICE = 8192
"""Positions; k² comparisons each."""
_LEAST = 1e-7
"""Of the merged rest: float32 logprobs do not sum to 1 closer than that."""


def kl(ids: Ids, logprobs: Logprobs, other_ids: Ids, other_logprobs: Logprobs) -> Floats:
    """Divergence in nats per position, [n]; infinite where a logprob is NaN. Raises ValueError for unlike shapes."""
    if not ids.shape == logprobs.shape == other_ids.shape == other_logprobs.shape:
        raise ValueError("needs four arrays of one shape, positions x candidates")
    found = np.empty(len(ids))
    for start in range(0, len(ids), _SLICE):
        part = slice(start, start + _SLICE)
        found[part] = _kl(ids[part], logprobs[part], other_ids[part], other_logprobs[part])
    return found


def _kl(ids: Ids, logprobs: Logprobs, other_ids: Ids, other_logprobs: Logprobs) -> Floats:
    same = ids[:, :, None] == other_ids[:, None, :]
    place = same.argmax(axis=2)
    shared = np.take_along_axis(same, place[:, :, None], axis=2)[:, :, 0] & (ids >= 0)
    log_p = np.where(shared, logprobs, -np.inf).astype(np.float64)
    log_q = np.where(shared, np.take_along_axis(other_logprobs, place, axis=1), -np.inf).astype(np.float64)
    p, q = np.exp(log_p), np.exp(log_q)
    with np.errstate(invalid="ignore"):  # 0 · (−inf + inf), which is 0 here
        terms = np.where(log_p > -np.inf, p * (log_p - log_q), 0.0) - p + q
    rest, other_rest = (np.maximum(1 - each.sum(axis=1), _LEAST) for each in (p, q))
    value: Floats = terms.sum(axis=1) + rest * np.log(rest / other_rest) - rest + other_rest
    broken = np.isnan(logprobs).any(axis=1) | np.isnan(other_logprobs).any(axis=1)
    return np.where(broken, np.inf, np.maximum(value, 0.0))


def deltas(logprobs: Logprobs, other_logprobs: Logprobs) -> Floats:
    """Absolute difference of the forced tokens' logprobs, [n]; infinite where one is NaN or just one is −inf."""
    with np.errstate(invalid="ignore"):
        found = np.where(logprobs == other_logprobs, 0.0, np.abs(logprobs.astype(np.float64) - other_logprobs))
    return np.where(np.isnan(found), np.inf, found)


def same_top(ids: Ids, other_ids: Ids) -> Flags:
    """Both runs have the same most probable token, [n]."""
    found: Flags = ids[:, 0] == other_ids[:, 0]
    return found


def gaps(logprobs: Logprobs) -> Floats:
    """By how much the most probable token's logprob exceeds the second's, [n]."""
    found: Floats = logprobs[:, 0].astype(np.float64) - logprobs[:, 1]
    return found
