"""Decode steps of the language model, sound or with faults: one token for each row of a batch, free or forced.

The server's step loop, and whoever proves a check in one process, call the same two functions for each step:
``logits`` and ``sample``. Faults change what these see or say, as faults of kernels do: logprobs and tokens together.
What a prefill yields (the first token of a reply) is sound, since the decode path does not compute it; only a state
that was restored wrongly spoils it as well. Which rows a fault strikes depends on its seed and on the place (request,
step, row) alone, so that the same run in the same order is repeated exactly, and another seed is another run of the
same server.

    prompts, sampling = [...], Sampling(seed=np.arange(len(prompts)))
    reference = generate(prompts, 512, sampling, top=20)
    faulty = replay(prompts, reference.replies(), faulty=Faulty({"kv-beyond": 300}), top=20)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from replay.emulator import language, lm
from replay.emulator.lm import Context, Ids, Logits, Numbers, PerRow, Sampling, Scores
from replay.emulator.noise import mixed, normals, text_number, units

NO_TOKEN = -1
_PIECE = 4096  # positions worked on at a time: their numbers stay near the processor
_CERTAIN = 25.0  # nats: more than any lead


class Faulty(NamedTuple):
    """Faults of the decode path that are on (name -> number, see faults.DECODE_FAULTS), and the seed of their luck."""

    active: Mapping[str, float] = {}
    seed: int = 0


SOUND = Faulty()


class Place(NamedTuple):
    """Where n tokens are computed; each field is for all of them, or an array of n."""

    request: PerRow = 0
    """Number of the request."""
    step: PerRow = 0
    """Number of the engine's step."""
    row: PerRow = 0
    """Of the request in its batch."""
    batch: PerRow = 1
    """Decoding rows of the step."""
    decoded: PerRow = 0
    """Output tokens before this one; at 0 it comes from the prefill."""
    cached: PerRow = 0
    """Tokens of the prompt that came from the prefix cache."""
    joined: PerRow = False
    """Requests joined or left the batch with this step."""


class Run(NamedTuple):
    """Free replies to n prompts."""

    ids: NDArray[np.int32]
    """[n, limit]: tokens, EOS included; NO_TOKEN after the end."""
    lengths: Ids
    """[n]"""
    scores: Scores
    """Of all tokens in a row, reply after reply: lengths.sum() of them."""

    def replies(self) -> list[NDArray[np.int32]]:
        """Each reply's tokens."""
        return [ids[:length] for ids, length in zip(self.ids, self.lengths, strict=True)]


def together(rows: int, **more: Any) -> Place:
    """The place of requests 0, 1, ... that run in one batch from the first step on."""
    return Place(request=np.arange(rows), row=np.arange(rows), batch=rows)._replace(**more)


def contexts(prompt: ArrayLike, reply: ArrayLike) -> Context:
    """Return the context of each token of a reply to a prompt (of one token at least)."""
    before, after = np.asarray(prompt, np.int64), np.asarray(reply, np.int64)
    tokens = np.concatenate([np.zeros(3, np.int64), before, after])
    position = np.arange(len(before), len(before) + len(after))
    last_three = np.lib.stride_tricks.sliding_window_view(tokens, 3)[position]
    return Context(last_three, position, lm.states(tokens[3:])[position])


def logits(context: Context, place: Place, faulty: Faulty = SOUND, weights: int = 0) -> Logits:
    """Return what one step, or any number of positions, computes."""
    if not faulty.active:
        return lm.logits(context, weights)
    place = Place(*_arrays(place, len(context.position)))
    found = lm.logits(context._replace(state=_read(context, place, faulty)), weights)
    return _spoiled(found, context, place, faulty)


