"""Does each chunk come when its token is made?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replay.outcomes import Outcome
from replay.probes.asking import OUTPUT
from replay.progress import Finding
from replay.wire import Wire

_BATCHED = 1.5
"""Tokens a chunk from which a stream counts as batched; --stream-interval 2 gives 16 / 9."""


def check_chunks(wire: Wire, replies: Sequence[Outcome], speculative: bool | None) -> Finding:
    """How the tokens of a short answer came: of the reply that came in most pieces, since a hiccup of client or network
    may join the others'. ``speculative``: whether the server speculates, where known."""
    reply = max(replies, key=lambda reply: (len(np.unique(reply.chunks["t_ns"])), len(reply.chunks)))
    chunks = reply.chunks
    tokens = reply.output_tokens or OUTPUT
    came = f"{wire.url}: {tokens} tokens came in {len(chunks)} chunk{'s' if len(chunks) != 1 else ''}"
    if len(chunks) < 2:
        return Finding(
            "warning",
            came,
            "start the server with --stream-interval 1; check for a proxy that buffers",
            why="decode rates of short answers cannot be measured: that takes two chunks",
        )
    if len(np.unique(chunks["t_ns"])) == 1:
        return Finding(
            "warning",
            f"{came}, all at one moment",
            "switch buffering off in the proxy or gateway before the server (nginx: proxy_buffering off)",
            why="something on the way holds the stream back: arrival times say nothing about decoding",
        )
    if tokens <= len(chunks):
        return Finding("ok", f"{came}: each one as it is made")
    if speculative:
        return Finding(
            "note",
            f"{came}, with speculation",
            why="several tokens a step are expected; whether --stream-interval is above 1 cannot be told from it",
        )
    middle = np.unique(chunks["tokens"][1:-1])
    regular = reply.token_source in ("usage", "ids") and len(middle) == 1 and middle[0] > 1
    cause = f", {middle[0]} in each: the server's --stream-interval" if regular else ""
    unless = "" if speculative is False else " (unless it speculates, which it does not say)"
    return Finding(
        "warning" if tokens / len(chunks) >= _BATCHED and speculative is False else "note",
        came + cause,
        "start the server with --stream-interval 1; without that flag, look for a proxy or gateway that joins events",
        why=f"tokens are held back and sent together{unless}: gaps between chunks are longer than between tokens",
    )
