"""Statistics: by hand on small sessions, and recomputed naively from the JSON of the recorded ones."""

from __future__ import annotations

import json
import statistics as plain
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.shared import TRACES, needs_shared
from tests.workloads.weka_sessions import agent, call, read
from workloads.formats import read as read_path
from workloads.statistics import Statistics, distribution, percentile, statistics
from workloads.trace import Notes, Trace


def _of(*requests: dict[str, Any], **more: Any) -> Statistics:
    return statistics([read(*requests, **more)[0]])


def test_percentiles_interpolate_linearly_and_nothing_is_null() -> None:
    assert percentile([10.0, 20.0, 30.0, 40.0], 90) == pytest.approx(37.0)
    assert percentile([], 50) is None
    assert distribution([4.0]).p99 == 4.0
    assert distribution([]).mean is None


def test_nothing_read_is_all_null_and_strict_json() -> None:
    found = statistics([])
    assert found.reuse.trie is None
    assert found.duty[0].duty is None
    assert found.distributions["input_tokens"].n == 0
    assert found.curves == {}
    assert b"NaN" not in msgspec.json.encode(found)


def test_growth_rewinds_and_uncached_tokens_by_hand() -> None:
    found = _of(
        call(0, 55, [1, 2, 3, 4, 5]),
        call(5, 68, [1, 2, 3, 4, 6, 7]),  # 1 block lost: 4 kept, 28 uncached
        call(9, 22, [1, 2]),  # shrinks; loses 4: 2 kept, 2 uncached
        call(15, 50, [8, 2, 3, 4, 5]),  # to zero: loses 2, 50 uncached
        call(20, 60, [1, 2, 3, 4, 5, 8]),  # loses 5 of the last, but the first prompt is still cached: 10 uncached
    )
    assert found.counts["rewinds"] == 4
    assert found.counts["rewinds_to_zero"] == 2
    assert found.labels["rewind_blocks"] == {"2-16": 3, "1": 1}
    assert found.counts["input_shrinks"] == 1
    assert found.counts["uncached_tokens"] == 55 + 28 + 2 + 50 + 10
    assert found.distributions["input_growth_tokens"].mean == pytest.approx((13 - 46 + 28 + 10) / 4)
    assert found.distributions["unique_tokens"].max == 80
    # Blocks asked for: 5 + 6 + 2 + 5 + 6 = 24. Seen blocks 2 3 4 5 do not help a prompt that starts with another one.
    assert found.reuse.previous == pytest.approx((4 + 2) / 24)
    assert found.reuse.trie == pytest.approx((4 + 2 + 0 + 5) / 24)
    assert found.reuse.set == pytest.approx((4 + 2 + 0 + 6) / 24)  # 8 was seen, though not after 5
    assert found.reuse.tokens == pytest.approx(1 - 145 / 255)


def test_partial_blocks_are_never_reused() -> None:
    """The second prompt keeps the partial third block of the first, but a cache of whole blocks cannot hold it."""
    found = _of(call(0, 25, [1, 2]), call(5, 35, [1, 2, 3]))
    assert found.counts["uncached_tokens"] == 25 + 15
    assert found.reuse.trie == pytest.approx(2 / 5)


def test_cache_is_shared_between_the_streams_of_a_session_but_not_between_sessions() -> None:
    rows = (call(0, 20, [1, 2]), agent(1.5, 2.0, call(0.0, 30, [1, 2, 3])), call(9, 40, [1, 2, 3, 4]))
    trace, _ = read(*rows)
    assert statistics([trace]).counts["uncached_tokens"] == 20 + 10 + 10  # main's last call has 3 from the subagent
    assert statistics([trace, trace]).counts["uncached_tokens"] == 2 * 40


