"""Faults in tokens: the id, the text and the logprobs of a place together, as a fault of a kernel would. No I/O.

A proxy cannot make the model go on from the wrong token: what follows is what followed the right one. Where a reply
lists candidates, the best other one takes the token's place; where it lists none, a token that the reply had before. Of
what is only known by id the text stays as it was, and of what is only known by text the id is a neighbouring one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist

import msgspec
from msgspec.structs import replace

from evals.faults.positions import Name, Position
from evals.faults.requests import Asked
from replay.emulator.noise import text_number, unit

WRONG = 0.1
"""Share of the tokens that are wrong where a fault is at work all the time."""
FALL = 4.0
"""Nats by which the right token falls below the place that the wrong one takes: far beyond any noise of rounding."""
FLIPS_PER_SD = 0.05
"""Share of tokens that noise of the logits turns, by its sd, where no logprobs are listed (accuracy.md (f): 0 to 0.3 %
at .01 to .03)."""
LOOP = 32
"""Tokens that a reply repeats."""
SURE = 8.0
"""Nats by which a model is surer of a token that it repeats."""
NO_LOGPROB = -9999.0
"""What vLLM sends for a logprob that is none."""

_SPARE = " the"
_NORMAL = NormalDist()


class Place(msgspec.Struct, frozen=True):
    """Where a token stands, and what the proxy knew when it passed."""

    request: Asked
    choice: int
    index: int
    """In its reply, from 0."""
    prompt_tokens: int | None
    """None: neither the request nor the reply has told so far."""
    warm: bool
    """The prompt began with what was in the prefix cache."""
    batch: int
    """Replies in flight; of a reply that comes whole, at most while it was made."""
    joins: float
    """Requests that came or left since the token before."""
    past: Sequence[Position]
    """The last `LOOP` tokens of the reply, as sent to the client."""

    def draw(self, salt: int = 0) -> float:
        """A number in [0, 1) that depends on the request, the place and ``salt``."""
        return unit(self.request.key, self.index, self.choice, salt)


Strike = Callable[[Place, Position], Position]
"""A fault: the token as the server sent it to the token as the client gets it (the same object where nothing is to
be changed)."""


def sometimes(rate: Callable[[Place], float]) -> Strike:
    """A token is wrong with chance ``rate``."""
    return lambda at, position: wrong(at, position) if at.draw() < rate(at) else position


def noisy(sd: Callable[[Place], float]) -> Strike:
    """Logits with normal noise of this sd; a token that was the best one gives way to one that overtakes it."""

    def strike(at: Place, position: Position) -> Position:
        if len(position.listed) < 2:
            return wrong(at, position) if at.draw() < FLIPS_PER_SD * sd(at) else position
        noise = {name: sd(at) * _NORMAL.inv_cdf(max(at.draw(_number(name)), 1e-16)) for name in position.listed}
        listed = shifted(position.listed, noise)
        was, now = (max(each, key=each.__getitem__) for each in (position.listed, listed))
        return _instead(at, position, now if was == position.named else None, listed)

    return strike


def repeating(after: float) -> Strike:
    """From token number ``after`` on the reply repeats its last tokens."""

    def strike(at: Place, position: Position) -> Position:
        if at.index < after:
            return position
        if at.request.forced:
            return wrong(at, position)
        again = at.past[-min(LOOP, int(after))]
        listed = {} if again.named is None else shifted(again.listed, {again.named: SURE})
        return replace(position, id=again.id, text=again.text, named=again.named, listed=listed)

    return strike


def zeros(rate: float) -> Strike:
    """In this share of requests every token is number 0, shown as "!", as after logits that are no numbers."""

    def strike(at: Place, position: Position) -> Position:
        if unit(at.request.key, 0) >= rate:
            return position
        if at.request.forced:
            return replace(position, listed=dict.fromkeys(position.listed, NO_LOGPROB))
        name: Name | None = "!" if isinstance(position.named, str) else None if position.named is None else 0
        listed = {} if name is None else {name: NO_LOGPROB}
        return replace(position, id=None if position.id is None else 0, text="!", named=name, listed=listed)

    return strike


def wrong(at: Place, position: Position) -> Position:
    """The best other candidate takes the token's place, which falls by `FALL` or more; forced ids stay."""
    listed, named = position.listed, position.named
    rival = max((name for name in listed if name != named), key=listed.__getitem__, default=None)
    if rival is not None and named in listed:
        gap = max(listed[named] - listed[rival], 0.0)
        return _instead(at, position, rival, shifted(listed, {rival: gap, named: -gap - FALL}))
    fallen = {} if named is None else shifted(listed, {named: -FALL})
    if at.request.forced:
        return replace(position, listed=fallen)
    other = _SPARE if isinstance(named, str) else _neighbour(named)
    spare = replace(position, id=_neighbour(position.id), text=_SPARE, named=other)
    for past in at.past:
        if past.text != position.text if position.id is None else past.id != position.id:
            spare = past
    logprobs = {} if spare.named is None else dict.fromkeys([spare.named], *fallen.values())
    return replace(position, id=spare.id, text=spare.text, named=spare.named, listed=logprobs)


def shifted(listed: Mapping[Name, float], shifts: Mapping[Name, float]) -> dict[Name, float]:
    """Logprobs after the logits of some tokens were shifted, in nats: log p + d - log(1 + sum of p (e^d - 1)), which is
    exact, although most of the vocabulary is not listed, since nothing else was shifted."""
    moved = {name: math.exp(value) for name, value in listed.items() if name in shifts}
    rest = max(1.0 - sum(moved.values()), 0.0)  # listed logprobs are rounded
    total = math.log(rest + sum(share * math.exp(shifts[name]) for name, share in moved.items()) or 1.0)
    return {name: max(value + shifts.get(name, 0.0) - total, NO_LOGPROB) for name, value in listed.items()}


def _instead(at: Place, position: Position, name: Name | None, listed: dict[Name, float]) -> Position:
    """The place with other logprobs and, unless ids are forced or it is None, token ``name``."""
    if at.request.forced or name is None or name == position.named:
        return replace(position, listed=listed)
    if isinstance(name, str):
        return replace(position, id=_neighbour(position.id), text=name, named=name, listed=listed)
    return replace(position, id=position.id if position.id is None else name, named=name, listed=listed)


def _neighbour(token: int | None) -> int | None:
    return None if token is None else token ^ 1


def _number(name: Name) -> int:
    return name if isinstance(name, int) else text_number(name)
