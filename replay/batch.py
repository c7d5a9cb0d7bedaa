"""A batch of streams, sent at once and recorded to their ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from replay.lanes import Outgoing
from replay.pages import page
from replay.records import Cell, Phase, Play, Session, Stream, Turn
from replay.sender import Sender, ServerGone
from replay.wire import Wire
from workloads.content import stable_random
from workloads.rendering import Prompt, Rendering, token_table


def fresh(rendering: Rendering, cell: Cell, key: str, window: str = "0") -> list[Outgoing]:
    """One request for each stream of the cell, its prompt of exactly ``cell.input_tokens`` token ids drawn by ``key``
    and the stream's number: as good as never in a prefix cache. Streams begin with different tokens, as far as the
    vocabulary goes, so that even prompts of one token are different work. ``window``: names the sessions together with
    the stream's number, so that no request id comes again in another window."""
    table = token_table(rendering)
    first = int(stable_random("first token", key).random() * len(table))
    turn = Turn(input_tokens=cell.input_tokens, output_tokens=cell.output_tokens, keep=0, new_blocks=[])
    batch = []
    for stream in range(cell.batch):
        prompt = Prompt(rendering, table, key, cell.input_tokens, salt=[(first + stream) % len(table)])
        prompt.advance(0, [stream], cell.input_tokens, cell.output_tokens)
        for _ in prompt.render():
            pass
        body, digest = prompt.body(cell.output_tokens)
        session = Session(
            id=f"{window}.{stream}",
            content_key=key,
            block_size=cell.input_tokens,
            streams=[Stream(agent="decode", turns=[turn])],
        )
        batch.append(
            Outgoing(
                session=session,
                play=Play(stream, 0),
                lane=stream,
                stream=0,
                number=0,
                turn=turn,
                body=body,
                digest=digest,
                due_ns=0,
            )
        )
    return batch


async def decode(
    wire: Wire, sender: Sender, batch: list[Outgoing], phase: Phase, opens: Callable[[], None] = lambda: None
) -> None:
    """Send the batch at once and wait for all its ends. ``opens`` is called right before, when a connection is open for
    each stream.

    Raises OSError if records cannot be written, and ServerGone if a stream fails and the server cannot be reached any
    more.
    """
    await wire.connect_ahead(len(batch))
    opens()
    now_ns = time.monotonic_ns()
    for outgoing in batch:
        outgoing.due_ns = now_ns
    streams = [asyncio.create_task(sender.record(outgoing, phase)) for outgoing in batch]
    try:
        await asyncio.wait(streams)
    except asyncio.CancelledError:  # Ctrl-C: what has come is recorded
        wire.cut("cancelled")
        await asyncio.gather(*streams, return_exceptions=True)
        raise
    ends = await asyncio.gather(*streams, return_exceptions=True)  # all are done: none keeps its error for itself
    if error := next((end for end in ends if isinstance(end, BaseException)), None):
        raise error
    if any(stream.result().status != "ok" for stream in streams):
        answer = await page(wire, "/health")
        if answer.failure == "no connection":
            raise ServerGone(f"{wire.url}: {answer.detail}: the server is gone: bring it back, continue with --resume")
