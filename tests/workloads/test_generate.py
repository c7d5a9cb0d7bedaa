"""Generated sessions: the measured marginals, the limits, and the same bytes everywhere."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workloads
from tests.workloads.weka_sessions import check
from workloads.errors import UserError
from workloads.formats import read, weka
from workloads.generate import DEMO, GROWTH, OUTPUT, TURNS, GeneratorSettings, generate, share_below, value_at
from workloads.statistics import Statistics, statistics
from workloads.trace import Notes

DEMO_FILE = Path(workloads.__file__).parent / "demo.jsonl"


@pytest.fixture(scope="module")
def found() -> Statistics:
    return statistics(generate(GeneratorSettings(sessions=300)))


@pytest.mark.parametrize(
    ("name", "p50", "p90", "tolerance"),
    [
        # From the published statistics of 710 recorded sessions: drawn directly ...
        ("output_tokens", 216, 898, 0.05),
        ("input_growth_tokens", 655, 3615, 0.1),
        ("idle_gap_s", 9.6, 118, 0.15),
        ("idle_gap_after_tool_s", 8.6, 72.2, 0.1),
        ("idle_gap_after_user_s", 21, 610, 0.2),
        ("requests_per_session", 45.5, 157, 0.25),
        ("first_input_tokens", 24_454, 258_903, 0.3),
        # ... and what follows from them
        ("service_s", 6.08, 18.3, 0.1),
        ("input_tokens", 103_659, 233_633, 0.3),
        ("uncached_tokens", 727, 4_804, 0.2),
        ("peak_context_tokens", 148_473, 341_042, 0.2),
    ],
)
def test_marginals_follow_the_recorded_sessions(
    found: Statistics, name: str, p50: float, p90: float, tolerance: float
) -> None:
    got = found.distributions[name]
    assert got.p50 == pytest.approx(p50, rel=tolerance)
    assert got.p90 == pytest.approx(p90, rel=tolerance)


def test_rewinds_and_reuse_follow_the_recorded_sessions(found: Statistics) -> None:
    rewinds, transitions = found.counts["rewinds"], found.counts["transitions"]
    assert rewinds / transitions == pytest.approx(3321 / 48561, rel=0.25)
    assert found.labels["rewind_blocks"]["1"] / rewinds == pytest.approx(1971 / 3321, rel=0.2)
    assert found.labels["rewind_blocks"]["over 512"] / rewinds == pytest.approx(744 / 3321, rel=0.4)
    assert found.counts["rewinds_to_zero"] / transitions == pytest.approx(83 / 48561, rel=0.5)
    assert found.reuse.trie == pytest.approx(0.963, abs=0.015)


def test_subagents_spawn_join_and_run_in_the_background() -> None:
    asked = GeneratorSettings(sessions=150, subagent_share=0.5, subagents=3.0, background_share=0.2, max_turns=60)
    found = statistics(generate(asked))
    with_any = sum(bool(trace.streams[1:]) for trace in generate(asked))
    assert with_any / 150 == pytest.approx(0.5, abs=0.12)
    assert found.counts["subagents"] / with_any == pytest.approx(3.0, rel=0.25)
    assert found.labels["join"]["background"] / found.counts["subagents"] == pytest.approx(0.2, abs=0.08)
    assert found.labels["join"]["next turn"] > 10
    assert found.labels["join"]["later turn"] > 10
    assert found.distributions["requests_per_subagent"].p50 == pytest.approx(11, rel=0.2)


@given(st.floats(0, 1), st.sampled_from([TURNS, OUTPUT, GROWTH]))
def test_quantiles_and_shares_are_inverse_and_within_the_table(
    share: float, table: tuple[tuple[float, float], ...]
) -> None:
    value = value_at(table, share)
    assert table[0][1] <= value <= table[-1][1] * (1 + 1e-12)
    assert value_at(table, share_below(table, value)) == pytest.approx(value)
    assert all(value_at(table, p) == pytest.approx(v) for p, v in table)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**9), st.integers(2_000, 40_000), st.integers(3, 12), st.integers(20, 400))
def test_limits_hold_for_every_seed(seed: int, context: int, turns: int, output: int) -> None:
    asked = GeneratorSettings(
        sessions=3,
        seed=seed,
        input_scale=0.1,
        max_context=context,
        max_turns=turns,
        max_output=output,
        max_pause_s=3.0,
        subagent_share=0.5,
    )
    for trace in generate(asked):
        check(trace)
        for stream in trace.streams:
            assert len(stream.turns) <= turns
            for number, turn in enumerate(stream.turns):
                assert turn.input_tokens + turn.output_tokens <= context + 1
                assert turn.output_tokens <= output
                waited = stream.parent is None and not turn.joins and number > 0
                blocked = any(child.spawn_turn == number - 1 for child in trace.streams[1:])
                assert not waited or blocked or turn.pause_s <= 3.001


def test_settings_scale_what_they_say() -> None:
    small = GeneratorSettings(sessions=60, max_turns=30)
    base = statistics(generate(small)).distributions
    scaled = statistics(generate(dataclasses.replace(small, input_scale=0.1, output_scale=0.5, pause_scale=0.2)))
    for name, factor in (("first_input_tokens", 0.1), ("output_tokens", 0.5), ("idle_gap_after_tool_s", 0.2)):
        before, after = base[name].p50, scaled.distributions[name].p50
        assert before is not None
        assert after == pytest.approx(factor * before, rel=0.03)


def test_seeds_differ_and_more_sessions_keep_the_first() -> None:
    few = list(generate(GeneratorSettings(sessions=3, max_turns=10)))
    assert list(generate(GeneratorSettings(sessions=5, max_turns=10)))[:3] == few
    assert list(generate(GeneratorSettings(sessions=3, max_turns=10, seed=43))) != few


def test_packaged_demo_regenerates_byte_for_byte(tmp_path: Path) -> None:
    made = tmp_path / "demo.jsonl"
    assert weka.write(generate(DEMO), made) == 12
    assert made.read_bytes() == DEMO_FILE.read_bytes()
    assert made.stat().st_size < 200_000


def test_packaged_demo_is_small_and_has_every_kind_of_turn() -> None:
    notes = Notes()
    traces = list(read(DEMO_FILE, notes))
    assert notes.counts == {}
    assert traces == list(generate(DEMO))  # what is written is what is read
    found = statistics(traces)
    d = found.distributions
    assert all(4 <= len(trace.streams[0].turns) <= 8 for trace in traces)
    assert d["input_tokens"].min is not None
    assert d["input_tokens"].min >= 1000
    assert d["peak_context_tokens"].max is not None
    assert d["peak_context_tokens"].max <= 16_000
    assert d["output_tokens"].max is not None
    assert d["output_tokens"].max <= 250
    assert found.labels["join"]["background"] == 1
    assert found.labels["join"]["next turn"] >= 2
    assert found.labels["join"]["later turn"] >= 1
    assert found.counts["rewinds"] >= 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_turns": 2}, "max_turns must be at least 3"),
        ({"max_context": 5000}, "lower input_scale"),
        ({"max_output": 5}, "lower output_scale"),
        ({"max_pause_s": 0.01}, "lower pause_scale"),
        ({"input_scale": 0.0}, "input_scale must be above 0"),
        ({"subagent_share": 1.5}, "share from 0 to 1"),
        ({"sessions": 0}, "at least 1"),
        (
            {"input_scale": 1e9},
            r"input_scale must be at most 97, not 1e\+09, or max_context be set, to at most 100,000,000",
        ),
        ({"input_scale": 50.0, "max_context": 200_000_000}, "block_size must be at least 103"),
        ({"input_scale": 1e9, "max_context": 10**9}, "input_scale must be at most 97"),
        ({"block_size": 1}, "block_size must be at least 3 for prompts of up to 1,022,230 tokens, not 1"),
        (
            {"output_scale": 1e9},
            r"output_scale must be at most 5496, .* max_output be set, to at most 100,000,000 tokens",
        ),
        ({"pause_scale": 1e9}, r"pause_scale must be at most 100, .* max_pause_s be set, to at most 7,776,000 s"),
        ({"subagents": 1e9}, "subagents must be at most 1000"),
        ({"subagents": float("nan")}, "at least 1"),
    ],
)
def test_impossible_settings_say_what_to_change(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        next(generate(dataclasses.replace(GeneratorSettings(), **wrong)))  # type: ignore[arg-type]


def test_long_sessions_up_to_the_bounds_can_be_made() -> None:
    asked = GeneratorSettings(
        sessions=4, input_scale=97, output_scale=5000, pause_scale=100, block_size=512, max_turns=8
    )
    for trace in generate(asked):
        check(trace)
        assert all(turn.input_tokens <= weka.MOST_TOKENS for stream in trace.streams for turn in stream.turns)
