"""The plan: deterministic, accounts for every turn, deals lanes so that none starts empty."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.experiment import Experiment, experiment_of
from replay.plan import SessionFile, build_plan, plan_digest, read_plan
from replay.records import Plan, Session
from workloads.errors import UserError
from workloads.trace import Stream, Trace, Turn


def turn(
    start: float,
    tokens: int,
    *,
    keep: int = 0,
    new: list[int],
    pause: float = 0.0,
    output: int = 10,
    service: float = 1.0,
    joins: list[int] | None = None,
) -> Turn:
    return Turn(
        start_s=start,
        service_s=service,
        pause_s=pause,
        input_tokens=tokens,
        output_tokens=output,
        keep=keep,
        new_blocks=new,
        joins=joins or [],
    )


def simple(name: str, turns: int = 3, pause: float = 5.0) -> Trace:
    """A session that grows by two blocks of 16 tokens a turn."""
    return Trace(
        id=name,
        block_size=16,
        streams=[
            Stream(
                agent="main",
                turns=[
                    turn(6.0 * k, 32 * (k + 1), keep=2 * k, new=[2 * k, 2 * k + 1], pause=pause if k else 0.0)
                    for k in range(turns)
                ],
            )
        ],
    )


def experiment(workload: dict[str, Any] | None = None, **replay: Any) -> Experiment:
    return experiment_of(
        {
            "model": "m",
            "workload": {"demo": True, **(workload or {})},
            "replay": {"lanes": 2, **replay},
            "backends": {"baseline": {"url": "http://a"}, "candidate": {"url": "http://b"}},
        }
    )


def build(folder: Path, traces: list[Trace], settings: Experiment, max_context: int | None = None) -> Plan:
    folder.mkdir(exist_ok=True)
    return build_plan(traces, settings, max_context=max_context, rendering_digest="r", folder=folder)


def sessions(folder: Path) -> list[Session]:
    return list(SessionFile(folder / "sessions.jsonl"))


def test_the_same_input_gives_the_same_digest_and_another_seed_another(tmp_path: Path) -> None:
    traces = [simple(f"t{i}", 2 + i) for i in range(5)]
    one = build(tmp_path / "1", traces, experiment())
    two = build(tmp_path / "2", traces, experiment())
    other = build(tmp_path / "3", traces, experiment(seed=2))
    assert plan_digest(one) == plan_digest(two) != plan_digest(other)
    assert read_plan(tmp_path / "1") == one


def test_a_changed_sessions_file_is_refused(tmp_path: Path) -> None:
    build(tmp_path, [simple("a"), simple("b")], experiment())
    with (tmp_path / "sessions.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match="changed"):
        read_plan(tmp_path)


def test_ideal_cached_tokens_by_hand(tmp_path: Path) -> None:
    """Growth, a partial block, a rewind, a branch seen before, a child that shares the parent's front."""
    main = Stream(
        agent="main",
        turns=[
            turn(0, 40, new=[1, 2, 3]),  # 2 full blocks and 8 tokens
            turn(2, 60, keep=3, new=[4]),  # all 40 tokens were sent before
            turn(4, 48, keep=2, new=[9]),  # back to 32
            turn(
                6, 70, keep=2, new=[3, 4, 5]
            ),  # 32 kept, then block 3 (48) seen in full; block 4 was seen only in part
        ],
    )
    child = Stream(agent="a", parent=0, spawn_turn=0, turns=[turn(7, 36, new=[1, 2, 8])])
    build(tmp_path, [Trace(id="x", block_size=16, streams=[main, child])], experiment(lanes=1))
    planned = sessions(tmp_path)[0]
    assert [t.ideal_cached for t in planned.streams[0].turns] == [0, 40, 32, 48]
    assert [t.ideal_cached for t in planned.streams[1].turns] == [32]


def test_an_unsent_turn_leaves_nothing_in_the_ideal_cache(tmp_path: Path) -> None:
    """The second turn is too long to send: the third finds only what the first one sent."""
    main = Stream(
        agent="main",
        turns=[
            turn(0, 32, new=[1, 2]),
            turn(2, 320, keep=2, new=list(range(3, 21))),
            turn(4, 64, keep=4, new=[]),
        ],
    )
    trace = Trace(id="x", block_size=16, streams=[main])
    build(tmp_path, [trace], experiment({"over_context": "skip"}, lanes=1), max_context=100)
    assert [t.ideal_cached for t in sessions(tmp_path)[0].streams[0].turns] == [0, 0, 32]


def test_pauses_are_capped_alike_and_the_share_is_recorded(tmp_path: Path) -> None:
    plan = build(tmp_path, [simple("a", 3, 5.0), simple("b", 3, 1.0)], experiment(pause_cap_s=2.0))
    assert plan.pause_removed_share == pytest.approx((4 * 0 + 2 * 3.0) / (2 * 5 + 2 * 1))
    for s in sessions(tmp_path):
        for t in s.streams[0].turns:
            assert t.pause_s == min(t.recorded_pause_s, 2.0)


