"""The emulator's language model in this process, as an endpoint of parity checks: no HTTP and no clock.

All that is asked for at the same time decodes in one batch, whichever calls asked: requests join it when a call comes
and leave it when they end, as in a server. Time passes in steps, and only while every call waits; so the same calls
give the same steps. Free replies take a step of Python each, forced ones about a thousand positions at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from evals.parity.endpoint import TOP, Ask, Chat, ChatReply, Generation, Need
from replay.emulator import decoding, language, lm
from replay.emulator.decoding import Faulty, Place
from replay.emulator.faults import DECODE_FAULTS, parse
from replay.emulator.lm import Context, Ids, Sampling, Scores
from replay.emulator.noise import MASK, mix, text_number
from workloads.errors import UserError

_PIECE = 4096
"""Positions worked on at a time, at most: 3 kB each."""


class Local:
    """An Endpoint. ``faults``: of the decode path, NAME or NAME:NUMBER (replay/emulator/faults.py); ``seed``: of their
    luck, and of what is sampled without a seed; ``block``: tokens of a block of its prefix cache.

    Raises UserError for a fault that is none of the decode path.
    """

    has: frozenset[Need] = frozenset({"token ids", "logprobs", "seeds", "trace replay", "cached tokens", "two starts"})

    def __init__(self, faults: Iterable[str] = (), *, seed: int = 0, block: int = 16) -> None:
        active = parse(faults)
        if others := sorted(active.keys() - DECODE_FAULTS.keys()):
            known = ", ".join(DECODE_FAULTS)
            raise UserError(f"fault {others[0]} is none of the decode path, which has: {known}")
        self.steps = 0
        """That were computed."""
        self._faulty = Faulty(active, seed)
        self._block = block
        self._cached: set[tuple[str, int]] = set()
        self._rows: list[_Row] = []
        self._requests = 0
        self._turns = 0
        self._changed = False

    async def generate(self, group: Sequence[Ask]) -> list[list[Generation]]:
        """See Endpoint."""
        asked = [[self._row(ask, choice) for choice in range(ask.n)] for ask in group]
        rows = [row for choices in asked for row in choices]
        self._rows += rows
        self._changed = True
        while not all(row.finish for row in rows):
            turn = self._turns
            await asyncio.sleep(0)  # so that others can ask too
            if turn == self._turns:  # the first of those who wait does it for all
                self._advance()
        return [[row.generation() for row in choices] for choices in asked]

    async def chat(self, group: Sequence[Chat]) -> list[ChatReply]:
        """See Endpoint: it has none."""
        return [ChatReply(error="no chat") for _ in group]

    async def page(self, path: str) -> tuple[int | None, bytes]:
        """See Endpoint: it has none."""
        return None, b""

    def _row(self, ask: Ask, choice: int) -> _Row:
        prompt, force = (
            np.asarray(ask.prompt, np.int64),
            np.asarray(ask.force if ask.force is not None else (), np.int64),
        )
        states = lm.states(prompt)
        number, self._requests = self._requests, self._requests + 1
        own = mix(text_number("unseeded") ^ self._faulty.seed, number)
        return _Row(
            ask=ask,
            number=number,
            seed=own if ask.seed is None else ask.seed + choice,
            cached=self._hit(ask.salt, states),
            forced=decoding.contexts(prompt, force) if force.size else None,
            left=force.size or ask.max_tokens,
            before=np.concatenate([np.zeros(3, np.int64), prompt[-3:]])[-3:],
            position=prompt.size,
            state=states[-1],
        )

    def _hit(self, salt: str, states: lm.Numbers) -> int:
        """Tokens of a prompt's start that are cached: whole blocks, and never its last token."""
        blocks = 0
        for edge in states[self._block : -1 : self._block].tolist():
            if (salt, edge) not in self._cached:
                break
            blocks += 1
        return blocks * self._block

    def _advance(self) -> None:
        """Compute the steps up to the next at which a request may leave."""
        self._turns += 1
        rows, count = self._rows, len(self._rows)
        steps = min(max(1, _PIECE // count), *(row.left for row in rows))
        top = max(row.ask.logprobs for row in rows)
        place = Place(
            request=np.array([row.number for row in rows]),
            step=np.full(count, self.steps),
            row=np.arange(count),
            batch=np.full(count, count),
            decoded=np.array([row.decoded for row in rows]),
            cached=np.array([row.cached for row in rows]),
            joined=np.full(count, self._changed),
        )
        free = np.array([index for index, row in enumerate(rows) if row.forced is None], np.int64)
        forced = np.setdiff1d(np.arange(count), free)
        if free.size:
            steps = self._draw([rows[index] for index in free], _at(place, free), steps, top)
        if forced.size:
            self._force([rows[index] for index in forced], _at(place, forced), steps, top)
        self.steps += steps
        for row in rows:
            row.left -= steps
            row.decoded += steps
            row.finish = row.finish or ("length" if row.left == 0 else None)
            if row.finish:
                self._keep(row)
        self._rows = [row for row in rows if not row.finish]
        self._changed = len(self._rows) < count

    def _draw(self, rows: list[_Row], place: Place, steps: int, top: int) -> int:
        """Free replies: ``steps`` steps, or as many as pass until one of them ends."""
        asks = [row.ask for row in rows]
        sampling = Sampling(
            temperature=np.array([ask.temperature for ask in asks]),
            top_p=np.array([ask.top_p for ask in asks]),
            seed=np.array([row.seed & MASK for row in rows], np.uint64),
        )
        before = np.stack([row.before for row in rows])
        position = np.array([row.position for row in rows])
        state = np.array([row.state for row in rows], np.uint64)
        drawn, scores, ended = [], [], False
        for step in range(steps):
            here = _later(place, step)
            context = Context(before, position + step, state)
            found = decoding.logits(context, here, self._faulty)
            tokens = decoding.sample(found, context.position, sampling, here, self._faulty)
            drawn.append(tokens)
            scores.append(lm.score(found, tokens, top))
            before = np.concatenate([before[:, 1:], tokens[:, None]], axis=1)
            state = state + lm.terms(tokens, context.position)
            for row, token in zip(rows, tokens.tolist(), strict=True):
                if token in row.ask.stop_token_ids or (token == language.EOS and not row.ask.ignore_eos):
                    row.finish, ended = "stop", True
            if ended:
                break
        ids, all_scores = np.stack(drawn), Scores(*map(np.stack, zip(*scores, strict=True)))
        for index, row in enumerate(rows):
            row.before, row.state = before[index], state[index]
            row.position += len(drawn)
            row.ids.append(ids[:, index])
            row.scores.append(Scores._make(part[:, index] for part in all_scores))
        return len(drawn)

    def _force(self, rows: list[_Row], place: Place, steps: int, top: int) -> None:
        """Forced replies: the next ``steps`` tokens of each, all at once."""
        step = np.tile(np.arange(steps), len(rows))
        here = _later(_at(place, np.repeat(np.arange(len(rows)), steps)), step)
        parts, tokens = [], []
        for row in rows:
            piece = slice(row.decoded, row.decoded + steps)
            assert row.forced is not None
            parts.append([each[piece] for each in row.forced])
            tokens.append(np.asarray(row.ask.force, np.int64)[piece])
        context = Context(*map(np.concatenate, zip(*parts, strict=True)))
        scores = lm.score(decoding.logits(context, here, self._faulty), np.concatenate(tokens), top)
        for index, row in enumerate(rows):
            row.ids.append(tokens[index])
            row.scores.append(Scores._make(part[index * steps : (index + 1) * steps] for part in scores))

    def _keep(self, row: _Row) -> None:
        """Put a request's whole blocks into the prefix cache."""
        states = lm.states(np.concatenate([np.asarray(row.ask.prompt, np.int64), *row.ids]))
        self._cached.update((row.ask.salt, edge) for edge in states[self._block : -1 : self._block].tolist())


@dataclass(eq=False)
class _Row:
    """One request under way."""

    ask: Ask
    number: int
    seed: int
    cached: int
    forced: Context | None
    """Of each forced token; the three fields below go on from the prompt otherwise."""
    left: int
    before: Ids
    position: int
    state: np.uint64
    decoded: int = 0
    finish: str | None = None
    ids: list[Ids] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)

    def generation(self) -> Generation:
        ids = np.concatenate(self.ids).astype(np.int32)
        top = self.ask.logprobs
        told = ids.size if top else 0
        top_ids = np.full((told, TOP), -1, np.int32)
        top_logprobs = np.full((told, TOP), -np.inf, np.float32)
        logprobs: NDArray[np.float32] = np.empty(0, np.float32)
        if top:
            scores = Scores(*map(np.concatenate, zip(*self.scores, strict=True)))
            logprobs = scores.logprobs
            top_ids[:, :top], top_logprobs[:, :top] = scores.top_ids[:, :top], scores.top_logprobs[:, :top]
        return Generation(
            ids=ids,
            logprobs=logprobs,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            finish_reason=self.finish,
            completion_tokens=ids.size,
            cached_tokens=self.cached,
        )


def _at(place: Place, rows: Ids) -> Place:
    return Place(*(each[rows] for each in place))


def _later(place: Place, steps: int | Ids) -> Place:
    """Of a place the one that comes some steps later; requests join and leave with the first alone."""
    joined = place.joined & (np.asarray(steps) == 0)
    return place._replace(step=place.step + steps, decoded=place.decoded + steps, joined=joined)
