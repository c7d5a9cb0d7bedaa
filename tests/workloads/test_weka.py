"""The Weka reader, case by case: right values by hand, from prompts in blocks of 10 tokens."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workloads.weka_sessions import agent, blocks, call, check, read, session
from workloads.formats import weka
from workloads.trace import Notes, Trace

# ---------------------------------------------------------------- lengths and blocks


def test_times_lengths_and_labels_are_carried() -> None:
    trace, notes = read(
        call(5.0, 25, [1, 2], out=7, api=2.0, ttft=0.5, input_types=["text"], output_types=["tool_use"]),
        call(10.0, 40, [1, 2, 3, 4], out=8, api=1.5, stop="end_turn", model="other", think_time=77),
        tool_tokens=12,
        system_tokens=8,
        models=["m", "other"],
        totals={"in": 1},
    )
    first, second = trace.streams[0].turns
    assert (trace.id, trace.block_size, trace.system_tokens, trace.streams[0].agent) == ("s", 10, 20, "main")
    assert (first.start_s, first.service_s, first.pause_s, first.ttft_s, first.input_types) == (0, 2, 0, 0.5, ["text"])
    assert (second.start_s, second.service_s, second.pause_s) == (5, 1.5, 3)  # from 7 to 10, whatever think_time says
    assert (second.stop, second.model, second.ttft_s, second.output_tokens) == ("end_turn", "other", None, 8)
    assert notes.counts == {}


def test_zero_output_becomes_one_and_is_flagged() -> None:
    trace, _ = read(call(0, 10, [1], out=0), call(5, 20, [1, 2]))
    assert [(turn.output_tokens, turn.zero_output) for turn in trace.streams[0].turns] == [(1, True), (10, False)]


def test_partial_last_block_is_the_beginning_of_the_next_prompts_block() -> None:
    trace, _ = read(call(0, 25, [1, 2]), call(5, 40, [1, 2, 3, 4]))
    assert blocks(trace) == [[1, 2, 3], [1, 2, 3, 4]]
    assert [turn.keep for turn in trace.streams[0].turns] == [0, 3]


def test_partial_last_block_is_shared_through_prompts_that_end_inside_it() -> None:
    trace, _ = read(call(0, 22, [1, 2]), call(5, 25, [1, 2]), call(9, 31, [1, 2, 3]))
    first, second, third = blocks(trace)
    assert first == second == [1, 2, 3]
    assert third[:3] == [1, 2, 3]
    assert third[3] < 0


def test_partial_last_block_is_minted_where_the_next_prompt_goes_elsewhere() -> None:
    trace, _ = read(call(0, 25, [1, 2]), call(5, 38, [1, 7, 8]), call(9, 35, [1, 7, 8]))
    first, second, third = blocks(trace)
    tails = [first[2], second[3], third[3]]
    assert (first[:2], second[:3], third[:3]) == ([1, 2], [1, 7, 8], [1, 7, 8])
    assert all(tail < 0 for tail in tails)  # the third is shorter than the second: not its continuation
    assert len(set(tails)) == 3


def test_short_hash_ids_get_minted_tails_that_differ_and_repeat() -> None:
    rows = (call(0, 40, [1, 2]), call(5, 40, [1, 2]))
    trace, notes = read(*rows)
    first, second = blocks(trace)
    assert (first[:2], second[:2]) == ([1, 2], [1, 2])
    assert len({*first[2:], *second[2:]}) == 4
    assert all(block < 0 for block in first[2:] + second[2:])
    assert notes.counts == {"hash_ids shorter than the input: new content minted": 2}
    assert read(*rows)[0] == trace


@pytest.mark.parametrize("absent", [{"hash_ids": []}, {"hash_ids": None}, {}])
def test_absent_hash_ids_share_nothing_unless_cached_tokens_say_so(absent: dict[str, Any]) -> None:
    rows = [call(0, 30, []), call(5, 45, [])]
    for row in rows:
        del row["hash_ids"]
        row |= absent
    trace, notes = read(*rows)
    assert [turn.keep for turn in trace.streams[0].turns] == [0, 0]
    assert notes.counts == {"no hash_ids: no sharing assumed": 2}
    trace, notes = read(rows[0], rows[1] | {"cached_tokens": 29})
    assert [turn.keep for turn in trace.streams[0].turns] == [0, 2]  # 29 tokens are two whole blocks of 10
    assert notes.counts["no hash_ids: sharing from cached_tokens"] == 1


def test_hash_ids_longer_than_the_input_are_cut_and_counted() -> None:
    trace, notes = read(call(0, 25, [1, 2, 3, 4, 5]), call(5, 30, [1, 2, 3]))
    assert blocks(trace) == [[1, 2, 3], [1, 2, 3]]
    assert notes.counts == {"hash_ids longer than the input cut": 1}


def test_other_block_sizes_and_global_scope() -> None:
    trace, _ = read(call(0, 1100, [5, 6]), call(5, 1500, [5, 6]), block_size=512, hash_id_scope="global")
    assert trace.scope == "global"
    assert blocks(trace)[0][:2] == [5, 6]
    again, _ = read(call(0, 1100, [5, 6]), block_size=512, hash_id_scope="global", id="another")
    minted = {block for prompt in blocks(trace) + blocks(again) for block in prompt if block < 0}
    assert len(minted) == 2  # minted ids of two sessions do not meet, though equal ids mean equal content
    _, notes = read(call(0, 10, [1]), hash_id_scope="galactic")
    assert notes.counts == {"unknown hash_id_scope taken as local": 1}


def test_rewinds_keep_the_common_prefix() -> None:
    trace, _ = read(
        call(0, 50, [1, 2, 3, 4, 5]),
        call(5, 60, [1, 2, 3, 4, 6, 7]),  # loses one block
        call(9, 20, [1, 8]),  # shrinks
        call(15, 30, [9, 10, 11]),  # loses everything
    )
    assert [turn.keep for turn in trace.streams[0].turns] == [0, 4, 1, 0]
    assert [turn.new_blocks for turn in trace.streams[0].turns] == [[1, 2, 3, 4, 5], [6, 7], [8], [9, 10, 11]]


def test_identical_retry_is_tagged() -> None:
    trace, _ = read(call(0, 25, [1, 2]), call(5, 25, [1, 2]), call(9, 26, [1, 2]))
    assert [turn.retry for turn in trace.streams[0].turns] == [False, True, False]
    assert trace.streams[0].turns[1].new_blocks == []


# ---------------------------------------------------------------- times


def test_missing_api_time_is_estimated_and_capped_at_the_gap() -> None:
    trace, notes = read(
        call(0, 10, [1], out=10, api=1.0),  # 0.1 s per token
        call(10, 10, [1], out=10, api=3.0),  # 0.3
        call(20, 10, [1], out=10, api=2.0),  # 0.2: the median
        call(30, 10, [1], out=50, api=None),  # 10 s
        call(45, 10, [1], out=50, api=None),  # 10 s, cut to 4
        call(49, 10, [1], out=100, api=None),  # nothing follows: 20 s
    )
    turns = trace.streams[0].turns
    assert [turn.service_s for turn in turns] == [1, 3, 2, 10, 4, 20]
    assert [turn.service_estimated for turn in turns] == [False] * 3 + [True] * 3
    assert [turn.pause_s for turn in turns] == [0, 9, 7, 8, 5, 0]
    assert notes.counts == {"missing api_time estimated from the output length": 3}


def test_out_of_order_requests_are_sorted_stably() -> None:
    trace, notes = read(
        call(9, 30, [1, 2, 3]), call(0, 10, [1]), call(5, 20, [1, 2]), call(9, 40, [1, 2, 3, 4], api=0.1)
    )
    assert [turn.input_tokens for turn in trace.streams[0].turns] == [10, 20, 30, 40]
    assert notes.counts["out-of-order requests sorted"] == 1


def test_overlap_that_continues_the_busy_prompt_is_sent_in_turn_and_counted() -> None:
    trace, notes = read(call(0.5, 20, [1, 2], api=5.0), call(2.5, 30, [1, 2, 3]))
    assert len(trace.streams) == 1
    assert [turn.pause_s for turn in trace.streams[0].turns] == [0, 0]
    assert notes.counts == {"overlapping requests of one stream serialised": 1}


def test_overlap_of_another_conversation_becomes_a_parallel_stream() -> None:
    trace, notes = read(
        call(0.5, 20, [1, 2]),
        call(5.0, 30, [1, 2, 3], api=10.0),
        call(7.5, 20, [1, 50], api=1.0),  # beside the second
        call(12.0, 30, [1, 50, 51], api=1.0),  # continues it
        call(20.0, 40, [1, 2, 3, 4]),
    )
    main, beside = trace.streams
    assert [turn.input_tokens for turn in main.turns] == [20, 30, 40]
    assert [turn.input_tokens for turn in beside.turns] == [20, 30]
    assert (beside.agent, beside.parent, beside.spawn_turn, beside.join_turn) == ("main/parallel", 0, 0, 2)
    assert beside.turns[0].pause_s == 6  # the first call ended at 1.5
    assert main.turns[2].pause_s == 5  # the second ended at 15, the parallel stream at 13
    assert notes.counts == {"overlapping requests split into parallel streams": 2}


def test_overlap_within_the_resolution_of_whole_seconds_is_no_overlap() -> None:
    trace, notes = read(call(0.0, 20, [1, 2], api=5.4), call(5.0, 20, [8, 9]))
    assert (len(trace.streams), notes.counts) == (1, {})
    trace, _ = read(call(0.1, 20, [1, 2], api=5.4), call(5.0, 20, [8, 9]))
    assert len(trace.streams) == 2


def test_exact_duplicates_are_dropped() -> None:
    trace, notes = read(call(0, 20, [1, 2]), call(0, 20, [1, 2]), call(5, 30, [1, 2, 3]))
    assert len(trace.streams[0].turns) == 2
    assert notes.counts == {"exact duplicate request dropped": 1}


# ---------------------------------------------------------------- subagents

MAIN = (call(0.0, 20, [1, 2], api=2.0), call(4.0, 30, [1, 2, 3], api=1.0), call(14.0, 40, [1, 2, 3, 4]))


def test_relative_and_absolute_clocks_give_the_same_trace() -> None:
    relative = agent(2.5, 9.0, call(0.0, 20, [50, 51]), call(5.0, 30, [50, 51, 52], api=4.0))
    absolute = agent(2.5, 9.0, call(2.5, 20, [50, 51]), call(7.5, 30, [50, 51, 52], api=4.0))
    trace, _ = read(*MAIN, relative)
    assert read(*MAIN, absolute)[0] == trace
    child = trace.streams[1]
    assert (child.agent, child.parent, child.spawn_turn, child.join_turn, child.background) == (
        "Explore",
        0,
        0,
        2,
        False,
    )
    assert [turn.start_s for turn in child.turns] == [2.5, 7.5]
    assert [turn.pause_s for turn in child.turns] == [0.5, 4]
    assert trace.streams[0].turns[2].joins == [1]
    assert trace.streams[0].turns[2].pause_s == 2.5  # the child's last call ended at 11.5


def test_relative_times_that_pass_the_spawn_time_stay_relative() -> None:
    """Guessing request by request would take the second for absolute: 5 is not before 4.2."""
    trace, _ = read(*MAIN, agent(4.2, 9.0, call(0.1, 20, [50, 51]), call(5.0, 30, [50, 51, 52], api=4.0)))
    assert [turn.start_s for turn in trace.streams[1].turns] == [4.3, 9.2]


def test_clock_is_decided_once_for_a_session_and_can_be_forced() -> None:
    ambiguous = agent(1.0, None, call(1.0, 20, [50, 51]), call(3.0, 20, [50, 51]), status="async_launched")
    clear = agent(4.5, 5.0, call(0.0, 20, [60, 61]), call(2.0, 20, [60, 61]))
    assert read(*MAIN, ambiguous)[0].streams[1].turns[0].start_s == 1.0
    assert read(*MAIN, ambiguous, clear)[0].streams[1].turns[0].start_s == 2.0
    assert read(*MAIN, ambiguous, clock="relative")[0].streams[1].turns[0].start_s == 2.0
    assert read(*MAIN, ambiguous, clear, clock="absolute")[0].streams[1].turns[1].start_s == 2.0 + 0.0


def test_asynchronous_subagent_is_background_and_never_joined() -> None:
    trace, _ = read(*MAIN, agent(2.5, None, call(0.0, 20, [50, 51]), status="async_launched"))
    assert (trace.streams[1].background, trace.streams[1].join_turn) == (True, None)
    assert all(not turn.joins for turn in trace.streams[0].turns)
    trace, _ = read(*MAIN, agent(2.5, None, call(0.0, 20, [50, 51])))  # completed, but without a duration: ends at 3.5
    assert (trace.streams[1].background, trace.streams[1].join_turn) == (False, 1)


def test_join_is_the_first_later_turn_after_the_end_even_if_the_parent_is_busy() -> None:
    busy = [call(t, 20, [1, 2], api=1.0) for t in (0.0, 3.0, 6.0, 9.0, 12.0)]
    child = agent(1.5, 6.0, call(0.0, 20, [50, 51], api=6.0))  # 1.5 to 7.5
    trace, _ = read(*busy, child)
    assert (trace.streams[1].spawn_turn, trace.streams[1].join_turn) == (0, 3)
    assert trace.streams[0].turns[3].pause_s == 1.5
    idle = [busy[0], busy[4]]
    trace, _ = read(*idle, child)
    assert (trace.streams[1].spawn_turn, trace.streams[1].join_turn) == (0, 1)
    assert trace.streams[0].turns[1].pause_s == 4.5


@pytest.mark.parametrize("relative", [True, False])
def test_nested_subagents_at_any_depth(relative: bool) -> None:
    b, c = (0.0, 0.0) if relative else (3.0, 5.0)
    inner = agent(5.0 if not relative else 2.0, 2.0, call(c + 0.0, 20, [70, 71], api=2.0))
    outer = agent(3.0, 9.0, call(b, 20, [50, 51], api=1.5), inner, call(b + 6, 30, [50, 51, 52], api=3.0))
    trace, _ = read(*MAIN, outer)
    main, child, grandchild = trace.streams
    assert (child.parent, child.spawn_turn, child.join_turn) == (0, 0, 2)
    assert (grandchild.parent, grandchild.spawn_turn, grandchild.join_turn) == (1, 0, 1)
    assert [turn.start_s for turn in child.turns] == [3, 9]
    assert grandchild.turns[0].start_s == 5
    assert grandchild.turns[0].pause_s == 0.5  # the spawning call ended at 4.5
    assert child.turns[1].pause_s == 2  # the grandchild ended at 7
    assert main.turns[2].joins == [1]


def test_subagent_before_the_first_turn_starts_with_the_session() -> None:
    orphan = agent(1.0, 4.0, call(0.0, 20, [50, 51], api=4.0))
    trace, _ = read(orphan, *(call(t, 20, [1, 2]) for t in (3.0, 6.0)))
    child = trace.streams[1]
    assert (child.spawn_turn, child.join_turn) == (None, 1)
    assert child.turns[0].start_s == 0
    assert child.turns[0].pause_s == 0
    assert trace.streams[0].turns[0].pause_s == 2  # the session starts with the orphan
    assert trace.streams[0].turns[1].pause_s == 1


def test_subagent_after_the_last_turn_is_not_waited_for() -> None:
    trace, _ = read(*MAIN, agent(16.0, 4.0, call(0.0, 20, [50, 51])))
    assert (trace.streams[1].spawn_turn, trace.streams[1].join_turn, trace.streams[1].background) == (2, None, False)


def test_subagent_without_requests_is_a_pure_delay() -> None:
    with_empty, notes = read(*MAIN, agent(5.0, 8.0))
    assert with_empty == read(*MAIN)[0]
    assert with_empty.streams[0].turns[2].pause_s == 9  # 5 to 14: its eight seconds are inside
    assert notes.counts == {"subagent without requests kept as a pause": 1}


def test_calls_inside_an_empty_subagent_move_up() -> None:
    trace, _ = read(*MAIN, agent(2.5, 9.0, agent(1.0, 4.0, call(0.0, 20, [50, 51], api=4.0))))
    assert (trace.streams[1].parent, trace.streams[1].spawn_turn, trace.streams[1].turns[0].start_s) == (0, 0, 3.5)


def test_repeated_agent_ids_are_kept_apart() -> None:
    one = agent(2.5, 1.0, call(0.0, 20, [50, 51]), agent_id="same")
    two = agent(5.5, 1.0, call(0.0, 20, [60, 61]), agent_id="same")
    trace, notes = read(*MAIN, one, two)
    assert [len(stream.turns) for stream in trace.streams] == [3, 1, 1]
    assert notes.counts == {"repeated agent id kept apart by its place": 1}
    trace, notes = read(*MAIN, one, one)
    assert len(trace.streams) == 2
    assert notes.counts["exact duplicate request dropped"] == 1


def test_session_of_subagents_only_has_one_as_main() -> None:
    trace, notes = read(agent(1.0, 4.0, call(0.0, 20, [50, 51])), agent(7.0, 2.0, call(0.0, 20, [60, 61])))
    assert [(stream.agent, stream.parent, stream.spawn_turn) for stream in trace.streams] == [
        ("Explore", None, None),
        ("Explore", 0, 0),
    ]
    assert notes.counts == {"main agent without calls: first subagent taken as main": 1}


# ---------------------------------------------------------------- tolerance

GROWING = [call(10.0 * n, 10 * n + 15, list(range(1, n + 2))) for n in range(6)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"in": -1}, "`$.requests[2].in`"),
        ({"in": "many"}, "`$.requests[2].in`"),
        ({"in": 1_000_000_000_000}, "<= 100000000 - at `$.requests[2].in`"),
        ({"out": 100_000_001}, "<= 100000000 - at `$.requests[2].out`"),
        ({"in": 10**25}, "`$.requests[2].in`"),
        ({"in": None}, "needs `in` and `out` - at `$.requests[2]`"),
        ({"t": None}, "`$.requests[2].t`"),
        ({"t": "noon"}, "`$.requests[2].t`"),
        ({"type": 7}, "`$.requests[2]`"),
        ({"model": 7}, "`$.requests[2].model`"),
        ({"hash_ids": [1, 2, "x"]}, "`$.requests[2].hash_ids[2]`"),
        ({"hash_ids": [1, -2, 3]}, "`$.requests[2].hash_ids[1]`"),
        ({"hash_ids": "12"}, "`$.requests[2].hash_ids`"),
    ],
)
def test_one_bad_request_is_skipped_and_the_rest_is_as_if_it_were_not_there(change: dict[str, Any], said: str) -> None:
    trace, notes = read(*GROWING[:2], GROWING[2] | change, *GROWING[3:])
    assert trace == read(*GROWING[:2], *GROWING[3:])[0]
    assert [turn.keep for turn in trace.streams[0].turns] == [0, 2, 3, 5, 6]
    assert blocks(trace)[2][:4] == [1, 2, 3, 4]
    assert notes.counts == {"request that cannot be read skipped": 1}
    first = notes.first["request that cannot be read skipped"]
    assert first.startswith("s.json ")
    assert said in first


def test_requests_that_are_no_objects_are_skipped() -> None:
    trace, notes = read(*GROWING, 5)  # type: ignore[arg-type]
    assert trace == read(*GROWING)[0]
    assert notes.first == {
        "request that cannot be read skipped": "s.json Expected `object`, got `int` - at `$.requests[6]`"
    }


def test_a_bad_request_does_not_hide_its_good_repetition() -> None:
    trace, notes = read(GROWING[0] | {"hash_ids": ["x"]}, *GROWING)
    assert trace == read(*GROWING)[0]
    assert notes.counts == {"request that cannot be read skipped": 1}


def test_a_session_is_skipped_if_more_than_a_fifth_of_its_requests_are_bad() -> None:
    bad = call(3.0, -1, [])
    trace, notes = read(*GROWING[:4], bad)
    assert len(trace.streams[0].turns) == 4
    assert notes.counts == {"request that cannot be read skipped": 1}
    with pytest.raises(msgspec.ValidationError, match=r"requests\[4\]\.in` \(2 of 6 requests .* above a fifth"):
        read(*GROWING[:4], bad, bad)


def test_a_bad_subagent_counts_with_all_that_is_in_it() -> None:
    lost = agent(12.0, 3.0, *(call(12.0 + n, 20, [50, 51]) for n in range(2)), duration_ms="long")
    with pytest.raises(msgspec.ValidationError, match=r"requests\[6\]\.duration_ms` \(3 of 9 requests"):
        read(*GROWING, lost)
    rest = (call(100.0 + n, 10, [1]) for n in range(10))
    trace, notes = read(*GROWING, lost, *rest)
    assert (len(trace.streams), notes.counts) == (1, {"request that cannot be read skipped": 3})


def test_a_bad_request_in_a_subagent_is_skipped_alone() -> None:
    inner = (call(0.0, 20, [50, 51]), call(1.0, -3, []), call(3.0, 30, [50, 51, 52]))
    trace, notes = read(*GROWING, agent(12.0, 6.0, *inner))
    assert trace == read(*GROWING, agent(12.0, 6.0, inner[0], inner[2]))[0]
    assert "`$.requests[6].requests[1].in`" in notes.first["request that cannot be read skipped"]


def test_null_and_unusable_session_keys_mean_the_default() -> None:
    rows = (call(0, 70, [1]), call(5, 130, [1, 2]))
    trace, notes = read(*rows, id=None, block_size=None, hash_id_scope=None, tool_tokens=None, system_tokens=None)
    assert (trace.id, trace.block_size, trace.scope, trace.system_tokens) == ("s", 64, "local", 0)
    assert notes.counts == {}
    trace, notes = read(*rows, id=[1], tool_tokens=-5, hash_id_scope=7, block_size=64)
    assert (trace.id, trace.scope, trace.system_tokens) == ("s", "local", 0)
    assert notes.counts == {
        f"unusable session key {key!r} ignored": 1 for key in ("id", "hash_id_scope", "tool_tokens")
    }
    assert "`$.tool_tokens`" in notes.first["unusable session key 'tool_tokens' ignored"]


def test_more_minted_ids_than_memory_holds_are_refused() -> None:
    rows = [call(10.0 * n, 100_000_000, [1, 2]) for n in range(3)]
    with pytest.raises(msgspec.ValidationError, match=r"29,999,994 blocks of 10 tokens without an id.*20,000,000"):
        read(*rows)


@pytest.mark.parametrize("odd", [1.7e12, 1.7e9, -1.7e9, 1e308])
def test_times_from_two_origins_are_refused(odd: float) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"session 's': .* two origins - at `\$\.requests\[") as caught:
        read(*GROWING, call(odd, 20, [1, 2]))
    if odd > 0:
        assert "`$.requests[6]`" in str(caught.value)
    with pytest.raises(msgspec.ValidationError, match="two origins"):
        read(*GROWING, agent(12.0, 6.0, call(0.0, 20, [50, 51]), call(odd, 20, [50, 51])))
    with pytest.raises(msgspec.ValidationError, match="two origins"):
        read(*GROWING, agent(odd, 6.0, call(12.0, 20, [50, 51]), call(13.0, 20, [50, 51])), clock="absolute")


def test_unix_times_are_one_origin() -> None:
    moved = [row | {"t": row["t"] + 1.7e9} for row in GROWING]
    for start in (0.0, 1.7e9 + 12):  # inner times of either clock
        trace, notes = read(*moved, agent(1.7e9 + 12, 6.0, call(start, 20, [50, 51])))
        assert trace == read(*GROWING, agent(12.0, 6.0, call(0.0, 20, [50, 51])))[0]
        assert notes.counts == {}


def test_a_gap_above_seven_days_is_noted() -> None:
    _, notes = read(*GROWING, call(50 + 7 * 86400, 20, [1, 2]))
    assert notes.counts == {}
    trace, notes = read(*GROWING, call(50 + 8 * 86400, 20, [1, 2]))
    assert trace.streams[0].turns[-1].pause_s == 8 * 86400 - 1
    assert notes.first == {"gap above 7 days between requests": "s.json 8 days - at `$.requests[6]`"}


def test_an_absurd_api_time_is_taken_as_missing() -> None:
    trace, notes = read(*GROWING[:5], GROWING[5] | {"api_time": 1.7e9})
    assert trace.streams[0].turns[-1].service_s == 1
    assert "api_time above 7 days taken as missing" in notes.counts


def test_unknown_keys_and_types_are_counted_once_per_kind() -> None:
    trace, notes = read(
        call(0, 20, [1, 2], mood="good"),
        {"type": "compaction", "t": "noon", "whatever": [1]},
        call(5, 30, [1, 2, 3], mood="bad"),
        colour=1,
    )
    assert len(trace.streams[0].turns) == 2
    assert notes.counts == {
        "unknown session key 'colour' ignored": 1,
        "unknown request key 'mood' ignored": 2,
        "request of unknown type 'compaction' skipped": 1,
    }
    assert notes.first["request of unknown type 'compaction' skipped"] == "s.json $.requests[1]"


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([call(0, 20, [1, 2]), {"type": "n", "t": 1, "in": "many", "out": 1}], "`$.requests[1].in`"),
        ([call(0, 20, [1, 2]), call(1, 30, [1, 2, "x"])], "`$.requests[1].hash_ids[2]`"),  # type: ignore[list-item]
        ([call(0, 20, [1, -2])], "`$.requests[0].hash_ids[1]`"),
        ([{"type": "n", "t": 1, "out": 1}], "needs `in` and `out` - at `$.requests[0]`"),
        ([agent(0, 1.0, {"type": "s", "in": 1, "out": 1})], "`t` - at `$.requests[0].requests[0]`"),
        ([], "no model call"),
    ],
)
def test_errors_name_the_place(requests: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        weka.trace(json.dumps(session(*requests)).encode(), "s.json", Notes())
    assert message in str(caught.value)


def test_length_aliases() -> None:
    row = call(0, 20, [1, 2]) | {"input_length": 20, "output_length": 10}
    del row["in"], row["out"]
    assert read(row)[0] == read(call(0, 20, [1, 2]))[0]


@given(st.lists(st.lists(st.integers(0, 30), max_size=12), min_size=1, max_size=8), st.sampled_from([None, 1, "\t"]))
def test_every_list_of_ids_comes_back(lists: list[list[int]], indent: int | str | None) -> None:
    """Ids are parsed as a difference of bytes against the list before: whatever lists, and however they are spaced."""
    rows = [call(float(10 * place), 10 * len(ids) + 1, ids) for place, ids in enumerate(lists)]
    data = json.dumps(session(*rows), indent=indent).encode()
    trace = weka.trace(data, "s.json", Notes())
    check(trace)
    assert [prompt[:-1] for prompt in blocks(trace)] == lists
    for before, after, turn in zip(blocks(trace), blocks(trace)[1:], trace.streams[0].turns[1:], strict=False):
        common = next((n for n, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), None)
        assert turn.keep == (min(len(before), len(after)) if common is None else common)


def _trees() -> st.SearchStrategy[list[dict[str, Any]]]:
    times = st.integers(0, 60).map(float)
    calls = st.builds(
        lambda t, ids, extra, out, api: call(t, 10 * len(ids) + extra, ids, out, api),
        times,
        st.lists(st.integers(0, 5), max_size=4),
        st.integers(0, 9),
        st.integers(0, 20),
        st.none() | st.floats(0.1, 9.0),
    )
    subagents = st.builds(
        lambda t, duration, rows, name: agent(t, duration, *rows, agent_id=name),
        times,
        st.none() | st.floats(0.0, 40.0),
        st.deferred(lambda: rows),
        st.sampled_from("ab"),
    )
    rows: st.SearchStrategy[list[dict[str, Any]]] = st.lists(calls | subagents, max_size=4)
    return rows


@settings(max_examples=60)
@given(_trees())
def test_any_tree_gives_a_sound_trace_or_a_named_error(rows: list[dict[str, Any]]) -> None:
    try:
        trace, _ = read(*rows)
    except msgspec.ValidationError as error:
        assert "no model call" in str(error)  # noqa: PT017 (either outcome is right)
        return
    again = weka.trace(msgspec.json.encode(weka.session(trace)), "s.json", Notes())
    check(again)

    def turns(trace: Trace) -> list[tuple[float, int, int]]:
        found = [(t.start_s, t.input_tokens, t.output_tokens) for stream in trace.streams for t in stream.turns]
        return sorted(found)

    assert len(turns(again)) <= len(
        turns(trace)
    )  # writing keeps every turn; only exact duplicates may merge on the way
    assert set(turns(again)) == set(turns(trace))


@given(st.data())
def test_damaged_bytes_are_an_error_of_msgspec_or_no_error(data: st.DataObject) -> None:
    """Nothing else may escape: the reader skips what msgspec refuses and goes on."""
    good = bytearray(json.dumps(session(*MAIN, agent(2.5, 9.0, call(0.0, 20, [50, 51])))).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(msgspec.MsgspecError):
        check(weka.trace(bytes(good), "s.json", Notes()))


def test_written_sessions_read_back_the_same() -> None:
    inner = agent(2.0, 2.0, call(0.0, 20, [70, 71], api=2.0))
    outer = agent(3.0, 9.0, call(0.0, 20, [50, 51], api=1.5), inner, call(6.0, 30, [50, 51, 52], api=3.0))
    rows = (
        *MAIN,
        outer,
        agent(2.2, None, call(0.0, 25, [80, 81]), status="async_launched"),
        call(20.0, 25, [1, 2], out=0),
    )
    trace, _ = read(*rows, system_tokens=7)
    assert weka.trace(msgspec.json.encode(weka.session(trace)), "s.json", Notes()) == trace
    assert [len(stream.turns) for stream in trace.streams] == [4, 1, 2, 1]


@pytest.mark.parametrize("scope", ["local", "global"])
def test_written_minted_blocks_are_ids_that_can_be_read(scope: str) -> None:
    trace, _ = read(call(0, 40, [1, 2]), call(5, 60, [], cached_tokens=40), hash_id_scope=scope)
    again = weka.trace(msgspec.json.encode(weka.session(trace)), "s.json", Notes())
    assert all(block >= 0 for prompt in blocks(again) for block in prompt)
    assert [turn.keep for turn in again.streams[0].turns] == [turn.keep for turn in trace.streams[0].turns] == [0, 4]
    assert [len(set(prompt)) for prompt in blocks(again)] == [4, 6]
