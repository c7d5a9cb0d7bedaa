"""What parity checks ask a server, and what comes back: tokens in, tokens out, with logprobs.

A check asks for generations in groups; those of one group are sent together and decode together. Two kinds of endpoint
answer alike: a server over HTTP (evals/parity/http.py), and the emulator's language model in this process
(evals/parity/local.py), with which CI proves detection rates that would take a server hours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

TOP = 20
"""Logprobs of so many tokens come with each position, at most."""

Need = Literal[
    "token ids",
    "logprobs",
    "seeds",
    "streaming",
    "trace replay",
    "chat",
    "tools",
    "cached tokens",
    "metrics",
    "speculation",
    "two starts",
]
"""What a check needs of a server: token ids in replies (return_token_ids), top logprobs, seeds that count, and so on.
trace replay: /inference/v1/generate with trace_decode_token_ids (vLLM: --enable-trace-replay --enable-scale-out).
two starts: each backend started twice."""

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class Ask(msgspec.Struct, kw_only=True, frozen=True):
    """One generation. ``prompt``: token ids. ``force``: ids that are to be decoded instead of sampled ones (trace
    replay). ``salt``: of the prefix cache; equal salts may share."""

    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    force: Sequence[int] | None = None
    logprobs: int = TOP
    """Top tokens a position; 0: none."""
    ignore_eos: bool = True
    stop_token_ids: Sequence[int] = ()
    n: int = 1
    stream: bool = False
    salt: str = ""


class Chat(msgspec.Struct, kw_only=True, frozen=True):
    """One chat completion, as its JSON body without model: for checks of text, tools and streams."""

    body: dict[str, Any]


class Generation(msgspec.Struct, kw_only=True):
    """What came back for one Ask (one choice of it). Arrays have one row a position; where no logprobs were asked or
    given they are empty. A top list that is shorter than the others is filled with id -1 and logprob -inf."""

    ids: Ints
    logprobs: Floats
    top_ids: Ints
    """Shape (positions, TOP)."""
    top_logprobs: Floats
    finish_reason: str | None = None
    completion_tokens: int | None = None
    """By usage."""
    cached_tokens: int | None = None
    text: str | None = None
    fingerprint: str | None = None
    error: str | None = None
    """Short class of a failure: "HTTP 500", "connection", "broke off". Whatever came before it is dropped."""
    sent_unix_s: float | None = None
    ended_unix_s: float | None = None


class ChatReply(msgspec.Struct, kw_only=True):
    """What came back for one Chat: its text, thoughts, tool calls (name, arguments as text), ids where told."""

    text: str | None = None
    reasoning: str | None = None
    tool_calls: list[tuple[str, str]] = []
    ids: list[int] | None = None
    finish_reason: str | None = None
    completion_tokens: int | None = None
    fingerprint: str | None = None
    error: str | None = None


class Endpoint(Protocol):
    """A server, or what stands for one."""

    has: frozenset[Need]
    """What it offers, as it was found."""

    async def generate(self, group: Sequence[Ask]) -> list[list[Generation]]:
        """Send all together; for each Ask its ``n`` generations. A failure is a Generation with ``error``."""

    async def chat(self, group: Sequence[Chat]) -> list[ChatReply]:
        """Send all together."""

    async def page(self, path: str) -> tuple[int | None, bytes]:
        """Status and body of a GET; no status: no whole reply."""
