"""The trace model: one recorded agent session as a tree of streams.

A prompt is a list of *blocks*. A block id names `block_size` tokens of content; the last block of a prompt
may be used only in part, and then shares its first tokens with any later, fuller use of the same id. A turn
stores its blocks as a difference against the turn before it in the same stream (how many leading blocks it
keeps, and the ids that follow), so that a session of n turns costs memory in proportion to its unique
content, not to n times its context.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class Turn(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One model call.

    Invariant: ``keep + len(new_blocks) == ceil(input_tokens / block_size)`` and ``keep`` is at most the number of
    blocks of the previous turn in the stream (0 for a first turn). Ids below zero were minted by a reader for
    content that the recording gave no id.
    """

    start_s: float
    """Recorded start, seconds from the start of the session (the session's earliest turn is at 0)."""
    service_s: float
    """Recorded (or, if ``service_estimated``, estimated) time from start to end of the reply, seconds."""
    pause_s: float
    """Seconds from the end of everything that this turn waits for (the previous turn of its stream, its joined
    children, or, for a first turn, its spawn turn) to its start; never below 0."""
    input_tokens: int
    output_tokens: int
    keep: int
    new_blocks: list[int]
    joins: list[int] = []
    """Indices (into ``Trace.streams``) of child streams that must have ended before this turn is sent."""
    model: str = ""
    stop: str = ""
    input_types: list[str] = []
    service_estimated: bool = False
    zero_output: bool = False
    """The recording says 0 output tokens; ``output_tokens`` is then 1, since a server cannot be asked for none."""
    retry: bool = False
    """The prompt is identical to the previous turn's."""
    ttft_s: float | None = None


class Stream(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One agent's ordered turns. Stream 0 of a trace is the main agent."""

    agent: str
    """"main", or the recorded kind of subagent ("Explore", ...)."""
    turns: list[Turn]
    parent: int | None = None
    """Index of the parent stream; None for the main agent."""
    spawn_turn: int | None = None
    """Index of the parent's turn whose reply started this stream; None: it starts with the session."""
    join_turn: int | None = None
    """Index of the parent's turn that waits for this stream; None: nothing waits for it."""
    background: bool = False


class Trace(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One recorded session. ``streams`` is in spawn order: a parent always stands before its children."""

    id: str
    block_size: int
    streams: list[Stream]
    scope: str = "local"
    """"local": block ids mean something inside this trace only. "global": equal ids are equal content in every
    trace of the same source."""
    system_tokens: int = 0
    """Length of the tool definitions and system prompt at the front of the main agent's prompts, tokens."""


def prompts(stream: Stream) -> Iterator[list[int]]:
    """Yield each turn's full list of block ids, in order. The yielded list must not be changed."""
    blocks: list[int] = []
    for turn in stream.turns:
        blocks = blocks[: turn.keep] + turn.new_blocks
        yield blocks


def shared_blocks(previous: list[int], current: list[int]) -> int:
    """Length of the longest common prefix of two block lists, found by bisection on slice comparisons (C speed)."""
    low, high = 0, min(len(previous), len(current))
    if previous[:high] == current[:high]:
        return high
    while low < high - 1:  # previous[:low] == current[:low] and previous[:high] != current[:high]
        middle = (low + high) // 2
        if previous[low:middle] == current[low:middle]:
            low = middle
        else:
            high = middle
    return low


class Notes(msgspec.Struct):
    """What a reader met that its user should know: a count and the first place of each kind, worst first."""

    counts: dict[str, int] = {}
    first: dict[str, str] = {}

    def add(self, kind: str, where: str = "", count: int = 1) -> None:
        """Count one more of ``kind``; ``where`` (file, position, detail) is kept for the first only."""
        self.counts[kind] = self.counts.get(kind, 0) + count
        self.first.setdefault(kind, where)
