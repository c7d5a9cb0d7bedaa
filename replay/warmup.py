"""Warm-up of one worker: before the block's clock starts, with a budget.

First some small requests that share nothing with anything (kernels, caches and connections of the server come up);
then, for every stream of a session that starts in mid-recording, the last prompt of its history with one token of
output, so that its own prefix is where it would be. Failures are tried once more and then only recorded: a block is not
lost over a warm-up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from replay.lanes import Outgoing
from replay.plan import first_turns
from replay.prompts import StreamPrompts
from replay.records import Plan, Play, RequestRecord, Session, Stream, Turn
from replay.sender import Sender
from workloads.content import stable_bytes

NewPrompts = Callable[[Session, Play, int], StreamPrompts]

_SMALL_INPUT = 512
_SMALL_OUTPUT = 16


class Warmed(msgspec.Struct, frozen=True):
    """What became of a worker's warm-up."""

    seconds: float
    planned: int
    succeeded: int


async def warm_up(
    sender: Sender,
    new_prompts: NewPrompts,
    plan: Plan,
    sessions: Callable[[int], Session],
    lanes: Sequence[int],
    *,
    requests: int,
    budget_s: float,
    block_salt: str,
    worker: int,
) -> Warmed:
    """Send the worker's share of the warm-up.

    ``requests``: number of small requests. What is not done after ``budget_s`` is left out.
    """
    started = time.monotonic()
    succeeded = 0

    async def attempt(make: Callable[[], Awaitable[Outgoing]]) -> None:
        nonlocal succeeded
        for _ in range(2):
            record: RequestRecord = await sender.record(await make(), "warmup")
            if record.status == "ok":
                succeeded += 1
                return

    jobs = [_small(new_prompts, block_salt, worker, number) for number in range(requests)]
    for lane in lanes:
        play = plan.lanes[lane][0]
        if play.start_turn:
            jobs += _histories(new_prompts, sessions(play.session), play, lane)
    gate = asyncio.Semaphore(max(1, min(len(lanes), 16)))

    async def one(make: Callable[[], Awaitable[Outgoing]]) -> None:
        async with gate:
            await attempt(make)

    try:
        async with asyncio.timeout(budget_s):
            await asyncio.gather(*[one(job) for job in jobs])
    except TimeoutError:
        pass
    return Warmed(time.monotonic() - started, len(jobs), succeeded)


def _small(new_prompts: NewPrompts, block_salt: str, worker: int, number: int) -> Callable[[], Awaitable[Outgoing]]:
    key = stable_bytes("warmup", block_salt, worker, number).hex()[:16]
    blocks = list(range(_SMALL_INPUT // 16))
    turn = Turn(input_tokens=_SMALL_INPUT, output_tokens=_SMALL_OUTPUT, keep=0, new_blocks=blocks)
    session = Session(
        id=f"small-{worker}-{number}",
        content_key=f"warmup/{key}",
        block_size=16,
        streams=[Stream(agent="warmup", turns=[turn])],
    )

    async def make() -> Outgoing:
        return await _outgoing(new_prompts, session, Play(-1, 0), 0, 0, lane=-1)

    return make


def _histories(
    new_prompts: NewPrompts, session: Session, play: Play, lane: int
) -> list[Callable[[], Awaitable[Outgoing]]]:
    """For each stream that has both history and a future: the last turn of its history that may be sent."""
    jobs: list[Callable[[], Awaitable[Outgoing]]] = []
    for index, first in enumerate(first_turns(session, play.start_turn)):
        turns = session.streams[index].turns
        past = [number for number, turn in enumerate(turns[:first]) if turn.fate == "send"]
        if not past or first == len(turns):
            continue

        async def make(index: int = index, last: int = past[-1]) -> Outgoing:
            return await _outgoing(new_prompts, session, play, index, last, lane, output_tokens=1)

        jobs.append(make)
    return jobs


async def _outgoing(
    new_prompts: NewPrompts,
    session: Session,
    play: Play,
    stream: int,
    number: int,
    lane: int,
    output_tokens: int | None = None,
) -> Outgoing:
    prompts = new_prompts(session, play, stream)
    for turn in session.streams[stream].turns[: number + 1]:
        prompts.advance(turn)
    await prompts.prepare()
    turn = session.streams[stream].turns[number]
    if output_tokens is not None:
        turn = msgspec.structs.replace(turn, output_tokens=output_tokens)
    body, digest = prompts.assemble(turn)
    return Outgoing(
        session=session,
        play=play,
        lane=lane,
        stream=stream,
        number=number,
        turn=turn,
        body=body,
        digest=digest,
        due_ns=time.monotonic_ns(),
    )
