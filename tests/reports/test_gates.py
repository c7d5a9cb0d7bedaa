"""Each gate is shown to pass on a sound run and to fail on the fault that it is for; and what is concluded then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from replay.records import CHUNK, Backend, Gpus, RequestRecord
from reports import chunks
from reports.analysis import Analysis, analyse
from reports.cli import report
from reports.conclusion import conclude
from reports.gates.gate import Gate, Thresholds
from reports.intervals import Effect, Estimate
from reports.render import html, markdown
from reports.render import json as as_json
from tests.reports.make_run import BASELINE, CANDIDATE, MS, failed, make_run, rewrite_block

Record = RequestRecord
replace = msgspec.structs.replace


def judged(path: Path, **options: Any) -> Analysis:
    return analyse(make_run(path, **{"sessions": 6, "turns": 5, **options}))


def gate(found: Analysis, name: str) -> Gate:
    return next(gate for gate in found.gates if gate.id == name)


def test_a_sound_run_passes_every_gate(tmp_path: Path) -> None:
    found = judged(tmp_path, specialised_share=0.9, server_tells=True)
    assert {gate.id: gate.status for gate in found.gates} == {gate.id: "pass" for gate in found.gates}
    assert len(found.gates) == 20
    assert found.conclusion.outcome == "candidate faster"


def on_candidate(**changes: Any) -> Any:
    def change(_: int, backend: str, record: Record) -> Record:
        return replace(record, **changes) if backend == CANDIDATE else record

    return change


def other_prompt(block: int, _: str, record: Record) -> Record:
    return (
        replace(record, prompt_digest="0" * 16)
        if block == 3 and record.turn == 2 and record.session == "s01"
        else record
    )


def fails_sometimes(_: int, backend: str, record: Record) -> Record:
    return failed(record) if backend == CANDIDATE and record.turn == 4 else record


def answers_in_one_chunk(backends: set[str]) -> Any:
    def change(_: int, backend: str, record: Record) -> Record:
        if record.turn != 2 or backend not in backends:
            return record
        return replace(record, first_chunk_tokens=record.output_tokens)

    return change


def one_token(_: int, __: str, record: Record) -> Record:
    if record.turn:
        return record
    one = {"asked_output": 1, "output_tokens": 1, "first_chunk_tokens": 1, "zero_output": True}
    return replace(record, last_token_ns=record.first_token_ns, **one)


def counts_events(_: int, __: str, record: Record) -> Record:
    return replace(record, output_tokens=None, output_tokens_client=record.output_tokens, token_source="estimated")


def fails_in_two_ways(block: int, backend: str, record: Record) -> Record:
    if backend != CANDIDATE or record.turn != 4:
        return record
    return failed(record, "http 503" if block == 2 or record.session < "s02" else "stalled")


def gets_further(_: int, backend: str, record: Record) -> Record | None:
    return None if backend == BASELINE and record.turn == 4 else record


def gets_further_and_fails(_: int, backend: str, record: Record) -> Record | None:
    if backend == CANDIDATE and record.turn == 3:
        return failed(record)
    return gets_further(_, backend, record)


def cut_at_the_end(_: int, __: str, record: Record) -> Record:
    return replace(failed(record, error="cut"), status="cut") if record.turn == 4 else record


def warm_cache(_: int, backend: str, record: Record) -> Record:
    return replace(record, cached_tokens=record.asked_input - 16) if backend == CANDIDATE else record


def shared_by_both(_: int, backend: str, record: Record) -> Record:
    return replace(record, cached_tokens=record.asked_input - 16)


def cold_cache(_: int, backend: str, record: Record) -> Record:
    return replace(record, cached_tokens=0) if backend == CANDIDATE else record


def late(_: int, backend: str, record: Record) -> Record:
    return replace(record, due_ns=record.sent_ns - 60 * MS)


def connecting(_: int, backend: str, record: Record) -> Record:
    return replace(record, due_ns=record.sent_ns - 60 * MS, connect_ns=60 * MS)


def waits_for_connection(_: int, backend: str, record: Record) -> Record:
    return replace(record, due_ns=record.sent_ns - 60 * MS, pool_wait_ns=60 * MS)


GPU = Gpus(count=8, kind="GB300")
BACKENDS = [
    Backend(name=BASELINE, decode_backend="auto", url=None, gpus=None, emulated=False),
    Backend(name=CANDIDATE, decode_backend="latency_specialized", url=None, gpus=GPU, emulated=False),
]

FAULTS: list[tuple[str, str, dict[str, Any]]] = [
    ("same_work", "fail", {"change": other_prompt}),
    ("same_work", "unknown", {"order": "A"}),
    ("turns_accounted", "fail", {"block": {"not_reached": 2}}),
    ("turns_accounted", "fail", {"block": {"sent": 31}}),
    ("turns_accounted", "fail", {"block": {"sent": 31}, "end": "duration", "duration_s": 60.0}),
    ("turns_accounted", "unknown", {"block": {"sent": None}, "end": "duration", "duration_s": 60.0}),
    ("turns_accounted", "pass", {"block": {"sent": None}}),
    ("pair_coverage", "fail", {"change": fails_sometimes}),
    ("pair_coverage", "fail", {"change": answers_in_one_chunk({BASELINE, CANDIDATE})}),
    ("pair_coverage", "pass", {"change": one_token}),
    ("pair_coverage", "pass", {"change": gets_further, "end": "duration", "duration_s": 60.0}),
    ("pair_coverage", "pass", {"change": cut_at_the_end, "end": "duration", "duration_s": 60.0}),
    ("error_rate", "fail", {"change": fails_sometimes}),
    ("matched_gpus", "fail", {"matched_gpus": False, "unmatched_reasons": ["16 against 8 GPUs"]}),
    ("balanced_order", "fail", {"order": "AB"}),
    ("balanced_order", "fail", {"order": "ABAB"}),
    ("balanced_order", "fail", {"order": "ABB"}),
    ("balanced_order", "pass", {"order": "BAABABBA"}),
    ("cache_parity", "fail", {"change": warm_cache}),
    ("cache_parity", "fail", {"change": shared_by_both}),
    ("cache_parity", "fail", {"change": cold_cache}),
    ("cache_parity", "unknown", {"change": on_candidate(cached_tokens=None)}),
    ("token_source", "fail", {"change": on_candidate(output_tokens=None, output_tokens_client=44)}),
    ("token_source", "fail", {"change": on_candidate(token_source="estimated")}),
    ("token_source", "fail", {"change": counts_events}),
    ("token_source", "pass", {"change": counts_events, "per_chunk": {BASELINE: 4, CANDIDATE: 4}}),
    ("output_lengths", "fail", {"change": on_candidate(output_tokens=36)}),
    ("output_lengths", "unknown", {"change": counts_events}),
    ("prompt_length", "fail", {"change": on_candidate(input_tokens=1020, asked_input=1000)}),
    ("prompt_length", "pass", {"change": on_candidate(input_tokens=1004, asked_input=1000)}),
    ("prompt_length", "unknown", {"change": on_candidate(input_tokens=None)}),
    ("acceptance_parity", "fail", {"per_chunk": {CANDIDATE: 3, BASELINE: 2}}),
    ("path_proof", "fail", {"specialised_share": 0.3}),
    ("path_proof", "unknown", {}),
    ("client_health", "fail", {"change": late}),
    ("client_health", "fail", {"change": waits_for_connection}),
    ("client_health", "pass", {"change": connecting}),
    ("client_health", "fail", {"block": {"loop_lag_ms": 40.0}}),
    ("noise_floor", "unknown", {"order": "ABB"}),
]


@pytest.mark.parametrize(
    ("name", "status", "options"), FAULTS, ids=[f"{f[0]}-{f[1]}-{n}" for n, f in enumerate(FAULTS)]
)
def test_gate(tmp_path: Path, name: str, status: str, options: dict[str, Any]) -> None:
    found = judged(tmp_path, **options)
    assert gate(found, name).status == status
    if status == "fail":
        assert found.conclusion.outcome == "INCONCLUSIVE"
        assert any(reason.startswith(gate(found, name).title) for reason in found.conclusion.reasons)
    if status == "unknown" and gate(found, name).required:
        assert found.conclusion.outcome == "INCONCLUSIVE"
        assert any(reason.startswith(f"{gate(found, name).title}: unknown") for reason in found.conclusion.reasons)
    elif status == "unknown":
        assert found.conclusion.outcome == "candidate faster"
        assert any(caveat.startswith(gate(found, name).title) for caveat in found.conclusion.caveats)


def test_without_proof_of_path_it_is_a_difference_between_deployments_in_every_rendering(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = judged(tmp_path)
    assert found.conclusion.outcome == "candidate faster"
    first = found.conclusion.reasons[0]
    assert "two deployments" in first
    assert "decode path makes the difference is not proven" in first
    report(tmp_path)
    shown = [capsys.readouterr().out, *((tmp_path / f"report.{kind}").read_text() for kind in ("html", "md", "json"))]
    for text in shown:
        assert first in text
        assert text.index(first) < text.index("All of the 95 % interval")
    proven = judged(tmp_path / "proven", specialised_share=0.9)
    assert not any("two deployments" in reason for reason in proven.conclusion.reasons)


@pytest.mark.parametrize(("per_chunk", "source"), [(1, "events"), (4, "client")])
def test_a_gap_between_chunks_never_passes_as_itl(tmp_path: Path, per_chunk: int, source: str) -> None:
    """Neither backend reports usage: the client counts its events, or, with a tokenizer, the text."""
    found = judged(tmp_path, change=counts_events, per_chunk={BASELINE: per_chunk, CANDIDATE: per_chunk})
    assert [backend.count_source for backend in found.backends] == [source] * 2
    assert found.conclusion.outcome == "INCONCLUSIVE"
    by_measure = {row.measure: row for row in found.rows if row.percentile == "P90"}
    assert by_measure["itl"].baseline.n == by_measure["itl_rate"].baseline.n == 0
    for per_token in ("tpot", "e2e_per_token"):
        assert (by_measure[per_token].baseline.value is None) == (source == "events")
    assert (found.backends[0].output_tokens_per_s is None) == (source == "events")
    assert by_measure["ttft"].baseline.value is not None
    html.render([found])


def test_a_backend_does_not_drop_out_of_its_own_headline(tmp_path: Path) -> None:
    """One turn in five of the candidate comes in one chunk: the others would be all that it is judged by."""
    found = judged(tmp_path, change=answers_in_one_chunk({CANDIDATE}))
    coverage = gate(found, "pair_coverage")
    assert coverage.numbers == {
        f"{BASELINE}: ok without a decode rate": 0.0,
        f"{CANDIDATE}: ok without a decode rate": pytest.approx(0.2),
    }
    assert coverage.explanation.startswith(f"{CANDIDATE}: ok without a decode rate 20.0%, {BASELINE} 0.0%.")


def test_slower_backend_sets_what_a_timed_run_must_cover(tmp_path: Path) -> None:
    found = judged(tmp_path, change=gets_further, end="duration", duration_s=60.0)
    assert (found.pairs.planned, found.pairs.count) == (24, 24)
    assert found.pairs.one_token == 0
    fails_one = judged(tmp_path / "b", change=gets_further_and_fails, end="duration", duration_s=60.0)
    assert fails_one.pairs.coverage == pytest.approx(18 / 24)


def test_partly_finished_run_is_inconclusive(tmp_path: Path) -> None:
    make_run(tmp_path, sessions=6, turns=5, order="ABBABAAB")
    for name in ("05-candidate", "06-baseline", "07-baseline", "08-candidate"):
        rewrite_block(tmp_path / "blocks" / name, finished=False)
    found = analyse(tmp_path)
    finished = gate(found, "blocks_finished")
    assert (finished.status, finished.number, finished.limit) == ("fail", 4, 8)
    assert "05-candidate, 06-baseline, 07-baseline, 08-candidate" in finished.explanation
    assert [other.id for other in found.gates if other.status == "fail"] == ["blocks_finished"]
    assert found.conclusion.outcome == "INCONCLUSIVE"


def test_a_server_that_went_away_counts_against_its_backend(tmp_path: Path) -> None:
    make_run(tmp_path, sessions=6, turns=5)
    for number, why in ((1, "server gone"), (2, "interrupted"), (3, None)):
        attempt = tmp_path / "blocks" / f"02-candidate.interrupted-{number}"
        shutil.copytree(tmp_path / "blocks" / "02-candidate", attempt)
        rewrite_block(attempt, finished=False, cut_short=why)
    found = analyse(tmp_path)
    assert found.backends[0].cut_short == {}
    assert found.backends[1].cut_short == {"interrupted": 1, "server gone": 1, "unfinished": 1}
    survived = gate(found, "server_survived")
    assert (survived.status, survived.number) == ("fail", 1)
    assert found.conclusion.outcome == "INCONCLUSIVE"
    for text in (html.render([found]), markdown.render([found])):
        assert "not judged: server gone" in text


@pytest.mark.parametrize("name", ["plan.json", "sessions.jsonl"])
def test_a_changed_plan_is_not_the_same_work(tmp_path: Path, name: str) -> None:
    make_run(tmp_path, sessions=6, turns=5)
    with (tmp_path / name).open("ab") as file:
        file.write(b"\n")
    found = analyse(tmp_path)
    assert gate(found, "same_work").status == "fail"
    assert f"{name} is not the file" in gate(found, "same_work").explanation
    assert found.conclusion.outcome == "INCONCLUSIVE"


def test_long_silence_fails(tmp_path: Path) -> None:
    make_run(tmp_path, sessions=6, turns=5)
    assert gate(analyse(tmp_path), "silence").status == "pass"
    strict = analyse(tmp_path, Thresholds(silence_s=0.01, silence_ttfts=0.1))
    silence = gate(strict, "silence")
    assert (silence.status, silence.limit) == ("fail", 0.01)
    assert silence.number == pytest.approx(0.06, abs=0.012)  # six sessions side by side, with TTFTs of 50 to 90 ms
    patient = analyse(tmp_path, Thresholds(silence_s=0.01, silence_ttfts=20))
    assert gate(patient, "silence").limit == pytest.approx(20 * 0.07)


def test_noise_floor_fails_an_effect_that_lies_below_it(tmp_path: Path) -> None:
    """Blocks that differ by 6 % whatever their backend, beside an effect of 2 %."""

    def uneven(block: int, _: str, record: Record) -> Record:
        assert record.first_token_ns is not None
        assert record.last_token_ns is not None
        slower = 1.06 if block in (1, 3) else 1.0
        span = (record.last_token_ns - record.first_token_ns) * slower
        last = record.first_token_ns + int(span)
        return replace(record, last_token_ns=last, end_ns=last + MS)

    found = judged(tmp_path, ratio=1.02, noise=0.0005, change=uneven)
    assert gate(found, "noise_floor").status == "fail"
    assert found.conclusion.outcome == "INCONCLUSIVE"


def test_path_proof_names_all_backends_that_do_not_tell(tmp_path: Path) -> None:
    told = gate(judged(tmp_path), "path_proof").explanation
    assert told == f"The servers of {BASELINE} and {CANDIDATE} do not tell which path their decode steps took."


def test_path_proof_does_not_ask_for_specialised_steps_nobody_set(tmp_path: Path) -> None:
    both_auto = [replace(backend, decode_backend="auto", gpus=GPU) for backend in BACKENDS]
    assert gate(judged(tmp_path / "a", specialised_share=0.0, backends=both_auto), "path_proof").status == "pass"
    assert gate(judged(tmp_path / "b", specialised_share=0.4, backends=both_auto), "path_proof").status == "fail"


def test_br_17_a_backend_that_refuses_long_prompts_does_not_win(tmp_path: Path) -> None:
    """40 % of the candidate's turns, the long ones, are refused; the others are 1.3 times as fast."""

    def refuses_long(_: int, backend: str, record: Record) -> Record:
        return failed(record) if backend == CANDIDATE and record.turn >= 3 else record

    found = judged(tmp_path, change=refuses_long)
    assert found.conclusion.outcome == "INCONCLUSIVE"
    errors = gate(found, "error_rate")
    assert errors.numbers == {BASELINE: 0.0, CANDIDATE: pytest.approx(0.4), "difference": pytest.approx(0.4)}
    assert found.pairs.coverage == pytest.approx(0.6)
    assert found.backends[1].failures == {"http 503": 24}
    ttft = next(row for row in found.rows if row.measure == "ttft" and row.percentile == "P90")
    assert ttft.candidate.value is None
    assert ttft.effect is not None  # compared on what both completed, and only on that
    assert ttft.effect.ratio.value == pytest.approx(1.0)


