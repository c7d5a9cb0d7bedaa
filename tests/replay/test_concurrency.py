"""Requests in flight, as the lanes would have them; and what a rule leaves of a plan."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from replay.concurrency import expected, in_flight, share_above
from replay.eligibility import rule
from replay.records import Play, Session, Stream, Turn
from tests.replay.test_eligibility import deployment
from tests.replay.test_lanes import plan_for, play


def test_share_of_the_time_above_a_limit() -> None:
    """One request 0-4, one 1-3, one 2-6, and idle time that counts for nothing."""
    intervals = [(0.0, 4.0), (1.0, 3.0), (2.0, 6.0), (10.0, 12.0), (11.0, 11.0)]
    assert share_above(intervals, 0) == 1.0
    assert share_above(intervals, 1) == 3 / 8
    assert share_above(intervals, 2) == 1 / 8
    assert share_above(intervals, 3) == 0.0
    assert share_above([], 1) is None
    assert share_above([(1.0, 1.0)], 0) is None


def turn(service: float, pause: float = 0.0, joins: list[int] | None = None, **other: Any) -> Turn:
    return Turn(
        input_tokens=1,
        output_tokens=1,
        keep=0,
        new_blocks=[1],
        pause_s=pause,
        recorded_service_s=service,
        joins=joins or [],
        **other,
    )


def tree(*streams: Stream) -> Session:
    return Session(id="s", content_key="s", block_size=16, streams=list(streams))


def test_a_plan_on_paper() -> None:
    """Main: 0-2, then after its subagent (2-5) and a pause of 1: 6-8. A second lane starts a second later."""
    main = Stream(agent="main", turns=[turn(2.0), turn(2.0, pause=1.0, joins=[1])])
    child = Stream(agent="a", turns=[turn(3.0)], parent=0, spawn_turn=0, join_turn=1)
    plan = plan_for([[Play(0, 0)], [Play(0, 1)]], lane_start_s=[0.0, 1.0])
    sessions = [tree(main, child)]
    assert sorted(in_flight(plan, sessions.__getitem__)) == [(0, 2), (1, 3), (2, 5), (3, 6), (6, 8), (7, 9)]
    path = rule(deployment("-tp 8 --cudagraph-capture-sizes 1"))
    assert path is not None
    words, share = expected(plan, sessions.__getitem__, path)
    assert share == 5 / 9  # 1-2, 2-3, 3-5, 7-8
    assert words.startswith("at 2 lanes at most 1 request fits: expect about 56 % standard decode (predicted")
    silent = [tree(Stream(agent="main", turns=[turn(0.0)]))]
    assert expected(plan, silent.__getitem__, path)[1] is None


def test_a_block_of_a_given_length_starts_lanes_over_and_cuts_them() -> None:
    sessions = [tree(Stream(agent="main", turns=[turn(2.0, pause=1.0)]))]
    plan = plan_for([[Play(0, 0)]], end="duration", duration_s=8.0)
    assert in_flight(plan, sessions.__getitem__) == [(1, 3), (4, 6), (7, 8)]
    silent = [tree(Stream(agent="main", turns=[turn(0.0)]))]
    assert in_flight(plan, silent.__getitem__) == [(0, 0)]


def test_an_open_plan_goes_by_the_clock() -> None:
    sessions = [tree(Stream(agent="main", turns=[turn(9.0, offset_s=1.0), turn(1.0, offset_s=2.0)]))]
    assert in_flight(plan_for([[Play(0, 0)]], mode="open"), sessions.__getitem__) == [(1, 10), (2, 3)]


@st.composite
def trees(draw: st.DrawFn) -> Session:
    """Streams that spawn at some turn of an earlier one, or with the session, some joined later, some turns cut."""
    seconds = st.integers(0, 5).map(float)
    streams: list[Stream] = []
    for index in range(draw(st.integers(1, 5))):
        turns = [
            turn(
                draw(seconds),
                draw(seconds),
                offset_s=draw(seconds),
                fate=draw(st.sampled_from(["send", "send", "cut"])),
            )
            for _ in range(draw(st.integers(1, 4)))
        ]
        streams.append(Stream(agent=str(index), turns=turns))
        if index == 0:
            turns[0].fate = turns[-1].fate = "send"
            continue
        streams[index].parent = parent = draw(st.integers(0, index - 1))
        above = streams[parent].turns
        spawn = draw(st.one_of(st.none(), st.integers(0, len(above) - 1)))
        streams[index].spawn_turn = spawn
        if draw(st.booleans()) and (spawn or 0) + 1 < len(above):
            draw(st.sampled_from(above[(spawn or 0) + 1 :])).joins.append(index)
    for stream in streams:  # a turn's recorded start is never before the one before it
        for one, following in zip(stream.turns, stream.turns[1:], strict=False):
            following.offset_s = max(following.offset_s, one.offset_s)
    return tree(*streams)


@given(sessions=st.lists(trees(), min_size=1, max_size=3), data=st.data())
def test_it_is_what_the_lanes_do_against_such_a_server(sessions: list[Session], data: st.DataObject) -> None:
    starts = [data.draw(st.integers(0, len(each.streams[0].turns) - 1)) for each in sessions]
    lanes = [[Play(n, 0, start) for n, start in enumerate(starts)], [Play(0, 1)]]
    sent, _ = play(
        sessions,
        lanes=lanes,
        service_s=lambda out: out.turn.recorded_service_s,
        lane_start_s=[0.0, 2.0],
    )
    plan = plan_for(lanes, lane_start_s=[0.0, 2.0])
    ours = sorted(in_flight(plan, sessions.__getitem__))
    assert ours == sorted((start, end) for _, _, start, end in sent)
