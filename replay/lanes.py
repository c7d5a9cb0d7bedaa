"""Lanes: who sends what after what, live.

A lane plays its sessions one after another; inside a session each stream is a task.

Closed loop: a turn is due a pause after the live end of everything it waits for (the turn before, joined children, the
spawn turn). A background child is waited for by nobody but the end of its session. Open loop: a turn is due at its
planned time, whatever has become of the others.

When the window closes nothing new is sent, and pauses are not waited out. Nothing here knows HTTP: a turn goes out
through ``Context.send``; time comes from ``Context.clock``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

import msgspec

from replay.plan import first_turns
from replay.records import Plan, Play, Session, Turn

_PREPARE_AHEAD_S = 5.0
"""Open loop: how long before a session's first send its prompts are made."""


class Clock:
    """CLOCK_MONOTONIC, and sleeps that end early when the window closes."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sleepers: dict[asyncio.Future[None], asyncio.Event | None] = {}
        self.closed = False
        """True once the window has closed: nothing may be sent any more."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def close(self) -> None:
        """Close the window: every sleep ends now, later ones end at once."""
        self.closed = True
        for sleeper in self._sleepers:
            _wake(sleeper)

    async def sleep_until(self, when_ns: int, over: asyncio.Event | None = None) -> None:
        """Sleep until ``when_ns``, until the window closes, or until :meth:`end` is called with the same ``over``."""
        while not self.closed and not (over and over.is_set()) and (left_ns := when_ns - self.now_ns()) > 0:
            sleeper: asyncio.Future[None] = self._loop.create_future()
            self._sleepers[sleeper] = over
            timer = self._loop.call_later(left_ns / 1e9, _wake, sleeper)
            try:
                await sleeper
            finally:
                timer.cancel()
                del self._sleepers[sleeper]

    def end(self, over: asyncio.Event) -> None:
        """Set the event and end the sleeps that were given it."""
        over.set()
        for sleeper, event in self._sleepers.items():
            if event is over:
                _wake(sleeper)


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)


class Body(Protocol):
    """The prompts of one stream, turn by turn."""

    def advance(self, turn: Turn) -> None:
        """Take the next turn of the stream, whether it will be sent or not."""

    async def prepare(self) -> None:
        """Make the bytes that the turn taken last adds, letting others run in between."""

    def assemble(self, turn: Turn) -> tuple[list[bytes], str]:
        """The prepared turn's request body, in parts, and its prompt digest."""


class Outgoing(msgspec.Struct, kw_only=True):
    """One turn on its way out."""

    session: Session
    play: Play
    lane: int
    stream: int
    number: int
    turn: Turn
    body: list[bytes]
    digest: str
    due_ns: int
    waited_ns: int = 0
    """Open loop: wait for a place among the requests in flight."""


class Ended(msgspec.Struct, frozen=True):
    """How a turn ended: when, and whether it was a success."""

    end_ns: int
    ok: bool


class Counts(msgspec.Struct):
    """Live progress of a set of lanes."""

    sent: int = 0
    ended: int = 0
    failed: int = 0
    lanes_in_session: int = 0
    plays_ended: int = 0
    plays_cut: int = 0
    """Plays that were under way when the window closed, or were given up after a failure."""


class Context(msgspec.Struct, kw_only=True):
    """What all lanes of a worker share."""

    plan: Plan
    sessions: Callable[[int], Session]
    send: Callable[[Outgoing], Awaitable[Ended]]
    new_body: Callable[[Session, Play, int], Body]
    """Prompts of a stream: (session, play, stream index)."""
    clock: Clock
    start: asyncio.Future[int]
    """Resolved with the block's start, CLOCK_MONOTONIC ns, when all workers are ready."""
    end_session_on_failure: bool = False
    in_flight_limit: asyncio.Semaphore | None = None
    """Open loop only."""
    time_scale: float = 1.0
    """Planned time passes this many times faster than the clock; not 1 only with an emulator that does so too."""
    counts: Counts

    def planned_ns(self, seconds: float) -> int:
        """A planned stretch of time on our clock, ns."""
        return int(seconds / self.time_scale * 1e9)


async def play_lane(context: Context, lane: int, ready: Callable[[], None] = lambda: None) -> None:
    """Play the lane's sessions until all are done (end: work) or the window closes (end: duration).

    ``ready`` is called when the lane's first prompts are made and it waits for the start.
    """
    plays = lane_plays(context.plan, lane)
    first = play_session(context, lane, next(plays), ready)
    if context.plan.mode == "open":
        # the clock decides when a session starts, not the end of the one before
        await asyncio.gather(first, *[_play_later(context, lane, play) for play in plays])
        return
    await first
    for play in plays:
        if context.clock.closed:
            return
        await play_session(context, lane, play)


