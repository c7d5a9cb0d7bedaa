"""Which decode steps may run on the specialised path (rules of vLLM 0.33.0, reference/decode-path.md)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from replay.emulator.profiles import DecodeBackend

MAX_TOKENS = 64


class Route(msgspec.Struct, frozen=True):
    """Where a step runs. ``tokens`` is what the step is padded to on the specialised path; ``reason`` says why not."""

    specialised: bool
    tokens: int
    reason: str


@lru_cache
def padded(tokens: int, verify: int, captured_sizes: tuple[int, ...]) -> int | None:
    """Return the smallest captured size, rounded up to whole requests, that holds ``tokens``; None if none does."""
    whole = (-(-size // verify) * verify for size in captured_sizes)
    return min((size for size in whole if size >= tokens), default=None)


def route(
    decode_backend: DecodeBackend, verify: Sequence[int], prompt_rows: int, captured_sizes: tuple[int, ...]
) -> Route:
    """Say whether a step runs specialised.

    ``verify`` holds the tokens that each decoding request verifies (1 + its drafts); ``prompt_rows`` counts the
    requests that still prefill in this step.
    """
    tokens = sum(verify)
    if decode_backend != "latency_specialized":
        return Route(False, tokens, "standard backend")
    if prompt_rows:
        return Route(False, tokens, "prompt rows")
    if min(verify) != max(verify):
        return Route(False, tokens, "uneven drafts")
    if tokens > MAX_TOKENS:
        return Route(False, tokens, f"over {MAX_TOKENS} tokens")
    size = padded(tokens, verify[0], captured_sizes)
    if size is None:
        return Route(False, tokens, "no captured size")
    return Route(True, size, "")
