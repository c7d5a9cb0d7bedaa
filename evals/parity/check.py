"""What a parity check is, and what it is given. Each is one file with one ``CHECK`` in evals/parity/checks/, and listed
there.

A check makes its cases once, before anything is measured, and asks every arm the same ones. It records what came and
judges nothing: reports/parity does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from evals.parity.endpoint import Endpoint, Generation, Ints, Need
from evals.records import Case, ParityReply

Budget = Literal["quick", "standard", "full"]
"""quick: minutes, finds what is plainly broken. standard: what a sign-off needs. full: the soak of a million steps."""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What cases are made from."""

    budget: Budget
    seed: int
    max_context: int
    """Longest prompt and reply together, tokens, on both backends."""
    max_requests: int
    """At once; the specialised path's most, where its rule is known, is ``specialised_requests``."""
    specialised_requests: int | None
    block: int
    """Tokens of a block of the prefix cache."""
    has: frozenset[Need]
    """What both backends offer."""


class Prompts(Protocol):
    """Makes the prompt of a case again."""

    def __call__(self, case: Case) -> list[int]:
        """Its ids, ``case.prompt_tokens`` of them."""


class Sink(Protocol):
    """Where a check's records go, as they come."""

    def reply(self, reply: ParityReply) -> None:
        """Append one reply."""

    def tokens(self, case: int, generation: Generation, *, repeat: int = 0) -> None:
        """Append a generation's positions."""


class Given(msgspec.Struct, frozen=True):
    """What a check runs with on one arm. ``traces``: ids of the reference traces that A1 decoded, by case of the check
    "T0"; empty until it has run."""

    endpoint: Endpoint
    prompts: Prompts
    traces: Mapping[int, Ints]
    sink: Sink
    salt: str = ""
    """Begins all salts: an arm on a server that another arm has used needs one of its own, to find nothing warm."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check. ``cases`` makes what will be asked (numbers from 0); ``run`` asks it of one arm."""

    id: str
    title: str
    finds: str
    """What kind of fault, in a few words."""
    statistic: str
    """What is judged, in a few words."""
    needs: frozenset[Need]
    cases: Callable[[Situation], list[Case]]
    run: Callable[[Given, Sequence[Case]], Awaitable[None]]
    instead: str = ""
    """Which check takes its place where its needs are not met, and what that costs in power."""
