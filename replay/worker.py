"""One client process: it plays its share of a block's lanes and appends its own files.

One worker is the same code path as many. The parent talks to it over a pipe: the worker says ``ready`` when its
prompts are made and its warm-up is over, the parent answers with the common start; a closed pipe means that the parent
is gone, and ends the worker.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import uvloop

from replay import health
from replay.lanes import Clock, Context, Counts, play_lane
from replay.outcomes import CountTokens
from replay.plan import SessionFile, read_plan
from replay.prompts import StreamPrompts
from replay.recorder import Recorder
from replay.records import Play, Session
from replay.sender import Sender, ServerGone
from replay.warmup import warm_up
from replay.wire import Limits, Wire
from workloads.content import load_tokenizer
from workloads.errors import UserError
from workloads.rendering import Rendering, token_table

_NO_LIMIT = 1_000_000
"""Connections: the plan alone limits what is in flight; a pool that did would hide load."""


class Assignment(msgspec.Struct, kw_only=True, frozen=True):
    """What one worker has to do in one block."""

    run: Path
    folder: Path
    """The block's folder."""
    worker: int
    lanes: list[int]
    url: str
    headers: dict[str, str]
    rendering: Rendering
    tokenizer: Path | None
    """Counts the tokens of answers where the server does not; None: its chunks are counted."""
    limits: Limits
    block_salt: str
    end_session_on_failure: bool
    max_in_flight: int | None
    warmup_requests: int
    warmup_s: float
    time_scale: float
    """Of the emulator; 1 for real servers."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Worker to parent: warm-up over, first prompts made."""

    warmup_s: float
    warmup_requests: int
    warmup_planned: int


class Go(msgspec.Struct, tag=True, frozen=True):
    """Parent to worker: start then (CLOCK_MONOTONIC ns)."""

    start_ns: int


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Parent to worker: the user wants to end the run; close the window now and cut what is in flight."""


class Progress(msgspec.Struct, tag=True, frozen=True):
    """Worker to parent, about twice a second."""

    counts: Counts
    in_flight: int


class Done(msgspec.Struct, tag=True, frozen=True):
    """Worker to parent: everything has ended and is written."""

    counts: Counts
    last_end_ns: int
    """End of the last reply; 0 if nothing was sent."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Worker to parent: the block cannot go on. ``why``: see Block.cut_short; the text is for the user."""

    why: str
    text: str


Message = Ready | Go | Stop | Progress | Done | Failed
_decoder = msgspec.msgpack.Decoder(Message)


def send_message(pipe: Connection, message: Message) -> None:
    """Write one message."""
    pipe.send_bytes(msgspec.msgpack.encode(message))


def receive_message(pipe: Connection) -> Message:
    """Read one message; EOFError when the other side is gone."""
    return _decoder.decode(pipe.recv_bytes())


