"""Does a prompt come back cached, and one with another salt not?"""

from __future__ import annotations

import secrets

from replay.outcomes import Outcome
from replay.probes.asking import counted
from replay.probes.lengths import purpose
from replay.progress import Finding
from replay.wire import Wire
from workloads.rendering import Rendering

_SHORTEST = 1_000
"""Tokens below which a prompt may be shorter than one block of the cache."""

OFF_WHY = "agent traffic is mostly repeated prefix: without its reuse prefill hides what decoding gains"
OFF_MEND = "start the server without --no-enable-prefix-caching"


async def check_caching(
    wire: Wire, rendering: Rendering, replies: dict[int, Outcome]
) -> tuple[bool | None, bool, list[Finding]]:
    """Whether prompts are cached (None: cannot be told), whether cached tokens are reported, and what to say of it.

    ``replies``: of the probes of single messages, by length; the longest is sent again.
    """
    length = max(replies, default=0)
    if length < _SHORTEST:
        return None, any(reply.cached_tokens is not None for reply in replies.values()), []
    _, again = await counted(wire, rendering, purpose(length), [length])
    if again.cached_tokens is None:
        return None, False, [
            Finding(
                "note",
                f"{wire.url}: cached tokens are not reported",
                "start vLLM with --enable-prompt-tokens-details",
                why="achieved prefix reuse cannot be compared with the ideal, or between the backends",
            )
        ]  # fmt: skip
    if again.cached_tokens == 0:
        return False, True, [
            Finding(
                "warning",
                f"{wire.url}: a prompt of {length} tokens, sent twice, is not cached",
                f"{OFF_MEND}; behind a router, let sessions stick to one replica",
                why=OFF_WHY,
            )
        ]  # fmt: skip
    # The same content after a salt that no earlier check can have used.
    _, other = await counted(wire, rendering, purpose(length), [length], salt=secrets.token_hex(8))
    found = f"{wire.url}: {again.cached_tokens} of {length} tokens are cached when a prompt is sent twice"
    if (other.cached_tokens or 0) > rendering.template.first:  # what stands before the salt may be
        return True, True, [
            Finding(
                "warning",
                f"{found}, but also {other.cached_tokens} when its first tokens differ",
                "switch off caches that ignore the start of a prompt (KV connectors with blending)",
                why="a salt at the start is what keeps blocks out of each other's cache",
            )
        ]  # fmt: skip
    return True, True, [Finding("ok", f"{found}, and not after another salt")]