def test_br_27_the_same_backend_twice_is_no_difference(tmp_path: Path) -> None:
    assert judged(tmp_path, ratio=1.0, noise=0.005).conclusion.outcome == "no difference"


def test_br_27_different_hit_rates_void_the_run(tmp_path: Path) -> None:
    found = judged(tmp_path, change=warm_cache)
    assert found.conclusion.outcome == "INCONCLUSIVE"
    assert gate(found, "cache_parity").numbers[f"{CANDIDATE}: first turns"] == pytest.approx(0.984)


def test_br_31_more_accepted_drafts_are_not_a_backend_effect(tmp_path: Path) -> None:

    def fails_once(_: int, __: str, record: Record) -> Record:  # so that sessions differ, and there is an interval
        return failed(record) if (record.session, record.turn) == ("s00", 4) else record

    found = judged(tmp_path, per_chunk={CANDIDATE: 4, BASELINE: 2}, change=fails_once)
    assert found.conclusion.outcome == "INCONCLUSIVE"
    accepted = {backend.name: backend.tokens_per_chunk for backend in found.backends}
    assert accepted[CANDIDATE].value == pytest.approx(4, rel=0.1)
    assert accepted[BASELINE].value == pytest.approx(2, rel=0.1)
    assert accepted[CANDIDATE].low is not None


