"""The language model's part in the step loop: the next token of each request that it speaks for, and its scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.emulator import decoding, lm
from replay.emulator.decoding import Faulty, Place


class Score(NamedTuple):
    """One output token as the model saw it."""

    token: int
    logprob: float
    """NaN where the logits were not numbers."""
    rank: int
    """In the whole vocabulary, from 1; 0 where the logits were not numbers."""
    others: NDArray[np.int32]
    """The most likely tokens, best first, or the tokens that were asked for, in their order."""
    other_logprobs: NDArray[np.float32]


class Voice(msgspec.Struct, kw_only=True):
    """How the model speaks for one request, and what it has said. Its context moves with each token."""

    last: tuple[int, int, int]
    position: int
    state: int
    request: int
    """Number of the request."""
    temperature: float
    top_p: float
    top_k: int
    seed: int
    min_tokens: int = 0
    trace: Sequence[int] = ()
    """Tokens that it is made to say first, whatever it would say."""
    scored: int | None = None
    """Most likely tokens to score at each position; None: no scores are kept."""
    scored_ids: Sequence[int] = ()
    """Tokens to score instead."""
    cached: int = 0
    decoded: int = 0
    scores: list[Score] = []
    """Of the tokens said since somebody last took them."""


Spot = tuple[tuple[int, int, int], int, int]


def context_of(prompt: NDArray[np.int32]) -> Spot:
    """Return ``last``, ``position`` and ``state`` of a Voice after a prompt."""
    a, b, c = ([0, 0, 0, *prompt[-3:].tolist()])[-3:]
    return (a, b, c), len(prompt), int(lm.states(prompt)[-1])


def say(voices: Sequence[Voice], place: Place, faulty: Faulty, weights: int) -> list[int]:
    """Return the next token of each voice, in one batch. ``place`` is theirs but for request, decoded and cached."""
    decoded = np.array([voice.decoded for voice in voices])
    place = place._replace(
        request=np.array([voice.request for voice in voices]),
        decoded=decoded,
        cached=np.array([voice.cached for voice in voices]),
    )
    context = lm.Context(
        np.array([voice.last for voice in voices], np.int64),
        np.array([voice.position for voice in voices], np.int64),
        np.array([voice.state for voice in voices], np.uint64),
    )
    sampling = lm.Sampling(
        np.array([voice.temperature for voice in voices]),
        np.array([voice.top_p for voice in voices]),
        np.array([voice.top_k for voice in voices]),
        np.array([voice.seed for voice in voices], np.uint64),
        decoded >= np.array([voice.min_tokens for voice in voices]),
    )
    found = decoding.logits(context, place, faulty, weights)
    tokens = decoding.sample(found, context.position, sampling, place, faulty)
    for row, voice in enumerate(voices):
        if voice.decoded < len(voice.trace):
            tokens[row] = voice.trace[voice.decoded]
    if any(voice.scored is not None for voice in voices):
        _keep_scores(voices, found, tokens)
    added = lm.terms(tokens, context.position)
    said: list[int] = tokens.tolist()
    for voice, token, state in zip(voices, said, (context.state + added).tolist(), strict=True):
        voice.last = (voice.last[1], voice.last[2], token)
        voice.position += 1
        voice.decoded += 1
        voice.state = state
    return said


def _keep_scores(voices: Sequence[Voice], found: lm.Logits, tokens: lm.Ids) -> None:
    scores = lm.score(found, tokens, max(voice.scored or 0 for voice in voices))
    logprobs, ranks = scores.logprobs.tolist(), scores.ranks.tolist()
    for row, voice in enumerate(voices):
        if voice.scored is None:
            continue
        others, other_logprobs = scores.top_ids[row, : voice.scored], scores.top_logprobs[row, : voice.scored]
        if voice.scored_ids:
            one = lm.Logits(found.ids[row : row + 1], found.values[row : row + 1], found.rest[row : row + 1])
            others = np.array(voice.scored_ids, np.int32)
            other_logprobs = (lm.values_of(one, others[None, :]) - lm.log_sum(one))[0].astype(np.float32)
        voice.scores.append(Score(int(tokens[row]), logprobs[row], ranks[row], others, other_logprobs))