async def _play_later(context: Context, lane: int, play: Play) -> None:
    session = context.sessions(play.session)
    first_s = min(turn.offset_s for stream in session.streams for turn in stream.turns)
    del session  # it may be hours until then
    start_ns = await context.start
    await context.clock.sleep_until(start_ns + context.planned_ns(first_s - _PREPARE_AHEAD_S))
    if not context.clock.closed:
        await play_session(context, lane, play)


def lane_plays(plan: Plan, lane: int) -> Iterator[Play]:
    """The lane's plays. With end: duration without an end: each time round with new play numbers, from turn 0."""
    plays = plan.lanes[lane]
    yield from plays
    if plan.end == "work":
        return
    stride = 1 + max(play.number for entries in plan.lanes for play in entries)
    lap = 0
    while True:
        lap += 1
        for play in plays:
            yield Play(play.session, play.number + lap * stride)


class _Tree(msgspec.Struct, kw_only=True):
    """One session being played."""

    context: Context
    lane: int
    play: Play
    session: Session
    firsts: list[int]
    """For each stream the index of its first turn that is not history."""
    ended: dict[int, asyncio.Event] = {}
    """For each stream that was started: set when it has ended, however it ended."""
    end_ns: dict[int, int] = {}
    tasks: list[asyncio.Task[None]] = []
    given_up: asyncio.Event
    head_start_s: float = 0.0
    """What is taken off the first pause of each stream that starts at once: a lane never starts with a wait."""

    @property
    def over(self) -> bool:
        return self.given_up.is_set() or self.context.clock.closed


async def play_session(context: Context, lane: int, play: Play, ready: Callable[[], None] | None = None) -> None:
    """Play one session tree; returns when all that was sent of it has ended.

    ``ready``: given for a lane's first session, which waits for the block's start; see :func:`play_lane`.
    """
    session = context.sessions(play.session)
    tree = _Tree(
        context=context,
        lane=lane,
        play=play,
        session=session,
        firsts=first_turns(session, play.start_turn),
        given_up=asyncio.Event(),
    )
    first: list[tuple[int, _Upcoming]] = []
    for index in range(len(session.streams)):
        if _has_turns(tree, index) and (context.plan.mode == "open" or _starts_at_once(tree, index)):
            first.append((index, _Upcoming(tree, index)))
            await first[-1][1].prepare()
    if play.start_turn:
        tree.head_start_s = min(upcoming.turn.pause_s for _, upcoming in first if upcoming.turn is not None)
    if ready is not None:
        ready()
        begin_ns = await context.start + context.planned_ns(context.plan.lane_start_s[lane])
        await context.clock.sleep_until(begin_ns)
    else:
        begin_ns = context.clock.now_ns()
    for index, upcoming in first:
        _start(tree, index, upcoming, begin_ns)
    context.counts.lanes_in_session += 1
    try:
        while pending := [task for task in tree.tasks if not task.done()]:
            await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
            for task in tree.tasks:
                if task.done():
                    task.result()  # a fault of our own must not pass unseen
    finally:
        context.counts.lanes_in_session -= 1
        for task in tree.tasks:
            task.cancel()
    if tree.over:
        context.counts.plays_cut += 1
    else:
        context.counts.plays_ended += 1


def _has_turns(tree: _Tree, index: int) -> bool:
    return any(turn.fate == "send" for turn in tree.session.streams[index].turns[tree.firsts[index] :])


def _starts_at_once(tree: _Tree, index: int) -> bool:
    """A stream that no turn of this play will spawn: the main agent, or one whose spawn turn is history or unknown."""
    stream = tree.session.streams[index]
    if stream.spawn_turn is None or stream.parent is None:
        return True
    return stream.spawn_turn < tree.firsts[stream.parent]


def _start(tree: _Tree, index: int, upcoming: _Upcoming, ready_ns: int) -> None:
    """Start a stream as a task; the pause before its first turn runs from ``ready_ns``."""
    tree.ended[index] = asyncio.Event()
    play = _play_open if tree.context.plan.mode == "open" else _play_closed
    tree.tasks.append(asyncio.get_running_loop().create_task(play(tree, index, upcoming, ready_ns)))