@pytest.mark.parametrize(
    ("policy", "turns", "lost"),
    [
        ("cut", {"send": 5, "cut: over max_context": 1, "cut: after a turn over max_context": 1}, {}),
        ("skip", {"send": 6, "cut: over max_context": 1}, {}),
        ("drop", {"send": 6}, {"session over max_context": 1, "turns of a session over max_context": 4}),
    ],
)
def test_over_context_policies_account_for_every_turn(
    tmp_path: Path, policy: str, turns: dict[str, int], lost: dict[str, int]
) -> None:
    """Session a has a turn of 200 tokens as its third of four; b has three small turns (played twice if a is gone)."""
    big = simple("a", 4)
    big.streams[0].turns[2].input_tokens = 200
    big.streams[0].turns[2].new_blocks = list(range(100, 109))
    plan = build(tmp_path, [big, simple("b", 3)], experiment({"over_context": policy}), max_context=150)
    assert plan.turns == turns
    assert plan.lost == lost


def test_a_child_of_a_cut_turn_is_cut(tmp_path: Path) -> None:
    trace = simple("a", 3)
    trace.streams.append(Stream(agent="c", parent=0, spawn_turn=1, turns=[turn(7, 16, new=[50])]))
    plan = build(tmp_path, [trace], experiment({"max_turns": 1}, lanes=1))
    assert plan.turns == {"send": 1, "cut: over max_turns": 2, "cut: spawn turn was cut": 1}


def test_nothing_left_to_send_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="over a limit"):
        build(tmp_path, [simple("a")], experiment(), max_context=10)
    with pytest.raises(UserError, match="no session"):
        build(tmp_path, [], experiment())


def test_start_points_are_drawn_over_turns_and_history_is_counted(tmp_path: Path) -> None:
    plan = build(tmp_path, [simple(f"t{i}", 10) for i in range(4)], experiment(start=[0.5, 0.9], lanes=4))
    starts = [entries[0].start_turn for entries in plan.lanes]
    assert all(5 <= s < 9 for s in starts)
    assert plan.turns == {"send": 40 - sum(starts), "history": sum(starts)}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 8), st.sampled_from(["work", "duration"]))
def test_no_lane_is_empty_every_session_is_played_and_plays_are_unique(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], lanes: int, end: str
) -> None:
    folder = tmp_path_factory.mktemp("plan")
    traces = [simple(f"t{i}", n) for i, n in enumerate(lengths)]
    plan = build(folder, traces, experiment(lanes=lanes, end=end, duration_s=5.0))
    plays = [(p.session, p.number) for entries in plan.lanes for p in entries]
    assert all(plan.lanes)
    assert len(plan.lanes) == lanes
    assert len(plays) == len(set(plays)) == max(len(lengths), lanes)
    assert {s for s, _ in plays} == set(range(len(lengths)))


def test_fixed_work_balances_lanes(tmp_path: Path) -> None:
    plan = build(tmp_path, [simple(f"t{i}", n) for i, n in enumerate([9, 3, 3, 3])], experiment())
    loads = sorted(sum([9, 3, 3, 3][p.session] for p in entries) for entries in plan.lanes)
    assert loads == [9, 9]


def test_open_loop_cuts_only_time_in_which_no_session_is_active(tmp_path: Path) -> None:
    """a is active at 0-1 and 100-101; b at 0-1 and 40-41: shared idle 1-40, 41-100, each cut to 5."""

    def gapped(name: str, second: float) -> Trace:
        return Trace(
            id=name,
            block_size=16,
            streams=[
                Stream(
                    agent="main",
                    turns=[
                        turn(0, 16, new=[1]),
                        turn(second, 32, keep=1, new=[2], pause=second - 1),
                    ],
                )
            ],
        )

    plan = build(tmp_path, [gapped("a", 100.0), gapped("b", 40.0)], experiment(mode="open", idle_cap_s=5.0, ramp_s=0.0))
    offsets = {s.id: [t.offset_s for t in s.streams[0].turns] for s in sessions(tmp_path)}
    assert offsets == {"a": [0, 12], "b": [0, 6]}
    assert plan.pause_removed_share == pytest.approx((34 + 54) / (39 + 59), abs=1e-6)


def test_br_39_memory_does_not_grow_with_the_length_of_sessions(tmp_path: Path) -> None:
    """One session is held at a time: four times the sessions take no four times the memory."""

    def peak(sessions: int) -> int:
        def traces() -> Iterator[Trace]:
            for number in range(sessions):
                yield simple(f"t{number}", 400)

        folder = tmp_path / str(sessions)
        folder.mkdir()
        tracemalloc.start()
        build_plan(traces(), experiment(), max_context=None, rendering_digest="r", folder=folder)
        _, highest = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return highest

    peak(4)  # what is imported and cached at first use
    assert peak(40) < 1.5 * peak(10)


def test_workload_sessions_takes_a_seeded_part(tmp_path: Path) -> None:
    plan = build(tmp_path, [simple(f"t{i}") for i in range(6)], experiment({"sessions": 2}))
    assert sum(len(entries) for entries in plan.lanes) == 2
    assert plan.lost == {"session beyond workload.sessions": 4, "turns of a session beyond workload.sessions": 12}
    assert plan.turns == {"send": 6}
