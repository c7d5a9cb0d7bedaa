"""The prompts of one stream of one play: workloads.rendering.Prompt as lanes want it."""

from __future__ import annotations

import asyncio

from replay.records import Play, Session, Turn
from workloads.rendering import Rendering, Table, prompt_for


class StreamPrompts:
    """Implements replay.lanes.Body."""

    def __init__(
        self,
        rendering: Rendering,
        table: Table,
        session: Session,
        play: Play,
        stream: int,
        *,
        seed: int,
        block_salt: str,
    ) -> None:
        self._prompt = prompt_for(
            rendering,
            table,
            content_key=session.content_key,
            block_size=session.block_size,
            seed=seed,
            block_salt=block_salt,
            session=session.id,
            play=play.number,
            system_tokens=session.system_tokens if stream == 0 else 0,
        )

    def advance(self, turn: Turn) -> None:
        """Take the stream's next turn."""
        self._prompt.advance(turn.keep, turn.new_blocks, turn.input_tokens, turn.output_tokens)

    async def prepare(self) -> None:
        """Render what the turn adds, about half a millisecond at a time."""
        for _ in self._prompt.render():
            await asyncio.sleep(0)

    def assemble(self, turn: Turn) -> tuple[list[bytes], str]:
        """The request body in parts, and its prompt digest."""
        return self._prompt.body(turn.output_tokens)
