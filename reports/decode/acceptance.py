"""Tokens that a decode step yields each stream, counted three ways that must agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from reports.counters import Delta, total
from reports.decode.window import Common, Stream

Way = Literal["chunks", "usage", "counters"]

AGREE = 0.01
"""Counts that differ by no more than this share agree."""

FORMULAS = {
    "Tokens per step, from chunks": "Tokens / chunks in the common decode window.",
    "Tokens per step, from usage": "Σ (O − c1) / Σ (chunks − 1) over the streams.",
    "Tokens per step, from counters": "G / S over the whole window by the server's /metrics: G, generation tokens less "
    "first tokens; S, the requests' decode steps: G − accepted draft tokens, or drafts, if those are more (drafts are "
    "accepted beyond a reply's last token, too). With a drafter that does not draft in every step (ngram) drafts are "
    "too few to tell, and what is accepted beyond a reply's last token makes this count too high. Without counters of "
    "drafts S is G: the server does not speculate.",
    "Steps per second": "Decode rate / (batch × tokens per step).",
}


class TokensPerStep(msgspec.Struct, frozen=True, kw_only=True):
    """Each count, the one to trust, and why. Null: unknown; ``agree`` is null if there are not two to compare."""

    value: float | None
    trusted: Way | None
    chunks: float | None
    usage: float | None
    counters: float | None
    agree: bool | None
    why: str


def from_chunks(window: Common) -> float | None:
    """Over the common decode window."""
    return window.tokens / window.chunks if window.chunks else None


def from_usage(streams: Sequence[Stream]) -> float | None:
    """Over whole streams, by the server's totals."""
    chunks = sum(len(stream.t_ns) - 1 for stream in streams)
    return sum(stream.output - int(stream.tokens[0]) for stream in streams) / chunks if chunks else None


def from_counters(grown: Sequence[Delta], batch: int) -> float | None:
    """Over the whole window, by growth of the server's counters; None without them. ``batch``: first tokens, where the
    server does not count them."""
    generated = total(grown, "generation_tokens")
    if generated is None:
        return None
    firsts = total(grown, "time_to_first_token_seconds_count")
    later = generated - (firsts if firsts is not None else batch)
    accepted = total(grown, "spec_decode_num_accepted_tokens") or 0.0  # absent: it does not speculate
    steps = max(later - accepted, total(grown, "spec_decode_num_drafts") or 0.0)
    return later / steps if later > 0 and steps > 0 else None


def weighed(chunks: float | None, usage: float | None, counters: float | None) -> TokensPerStep:
    """The three counts held against each other."""
    known = [value for value in (chunks, usage, counters) if value is not None]
    agree = max(known) <= min(known) * (1 + AGREE) if len(known) > 1 else None
    value, trusted, why = _trusted(chunks, usage, counters, agree)
    return TokensPerStep(
        value=value, trusted=trusted, chunks=chunks, usage=usage, counters=counters, agree=agree, why=why
    )


def _trusted(
    chunks: float | None, usage: float | None, counters: float | None, agree: bool | None
) -> tuple[float | None, Way | None, str]:
    if counters is None:
        said = "the server's counters are missing: whether a chunk is a step is not known"
        return (chunks, "chunks", said) if chunks is not None else (usage, "usage" if usage else None, said)
    if chunks is None or usage is None:
        return counters, "counters", "tokens of chunks are not known"
    if agree:
        return chunks, "chunks", ""
    if _close(usage, counters):
        return chunks, "chunks", "whole streams had another acceptance than the common decode window"
    if usage > counters:
        return counters, "counters", "chunks carry several steps (--stream-interval, or a busy server)"
    return counters, "counters", "the tokens of a step come in several chunks"


def _close(one: float, other: float) -> bool:
    return max(one, other) <= min(one, other) * (1 + AGREE)