async def _play_closed(tree: _Tree, index: int, upcoming: _Upcoming, ready_ns: int) -> None:
    context = tree.context
    head_start_s = tree.head_start_s if upcoming.number >= 0 else 0.0  # made ready before the start
    children = _children(tree.session, index)
    try:
        await upcoming.prepare_first()
        while upcoming.turn is not None and not tree.over:
            number, turn = upcoming.number, upcoming.turn
            for child in upcoming.joins:
                if child in tree.ended:  # otherwise it was never started: nothing to wait for
                    await tree.ended[child].wait()
                    ready_ns = max(ready_ns, tree.end_ns[child])
            due_ns = ready_ns + context.planned_ns(max(turn.pause_s - head_start_s, 0.0))
            head_start_s = 0.0
            await context.clock.sleep_until(due_ns, tree.given_up)
            if tree.over:
                return
            outgoing = _outgoing(tree, index, upcoming, due_ns)
            # the next prompt is made while the reply streams
            ended, _ = await asyncio.gather(_send(context, outgoing), upcoming.prepare())
            ready_ns = ended.end_ns
            if not ended.ok and context.end_session_on_failure:
                context.clock.end(tree.given_up)
                return
            for child in children.get(number, []):
                if _has_turns(tree, child):
                    _start(tree, child, _Upcoming(tree, child), ready_ns)
    finally:
        tree.end_ns[index] = ready_ns
        tree.ended[index].set()


async def _play_open(tree: _Tree, index: int, upcoming: _Upcoming, ready_ns: int) -> None:
    context = tree.context
    start_ns = await context.start
    while upcoming.turn is not None:
        due_ns = start_ns + context.planned_ns(upcoming.turn.offset_s)
        await context.clock.sleep_until(due_ns)
        if context.clock.closed:
            return
        outgoing = _outgoing(tree, index, upcoming, due_ns)
        tree.tasks.append(asyncio.get_running_loop().create_task(_when_there_is_room(context, outgoing)))
        await upcoming.prepare()


async def _when_there_is_room(context: Context, outgoing: Outgoing) -> None:
    """Open loop: send, after a wait if as many requests as allowed are in flight."""
    if context.in_flight_limit is None:
        await _send(context, outgoing)
        return
    since_ns = context.clock.now_ns()
    async with context.in_flight_limit:
        outgoing.waited_ns = context.clock.now_ns() - since_ns
        await _send(context, outgoing)


class _Upcoming:
    """The next turn of a stream that is to be sent, its bytes made ahead of time."""

    def __init__(self, tree: _Tree, index: int) -> None:
        self.number = -1
        self.turn: Turn | None = None
        self.joins: list[int] = []
        """Children to wait for: the turn's own, and those of turns before it that are not sent."""
        self.body = tree.context.new_body(tree.session, tree.play, index)
        self._turns = iter(enumerate(tree.session.streams[index].turns))
        self._first = tree.firsts[index]

    async def prepare_first(self) -> None:
        """As :meth:`prepare`, unless that was done already."""
        if self.number < 0:
            await self.prepare()

    async def prepare(self) -> None:
        """Move on to the next turn to send (``turn`` is None after the last) and make its bytes."""
        self.turn = None
        self.joins = []
        for number, turn in self._turns:
            self.body.advance(turn)
            if number >= self._first:
                self.joins += turn.joins
            if number >= self._first and turn.fate == "send":
                await self.body.prepare()
                self.number, self.turn = number, turn
                return


def _children(session: Session, index: int) -> dict[int, list[int]]:
    """For each turn of a stream the children that its reply spawns."""
    children: dict[int, list[int]] = {}
    for child, stream in enumerate(session.streams):
        if stream.parent == index and stream.spawn_turn is not None:
            children.setdefault(stream.spawn_turn, []).append(child)
    return children


def _outgoing(tree: _Tree, index: int, upcoming: _Upcoming, due_ns: int) -> Outgoing:
    """The prepared turn with its bytes; ``upcoming`` may move on."""
    assert upcoming.turn is not None
    body, digest = upcoming.body.assemble(upcoming.turn)
    return Outgoing(
        session=tree.session,
        play=tree.play,
        lane=tree.lane,
        stream=index,
        number=upcoming.number,
        turn=upcoming.turn,
        body=body,
        digest=digest,
        due_ns=due_ns,
    )


async def _send(context: Context, outgoing: Outgoing) -> Ended:
    if context.clock.closed:  # it waited for its place in the open loop until the window closed
        return Ended(context.clock.now_ns(), False)
    context.counts.sent += 1
    ended = await context.send(outgoing)
    context.counts.ended += 1
    if not ended.ok:
        context.counts.failed += 1
    return ended