def ratio_effect(low: float, value: float, high: float) -> Effect:
    nothing = Estimate(1.0, 1.0, 1.0, 1, 1)
    return Effect(nothing, nothing, Estimate(value, low, high, 100, 10), nothing, [])


@pytest.mark.parametrize(
    ("interval", "outcome"),
    [
        ((1.1, 1.2, 1.3), "candidate faster"),
        ((0.7, 0.8, 0.9), "candidate slower"),
        ((0.97, 1.0, 1.03), "no difference"),
        ((0.9, 1.0, 1.1), "INCONCLUSIVE"),
        ((0.97, 1.02, 1.07), "INCONCLUSIVE"),
    ],
)
def test_conclusion_follows_the_interval(interval: tuple[float, float, float], outcome: str) -> None:
    assert conclude(ratio_effect(*interval), [], Thresholds()).outcome == outcome
    broken = Gate(id="x", title="X", status="fail", number=None, limit=None, unit="", explanation="Broken.")
    assert conclude(ratio_effect(*interval), [broken], Thresholds()).outcome == "INCONCLUSIVE"
    unknown = replace(broken, status="unknown")
    assert conclude(ratio_effect(*interval), [unknown], Thresholds()).outcome == "INCONCLUSIVE"
    optional = conclude(ratio_effect(*interval), [replace(unknown, required=False)], Thresholds())
    assert (optional.outcome, optional.caveats) == (outcome, ["X: unknown. Broken."])


