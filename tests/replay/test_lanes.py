"""Lanes in virtual time: trees spawn and join, pauses are kept, nothing hangs and nothing is sent twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.lanes import Context, Counts, Ended, Outgoing, play_lane
from replay.records import Plan, Play, Session, Stream, Turn
from tests.replay.virtual import VirtualClock, run


class _NoBody:
    def advance(self, turn: Turn) -> None:
        pass

    async def prepare(self) -> None:
        pass

    def assemble(self, turn: Turn) -> tuple[list[bytes], str]:
        return [], ""


def turn(pause: float = 0.0, joins: list[int] | None = None, offset: float = 0.0, fate: str = "send") -> Turn:
    return Turn(
        input_tokens=10,
        output_tokens=1,
        keep=0,
        new_blocks=[1],
        pause_s=pause,
        joins=joins or [],
        offset_s=offset,
        fate=fate,  # type: ignore[arg-type]
    )


def session(*streams: Stream) -> Session:
    return Session(id="s", content_key="s", block_size=16, streams=list(streams))


def plan_for(lanes: list[list[Play]], **changes: Any) -> Plan:
    facts: dict[str, Any] = {
        "seed": 1,
        "mode": "closed",
        "end": "work",
        "duration_s": None,
        "drain_s": 0.0,
        "lanes": lanes,
        "lane_start_s": [0.0] * len(lanes),
        "sessions": 1,
        "sessions_digest": "",
        "api": "completions",
        "rendering_digest": "",
        "pause_cap_s": None,
        "pause_removed_share": 0.0,
        "turns": {},
    }
    return Plan(**{**facts, **changes})


Sent = list[tuple[tuple[int, int], float, float, float]]
"""((stream, turn), due, sent, ended), seconds."""


def play(
    sessions: list[Session],
    *,
    lanes: list[list[Play]] | None = None,
    close_s: float | None = None,
    fails: Callable[[Outgoing], bool] = lambda _: False,
    service_s: Callable[[Outgoing], float] = lambda _: 1.0,
    end_session: bool = False,
    limit: int | None = None,
    **plan: Any,
) -> tuple[Sent, Counts]:
    """Play in virtual time; the server takes ``service_s`` for a turn."""
    sent: Sent = []

    async def main() -> Counts:
        clock = VirtualClock()
        loop = asyncio.get_running_loop()

        async def send(outgoing: Outgoing) -> Ended:
            at = loop.time()
            await asyncio.sleep(service_s(outgoing))
            sent.append(((outgoing.stream, outgoing.number), outgoing.due_ns / 1e9, at, loop.time()))
            return Ended(clock.now_ns(), not fails(outgoing))

        start: asyncio.Future[int] = loop.create_future()
        start.set_result(0)
        context = Context(
            plan=plan_for(lanes or [[Play(0, 0)]], **plan),
            sessions=sessions.__getitem__,
            send=send,
            new_body=lambda *_: _NoBody(),
            clock=clock,
            start=start,
            end_session_on_failure=end_session,
            in_flight_limit=asyncio.Semaphore(limit) if limit else None,
            counts=Counts(),
        )
        if close_s is not None:
            loop.call_later(close_s, clock.close)
        await asyncio.gather(*[play_lane(context, lane) for lane in range(len(context.plan.lanes))])
        return context.counts

    counts = run(main())
    return sorted(sent, key=lambda entry: entry[2]), counts


def times(sent: Sent) -> dict[tuple[int, int], tuple[float, float]]:
    return {key: (at, ended) for key, _, at, ended in sent}


def test_a_pause_runs_from_the_live_end_of_the_reply() -> None:
    sent, _ = play([session(Stream(agent="main", turns=[turn(), turn(2.0), turn(40.0)]))], service_s=lambda _: 3.0)
    assert times(sent) == {(0, 0): (0, 3), (0, 1): (5, 8), (0, 2): (48, 51)}


def test_br_25_full_fidelity_keeps_every_pause() -> None:
    """Recorded gaps 2, 40, 700 s with a second session active throughout: all three within 1 % + 10 ms."""
    gaps = [2.0, 40.0, 700.0]
    slow = session(Stream(agent="main", turns=[turn(), *[turn(gap) for gap in gaps]]))
    busy = session(Stream(agent="main", turns=[turn(0.1) for _ in range(600)]))
    record: dict[int, list[tuple[float, float]]] = {0: [], 1: []}

    def service(outgoing: Outgoing) -> float:
        at = asyncio.get_running_loop().time()
        record[outgoing.lane].append((at, at + 1.3))
        return 1.3

    play([slow, busy], lanes=[[Play(0, 0)], [Play(1, 0)]], service_s=service)
    kept = [after[0] - before[1] for before, after in zip(record[0], record[0][1:], strict=False)]
    for measured, recorded in zip(kept, gaps, strict=True):
        assert abs(measured - recorded) <= 0.01 * recorded + 0.01
    assert len(record[1]) == 600


def test_children_spawn_and_join_in_a_tree_and_background_never_blocks() -> None:
    """main 0 spawns 1 (joined by main 2) and 2 (background); 1 spawns 3 (joined by 1's last turn)."""
    tree = session(
        Stream(agent="main", turns=[turn(), turn(0.5), turn(1.0, joins=[1]), turn()]),
        Stream(agent="a", turns=[turn(1.0), turn(0.0, joins=[3])], parent=0, spawn_turn=0, join_turn=2),
        Stream(agent="b", turns=[turn(5.0), turn(50.0)], parent=0, spawn_turn=0, background=True),
        Stream(agent="c", turns=[turn(10.0)], parent=1, spawn_turn=0, join_turn=1),
    )
    sent, counts = play([tree])
    at = times(sent)
    assert at[(0, 0)] == (0, 1)
    assert at[(1, 0)] == (2, 3)  # 1 s after its spawn turn ended
    assert at[(3, 0)] == (13, 14)  # 10 s after its own spawn turn ended
    assert at[(1, 1)] == (14, 15)  # waits for its child
    assert at[(0, 1)] == (1.5, 2.5)  # the parent goes on meanwhile
    assert at[(0, 2)] == (16, 17)  # 1 s after the joined child ended
    assert at[(2, 1)] == (57, 58)  # in the background, after the main agent has ended
    assert (counts.sent, counts.plays_ended) == (9, 1)


def test_a_lane_is_free_only_when_the_whole_tree_is_done() -> None:
    tree = session(
        Stream(agent="main", turns=[turn()]),
        Stream(agent="b", turns=[turn(9.0)], parent=0, spawn_turn=0, background=True),
    )
    sent, _ = play([tree], lanes=[[Play(0, 0), Play(0, 1)]])
    assert [at for key, _, at, _ in sent if key == (0, 0)] == [0, 11]


def test_a_failed_child_releases_its_join() -> None:
    tree = session(
        Stream(agent="main", turns=[turn(), turn(joins=[1])]),
        Stream(agent="a", turns=[turn(1.0), turn(1.0)], parent=0, spawn_turn=0, join_turn=1),
    )
    sent, counts = play([tree], fails=lambda outgoing: outgoing.stream == 1)
    assert times(sent)[(0, 1)] == (5, 6)
    assert counts.failed == 2


def test_end_session_on_failure_gives_the_tree_up() -> None:
    tree = session(
        Stream(agent="main", turns=[turn(), turn(), turn()]),
        Stream(agent="a", turns=[turn(100.0)], parent=0, spawn_turn=0, background=True),
    )
    sent, counts = play([tree], fails=lambda outgoing: outgoing.number == 1, end_session=True)
    assert set(times(sent)) == {(0, 0), (0, 1)}
    assert (counts.plays_cut, counts.plays_ended) == (1, 0)


def test_end_session_on_failure_does_not_wait_for_the_pauses_of_the_other_streams() -> None:
    tree = session(
        Stream(agent="main", turns=[turn(), turn()]),
        Stream(agent="a", turns=[turn(5000.0)], parent=0, spawn_turn=0, background=True),
    )
    sent, _ = play(
        [tree], lanes=[[Play(0, 0), Play(0, 1)]], fails=lambda outgoing: outgoing.number == 1, end_session=True
    )
    assert [at for key, _, at, _ in sent if key == (0, 0)] == [0, 2]


def test_a_turn_waits_for_the_joins_of_unsent_turns_before_it() -> None:
    tree = session(
        Stream(agent="main", turns=[turn(), turn(joins=[1], fate="cut"), turn(1.0)]),
        Stream(agent="a", turns=[turn(100.0)], parent=0, spawn_turn=0, join_turn=1),
    )
    sent, _ = play([tree])
    assert times(sent)[(0, 2)] == (103, 104)


def test_the_window_closes_without_waiting_pauses_out() -> None:
    tree = session(
        Stream(agent="main", turns=[turn(), turn(1000.0)]),
        Stream(agent="a", turns=[turn(5.0), turn()], parent=0, spawn_turn=0, join_turn=1),
    )
    sent, counts = play([tree], close_s=6.5)
    assert set(times(sent)) == {(0, 0), (1, 0)}
    assert max(ended for *_, ended in sent) == 7  # what was in flight drains
    assert counts.plays_cut == 1


def test_a_join_on_a_child_that_was_never_spawned_does_not_hang() -> None:
    tree = session(
        Stream(agent="main", turns=[turn(), turn(joins=[1])]),
        Stream(agent="a", turns=[turn(fate="cut")], parent=0, spawn_turn=0, join_turn=1),
    )
    sent, _ = play([tree])
    assert set(times(sent)) == {(0, 0), (0, 1)}


def test_a_play_that_starts_in_the_middle_sends_no_history() -> None:
    """Children recorded before the start are history; one that spans it goes on at once; a later one is spawned."""
    tree = session(
        Stream(agent="main", turns=[turn(offset=0), turn(offset=10), turn(3.0, offset=20), turn(joins=[2], offset=30)]),
        Stream(agent="done", turns=[turn(offset=5)], parent=0, spawn_turn=0, join_turn=1),
        Stream(agent="spans", turns=[turn(offset=12), turn(7.0, offset=25)], parent=0, spawn_turn=1, join_turn=3),
        Stream(agent="later", turns=[turn(offset=22)], parent=0, spawn_turn=2, background=True),
    )
    sent, _ = play([tree], lanes=[[Play(0, 0, 2)]])
    # the 3 s before the first of them are not waited out: nobody starts with a pause
    assert times(sent) == {(0, 2): (0, 1), (2, 1): (4, 5), (3, 0): (1, 2), (0, 3): (5, 6)}


def test_fixed_duration_starts_over_with_new_play_numbers() -> None:
    one = session(Stream(agent="main", turns=[turn()]))
    numbers = []

    def service(outgoing: Outgoing) -> float:
        numbers.append(outgoing.play.number)
        return 1.0

    play([one], lanes=[[Play(0, 0)], [Play(0, 1)]], close_s=3.5, service_s=service, end="duration", duration_s=3.5)
    assert len(numbers) == len(set(numbers)) == 8


def test_br_23_open_loop_counts_from_the_schedule() -> None:
    """Ten arrivals 100 ms apart, one in flight at most; the first takes 1,000 ms, the rest 10 ms."""
    one = session(Stream(agent="main", turns=[turn(offset=0.1 * i) for i in range(10)]))
    sent, _ = play([one], mode="open", limit=1, service_s=lambda out: 1.0 if out.number == 0 else 0.01)
    from_schedule = [round((ended - due) * 1e3) for _, due, _, ended in sent]
    assert from_schedule == [1000, 910, 820, 730, 640, 550, 460, 370, 280, 190]


def test_open_loop_sends_on_time_whatever_the_server_does() -> None:
    one = session(
        Stream(agent="main", turns=[turn(offset=0), turn(offset=2)]),
        Stream(agent="a", turns=[turn(offset=1)], parent=0, spawn_turn=0, join_turn=1),
    )
    two = session(Stream(agent="main", turns=[turn(offset=3)]))
    sent, _ = play([one, two], lanes=[[Play(0, 0), Play(1, 0)]], mode="open", service_s=lambda _: 60.0)
    assert [at for _, _, at, _ in sent] == [0, 1, 2, 3]


@st.composite
def trees(draw: st.DrawFn) -> Session:
    streams = [Stream(agent="main", turns=[])]
    for index in range(draw(st.integers(1, 5))):
        if index:
            parent = draw(st.integers(0, index - 1))
            spawn = draw(st.integers(0, len(streams[parent].turns) - 1))
            later = range(spawn + 1, len(streams[parent].turns))
            join = draw(st.sampled_from([None, *later]))
            streams.append(Stream(agent="a", turns=[], parent=parent, spawn_turn=spawn, join_turn=join))
            if join is not None:
                streams[parent].turns[join].joins.append(index)
        cut_from = draw(st.integers(0, 9))
        streams[index].turns = [
            turn(draw(st.floats(0, 20)), offset=10.0 * index + k, fate="send" if k < cut_from or index == 0 else "cut")
            for k in range(draw(st.integers(1, 5)))
        ]
    for stream in streams[1:]:
        assert stream.parent is not None
        assert stream.spawn_turn is not None
        if streams[stream.parent].turns[stream.spawn_turn].fate == "cut":
            for t in stream.turns:
                t.fate = "cut"
    return session(*streams)


@settings(max_examples=150, deadline=None)
@given(trees(), st.data())
def test_any_tree_is_played_once_in_order_and_ends(tree: Session, data: st.DataObject) -> None:
    main = tree.streams[0].turns
    start = data.draw(st.integers(0, len(main) - 1))
    failing = data.draw(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))))
    close = data.draw(st.none() | st.floats(0, 60))
    sent, counts = play(
        [tree], lanes=[[Play(0, 0, start)]], fails=lambda out: (out.stream, out.number) in failing, close_s=close
    )
    at = times(sent)
    assert len(at) == len(sent) == counts.sent == counts.ended
    for (index, number), (begun, _) in at.items():
        assert tree.streams[index].turns[number].fate == "send"
        for other in range(number):
            if (index, other) in at:
                assert at[(index, other)][1] + tree.streams[index].turns[number].pause_s <= begun + 1e-6
        for child in tree.streams[index].turns[number].joins:
            assert all(ended <= begun + 1e-6 for (i, _), (_, ended) in at.items() if i == child)
    if close is None:
        begin_s = main[start].offset_s
        for index, stream in enumerate(tree.streams):
            for number, t in enumerate(stream.turns):
                expected = t.fate == "send" and (number >= start if index == 0 else start == 0 or t.offset_s >= begin_s)
                assert ((index, number) in at) == expected
    else:
        assert all(begun <= close + 1e-6 for begun, _ in at.values())


def test_a_fault_of_our_own_is_not_swallowed() -> None:
    def broken(_: Outgoing) -> float:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        play([session(Stream(agent="main", turns=[turn()]))], service_s=broken)
