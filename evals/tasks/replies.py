"""From one reply to its outcome: right, wrong, unparsed, truncated and error are five different things.

Answers are looked for in what was said, never in the reasoning: a draft is no answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from evals.records import Outcome

_THINKING, _THOUGHT = "<think>", "</think>"
_MARKS = re.compile(r"</?think>|<\|(open|close)\|>\s*think\s*<\|sep\|>|thinkresponse")
"""Around thoughts; of Kimi K3 too, and what is left of its own where special tokens are not shown."""
_GIVEN_UP = ("abort", "error")
"""vLLM's finish reasons of requests that it did not finish."""


class Reply(msgspec.Struct, kw_only=True, frozen=True):
    """What came back for one request."""

    text: str | None = None
    reasoning: str | None = None
    """As the server's reasoning parser cut it off."""
    finish_reason: str | None = None
    error: str | None = None
    """Why there is no reply."""


class Found(NamedTuple):
    """An answer and the rule that found it."""

    given: str
    route: str


class Judged(msgspec.Struct, kw_only=True, frozen=True):
    """What a reply is worth: the fields of Answer that a task decides."""

    outcome: Outcome
    score: float = 0.0
    given: str | None = None
    route: str | None = None
    scores: dict[str, float] = {}


def lost(reply: Reply) -> bool:
    """Whether there is no reply. One of no character, thoughts included, is none, unless its limit ended it."""
    if reply.error is not None or reply.finish_reason in _GIVEN_UP:
        return True
    return not (reply.text or reply.reasoning) and not cut(reply)


def cut(reply: Reply) -> bool:
    """Whether the limit of its length ended the reply."""
    return reply.finish_reason == "length"


def said(reply: Reply) -> str:
    """The reply without its thoughts, also where the server has no reasoning parser and left them in the text."""
    text = reply.text or ""
    if _THOUGHT in text:
        return text.rpartition(_THOUGHT)[2].lstrip()
    return "" if text.lstrip().startswith(_THINKING) else text


def thinks_aloud(reply: Reply) -> bool:
    """Whether thoughts stand in the text, and none where a reasoning parser puts them: the server has none."""
    return not reply.reasoning and _MARKS.search(reply.text or "") is not None


def nothing_found(reply: Reply) -> Judged:
    """The outcome of a reply that holds no answer."""
    if lost(reply):
        return Judged(outcome="error")
    return Judged(outcome="truncated" if cut(reply) else "unparsed")


def compare(reply: Reply, key: str, find: Callable[[str, bool], Found | None]) -> Judged:
    """Judge a short answer against ``key``. ``find`` takes what was said, and whether its end was cut off."""
    found = None if lost(reply) else find(said(reply), cut(reply))
    if found is None:
        return nothing_found(reply)
    right = found.given == key
    return Judged(outcome="right" if right else "wrong", score=float(right), given=found.given, route=found.route)
