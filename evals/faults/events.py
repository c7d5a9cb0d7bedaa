"""Faults in what a reply is made of: events in, events out. A reply that comes whole is one event. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec

from evals.faults import positions
from evals.faults.positions import Json, Position
from evals.faults.requests import Asked
from evals.faults.tokens import LOOP, Place, Strike
from replay.emulator.noise import unit


class Event(msgspec.Struct):
    """One event of a stream, or a whole reply."""

    raw: bytes
    """As it came, with the blank line that ends it."""
    body: Json | None
    """Its JSON; None for the terminal event and comments."""
    edited: bool = False
    """``body`` is no longer what ``raw`` says."""

    @property
    def choices(self) -> list[Json]:
        """All choices in it."""
        return (self.body or {}).get("choices") or []

    def encoded(self, streamed: bool) -> bytes:
        """As it goes out: untouched ones byte for byte."""
        if not self.edited:
            return self.raw
        body = msgspec.json.encode(self.body)
        return b"data: %b\n\n" % body if streamed else body


class Moment(msgspec.Struct, frozen=True):
    """The proxy's traffic when an event came."""

    batch: int
    """See `Place`."""
    joins: int
    """Other requests that came or left since this one's last event."""


Rewrite = Callable[[Event, Moment], list[Event]]
"""The faults of one reply: called for its events in order; edits them, holds them back or drops them."""
Reply = Callable[[Asked, float], Rewrite | None]
"""A fault in replies, given the fault's number; None: this reply stays as it is."""


def on_tokens(strike: Callable[[float], Strike]) -> Reply:
    """Make a fault in replies of one in tokens."""
    return lambda request, number: _struck(request, strike(number))


def _struck(request: Asked, strike: Strike) -> Rewrite | None:
    if request.body.get("echo"):
        return None  # its first tokens are the prompt's
    numbers: dict[int, count[int]] = {}
    past: dict[int, deque[Position]] = {}
    prompt_tokens, warm = request.prompt_tokens, request.warm

    def rewrite(event: Event, moment: Moment) -> list[Event]:
        nonlocal prompt_tokens, warm
        usage = (event.body or {}).get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        warm = warm if cached is None else cached > 0
        for choice in event.choices:
            ids = choice.get("prompt_token_ids") or (event.body or {}).get("prompt_token_ids")
            prompt_tokens = prompt_tokens or (len(ids) if ids else usage.get("prompt_tokens"))
            number = choice.get("index", 0)
            emitted = past.setdefault(number, deque(maxlen=LOOP))
            before = positions.read(choice, _unseen(request, event, choice, usage))
            after = []
            for position, index in zip(before, numbers.setdefault(number, count())):  # noqa: B905 (endless)
                joins = moment.joins / len(before)
                at = Place(request, number, index, prompt_tokens, warm, moment.batch, joins, emitted)
                after.append(strike(at, position))
                emitted.append(after[-1])
            if any(new is not old for new, old in zip(after, before, strict=True)):
                positions.write(choice, before, after)
                event.edited = True
        return [event]

    return rewrite


def _unseen(request: Asked, event: Event, choice: Json, usage: Json) -> int:
    """Tokens of a choice that shows neither ids nor logprobs: a stream's chunk has one, a whole reply what its usage
    says."""
    if request.streamed:
        return int(positions.shows_tokens(choice))
    return int((usage.get("completion_tokens") or 0) / len(event.choices))


def drop_last_chunk(request: Asked, number: float) -> Rewrite | None:
    """The tokens of a stream's last chunk are lost. Its finish reason goes on, and so does the usage: nothing else
    tells. Each chunk waits for the next one, since only that tells which is the last."""
    held: list[Event] = []

    def rewrite(event: Event, moment: Moment) -> list[Event]:
        shows = any(map(positions.shows_tokens, event.choices))
        ends = any(choice.get("finish_reason") for choice in event.choices)
        if not shows and not ends:
            return [event]
        out = [*held, event]
        held.clear()
        if ends:
            last = event if shows else out[0]  # a finish reason may come with the last tokens, or after them
            for choice in filter(positions.shows_tokens, last.choices):
                positions.blank(choice)
                last.edited = True
        else:
            held.append(out.pop())
        return out

    return rewrite if request.streamed else None


def cut_tools(request: Asked, number: float) -> Rewrite | None:
    """In this share of requests tool calls are cut: half of the first piece of their arguments is all that comes."""
    begun: set[tuple[int, int]] = set()

    def rewrite(event: Event, moment: Moment) -> list[Event]:
        for choice in event.choices:
            calls = (choice.get("delta") or choice.get("message") or {}).get("tool_calls") or []
            for place, call in enumerate(calls):
                which = (choice.get("index", 0), call.get("index", place))
                arguments = (call.get("function") or {}).get("arguments")
                if arguments:
                    call["function"]["arguments"] = "" if which in begun else arguments[: len(arguments) // 2]
                    begun.add(which)
                    event.edited = True
        return [event]

    return rewrite if unit(request.key, 0) < number else None


def stopped(request: Asked, number: float) -> Rewrite | None:
    """What ended at our limit says that it ended by itself."""

    def rewrite(event: Event, moment: Moment) -> list[Event]:
        for choice in event.choices:
            if choice.get("finish_reason") == "length":
                choice["finish_reason"] = "stop"
                event.edited = True
        return [event]

    return rewrite if request.shortened else None


def rename(request: Asked, number: float) -> Rewrite:
    """Replies name another model."""

    def rewrite(event: Event, moment: Moment) -> list[Event]:
        model: Any = (event.body or {}).get("model")
        if event.body is not None and model is not None:
            event.body["model"] = f"renamed-{model}"
            event.edited = True
        return [event]

    return rewrite