@pytest.mark.parametrize(("interval", "small"), [((1.006, 1.009, 1.016), True), ((1.02, 1.1, 1.2), False)])
def test_an_effect_that_is_shown_but_small_is_called_so(interval: tuple[float, float, float], small: bool) -> None:
    found = conclude(ratio_effect(*interval), [], Thresholds())
    assert found.outcome == "candidate faster"
    assert ("small: less than the 5%" in found.reasons[-1]) == small


def test_br_29_too_few_sessions_are_said_with_the_number_needed() -> None:
    found = conclude(ratio_effect(0.9, 1.0, 1.1), [], Thresholds())
    assert found.outcome == "INCONCLUSIVE"
    # half-width 0.1003, needed log 1.05 = 0.0488: (0.1003 / 0.0488)^2 x 10 = 42.3
    assert "About 43 sessions like these" in found.reasons[0]
    loose = conclude(ratio_effect(0.9, 1.0, 1.1), [], Thresholds(equal_within=0.12))
    assert loose.outcome == "no difference"


def test_same_figures_in_all_sessions_make_no_interval_and_no_conclusion(tmp_path: Path) -> None:
    def constant(_: int, backend: str, record: Record) -> Record:
        assert record.first_token_ns is not None
        assert record.output_tokens is not None
        each = 10 * MS if backend == BASELINE else 8 * MS
        last = record.first_token_ns + (record.output_tokens - 1) * each
        return replace(record, last_token_ns=last, end_ns=last + MS)

    found = judged(tmp_path, change=constant, turns=1)
    assert found.headlines[0].effect is not None
    ratio = found.headlines[0].effect.ratio
    assert (ratio.value, ratio.low, ratio.high) == (pytest.approx(1.25), None, None)
    assert "no variation" in ratio.reason
    assert found.conclusion.outcome == "INCONCLUSIVE"
    assert "no variation" in " ".join(found.conclusion.reasons)