def test_gaps_rates_and_duty_by_hand() -> None:
    found = _of(
        call(0, 20, [1, 2], out=21, api=2.0, ttft=1.0),
        call(12, 20, [1, 2], out=0, api=1.0, stop="end_turn"),
        call(113, 20, [1, 2], out=10, api=5.0),
        agent(114.0, 6.0, call(0.0, 20, [5, 6], api=6.0)),
    )
    gaps = found.distributions
    assert (gaps["idle_gap_s"].n, gaps["idle_gap_s"].mean) == (2, 55)
    assert (gaps["idle_gap_after_tool_s"].max, gaps["idle_gap_after_user_s"].max) == (10, 100)
    assert gaps["start_to_start_s"].max == 101
    assert gaps["decode_tok_s"].max == 20  # 20 tokens after the first in 1 s
    assert (gaps["e2e_tok_s"].n, gaps["e2e_tok_s"].max) == (3, 10.5)  # none for the empty answer
    assert gaps["output_tokens"].min == 0
    assert (gaps["peak_in_flight"].max, gaps["session_span_s"].max, gaps["session_service_s"].max) == (2, 120, 14)
    # Busy: 0-2, 12-13, 113-120: 10 s. Idle: 10 s and 100 s.
    assert {duty.cap_s: duty.duty for duty in found.duty} == pytest.approx(
        {0.0: 1.0, 2.0: 10 / 14, 10.0: 10 / 30, 60.0: 10 / 80, 300.0: 10 / 120, None: 10 / 120}
    )
    assert [(idle.gaps_share, idle.time_share) for idle in found.idle[:3]] == [
        (1.0, 1.0),
        (0.5, pytest.approx(100 / 110)),
        (0.5, pytest.approx(100 / 110)),
    ]


def test_context_limits_count_input_and_output() -> None:
    found = _of(call(0, 32_760, [], out=8), call(5, 32_760, [], out=9), call(9, 70_000, []))
    first, second, third, *_ = found.context_limits
    assert (first.requests, first.sessions, second.requests, third.requests) == (2, 1, 1, 0)
    assert first.requests_share == pytest.approx(2 / 3)


def test_joins_are_told_apart() -> None:
    main = [call(t, 20, [1, 2]) for t in (0.0, 4.0, 8.0, 12.0)]
    found = _of(
        *main,
        agent(1.0, 2.0, call(0.0, 10, [5])),
        agent(1.1, 5.0, call(0.0, 10, [5])),
        agent(1.2, None, call(0.0, 10, [5]), status="async_launched"),
        agent(13.0, 2.0, call(0.0, 10, [5])),
    )
    assert found.labels["join"] == {"next turn": 1, "later turn": 1, "background": 1, "after the last turn": 1}
    assert (found.counts["subagents"], found.counts["subagent_requests"], found.counts["main_requests"]) == (4, 4, 4)


# ---------------------------------------------------------------- the recorded sessions

Recorded = tuple[list[dict[str, Any]], list[Trace], Notes]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("sessions")
    with tarfile.open(TRACES) as archive:
        archive.extractall(folder, filter="data")
    (inner,) = folder.iterdir()
    notes = Notes()
    traces = list(read_path(inner, notes))
    return [json.loads(path.read_text()) for path in sorted(Path(inner).glob("*.json"))], traces, notes


