"""The servers' own counters: BR-07's values by hand, and the gates that lean on them, each shown to fail."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.records import MetricsSample, RequestRecord
from reports.analysis import Analysis, analyse
from reports.counters import ServerCounters, by_label, deltas, total
from reports.gates.gate import Gate, Thresholds
from reports.render import html, markdown
from tests.reports.make_run import BASELINE, CANDIDATE, MS, failed, make_run

Samples = list[tuple[str, dict[str, str], float]]
E0, E1 = {"engine": "0"}, {"engine": "1"}


def of_engines(name: str, first: float, second: float) -> Samples:
    return [(name, E0, first), (name, E1, second)]


# --- deltas -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vllm:generation_tokens_total", "vllm:generation_tokens"])
def test_br_07_a_reset_engine_counts_from_anew_under_either_spelling(name: str) -> None:
    grown = deltas(of_engines("vllm:generation_tokens_total", 1000, 700), of_engines(name, 1500, 20))
    assert [(delta.value, delta.reset) for delta in grown] == [(500, False), (20, True)]
    assert total(grown, "generation_tokens") == 520


def test_br_07_engines_are_summed_before_the_ratio(tmp_path: Path) -> None:
    def spoil(samples: Samples, at: str) -> None:
        hits, queries = ((10, 0), (20, 0)) if at == "start" else ((40, 0), (100, 20))
        samples += of_engines("vllm:prefix_cache_hits_total", *hits)
        samples += of_engines("vllm:prefix_cache_queries_total", *queries)

    counted = told(tmp_path, spoil, order="AB")[BASELINE]
    assert (counted.prefix_cache_hits, counted.prefix_cache_queries) == (30, 100)
    assert counted.hit_rate == pytest.approx(0.30)


def test_br_07_a_missing_counter_is_absent_and_never_0(tmp_path: Path) -> None:
    grown = deltas(of_engines("vllm:generation_tokens_total", 1, 1), [])
    assert total(grown, "generation_tokens") is None
    assert by_label(grown, "generation_tokens", "engine") == {}
    counted = told(tmp_path, lambda samples, at: None, order="AB")
    assert counted[BASELINE].preemptions is None
    assert counted[BASELINE].hit_rate is None
    assert counted[BASELINE].acceptance_length is None


def test_a_series_that_comes_up_in_between_began_at_0_and_one_that_went_was_reset() -> None:
    name = "vllm:request_success_total"
    grown = deltas([(name, {"finished_reason": "stop"}, 7.0)], [(name, {"finished_reason": "length"}, 3.0)])
    assert by_label(grown, "request_success", "finished_reason") == {"length": 3, "stop": 0}
    assert [delta.labels["finished_reason"] for delta in grown if delta.reset] == ["stop"]


def test_gauges_are_not_taken_for_counters() -> None:
    assert deltas([("vllm:num_requests_running", E0, 5.0)], [("vllm:num_requests_running", E0, 2.0)]) == []


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=5), st.lists(st.integers(0, 10**9), min_size=1, max_size=5))
def test_without_a_reset_the_growth_is_the_difference_of_the_sums(start: list[int], more: list[int]) -> None:
    name, both = "vllm:prompt_tokens_total", list(zip(start, more, strict=False))
    before = [(name, {"engine": str(n)}, float(was)) for n, (was, _) in enumerate(both)]
    after = [(name, {"engine": str(n)}, float(was + grew)) for n, (was, grew) in enumerate(both)]
    grown = deltas(before, after)
    assert total(grown, "prompt_tokens") == sum(grew for _, grew in both)
    assert not any(delta.reset for delta in grown)


# --- runs -------------------------------------------------------------------------------------------------------------


Spoil = Callable[[Samples, str], None]
"""Changes the samples of a reading in place, knowing its edge."""


def spoiled(folder: Path, spoil: Spoil) -> None:
    """Change the readings of a block."""
    file = folder / "metrics.jsonl"
    readings = [msgspec.json.decode(line, type=MetricsSample) for line in file.read_bytes().splitlines()]
    for reading in readings:
        spoil(reading.samples, reading.at)
    file.write_bytes(b"".join(msgspec.json.encode(reading) + b"\n" for reading in readings))


def run_of(path: Path, spoil: Spoil | None = None, backends: str = "*", **options: Any) -> Path:
    """A sound run, but for what ``spoil`` does to the readings of the ``backends``' blocks."""
    run = make_run(path, **{"sessions": 6, "turns": 5, "server_tells": True, **options})
    for folder in (run / "blocks").glob(f"*-{backends}"):
        if spoil is not None:
            spoiled(folder, spoil)
    return run