def on_two_turns(**shift_ns: int) -> Any:
    """Times of turn 2 of two sessions of one candidate block, shifted."""

    def change(block: int, _: str, record: Record) -> Record:
        if block != 2 or record.turn != 2 or record.session not in ("s01", "s03"):
            return record
        return replace(record, **{name: getattr(record, name) + by for name, by in shift_ns.items()})

    return change


@pytest.mark.parametrize(
    "shift",
    [
        {"due_ns": 2 * MS},
        {"sent_ns": 200 * MS},
        {"first_token_ns": -200 * MS},
        {"first_token_ns": 5000 * MS},
        {"last_token_ns": 5000 * MS},
        {"last_token_ns": -5000 * MS},
        {"end_ns": -900 * MS},
    ],
)
def test_impossible_times_are_left_out_of_speed_and_fail(tmp_path: Path, shift: dict[str, int]) -> None:
    found = judged(tmp_path, change=on_two_turns(**shift))
    assert [block.impossible for block in found.blocks] == [0, 2, 0, 0]
    accounted = gate(found, "turns_accounted")
    assert (accounted.status, accounted.number) == ("fail", 2)
    assert accounted.explanation.startswith("02-candidate: 2 turns with times in an impossible order")
    assert found.conclusion.outcome == "INCONCLUSIVE"
    assert found.backends[1].without_itl == {"impossible times": 2}
    assert found.pairs.with_itl == 28
    counts = {row.measure: (row.baseline.n, row.candidate.n) for row in found.rows if row.measure != "chunk_gap"}
    assert set(counts.values()) == {(60, 58)}
    html.render([found])


