"""The emulator's language model: real logprobs over the whole vocabulary, for n positions at a time.

A pure function of the context: of its last three tokens, of the position, and of a number that stands for the whole
prefix (``states``), as a recurrent state does. The first two choose 64 words as candidates and how clearly the first
of them leads: by 0 to 8 nats, all equally likely, so that most positions have one clear token and some have close
rivals (top-1 probability .3 to .999, rarely less). The prefix adds to each candidate's logit a number of standard
deviation ``STATE_SD``, so that a wrong prefix shows in every logprob and changes some of the tokens. EOS has a
probability of its own; all other tokens share ``REST``.

Sampling is vLLM's: greedy at temperature 0; else temperature, top-k and top-p, and the largest sum of logit and Gumbel
noise, which depends on (seed, position, token id) alone. Two arms with the same seed therefore draw the same tokens as
long as their logits agree.

A row takes about 3 kB while it is worked on: callers with a million positions go in pieces (decoding.replay does).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from replay.emulator import language
from replay.emulator.noise import mixed, normals, units

CANDIDATES = 64
STATE_SD = 0.5
REST = 1e-5
"""Probability of all tokens together that are neither candidate nor EOS, about (the prefix's numbers change it)."""
OTHERS = language.VOCAB_SIZE - CANDIDATES - 1
"""How many tokens that are."""
BROKEN = language.IDS["!"]
"""What is sampled from logits that are not numbers. vLLM's argmax then gives token 0, "!" in many vocabularies."""

_LARGEST_LEAD = 8.0
_FALL = -1.5 * np.log(np.arange(1, CANDIDATES))  # logits of the second candidate and below, were there no lead
_FALLEN = float(np.exp(_FALL).sum())
_EOS_PLACES = 2 / language.MEAN_REPLY  # share of positions at which EOS has a probability of .1 to .9
_EOS_ELSEWHERE = 1e-5
_STRIDE, _END, _END_HEIGHT, _STATE, _GUMBEL, _OTHER, _OTHER_GUMBEL = range(0x1A97, 0x1A9E)  # what numbers are drawn for

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Numbers = NDArray[np.uint64]
PerRow = Any
"""A number for all rows, or an array of one for each."""


class Context(NamedTuple):
    """What decides n next tokens."""

    before: Ids
    """[n, 3]: the last three tokens, the latest last; 0 where there are none."""
    position: Ids
    """[n]: of the next token, counted from the start of the prompt."""
    state: Numbers
    """[n]: the prefix, as ``states`` has it."""


class Logits(NamedTuple):
    """What the model says of n next tokens. Logits are natural, and not normalised."""

    ids: Ids
    """[n, 65]: the candidates, the one that leads without the prefix first, then EOS."""
    values: Floats
    """[n, 65]: their logits."""
    rest: Floats
    """[n]: the logit of each token that is none of them."""


class Sampling(NamedTuple):
    """How tokens are drawn; each field is for all rows, or an array of n."""

    temperature: PerRow = 1.0
    top_p: PerRow = 1.0
    top_k: PerRow = 0
    """0: all."""
    seed: PerRow = 0
    may_end: PerRow = True
    """False: EOS is not drawn (min_tokens)."""


class Scores(NamedTuple):
    """Raw logprobs of n tokens (before temperature, top-k and top-p): vLLM's ``raw_logprobs``."""

    logprobs: NDArray[np.float32]
    """[n]: of the tokens asked for; NaN where the logits are not numbers."""
    ranks: NDArray[np.int32]
    """[n]: 1 for the most likely token of the vocabulary; 0 where the logits are not numbers."""
    top_ids: NDArray[np.int32]
    """[n, top]: the most likely tokens, best first."""
    top_logprobs: NDArray[np.float32]
    """[n, top]"""


def states(tokens: ArrayLike, start: int = 0, before: int = 0) -> Numbers:
    """Return the state before each token and after the last: [len + 1].

    ``start`` is the position of the first token, ``before`` the state there. A state is a sum of numbers that depend
    on one token and its place each, modulo 2^64: it can be continued, and any change of a prefix changes it.
    """
    ids = np.asarray(tokens, np.int64)
    new = terms(ids, np.arange(start, start + len(ids)))
    return np.concatenate([np.array([before], np.uint64), new]).cumsum(dtype=np.uint64)


def terms(tokens: Ids, position: Ids) -> Numbers:
    """Return what each of n tokens at its position adds to the state."""
    return mixed(tokens, position, _STATE)


def logits(context: Context, weights: int = 0) -> Logits:
    """Return the logits of n next tokens. ``weights`` tells one model from another."""
    before, position, state = context
    key = mixed(before[:, 0] << 40 ^ before[:, 1] << 20 ^ before[:, 2], position, weights)
    lead = units(key) * _LARGEST_LEAD
    stride = mixed(key, _STRIDE)
    count = len(language.WORDS)  # a power of two: any odd stride visits different words
    start, stride = stride >> np.uint64(32), stride | np.uint64(1)
    words = start[:, None] + np.arange(CANDIDATES, dtype=np.uint64) * stride[:, None]
    ids = np.empty((len(key), CANDIDATES + 1), np.int64)
    ids[:, :-1] = language.FIRST_WORD + (words & np.uint64(count - 1)).astype(np.int64)
    ids[:, -1] = language.EOS
    words_log_sum = np.log1p(_FALLEN * np.exp(-lead))
    ends = units(mixed(key, _END)) < _EOS_PLACES
    end = np.where(ends, 0.1 + 0.8 * units(mixed(key, _END_HEIGHT)), _EOS_ELSEWHERE)
    values = np.empty(ids.shape)
    values[:, 0] = 0.0
    values[:, 1:-1] = _FALL - lead[:, None]
    values[:, :-1] += STATE_SD * normals(mixed(state[:, None], ids[:, :-1], _STATE))
    values[:, -1] = words_log_sum + np.log(end / (1 - end))
    return Logits(ids, values, words_log_sum + np.log(REST / OTHERS))


def log_sum(found: Logits) -> Floats:
    """Return the logarithm of the sum over the whole vocabulary, [n]: logprob = logit - this."""
    return _log_sum(found.values, found.rest)


def _log_sum(values: Floats, rest: Floats) -> Floats:
    high = values.max(axis=1)
    total = np.exp(values - high[:, None]).sum(axis=1) + OTHERS * np.exp(rest - high)
    result: Floats = high + np.log(total)
    return result


def values_of(found: Logits, tokens: ArrayLike) -> Floats:
    """Return the logits of given tokens: [n] of one for each row, [n, m] of m for each row."""
    wanted = np.asarray(tokens, np.int64)
    flat = wanted.reshape(len(found.ids), -1)
    out = np.empty(flat.shape)
    rows = np.arange(len(flat))
    for column in range(flat.shape[1]):
        hit = found.ids == flat[:, column, None]
        out[:, column] = np.where(hit.any(axis=1), found.values[rows, hit.argmax(axis=1)], found.rest)
    return out.reshape(wanted.shape)


def score(found: Logits, tokens: ArrayLike, top: int = 0) -> Scores:
    """Return logprob and rank of one token in each row, and the ``top`` most likely ones (65 at most)."""
    norm = log_sum(found)
    chosen = values_of(found, tokens)
    above = (found.values > chosen[:, None]).sum(axis=1) + OTHERS * (found.rest > chosen)
    broken = np.isnan(chosen)
    order = np.argsort(-found.values, axis=1)[:, :top] if top else np.empty((len(norm), 0), np.int64)
    return Scores(
        (chosen - norm).astype(np.float32),
        np.where(broken, 0, 1 + above).astype(np.int32),
        np.take_along_axis(found.ids, order, 1).astype(np.int32),
        (np.take_along_axis(found.values, order, 1) - norm[:, None]).astype(np.float32),
    )


def sample(found: Logits, position: Ids, sampling: Sampling) -> Ids:
    """Return one token for each row.

    The tokens outside the candidates draw one number together: the largest of their Gumbel noises, whose distribution
    is known, and which of them has it. Where the nucleus of top-p reaches them, all are in it, since they tie.
    """
    ids, values, rest = found
    n = len(rest)
    temperature, top_p, top_k, seed, may_end = (_rows(field, n) for field in sampling)
    values = values.copy()
    values[~may_end.astype(np.bool_), -1] = -np.inf
    greedy = temperature == 0
    if greedy.all():
        best = values.argmax(axis=1)
        return np.where(np.isnan(found.rest), BROKEN, ids[np.arange(n), best])
    heat = np.where(greedy, 1.0, temperature)
    values, rest = values / heat[:, None], rest / heat
    if (top_p < 1).any() or (top_k > 0).any():
        values, rest = _nucleus(values, rest, top_p, top_k)
    drawn = mixed(seed, position, _GUMBEL)
    values = values + np.where(greedy[:, None], 0.0, _gumbel(mixed(drawn[:, None], ids)))
    best = values.argmax(axis=1)
    tokens = ids[np.arange(n), best]
    others = rest + np.log(OTHERS) + _gumbel(mixed(drawn, _OTHER_GUMBEL))
    rows = np.flatnonzero((others > values[np.arange(n), best]) & ~greedy)
    if rows.size:
        which = (mixed(drawn[rows], _OTHER) % np.uint64(OTHERS)).astype(np.int64)
        passed = np.sort(ids[rows], axis=1) - np.arange(CANDIDATES + 1) <= which[:, None]  # of the candidates, in order
        tokens[rows] = which + passed.sum(axis=1)
    return np.where(np.isnan(found.rest), BROKEN, tokens)


def _rows(field: PerRow, n: int) -> NDArray[Any]:
    return np.broadcast_to(np.asarray(field), (n,))


def _nucleus(values: Floats, rest: Floats, top_p: Floats, top_k: Ids) -> tuple[Floats, Floats]:
    """Take out what lies outside of top-k, then of top-p: the fewest most likely tokens that hold this much."""
    order = np.argsort(-values, axis=1)
    ranked = np.take_along_axis(values, order, 1)
    limited = (top_k > 0) & (top_k <= CANDIDATES + 1)
    ranked = np.where(limited[:, None] & (np.arange(CANDIDATES + 1) >= top_k[:, None]), -np.inf, ranked)
    rest = np.where(limited, -np.inf, rest)
    shares = np.exp(ranked - _log_sum(ranked, rest)[:, None])
    held = shares.cumsum(axis=1)
    ranked = np.where((held - shares < top_p[:, None]) | (top_p[:, None] >= 1), ranked, -np.inf)
    kept = np.empty_like(values)
    np.put_along_axis(kept, order, ranked, 1)
    return kept, np.where((held[:, -1] < top_p) | (top_p >= 1), rest, -np.inf)


def _gumbel(x: Numbers) -> Floats:
    return -np.log(-np.log(units(x) + 2.0**-54))
