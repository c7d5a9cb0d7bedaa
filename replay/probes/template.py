"""What does the chat template add?"""

from __future__ import annotations

from replay.probes.asking import counted
from replay.progress import Finding
from replay.wire import Wire
from workloads.errors import UserError
from workloads.rendering import Rendering, Template


async def measure_template(wire: Wire, rendering: Rendering) -> tuple[Template, list[Finding]]:
    """Tokens that the chat template adds, from three probes of known content: a first turn without and with a system
    message, and a second turn. Token-id prompts have none. Raises UserError for what cannot be."""
    if rendering.api == "completions":
        return Template(), []

    async def added(inputs: list[int], system: int = 0) -> int:
        tokens, _ = await counted(wire, rendering, f"template {inputs} {system}", inputs, system=system)
        return tokens - inputs[-1]

    first = await added([64])
    with_system = await added([96], system=32)
    pair = await added([64, 128]) - first
    if min(first, with_system, pair) < 0 or max(first, with_system, pair) > 2_000:
        raise UserError(
            f"{wire.url}: the chat template seems to add {first}, {with_system} and {pair} tokens, which cannot be: "
            "does tokenizer belong to the served model?"
        )
    return Template(first=first, with_system=with_system, pair=pair), [
        Finding(
            "ok",
            f"{wire.url}: chat template adds {first} tokens to a first message ({with_system} with a system message), "
            f"{pair} to each further pair",
        )
    ]