def main(assignment: Assignment, pipe: Connection) -> None:
    """Entry point of the worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    try:
        uvloop.run(_run(assignment, pipe))
    except BrokenPipeError:
        os._exit(1)  # the parent has ended the block already
    except OSError as error:
        send_message(pipe, Failed("client", f"{assignment.folder}: {error.strerror or error}; mend it, then --resume"))
    except ServerGone as error:
        send_message(pipe, Failed("server gone", str(error)))
    except UserError as error:
        send_message(pipe, Failed("client", str(error)))
    except Exception as error:
        send_message(
            pipe, Failed("client", f"client worker {assignment.worker} failed: {type(error).__name__}: {error}")
        )
        raise


async def _run(assignment: Assignment, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    plan = read_plan(assignment.run)
    sessions = SessionFile(assignment.run / "sessions.jsonl").__getitem__
    table = token_table(assignment.rendering)

    def new_prompts(session: Session, play: Play, stream: int) -> StreamPrompts:
        return StreamPrompts(
            assignment.rendering, table, session, play, stream, seed=plan.seed, block_salt=assignment.block_salt
        )

    counts = Counts()
    clock = Clock()
    start: asyncio.Future[int] = loop.create_future()
    limit = assignment.max_in_flight
    with Recorder(assignment.folder, assignment.worker) as recorder:
        async with Wire(assignment.url, assignment.limits, connections=_NO_LIMIT, headers=assignment.headers) as wire:
            _listen(pipe, start, clock, wire)
            sender = Sender(wire, assignment.rendering, recorder, token_counter(assignment.tokenizer))
            context = Context(
                plan=plan,
                sessions=sessions,
                send=sender.send,
                new_body=new_prompts,
                clock=clock,
                start=start,
                end_session_on_failure=assignment.end_session_on_failure,
                in_flight_limit=asyncio.Semaphore(limit) if limit else None,
                time_scale=assignment.time_scale,
                counts=counts,
            )
            warmed = await warm_up(
                sender,
                new_prompts,
                plan,
                sessions,
                assignment.lanes,
                requests=assignment.warmup_requests,
                budget_s=assignment.warmup_s,
                block_salt=assignment.block_salt,
                worker=assignment.worker,
            )
            barrier = _Barrier(len(assignment.lanes))
            lanes = [loop.create_task(play_lane(context, lane, barrier.arrive)) for lane in assignment.lanes]
            await _or_first_failure(barrier.passed, lanes)
            gc.collect()
            gc.freeze()  # what is there stays: a collection in mid-block would only delay stamps
            send_message(pipe, Ready(warmed.seconds, warmed.succeeded, warmed.planned))
            start_ns = await start
            await wire.connect_ahead(len(lanes))  # within the start's delay, so that they are young
            background = [
                loop.create_task(health.watch(recorder.health, lambda: (wire.in_flight, counts.lanes_in_session))),
                loop.create_task(_report(pipe, counts, wire)),
                loop.create_task(_close_in_time(context, start_ns, wire)),
            ]
            await asyncio.gather(*lanes)
            for task in background:
                task.cancel()
    send_message(pipe, Done(counts, sender.last_end_ns))


def token_counter(path: Path | None) -> CountTokens | None:
    """Counts the tokens of a text as the served model would; None without its tokenizer."""
    if path is None:
        return None
    tokenizer = load_tokenizer(path)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


class _Barrier:
    """Resolves once ``count`` lanes have arrived."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self.passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def arrive(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            self.passed.set_result(None)


async def _or_first_failure(wanted: asyncio.Future[None], tasks: list[asyncio.Task[None]]) -> None:
    """Wait for ``wanted``; if one of the tasks fails before, raise its exception."""
    await asyncio.wait([wanted, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()
    await wanted


def _listen(pipe: Connection, start: asyncio.Future[int], clock: Clock, wire: Wire) -> None:
    """Take the parent's messages as they come. A closed pipe: the parent was killed, and so this ends too."""

    def on_message() -> None:
        try:
            message = receive_message(pipe)
        except (EOFError, OSError):
            os._exit(1)
        if isinstance(message, Go) and not start.done():
            start.set_result(message.start_ns)
        elif isinstance(message, Stop):
            clock.close()
            wire.cut("cancelled")

    asyncio.get_running_loop().add_reader(pipe.fileno(), on_message)


async def _report(pipe: Connection, counts: Counts, wire: Wire) -> None:
    while True:
        await asyncio.sleep(0.5)
        send_message(pipe, Progress(counts, wire.in_flight))


async def _close_in_time(context: Context, start_ns: int, wire: Wire) -> None:
    """Close the window at its end, and cut what has not drained by then."""
    plan = context.plan
    if plan.duration_s is None:
        return
    await context.clock.sleep_until(start_ns + context.planned_ns(plan.duration_s))
    context.clock.close()
    await asyncio.sleep(context.planned_ns(plan.drain_s) / 1e9)
    wire.cut()
