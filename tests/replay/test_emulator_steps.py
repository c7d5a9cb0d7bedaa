"""Step times, eligibility, speculation and scheduling in virtual time, against values computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.emulator import language, profiles, speculation
from replay.emulator.eligibility import route
from replay.emulator.scheduler import Scheduler, Sequence
from replay.emulator.settings import EmulatorSettings, resolve
from replay.emulator.speculation import Speculation
from workloads.errors import UserError

DL7_AL6 = Speculation(draft_tokens=7, acceptance_length=6.0)
CAPTURED = profiles.CAPTURED_SIZES


def a_sequence(prompt: int, limit: int, first: int = 1000, **more: Any) -> Sequence:
    return Sequence(np.arange(first, first + prompt, dtype=np.int32) % 4000 + 300, limit=limit, **more)


def play(scheduler: Scheduler, until: float = float("inf")) -> list[dict[str, Any]]:
    """Run steps back to back in virtual time and return what each was."""
    clock, log = 0.0, []
    while clock < until and (step := scheduler.begin(clock / 60)) is not None:
        yields = scheduler.end(step)
        clock += step.seconds
        log.append(
            {
                "t": clock,
                "seconds": step.seconds,
                "rows": len(step.parts),
                "prompt": step.prompt_tokens,
                "specialised": step.route.specialised,
                "reason": step.route.reason,
                "yields": {id(sequence): tokens for sequence, tokens in yields},
            }
        )
    return log


def decode_rate(log: list[dict[str, Any]], rows: int) -> float:
    """Total decode tokens per second over the steps that held ``rows`` decoding requests and no prompt."""
    steps = [entry for entry in log if entry["rows"] == rows and not entry["prompt"]]
    return sum(len(tokens) for entry in steps for tokens in entry["yields"].values()) / sum(s["seconds"] for s in steps)


# --- profiles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "rows", "drafts", "tokens_per_s"),
    [
        ("auto", 1, None, 136.4),
        ("auto", 64, None, 2226.0),
        ("latency_specialized", 1, None, 256.4),
        ("latency_specialized", 64, None, 3606.1),
        ("auto", 1, DL7_AL6, 488.0),
        ("latency_specialized", 1, DL7_AL6, 842.0),
    ],
)
def test_published_rows_come_out_of_the_step_loop(
    backend: profiles.DecodeBackend, rows: int, drafts: Speculation | None, tokens_per_s: float
) -> None:
    scheduler = Scheduler(EmulatorSettings(profile="kimi-k3-tp16", decode_backend=backend, speculation=drafts))
    for row in range(rows):
        scheduler.add(a_sequence(1, 601, first=1000 + row))
    log = play(scheduler)
    assert decode_rate(log, rows) == pytest.approx(tokens_per_s, rel=0.002)
    assert {entry["specialised"] for entry in log if not entry["prompt"]} == {backend == "latency_specialized"}


def test_step_time_between_the_rows_is_linear() -> None:
    time = profiles.step_time(profiles.KIMI_K3_TP16, "auto")
    one, many, drafted = 1 / 136.4, 64 / 2226.0, 6 / 488.0
    assert time.seconds(1, 1) == pytest.approx(one)
    assert time.seconds(64, 1) == pytest.approx(many)
    assert time.seconds(22, 1) == pytest.approx(one + (many - one) / 3)  # a third of the way from 1 to 64
    assert time.seconds(8, 8) == pytest.approx(drafted)
    # a second request that verifies 8 tokens costs as much as 8 more requests without drafts
    assert time.seconds(16, 8) == pytest.approx(drafted + 8 * (many - one) / 63)


def test_every_profile_is_whole_and_says_what_is_assumed() -> None:
    for profile in profiles.PROFILES.values():
        assert profile.kv_blocks * profile.block_size >= profile.max_model_len
        for backend in ("auto", "latency_specialized"):
            time = profiles.step_time(profile, backend)  # type: ignore[arg-type]
            assert min(time.first_s, time.per_draft_s, time.per_token_s) > 0
        published = all(row.source == profiles.BLOG for row in profile.steps)
        assert published == (profile.name == "kimi-k3-tp16")
        assert profile.assumed


# --- eligibility ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verify", "prompt_rows", "specialised", "tokens", "reason"),
    [
        ([1], 0, True, 1, ""),
        ([1] * 8, 0, True, 8, ""),
        ([1] * 9, 0, True, 16, ""),  # padded up to the next captured size
        ([1] * 33, 0, True, 64, ""),
        ([1] * 64, 0, True, 64, ""),
        ([1] * 65, 0, False, 65, "over 64 tokens"),
        ([8], 0, True, 8, ""),
        ([8] * 3, 0, True, 32, ""),
        ([8] * 8, 0, True, 64, ""),
        ([8] * 9, 0, False, 72, "over 64 tokens"),  # 7 drafts: more than 8 requests run standard
        ([4] * 3, 0, True, 16, ""),
        ([6] * 3, 0, True, 18, ""),  # 16 rounded up to whole requests of 6
        ([6] * 10, 0, True, 66, ""),
        ([6] * 11, 0, False, 66, "over 64 tokens"),
        ([8, 8, 3], 0, False, 19, "uneven drafts"),
        ([1] * 4, 1, False, 4, "prompt rows"),
        ([], 2, False, 0, "prompt rows"),
    ],
)
def test_which_steps_run_specialised(
    verify: list[int], prompt_rows: int, specialised: bool, tokens: int, reason: str
) -> None:
    found = route("latency_specialized", verify, prompt_rows, CAPTURED)
    assert (found.specialised, found.tokens, found.reason) == (specialised, tokens, reason)


def test_the_standard_backend_never_runs_specialised_and_a_missing_size_is_a_reason() -> None:
    assert route("auto", [1], 0, CAPTURED).reason == "standard backend"
    assert route("latency_specialized", [1] * 5, 0, (1, 2, 4)).reason == "no captured size"


def test_padding_costs_the_padded_step() -> None:
    seconds = {}
    for rows in (9, 16):
        scheduler = Scheduler(EmulatorSettings(profile="kimi-k3-tp16", decode_backend="latency_specialized"))
        for row in range(rows):
            scheduler.add(a_sequence(1, 50, first=1000 + row))
        seconds[rows] = next(e["seconds"] for e in play(scheduler) if e["rows"] == rows and not e["prompt"])
    assert seconds[9] == pytest.approx(seconds[16])


# --- speculation ------------------------------------------------------------------------------------------------------


def test_a_whole_acceptance_length_is_met_by_every_step() -> None:
    accepted = speculation.schedule(DL7_AL6, seed=3)
    assert {accepted(step, step * 6) for step in range(100)} == {6}


def test_a_broken_acceptance_length_mixes_its_neighbours() -> None:
    accepted = speculation.schedule(Speculation(draft_tokens=7, acceptance_length=2.5), seed=3)
    assert [accepted(step, 0) for step in range(6)] == [2, 3, 2, 3, 2, 3]


@given(st.integers(1, 7), st.floats(0, 1), st.integers(1, 400))
def test_the_mean_acceptance_is_held_after_any_number_of_steps(drafts: int, share: float, steps: int) -> None:
    length = 1 + share * drafts
    accepted = speculation.schedule(Speculation(draft_tokens=drafts, acceptance_length=length), seed=0)
    counts = [accepted(step, 0) for step in range(steps)]
    assert set(counts) <= {int(length), int(length) + 1}
    assert abs(sum(counts) - steps * length) < 1 + 1e-6


def test_acceptance_rates_hold_per_position_and_depend_on_seed_and_position_only() -> None:
    rates = (0.9, 0.6, 0.2)
    accepted = speculation.schedule(Speculation(draft_tokens=3, acceptance_rates=rates), seed=5)
    counts = [accepted(0, position) for position in range(20_000)]
    for place, rate in enumerate(rates):
        assert np.mean([count > place + 1 for count in counts]) == pytest.approx(rate, abs=0.015)
    again = speculation.schedule(Speculation(draft_tokens=3, acceptance_rates=rates), seed=5)
    assert [again(9, position) for position in range(50)] == counts[:50]
    other = speculation.schedule(Speculation(draft_tokens=3, acceptance_rates=rates), seed=6)
    assert [other(0, position) for position in range(50)] != counts[:50]


@pytest.mark.parametrize(
    "settings",
    [
        EmulatorSettings(profile="kimi-k9"),
        EmulatorSettings(time_scale=0),
        EmulatorSettings(kv_blocks=10),
        EmulatorSettings(max_num_seqs=0),
        EmulatorSettings(faults=("stal:0.1",)),
        EmulatorSettings(faults=("stall",)),
        EmulatorSettings(faults=("stall:2",)),
        EmulatorSettings(faults=("no-cache:1",)),
        EmulatorSettings(speculation=Speculation(draft_tokens=3)),
        EmulatorSettings(speculation=Speculation(draft_tokens=3, acceptance_length=4.5)),
        EmulatorSettings(speculation=Speculation(draft_tokens=2, acceptance_rates=(0.5, 0.6))),
        EmulatorSettings(speculation=Speculation(draft_tokens=2, acceptance_rates=(0.5,))),
        EmulatorSettings(
            decode_backend="latency_specialized", speculation=Speculation(draft_tokens=8, acceptance_length=2)
        ),
    ],
)
def test_impossible_settings_are_refused(settings: EmulatorSettings) -> None:
    with pytest.raises(UserError):
        resolve(settings)


# --- scheduling -------------------------------------------------------------------------------------------------------


def test_chunked_prefill_rides_along_with_decoding_and_costs_what_the_profile_says() -> None:
    settings = EmulatorSettings(profile="toy", max_num_batched_tokens=1000, decode_backend="latency_specialized")
    scheduler = Scheduler(settings)
    short, long = a_sequence(10, 8), a_sequence(2500, 2, first=2000)
    scheduler.add(short)
    log = play(scheduler, until=1e-9)  # the short prompt alone
    scheduler.add(long)
    log += play(scheduler)
    # 1 decode token + 999 of the prompt, twice, then the remaining 502, which yields its first token
    assert [entry["prompt"] for entry in log] == [10, 999, 999, 502, 0, 0, 0, 0]
    assert [entry["reason"] for entry in log[:4]] == ["prompt rows"] * 4
    assert [len(entry["yields"]) for entry in log] == [1, 1, 1, 2, 2, 1, 1, 1]
    toy_s = 1 / 250  # one row on the standard path, which every step with prompt tokens takes
    assert log[0]["seconds"] == pytest.approx(toy_s + 10 / 400_000 + 0.0002)
    assert log[1]["seconds"] == pytest.approx(toy_s + 999 / 400_000 + 0.0002)
    assert log[5]["seconds"] == pytest.approx(1 / 450)
    assert (short.finish, short.output, long.output) == ("length", 8, 2)
    # the prefill step's token and those of mixed steps are not specialised: 8 - 4
    assert short.specialised_tokens == 4


def test_rows_are_limited_and_the_waiting_queue_is_served_in_order() -> None:
    scheduler = Scheduler(EmulatorSettings(max_num_seqs=2))
    sequences = [a_sequence(5, 3, first=1000 * n) for n in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    log = play(scheduler)
    assert max(entry["rows"] for entry in log) == 2
    first_seen = {}
    for number, entry in enumerate(log):
        for key in entry["yields"]:
            first_seen.setdefault(key, number)
    starts = [first_seen[id(sequence)] for sequence in sequences]
    assert starts == sorted(starts)
    assert starts[0] < starts[2]


def test_a_request_waits_until_its_prompt_and_reply_fit_the_kv_cache() -> None:
    scheduler = Scheduler(EmulatorSettings(max_model_len=640, kv_blocks=10))  # 10 blocks of 64
    first, second = a_sequence(300, 80), a_sequence(300, 20, first=3000)  # ceil(380/64) = 6 and ceil(320/64) = 5 blocks
    scheduler.add(first)
    scheduler.add(second)
    step = scheduler.begin()
    assert step is not None
    assert [part[0] for part in step.parts] == [first]
    assert scheduler.cache.used == 6
    assert list(scheduler.waiting) == [second]
    scheduler.end(step)
    play(scheduler)
    assert (first.finish, second.finish) == ("length", "length")
    assert scheduler.cache.used == 0


def test_cached_tokens_are_those_computed_by_hand() -> None:
    scheduler = Scheduler(EmulatorSettings())  # blocks of 64
    first = a_sequence(1024, 1)
    repeat = Sequence(first.prompt, limit=1)
    longer = Sequence(np.append(first.prompt, first.prompt), limit=1)
    changed = Sequence(np.append(first.prompt[:200], np.int32(300)), limit=1)
    for sequence in (first, repeat, longer, changed):
        scheduler.add(sequence)
        play(scheduler)
    # the last token always runs: a repeat of 16 full blocks finds 15; 200 shared tokens hold 3 full blocks
    assert [s.cached for s in (first, repeat, longer, changed)] == [0, 15 * 64, 16 * 64, 3 * 64]
    assert scheduler.counts.cache_queries == 1024 + 1024 + 2048 + 201
    assert scheduler.counts.cache_hits == (15 + 16 + 3) * 64


@pytest.mark.parametrize(("reply", "cached"), [(92, 128), (93, 192)])
def test_a_reply_becomes_a_cached_prefix_but_for_its_last_token(reply: int, cached: int) -> None:
    scheduler = Scheduler(EmulatorSettings())
    first = a_sequence(100, reply)
    scheduler.add(first)
    output = [token for entry in play(scheduler) for token in entry["yields"][id(first)]]
    # 100 + 92 tokens would fill 3 blocks of 64, but the KV of the newest token is never computed
    again = Sequence(np.array([*first.prompt, *output, 5, 6, 7], np.int32), limit=1)
    scheduler.add(again)
    play(scheduler)
    assert again.cached == cached


def test_without_the_cache_nothing_is_ever_found() -> None:
    scheduler = Scheduler(EmulatorSettings(faults=("no-cache",)))
    for _ in range(2):
        sequence = a_sequence(1024, 200)
        scheduler.add(sequence)
        play(scheduler)
        assert sequence.cached == 0
    assert scheduler.counts.cache_queries == 0


def test_abort_frees_blocks_whether_waiting_running_or_in_a_step() -> None:
    scheduler = Scheduler(EmulatorSettings(max_num_seqs=1))
    running, waiting = a_sequence(200, 50), a_sequence(200, 50, first=3000)
    scheduler.add(running)
    scheduler.add(waiting)
    step = scheduler.begin()
    assert step is not None
    scheduler.abort(waiting)
    scheduler.abort(running)
    scheduler.abort(running)
    scheduler.abort(a_sequence(10, 5))  # one that was never added
    assert scheduler.end(step) == []
    assert scheduler.begin() is None
    assert (scheduler.cache.used, running.finish, waiting.finish) == (0, "abort", "abort")


def test_drafts_are_counted_and_a_reply_never_passes_its_limit() -> None:
    scheduler = Scheduler(EmulatorSettings(speculation=DL7_AL6))
    sequence = a_sequence(10, 14)
    scheduler.add(sequence)
    log = play(scheduler)
    assert [len(entry["yields"][id(sequence)]) for entry in log] == [1, 6, 6, 1]
    counts = scheduler.counts
    assert (counts.drafts, counts.draft_tokens) == (3, 21)
    assert counts.accepted_per_position == [3, 3, 3, 3, 3, 0, 0]


def test_drafts_shrink_at_the_end_of_the_context_and_then_the_step_is_standard() -> None:
    settings = EmulatorSettings(
        speculation=DL7_AL6, decode_backend="latency_specialized", max_model_len=128, kv_blocks=100
    )
    scheduler = Scheduler(settings)
    near, far = a_sequence(100, 28), a_sequence(20, 50, first=2500)
    scheduler.add(near)
    scheduler.add(far)
    log = play(scheduler)
    assert "uneven drafts" in {entry["reason"] for entry in log}
    assert (near.context, far.context) == (128, 70)


def test_what_is_said_does_not_depend_on_batch_backend_or_drafts() -> None:
    def reply(settings: EmulatorSettings, company: int) -> list[int]:
        scheduler = Scheduler(settings)
        sequence = a_sequence(40, 100, seed=9)
        for sequence_of_others in [a_sequence(30, 60, first=7 * n) for n in range(company)]:
            scheduler.add(sequence_of_others)
        scheduler.add(sequence)
        return [token for entry in play(scheduler) for token in entry["yields"].get(id(sequence), [])]

    alone = reply(EmulatorSettings(), 0)
    assert len(alone) == 100
    assert reply(EmulatorSettings(decode_backend="latency_specialized", speculation=DL7_AL6), 12) == alone


def test_replies_end_by_themselves_only_where_they_may() -> None:
    def length(**more: Any) -> tuple[int, str | None]:
        scheduler = Scheduler(EmulatorSettings())
        sequence = a_sequence(10, 3000, **more)
        scheduler.add(sequence)
        play(scheduler)
        return sequence.output, sequence.finish

    natural = [length(may_end=True, seed=seed) for seed in range(12)]
    assert {finish for _, finish in natural} == {"stop"}
    assert np.mean([tokens for tokens, _ in natural]) == pytest.approx(language.MEAN_REPLY, rel=0.7)
    assert length(may_end=False) == (3000, "length")
    assert all(length(may_end=True, min_tokens=900, seed=seed)[0] > 900 for seed in range(5))


def test_drift_and_slowness_lengthen_steps() -> None:
    plain, slow = (Scheduler(EmulatorSettings(faults=f)) for f in ((), ("slow:1.5", "drift:10")))
    for scheduler in (plain, slow):
        scheduler.add(a_sequence(10, 500))
    usual, at_start = plain.begin(2.0), slow.begin(0.0)
    assert usual is not None
    assert at_start is not None
    assert at_start.seconds == pytest.approx(1.5 * usual.seconds)
    plain.end(usual)
    slow.end(at_start)
    usual, later = plain.begin(2.0), slow.begin(2.0)
    assert usual is not None
    assert later is not None
    assert later.seconds == pytest.approx(1.5 * 1.2 * usual.seconds)


def test_long_contexts_cost_time() -> None:
    def step_s(prompt: int) -> float:
        scheduler = Scheduler(EmulatorSettings(profile="kimi-k3-tp16"))
        scheduler.add(a_sequence(prompt, 3))
        return float(play(scheduler)[-1]["seconds"])

    assert step_s(500) == pytest.approx(1 / 136.4)
    assert step_s(101_024) - step_s(500) == pytest.approx(100_002 * 1.7e-9, rel=0.01)