def test_a_timer_may_fire_a_millisecond_early(tmp_path: Path) -> None:
    found = judged(tmp_path, change=on_two_turns(due_ns=MS))
    assert gate(found, "turns_accounted").status == "pass"


@pytest.mark.parametrize(
    ("place", "field", "by"), [(0, "t_ns", -1), (-1, "t_ns", 1), (5, "tokens", 1), (0, "tokens", -1), (5, "t_ns", 1)]
)
def test_chunks_that_are_not_those_of_their_row_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int, field: str, by: int
) -> None:
    monkeypatch.setattr(chunks, "_SLAB", 100)  # several slabs
    make_run(tmp_path, sessions=6, turns=5, workers=2)
    file = tmp_path / "blocks" / "03-candidate" / "w1.chunks.bin"
    row = [json.loads(line) for line in file.with_name("w1.requests.jsonl").open()][3]
    records = np.fromfile(file, CHUNK)
    records[field][row["chunk_start"] + (place if place >= 0 else row["chunk_count"] - 1)] += by
    records.tofile(file)
    found = analyse(tmp_path)
    inner = (place, field) == (5, "t_ns")  # neither first nor last: nothing to hold it against
    assert [block.chunks_disagree for block in found.blocks] == [0, 0, 0 if inner else 1, 0]
    accounted = gate(found, "turns_accounted")
    assert accounted.status == ("pass" if inner else "fail")
    assert inner or accounted.explanation.startswith("03-candidate: 1 turn whose chunk times or tokens are not")


