"""Are prompts as long as planned, and does a grown conversation go through?"""

from __future__ import annotations

from replay.outcomes import Outcome
from replay.probes.asking import OUTPUT, counted
from replay.progress import Finding
from replay.wire import Wire
from workloads.errors import UserError
from workloads.rendering import Rendering

_TOLERANCE = 0.005
"""Share by which the server's prompt_tokens may differ from the plan."""

LENGTHS = [100, 1_000, 8_000]

CONVERSATION = [200, 500, 900]
"""A conversation of three turns, after a system message where the protocol has one."""

_SYSTEM = 64


def purpose(length: int) -> str:
    """Names the probe of that length, and with it its content."""
    return f"length {length}"


async def check_lengths(
    wire: Wire, rendering: Rendering, max_model_len: int | None
) -> tuple[dict[int, Outcome], list[Finding]]:
    """The replies to single messages of planned lengths. Raises UserError when prompts are not as long as planned."""
    replies: dict[int, Outcome] = {}
    for length in LENGTHS:
        if not _fits(length, max_model_len):
            continue
        found, replies[length] = await counted(wire, rendering, purpose(length), [length])
        if abs(found - length) > _TOLERANCE * length:
            raise UserError(
                f"{wire.url}: a prompt planned as {length} tokens has {found} by the server's count: "
                "give tokenizer of the served model, or use api: completions (token ids are exact)"
            )
    shown = ", ".join(f"{length}: {reply.input_tokens}" for length, reply in replies.items())
    return replies, [Finding("ok", f"{wire.url}: prompt lengths as planned ({shown})")] if replies else []


async def check_conversation(wire: Wire, rendering: Rendering, max_model_len: int | None) -> list[Finding]:
    """Send a grown conversation. Raises UserError when it is refused."""
    if not CONVERSATION or not _fits(CONVERSATION[-1], max_model_len):
        return []
    planned = CONVERSATION[-1]
    found, _ = await counted(wire, rendering, "conversation", CONVERSATION, system=_SYSTEM)
    what = f"{wire.url}: a conversation of {len(CONVERSATION)} turns planned as {planned} tokens has {found}"
    if abs(found - planned) <= _TOLERANCE * planned:
        return [Finding("ok", what)]
    return [
        Finding(
            "warning",
            what,
            "use api: completions (token ids are exact), or a chat template that adds the same to every message",
            why="the chat template treats earlier messages in its own way: later turns of a session would be longer "
            "or shorter than recorded",
        )
    ]


def _fits(length: int, max_model_len: int | None) -> bool:
    return max_model_len is None or length + OUTPUT <= max_model_len