def told(path: Path, spoil: Spoil | None, **options: Any) -> dict[str, ServerCounters]:
    return {each.backend: each for each in analyse(run_of(path, spoil, **options)).counters}


def gate(found: Analysis, name: str) -> Gate:
    return next(gate for gate in found.gates if gate.id == name)


def test_blocks_are_summed_and_gauges_read_in_between(tmp_path: Path) -> None:
    def change(samples: Samples, at: str) -> None:
        if at == "between":
            samples += [("vllm:num_requests_waiting", E1, 4.0), ("vllm:kv_cache_usage_perc", E0, 0.25)]
            samples += [("vllm:kv_cache_usage_perc", E1, 0.5), ("vllm:num_requests_running", E1, 3.0)]
        else:
            samples.append(("vllm:num_requests_running", E0, 99.0))  # not under load

    counted = told(tmp_path, change)[CANDIDATE]
    assert counted.blocks == 2
    output = sum(6 * (40 + turn) for turn in range(5))
    assert counted.generation_tokens == 2 * output
    assert [work.generated_for_us for work in counted.work] == [output, output]
    assert (counted.waiting_mean, counted.waiting_max, counted.running_max) == (4.0, 4, 5)
    assert counted.kv_use_max == 0.5
    assert counted.notes == []


def test_a_reset_inside_a_block_is_noted_in_the_report(tmp_path: Path) -> None:
    def restart(samples: Samples, at: str) -> None:
        if at == "end":
            samples[0] = (*samples[0][:2], 100.0)

    found = analyse(run_of(tmp_path, restart, "baseline"))
    (note, _) = found.counters[0].notes
    assert "01-baseline: counters of engine 0 were reset" in note
    assert found.counters[0].generation_tokens == 200
    for text in (html.render([found]), markdown.render([found])):
        assert note in text