def test_estimated_tokens_of_chunks_need_not_add_up(tmp_path: Path) -> None:
    make_run(tmp_path, sessions=6, turns=5, change=on_candidate(token_source="estimated"))
    file = tmp_path / "blocks" / "03-candidate" / "w0.chunks.bin"
    records = np.fromfile(file, CHUNK)
    records["tokens"][5] += 3
    records.tofile(file)
    assert gate(analyse(tmp_path), "turns_accounted").status == "pass"


@pytest.mark.parametrize("missing", [True, False])
def test_client_health_is_unknown_if_one_worker_left_no_sample(tmp_path: Path, missing: bool) -> None:
    make_run(tmp_path, sessions=6, turns=12, workers=2)
    assert gate(analyse(tmp_path), "client_health").status == "pass"
    file = tmp_path / "blocks" / "02-candidate" / "w1.health.jsonl"
    if missing:
        file.unlink()
    else:
        file.write_bytes(b"")
    found = analyse(tmp_path)
    health = gate(found, "client_health")
    assert health.status == "unknown"
    assert "No health sample of 02-candidate/w1" in health.explanation
    assert found.conclusion.outcome == "INCONCLUSIVE"
    html.render([found])


def test_a_worker_that_measured_for_less_than_three_seconds_owes_no_sample(tmp_path: Path) -> None:
    make_run(tmp_path, sessions=6, turns=5, workers=2)
    (tmp_path / "blocks" / "02-candidate" / "w1.health.jsonl").write_bytes(b"")
    assert gate(analyse(tmp_path), "client_health").status == "pass"


def all_in_one_read(_: int, __: str, record: Record) -> Record:
    return replace(record, last_token_ns=record.first_token_ns)


@pytest.mark.filterwarnings("error")
def test_completed_turns_without_a_decode_rate_are_called_so(tmp_path: Path) -> None:
    found = judged(tmp_path, change=all_in_one_read)
    first = found.conclusion.reasons[1]  # after the one about deployments
    assert "0 of 30 turns that completed in every block have a measurable decode rate in all of them" in first
    assert f"{BASELINE} all output at one instant (60 of 60 completed)" in first
    assert "No turn completed" not in " ".join(found.conclusion.reasons)
    assert gate(found, "noise_floor").explanation == "Unknown: no turn has a decode rate in every block."
    assert gate(found, "client_health").status == "pass"
    strict = as_json.render([found])
    assert "the baseline's figure is 0" in strict  # TPOT by the n-1 rule: 0 over 0
    html.render([found])