def _lists(session: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The request lists of a session: the main agent's and each subagent's, with times from the session's start."""
    main = [entry for entry in session["requests"] if entry["type"] != "subagent"]
    children = [entry for entry in session["requests"] if entry["type"] == "subagent"]
    return [main] + [[c | {"t": entry["t"] + c["t"]} for c in entry["requests"]] for entry in children]


@needs_shared
def test_recorded_counts_and_lengths(recorded: Recorded) -> None:
    sessions, traces, notes = recorded
    found = statistics(traces)
    calls = [c for session in sessions for requests in _lists(session) for c in requests]
    assert found.counts["sessions"] == len(sessions) == 49
    assert found.counts["requests"] == len(calls)
    assert found.counts["subagents"] == sum(len(_lists(session)) - 1 for session in sessions)
    assert found.counts["input_tokens"] == sum(c["in"] for c in calls)
    assert found.counts["output_tokens"] == sum(c["out"] for c in calls)
    assert found.counts["service_estimated"] == sum(c.get("api_time") is None for c in calls)
    assert notes.counts["missing api_time estimated from the output length"] == found.counts["service_estimated"]
    for name, values in {
        "input_tokens": [c["in"] for c in calls],
        "output_tokens": [c["out"] for c in calls],
        "service_s": [c["api_time"] for c in calls if c.get("api_time") is not None],
        "ttft_s": [c["ttft"] for c in calls if "ttft" in c],
        "first_input_tokens": [session["requests"][0]["in"] for session in sessions],
        "declared_prefix_tokens": [session["tool_tokens"] + session["system_tokens"] for session in sessions],
        "requests_per_session": [sum(map(len, _lists(session))) for session in sessions],
        "peak_context_tokens": [max(c["in"] + c["out"] for r in _lists(s) for c in r) for s in sessions],
        "unique_tokens": [64 * len({i for r in _lists(s) for c in r for i in c["hash_ids"]}) for s in sessions],
    }.items():
        got = found.distributions[name]
        assert got.n == len(values)
        assert got.mean == pytest.approx(plain.fmean(values))
        ranked = sorted(values)
        for q, value in ((50, got.p50), (90, got.p90)):
            below, part = divmod((len(ranked) - 1) * q / 100, 1)
            low, high = ranked[int(below)], ranked[min(int(below) + 1, len(ranked) - 1)]
            assert value == pytest.approx(low + (high - low) * part)


@needs_shared
def test_recorded_transitions(recorded: Recorded) -> None:
    """On the sessions where no two conversations ran in one list, the lists are the streams."""
    sessions, traces, _ = recorded
    plain_ones = [place for place, trace in enumerate(traces) if not any("/" in s.agent for s in trace.streams)]
    assert len(plain_ones) == 48
    found = statistics([traces[place] for place in plain_ones])
    growth, gaps, starts, lost = [], [], [], []
    for place in plain_ones:
        rows = _lists(sessions[place])
        rate = float(np.median([c["api_time"] / c["out"] for r in rows for c in r if c.get("api_time") and c["out"]]))
        for requests in rows:
            for before, after in pairwise(requests):
                step = after["t"] - before["t"]
                service = before.get("api_time") or min(step, rate * before["out"])
                growth.append(after["in"] - before["in"])
                starts.append(step)
                gaps.append(max(0.0, step - service))
                pairs = zip(before["hash_ids"], after["hash_ids"], strict=False)
                same = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
                kept = min(len(before["hash_ids"]), len(after["hash_ids"])) if same is None else same
                if kept < len(before["hash_ids"]):
                    lost.append(len(before["hash_ids"]) - kept)
    for name, values in {
        "input_growth_tokens": growth,
        "idle_gap_s": gaps,
        "start_to_start_s": starts,
        "rewind_blocks": lost,
    }.items():
        got = found.distributions[name]
        assert got.n == len(values)
        assert got.mean == pytest.approx(plain.fmean(values), abs=1e-5)
        assert got.p50 == pytest.approx(float(np.percentile(values, 50)), abs=1e-5)
        assert got.p90 == pytest.approx(float(np.percentile(values, 90)), abs=1e-5)


@needs_shared
def test_recorded_prefix_reuse(recorded: Recorded) -> None:
    """Against sets of whole prefixes, on the smaller sessions and those with subagents (the naive way is slow)."""
    sessions, traces, _ = recorded
    size = [sum(len(c["hash_ids"]) for requests in _lists(session) for c in requests) for session in sessions]
    chosen = [place for place, session in enumerate(sessions) if size[place] < 100_000 or
              (len(_lists(session)) > 1 and size[place] < 300_000)]  # fmt: skip
    found = statistics([traces[place] for place in chosen])
    hits = in_set = total = uncached = 0
    for place in chosen:
        known: set[int] = set()
        seen: set[int] = set()
        for c in sorted((c for r in _lists(sessions[place]) for c in r), key=lambda c: float(c["t"])):
            ids = c["hash_ids"]
            prefixes, chain = [], 0
            for block in ids:
                chain = hash((chain, block))
                prefixes.append(chain)
            run = next((n for n, prefix in enumerate(prefixes) if prefix not in known), len(ids))
            in_set += next((n for n, block in enumerate(ids) if block not in seen), len(ids))
            hits += run
            total += len(ids)
            uncached += c["in"] - 64 * run
            known.update(prefixes)
            seen.update(ids)
    assert len(chosen) > 10
    assert found.counts["subagents"] > 3
    assert found.counts["uncached_tokens"] == uncached
    assert found.reuse.trie == pytest.approx(hits / total)
    assert found.reuse.set == pytest.approx(in_set / total)


@needs_shared
def test_recorded_sessions_survive_being_written(recorded: Recorded) -> None:
    from workloads.formats import weka

    _, traces, _ = recorded
    for trace in traces:
        assert weka.trace(msgspec.json.encode(weka.session(trace)), "", Notes()) == trace