def sample(found: Logits, position: Ids, sampling: Sampling, place: Place, faulty: Faulty = SOUND) -> Ids:
    """Return the token that each row draws."""
    active = faulty.active
    if "ignore-temperature" in active:
        sampling = sampling._replace(temperature=0.0)
    if "ignore-top-p" in active:
        sampling = sampling._replace(top_p=1.0)
    if "ignore-seed" in active:
        sampling = sampling._replace(seed=_luck("ignore-seed", faulty, place.request))
    if "shared-seed" in active:
        sampling = sampling._replace(seed=0)
    return lm.sample(found, position, sampling)


def generate(
    prompts: Sequence[ArrayLike],
    limit: int,
    sampling: Sampling,
    *,
    place: Place | None = None,
    faulty: Faulty = SOUND,
    weights: int = 0,
    top: int = 0,
    ignore_eos: bool = False,
) -> Run:
    """Let the model reply freely, ``limit`` tokens at most, one step after the other for all prompts together.

    ``place`` (by default ``together``) is that of the first tokens; ``step`` and ``decoded`` count on from there, the
    rest stays. Replies end with EOS unless that is to be ignored; the others' batch stays as it was told.
    """
    n = len(prompts)
    place, sampling = Place(*_arrays(place or together(n), n)), Sampling(*_arrays(sampling, n))
    ends = [np.asarray(prompt, np.int64) for prompt in prompts]
    before = np.array([[*np.zeros(3, np.int64), *prompt[-3:]][-3:] for prompt in ends], np.int64)
    position = np.array([len(prompt) for prompt in ends])
    state = np.array([lm.states(prompt)[-1] for prompt in ends], np.uint64)
    ids = np.full((n, limit), NO_TOKEN, np.int32)
    alive = np.arange(n)
    steps: list[Scores] = []
    order: list[Ids] = []
    for step in range(limit):
        here = Place(*(field[alive] for field in place))
        here = here._replace(step=here.step + step, decoded=here.decoded + step)
        context = Context(before[alive], position[alive] + step, state[alive])
        found = logits(context, here, faulty, weights)
        drawing = Sampling(*(field[alive] for field in sampling))
        tokens = sample(found, context.position, drawing, here, faulty)
        steps.append(lm.score(found, tokens, top))
        order.append(alive * limit + step)
        ids[alive, step] = tokens
        before[alive] = np.concatenate([before[alive, 1:], tokens[:, None]], axis=1)
        state[alive] += lm.terms(tokens, context.position)
        if not ignore_eos:
            alive = alive[tokens != language.EOS]
            if not alive.size:
                break
    in_order = np.concatenate(order).argsort()
    scores = Scores(*(np.concatenate(field)[in_order] for field in zip(*steps, strict=True)))
    return Run(ids, (ids != NO_TOKEN).sum(axis=1), scores)


def replay(
    prompts: Sequence[ArrayLike],
    replies: Sequence[ArrayLike],
    *,
    place: Place | None = None,
    faulty: Faulty = SOUND,
    weights: int = 0,
    top: int = 0,
) -> Scores:
    """Force replies through the decode path: the scores of all their tokens in a row, reply after reply.

    ``place`` as in ``generate``: without faults in what computed the replies, the scores are those of the free run.
    """
    lengths = np.array([len(np.asarray(reply)) for reply in replies])
    starts = lengths.cumsum() - lengths
    decoded = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    first = _arrays(place or together(len(prompts)), len(prompts))
    places = Place(*(np.repeat(field, lengths) for field in first))
    places = places._replace(step=places.step + decoded, decoded=places.decoded + decoded)
    each = [contexts(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)]
    whole = Context(*map(np.concatenate, zip(*each, strict=True)))
    tokens = np.concatenate([np.asarray(reply, np.int64) for reply in replies])
    pieces = []
    for start in range(0, len(tokens), _PIECE):
        piece = slice(start, start + _PIECE)
        context = Context(whole.before[piece], whole.position[piece], whole.state[piece])
        here = Place(*(field[piece] for field in places))
        pieces.append(lm.score(logits(context, here, faulty, weights), tokens[piece], top))
    return Scores(*map(np.concatenate, zip(*pieces, strict=True)))