def test_texts_name_the_real_cause_when_nothing_completed(tmp_path: Path) -> None:
    def refuse(_: int, backend: str, record: Record) -> Record:
        return failed(record) if backend == CANDIDATE else record

    found = judged(tmp_path, change=refuse)
    why = f"None of 60 turns of {CANDIDATE} completed"
    assert f"There is nothing to compare. {why}, most often by http 503." in found.conclusion.reasons
    for name in ("prompt_length", "output_lengths", "cache_parity", "acceptance_parity"):
        assert gate(found, name).explanation.startswith(why)
    one = judged(tmp_path / "one", order="AA")
    assert f"There is nothing to compare. {CANDIDATE} has no finished block." in one.conclusion.reasons


def test_client_health_names_what_is_missing(tmp_path: Path) -> None:
    everything = judged(tmp_path / "a", change=lambda _, __, record: failed(record))
    assert "None of 60 turns of baseline completed" in gate(everything, "client_health").explanation
    whole = judged(tmp_path / "b", change=lambda _, __, record: replace(record, streamed=False))
    assert "No completed turn was streamed" in gate(whole, "client_health").explanation
    retried = judged(tmp_path / "c", change=lambda _, __, record: replace(record, attempts=2))
    assert "at its first attempt" in gate(retried, "client_health").explanation
    make_run(tmp_path / "d", sessions=6, turns=5)
    for file in (tmp_path / "d").glob("blocks/*/w0.health.jsonl"):
        file.unlink()
    assert "No worker left a health sample" in gate(analyse(tmp_path / "d"), "client_health").explanation


@pytest.mark.parametrize(
    ("name", "finding", "options"),
    [
        (
            "error_rate",
            "candidate failed 12 of 60 turns (20.0%), most often by http 503 (8 x); baseline failed none of 60.",
            {"change": fails_in_two_ways},
        ),
        (
            "acceptance_parity",
            "Tokens per chunk: baseline 1.971, candidate 2.929, 48.6% apart.",
            {"per_chunk": {CANDIDATE: 3, BASELINE: 2}},
        ),
        ("balanced_order", "Order of finished blocks: A B (A baseline, B candidate): baseline has 1", {"order": "AB"}),
        (
            "balanced_order",
            "Order of finished blocks: A B A B (A baseline, B candidate): candidate comes 1 later",
            {"order": "ABAB"},
        ),
        (
            "output_lengths",
            "candidate answered 14.3% shorter than baseline",
            {"change": on_candidate(output_tokens=36)},
        ),
        (
            "prompt_length",
            "Off by more than planned: candidate 2.00%.",
            {"change": on_candidate(input_tokens=1020, asked_input=1000)},
        ),
        ("cache_parity", "Hit rates differ, 70.0% of baseline against 0.0% of candidate", {"change": cold_cache}),
        (
            "token_source",
            "Turns without an exact count: baseline 0.0%, candidate 100.0%.",
            {"change": on_candidate(token_source="estimated")},
        ),
        ("token_source", "baseline and candidate: one for each event is no count", {"change": counts_events}),
        ("matched_gpus", "16 against 8 GPUs.", {"matched_gpus": False, "unmatched_reasons": ["16 against 8 GPUs"]}),
    ],
)
def test_failed_gates_lead_with_the_finding(tmp_path: Path, name: str, finding: str, options: dict[str, Any]) -> None:
    found = gate(judged(tmp_path, **options), name)
    assert found.status == "fail"
    assert found.explanation.startswith(finding)


def test_conclusion_without_a_ratio() -> None:
    assert conclude(None, [], Thresholds()).outcome == "INCONCLUSIVE"