def test_a_block_without_a_reading_at_an_edge_is_left_out_with_its_reason(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    file = run / "blocks" / "01-baseline" / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    broken = MetricsSample(t_ns=1, at="end", error="http 503")
    file.write_bytes(b"".join(lines[:-1]) + msgspec.json.encode(broken) + b"\n")
    counted = analyse(run).counters[0]
    assert counted.blocks == 1
    assert counted.notes == ["01-baseline: /metrics could not be read at its end (http 503): left out"]


def test_a_torn_last_reading_is_dropped(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    with (run / "blocks" / "01-baseline" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"t_ns": 5, "at"')
    found = analyse(run)
    assert found.counters[0].blocks == 2
    assert any("metrics.jsonl: torn last line" in note for note in found.notes)


def test_the_section_is_there_only_with_counters(tmp_path: Path) -> None:
    without = analyse(make_run(tmp_path / "without", sessions=6, turns=5))
    with_them = analyse(run_of(tmp_path / "with"))
    for render in (html.render, markdown.render):
        assert "Server counters" not in render([without])
        assert "Server counters" in render([with_them])
    assert {gate(without, name).status for name in ("server_to_itself", "server_timing")} == {"unknown"}
    assert {gate(with_them, name).status for name in ("server_to_itself", "server_timing")} == {"pass"}


# --- nobody else ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])  # generated and prompt tokens
def test_others_traffic_on_the_server_is_found(tmp_path: Path, number: int) -> None:
    def foreign(share: float) -> Spoil:
        def change(samples: Samples, at: str) -> None:
            if at == "end":
                name, labels, value = samples[number]
                before = (5_000, 70_000)[number]
                samples[number] = (name, labels, before + (value - before) * (1 + share))

        return change

    alone = gate(analyse(run_of(tmp_path / "alone", foreign(0.005), "candidate")), "server_to_itself")
    assert alone.status == "pass"
    assert alone.number == pytest.approx(0.005, abs=1e-3)
    found = analyse(run_of(tmp_path / "shared", foreign(0.02), "candidate"))
    shared = gate(found, "server_to_itself")
    assert shared.status == "fail"
    assert shared.number == pytest.approx(0.02, abs=1e-3)
    assert "Somebody else used the server of candidate: 02-candidate: " in shared.problems[0]
    assert found.conclusion.outcome == "INCONCLUSIVE"


def test_what_failed_turns_may_have_used_is_not_held_against_others(tmp_path: Path) -> None:
    """Their replies were lost, but the server worked for them: up to what was asked."""

    def lost(_: int, backend: str, record: RequestRecord) -> RequestRecord:
        return failed(record) if record.turn == 4 else record

    def worked(samples: Samples, at: str) -> None:
        if at == "end":
            for number, more in enumerate((6 * 44, 6 * 3000)):
                name, labels, value = samples[number]
                samples[number] = (name, labels, value + more)

    found = gate(analyse(run_of(tmp_path, worked, change=lost)), "server_to_itself")
    assert (found.status, found.number) == ("pass", 0)


# --- acceptance -------------------------------------------------------------------------------------------------------


def accepting(accepted: int) -> Spoil:
    """1000 drafts of 3 tokens in each block, that many accepted, more at the earlier positions."""

    def change(samples: Samples, at: str) -> None:
        if at != "between":
            on = at == "end"
            spec = "vllm:spec_decode_num_"
            samples += [
                (f"{spec}drafts_total", E0, 1000.0 * on),
                (f"{spec}draft_tokens_total", E0, 3000.0 * on),
                (f"{spec}accepted_tokens_total", E0, float(accepted * on)),
            ]
            per_pos = f"{spec}accepted_tokens_per_pos_total"
            samples += [(per_pos, {**E0, "position": str(n)}, [900.0, accepted - 900.0, 0.0][n] * on) for n in range(3)]

    return change


def test_acceptance_by_the_servers_counters(tmp_path: Path) -> None:
    run = run_of(tmp_path, accepting(1500), per_chunk={BASELINE: 2, CANDIDATE: 2})
    found = analyse(run)
    counted = found.counters[0]
    assert (counted.drafts, counted.draft_tokens, counted.accepted_tokens) == (2000, 6000, 3000)
    assert counted.acceptance_length == 2.5
    assert counted.acceptance_by_position == [0.9, 0.6, 0.0]
    parity = gate(found, "acceptance_parity")
    assert (parity.status, parity.number) == ("pass", 0)
    assert "Acceptance length, by the servers' counters: baseline 2.500, candidate 2.500" in parity.explanation
    assert re.search(r"tokens per chunk at the client: (1\.9\d\d|2\.000), ", parity.explanation)
    for text in (html.render([found]), markdown.render([found])):
        assert "Accepted at draft position" in text
        assert "90.0%" in text


def test_br_31_unequal_acceptance_by_the_counters_fails_though_chunks_look_alike(tmp_path: Path) -> None:
    run = run_of(tmp_path, accepting(1500), "baseline")
    for folder in (run / "blocks").glob("*-candidate"):
        spoiled(folder, accepting(1800))
    parity = gate(analyse(run), "acceptance_parity")
    assert parity.status == "fail"
    assert parity.number == pytest.approx(2.8 / 2.5 - 1)


def test_counters_of_one_backend_alone_do_not_decide_acceptance(tmp_path: Path) -> None:
    run = run_of(tmp_path, accepting(1500), "baseline")
    assert gate(analyse(run), "acceptance_parity").explanation.startswith("Tokens per chunk: ")


# --- timing -----------------------------------------------------------------------------------------------------------


def timed(**changes: float) -> Callable[[int, str, RequestRecord], RequestRecord]:
    """The server's own times of the candidate's turns, by these factors or (ending in _ms) this much earlier."""

    def change(_: int, backend: str, record: RequestRecord) -> RequestRecord:
        assert record.first_token_ns is not None
        assert record.server_itl_s is not None
        if backend != CANDIDATE:
            return record
        ttft = (record.first_token_ns - record.sent_ns) * 1e-9 - changes.get("ttft_ms", 2.0) * 1e-3
        itl = record.server_itl_s * changes.get("itl", 1.0)
        return msgspec.structs.replace(record, server_first_token_s=ttft, server_itl_s=itl)

    return change


@pytest.mark.parametrize(
    ("server", "status"),
    [
        ({}, "pass"),
        ({"itl": 1 / 1.015}, "pass"),
        ({"itl": 1 / 1.03}, "fail"),  # the client sees tokens 3 % slower than they were made
        ({"itl": 1 / 0.97}, "fail"),  # a proxy sends them in bunches: the last come soon after the first
        ({"ttft_ms": 17.0}, "pass"),  # a quarter of the median TTFT is 17.5 ms
        ({"ttft_ms": 18.0}, "fail"),
    ],
)
def test_client_against_server_turn_by_turn(tmp_path: Path, server: dict[str, float], status: str) -> None:
    found = analyse(run_of(tmp_path, change=timed(**server)), Thresholds(server_ttft_excess_ms=5.0))
    timing = gate(found, "server_timing")
    assert timing.status == status
    assert timing.numbers[f"{CANDIDATE}: TTFT, client − server P90, ms"] == pytest.approx(server.get("ttft_ms", 2.0))
    assert timing.numbers[f"{CANDIDATE}: ITL, client / server − 1"] == pytest.approx(
        1 / server.get("itl", 1.0) - 1, abs=1e-6
    )
    if status == "fail":
        assert len([problem for problem in timing.problems if CANDIDATE in problem]) == 1
        assert "a proxy batches chunks" in timing.problems[0]


def test_the_time_of_a_fast_emulator_is_the_clients(tmp_path: Path) -> None:
    timing = gate(analyse(run_of(tmp_path, time_scale=4.0, emulated=True)), "server_timing")
    assert timing.status == "pass"
    assert timing.numbers[f"{BASELINE}: TTFT, client − server, ms"] == pytest.approx(2.0)


def quieted(folder: Path) -> list[RequestRecord]:
    """A block's turns, whose replies hold no times of the server from now on."""
    file = folder / "w0.requests.jsonl"
    own = [msgspec.json.decode(line, type=RequestRecord) for line in file.read_bytes().splitlines()]
    quiet = [msgspec.structs.replace(each, server_first_token_s=None, server_itl_s=None) for each in own]
    file.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in quiet))
    return own


def histograms(client: list[RequestRecord], *, slower: float, later_ms: float) -> Spoil:
    """Sums and counts of a server that saw the client's own turns, with tokens faster and TTFTs earlier by that."""

    def seconds(later: int | None, earlier: int | None) -> float:
        assert later is not None
        assert earlier is not None
        return (later - earlier) / 1e9

    ttft = sum(seconds(turn.first_token_ns, turn.sent_ns) - later_ms * 1e-3 for turn in client)
    itl = sum(seconds(turn.last_token_ns, turn.first_token_ns) / slower for turn in client)

    def change(samples: Samples, at: str) -> None:
        if at != "between":
            on = at == "end"
            samples += [
                ("vllm:time_to_first_token_seconds_sum", E0, 9.0 + ttft * on),
                ("vllm:time_to_first_token_seconds_count", E0, 30.0 + len(client) * on),
                ("vllm:inter_token_latency_seconds_sum", E0, 5.0 + itl * on),
            ]

    return change


@pytest.mark.parametrize(
    ("slower", "later_ms", "status"),
    [(1.04, 2.0, "pass"), (1.06, 2.0, "fail"), (1.0, 49.0, "pass"), (1.0, 51.0, "fail")],
)
def test_without_times_in_replies_the_means_of_the_histograms_are_compared(
    tmp_path: Path, slower: float, later_ms: float, status: str
) -> None:
    run = make_run(tmp_path, sessions=6, turns=5, server_tells=True)
    for folder in (run / "blocks").iterdir():
        own = quieted(folder)
        spoiled(folder, histograms(own, slower=slower, later_ms=later_ms))
    found = analyse(run)
    timing = gate(found, "server_timing")
    assert timing.status == status
    assert timing.number == pytest.approx(slower - 1, abs=1e-6)
    assert timing.numbers[f"{BASELINE}: TTFT, client − server, ms"] == pytest.approx(later_ms)
    assert timing.numbers[f"{BASELINE}: TTFT, client − server P90, ms"] is None
    assert "means" in timing.explanation
    assert found.counters[0].ttft_count == 60


def test_the_sent_time_counts_and_not_the_due_time(tmp_path: Path) -> None:
    def waits(_: int, __: str, record: RequestRecord) -> RequestRecord:
        return msgspec.structs.replace(record, due_ns=record.sent_ns - 400 * MS)

    assert gate(analyse(run_of(tmp_path, change=waits)), "server_timing").status == "pass"


def test_means_of_other_requests_too_are_not_compared(tmp_path: Path) -> None:
    run = make_run(tmp_path, sessions=6, turns=5, server_tells=True)
    for folder in (run / "blocks").iterdir():
        own = quieted(folder)
        spoiled(folder, histograms([*own, *own], slower=1.0, later_ms=0.0))
    assert gate(analyse(run), "server_timing").status == "unknown"
