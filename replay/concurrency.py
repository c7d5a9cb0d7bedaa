"""How many requests of a plan will be in flight, by recorded times; and what a rule of the path leaves of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from replay.lanes import lane_plays
from replay.plan import first_turns
from replay.records import PathRule, Plan, Play, Session


def expected(plan: Plan, session: Callable[[int], Session], rule: PathRule) -> tuple[str, float | None]:
    """A prediction for a plan, in words, and the share of decode time that it says runs standard.

    ``session``: sessions of the plan by number. Supposes that requests take as long as they were recorded to take, and
    that a step is standard while more than rule.max_requests are in flight; prompts, which make steps standard too, are
    left out. None where the recording shows no times.
    """
    drafts = rule.tokens_per_request - 1
    drafting = f" with {_count(drafts, 'draft')}" if drafts else ""
    fits = f"{_count(rule.max_requests, 'request')} fit{'s' if rule.max_requests == 1 else ''}"
    fit = f"at {_count(len(plan.lanes), 'lane')}{drafting} at most {fits}"
    share = share_above(in_flight(plan, session), rule.max_requests)
    if share is None:
        return f"{fit}; the recording has no times to say more", None
    return (
        f"{fit}: expect about {100 * share:.0f} % standard decode (predicted from recorded times), besides prompts",
        share,
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def share_above(intervals: Sequence[tuple[float, float]], limit: int) -> float | None:
    """Share of the time with at least one interval open in which more than ``limit`` are; None if none ever is."""
    lasting = [(start, end) for start, end in intervals if end > start]
    edges = sorted([(start, 1) for start, _ in lasting] + [(end, -1) for _, end in lasting])
    busy = above = 0.0
    under_way = 0
    for (at, step), (until, _) in itertools.pairwise(edges):
        under_way += step
        busy += until - at if under_way else 0.0
        above += until - at if under_way > limit else 0.0
    return above / busy if busy else None


def in_flight(plan: Plan, session: Callable[[int], Session]) -> list[tuple[float, float]]:
    """(start, end) of each request of a block, seconds from its start, if each took as long as it was recorded to.

    As replay/lanes.py plays a plan against a server that answers so: streams spawn and join, pauses are the plan's.
    """
    intervals: list[tuple[float, float]] = []
    for lane in range(len(plan.lanes)):
        now = plan.lane_start_s[lane]
        for play in lane_plays(plan, lane):
            tree = session(play.session)
            played = _on_the_clock(tree) if plan.mode == "open" else _played(tree, play, now)
            intervals += played
            before, now = now, max((end for _, end in played), default=now)
            if plan.duration_s is not None and now >= plan.duration_s:
                break
            if plan.end == "duration" and now == before:
                break  # the recording has no times: the lane would start over for ever
    if plan.duration_s is None:
        return intervals
    return [(start, min(end, plan.duration_s)) for start, end in intervals if start < plan.duration_s]


def _on_the_clock(session: Session) -> list[tuple[float, float]]:
    turns = [turn for stream in session.streams for turn in stream.turns if turn.fate == "send"]
    return [(turn.offset_s, turn.offset_s + turn.recorded_service_s) for turn in turns]


def _played(session: Session, play: Play, now: float) -> list[tuple[float, float]]:
    """Intervals of one session tree, played in the closed loop from ``now``, seconds."""
    firsts = first_turns(session, play.start_turn)
    sent = [
        [turn for turn in stream.turns[first:] if turn.fate == "send"]
        for stream, first in zip(session.streams, firsts, strict=True)
    ]
    intervals: list[tuple[float, float]] = []
    ends: dict[int, float] = {}
    """For each stream that was started."""

    def run(index: int, ready: float, head_start: float) -> None:
        stream, waiting = session.streams[index], list[int]()
        for number, turn in enumerate(stream.turns[firsts[index] :], start=firsts[index]):
            waiting += turn.joins
            if turn.fate != "send":
                continue
            ready = max([ready, *(ends[child] for child in waiting if child in ends)])
            start = ready + max(turn.pause_s - head_start, 0.0)
            ready = start + turn.recorded_service_s
            intervals.append((start, ready))
            waiting, head_start = [], 0.0
            for child, other in enumerate(session.streams):
                if other.parent == index and other.spawn_turn == number and sent[child]:
                    run(child, ready, 0.0)
        ends[index] = ready

    at_once = [
        index
        for index, stream in enumerate(session.streams)
        if sent[index]
        and (stream.parent is None or stream.spawn_turn is None or stream.spawn_turn < firsts[stream.parent])
    ]
    head_start = min(sent[index][0].pause_s for index in at_once) if play.start_turn else 0.0
    for index in reversed(at_once):  # children before the parents that wait for them
        run(index, now, head_start)
    return intervals
