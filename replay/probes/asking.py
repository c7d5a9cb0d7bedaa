"""One small request of known content, and what came of it."""

from __future__ import annotations

from replay.outcomes import Outcome, outcome
from replay.wire import Exchange, Wire
from workloads.content import stable_bytes
from workloads.errors import UserError
from workloads.rendering import PATHS, SALT_TOKENS, Prompt, Rendering, token_table

BLOCK = 64
OUTPUT = 16
"""Tokens asked for where nothing else is said."""

REPLY = 32
"""Tokens that a conversation's earlier replies take in its prompt."""


async def send(
    wire: Wire,
    rendering: Rendering,
    purpose: str,
    inputs: list[int],
    *,
    system: int = 0,
    output: int = OUTPUT,
    salt: str = "",
) -> Exchange:
    """Send the last prompt of a conversation that grows through ``inputs`` tokens, after a system message of
    ``system`` tokens. ``purpose`` decides its content, with ``salt`` its first tokens."""
    table = token_table(rendering)
    salt_tokens = [byte % len(table) for byte in stable_bytes("check", purpose, *([salt] if salt else []))]
    prompt = Prompt(rendering, table, f"check/{purpose}", BLOCK, salt_tokens[:SALT_TOKENS], system)
    blocks = 0
    for tokens in inputs:
        needed = -(-tokens // BLOCK)
        prompt.advance(blocks, list(range(blocks, needed)), tokens, REPLY)
        blocks = needed
        for _ in prompt.render():
            pass
    body, _ = prompt.body(output)
    return await wire.exchange(PATHS[rendering.api], body, {"X-Request-ID": f"check.{purpose}".replace(" ", "")})


def read(wire: Wire, rendering: Rendering, exchange: Exchange, output: int = OUTPUT) -> Outcome:
    """What the exchange came to."""
    return outcome(
        exchange,
        api=rendering.api,
        asked_output=output,
        exact_length=rendering.length_control != "none",
        limits=wire.limits,
    )


async def ask(
    wire: Wire, rendering: Rendering, purpose: str, inputs: list[int], *, system: int = 0, salt: str = ""
) -> Outcome:
    """As `send`, read."""
    return read(wire, rendering, await send(wire, rendering, purpose, inputs, system=system, salt=salt))


async def counted(
    wire: Wire, rendering: Rendering, purpose: str, inputs: list[int], *, system: int = 0, salt: str = ""
) -> tuple[int, Outcome]:
    """Ask for what must succeed; the prompt's length by the server's count, and the reply. Raises UserError."""
    reply = await ask(wire, rendering, purpose, inputs, system=system, salt=salt)
    if reply.status != "ok" or reply.input_tokens is None:
        shape = f"{inputs[-1]} tokens" + (f" in {len(inputs)} turns" if len(inputs) > 1 else "")
        shape += " with a system message" if system else ""
        raise UserError(
            f"{wire.url}: a probe of {shape} failed: {reply.error or 'no usage'} ({reply.detail}): "
            "the experiment would send such requests"
        )
    return reply.input_tokens, reply
