"""Each gate is shown to pass on a sound run and to fail on the fault that it is for; and what is concluded then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from replay.records import Backend, Gpus, RequestRecord
from reports.analysis import Analysis, analyse
from reports.conclusion import conclude
from reports.gates.gate import Gate
from reports.intervals import Effect, Estimate
from tests.reports.make_run import BASELINE, CANDIDATE, MS, failed, make_run

Record = RequestRecord
replace = msgspec.structs.replace


def judged(path: Path, **options: Any) -> Analysis:
    return analyse(make_run(path, **{"sessions": 6, "turns": 5, **options}))


def gate(found: Analysis, name: str) -> Gate:
    return next(gate for gate in found.gates if gate.id == name)


def test_a_sound_run_passes_every_gate(tmp_path: Path) -> None:
    found = judged(tmp_path, specialised_share=0.9)
    assert {gate.id: gate.status for gate in found.gates} == {gate.id: "pass" for gate in found.gates}
    assert len(found.gates) == 13
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
    ("pair_coverage", "fail", {"change": fails_sometimes}),
    ("error_rate", "fail", {"change": fails_sometimes}),
    ("matched_gpus", "fail", {"matched_gpus": False, "unmatched_reasons": ["16 against 8 GPUs"]}),
    ("matched_gpus", "unknown", {"backends": BACKENDS}),
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
    if status == "unknown":
        assert any(caveat.startswith(gate(found, name).title) for caveat in found.conclusion.caveats)


def test_noise_floor_fails_an_effect_that_lies_below_it(tmp_path: Path) -> None:
    """Blocks that differ by 6 % whatever their backend, beside an effect of 2 %."""

    def uneven(block: int, _: str, record: Record) -> Record:
        assert record.first_token_ns is not None
        assert record.last_token_ns is not None
        slower = 1.06 if block in (1, 3) else 1.0
        span = (record.last_token_ns - record.first_token_ns) * slower
        return replace(record, last_token_ns=record.first_token_ns + int(span))

    found = judged(tmp_path, ratio=1.02, noise=0.0005, change=uneven)
    assert gate(found, "noise_floor").status == "fail"
    assert found.conclusion.outcome == "INCONCLUSIVE"


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
    assert judged(tmp_path, ratio=1.0, noise=0.05).conclusion.outcome == "no difference"


def test_br_27_different_hit_rates_void_the_run(tmp_path: Path) -> None:
    found = judged(tmp_path, change=warm_cache)
    assert found.conclusion.outcome == "INCONCLUSIVE"
    assert gate(found, "cache_parity").numbers[f"{CANDIDATE}: first turns"] == pytest.approx(0.984)


def test_br_31_more_accepted_drafts_are_not_a_backend_effect(tmp_path: Path) -> None:
    found = judged(tmp_path, per_chunk={CANDIDATE: 4, BASELINE: 2})
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
        ((0.9, 1.0, 1.1), "no difference"),
    ],
)
def test_conclusion_follows_the_interval(interval: tuple[float, float, float], outcome: str) -> None:
    assert conclude(ratio_effect(*interval), []).outcome == outcome
    broken = Gate(id="x", title="X", status="fail", number=None, limit=None, unit="", explanation="Broken.")
    assert conclude(ratio_effect(*interval), [broken]).outcome == "INCONCLUSIVE"
    assert conclude(ratio_effect(*interval), [replace(broken, status="unknown")]).outcome == outcome


def test_conclusion_without_a_ratio() -> None:
    assert conclude(None, []).outcome == "INCONCLUSIVE"