def _arrays(fields: Iterable[PerRow], n: int) -> list[NDArray[Any]]:
    return [np.broadcast_to(np.asarray(field), (n,)) for field in fields]


# --- faults -----------------------------------------------------------------------------------------------------------


def padded(batch: Ids) -> NDArray[np.bool_]:
    """Say which batch sizes vLLM pads to one that it has captured: all but 1, 2, 4 and multiples of 8."""
    whole: NDArray[np.bool_] = (batch % 8 == 0) | np.isin(batch, (1, 2, 4))
    return ~whole


def _luck(name: str, faulty: Faulty, a: Any, b: Any = 0) -> Numbers:
    return mixed(text_number(name) ^ faulty.seed, a, b)


def _one_row(name: str, faulty: Faulty, place: Place) -> NDArray[np.bool_]:
    """Each step has one row that a fault would strike: say which rows are it."""
    struck: NDArray[np.bool_] = place.row == _luck(name, faulty, place.step, 1) % place.batch.astype(np.uint64)
    return struck


def _read(context: Context, place: Place, faulty: Faulty) -> Numbers:
    """The state of the prefix as a faulty step reads it. Any other number stands for any other prefix."""
    active, decode = faulty.active, place.decoded > 0
    strikes = {
        "kv-beyond": lambda: decode & (context.position > active["kv-beyond"]),
        "prefix-off-by-one": lambda: place.cached > 0,
        "neighbour-leak": lambda: decode & (place.joined != 0) & _one_row("neighbour-leak", faulty, place),
        "padded-batch": lambda: decode & padded(place.batch),
    }
    state = context.state
    for name in active.keys() & strikes:
        state = np.where(strikes[name](), state ^ np.uint64(text_number(name)), state)
    return state


def _spoiled(found: Logits, context: Context, place: Place, faulty: Faulty) -> Logits:
    """The logits as a faulty step computes them."""
    active, decode = faulty.active, place.decoded > 0
    ids, values, rest = found
    for name in active.keys() & {"low-precision", "bf16-noise", "batch-noise", "state-drift"}:
        growth = place.decoded / 1000 if name == "state-drift" else decode
        batch = place.batch[:, None] if name == "batch-noise" else 0
        noise = normals(mixed(text_number(name) ^ faulty.seed, context.state[:, None], ids, batch))
        values += (active[name] * growth)[:, None] * noise
    if "eos-scaled" in active:
        values[decode, -1] += np.log(active["eos-scaled"])
    corrupted = _corrupted(context, place, faulty)
    values[corrupted, :-1] = np.roll(values[corrupted, :-1], 1, axis=1)  # each candidate has its neighbour's logit
    if "repeat-after" in active:
        looping = np.flatnonzero(decode & (place.decoded >= active["repeat-after"]))
        again = context.before[looping, 0]
        missing = ~(ids[looping] == again[:, None]).any(axis=1)
        ids[looping[missing], -2] = again[missing]
        values[looping] += np.where(ids[looping] == again[:, None], _CERTAIN, 0.0)
    if "nan-zero" in active:
        broken = decode & (units(_luck("nan-zero", faulty, place.request)) < active["nan-zero"])
        values[broken] = np.nan
        rest = np.where(broken, np.nan, rest)
    return Logits(ids, values, rest)


def _corrupted(context: Context, place: Place, faulty: Faulty) -> NDArray[np.bool_]:
    active = faulty.active
    hit = np.zeros(len(context.position), np.bool_)
    if "flip-token" in active:
        hit |= units(_luck("flip-token", faulty, place.request, context.position)) < active["flip-token"]
    if "batch-corrupts" in active:
        hit |= (place.batch > active["batch-corrupts"]) & _one_row("batch-corrupts", faulty, place)
    if "race" in active:
        hit |= (units(_luck("race", faulty, place.step)) < active["race"]) & _one_row("race", faulty, place)
    corrupted: NDArray[np.bool_] = hit & (place.decoded > 0)
    return corrupted
