"""Per-request measures against values worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest

from replay.records import RequestRecord
from reports import chunks
from reports.measures import INFINITY, MEASURES, count_source, measured, uncached_input
from reports.run import LoadedBlock, load
from tests.reports.make_run import BASELINE, MS, START_NS, Chunks, failed, request, write_block, write_frame


def one_block(
    tmp_path: Path, requests: list[tuple[RequestRecord, Chunks]], **changes: Any
) -> tuple[LoadedBlock, pl.DataFrame]:
    """A run of one block with these requests, loaded; and their measures."""
    write_frame(tmp_path, send=len(requests), order=[BASELINE])
    write_block(tmp_path, 1, BASELINE, requests, **changes)
    loaded = load(tmp_path).blocks[0]
    return loaded, measured(loaded.requests, 1.0, count_source(loaded.requests))


def br_01() -> tuple[RequestRecord, Chunks]:
    """Five chunks of four tokens, the first 200 ms after the request, 40 ms apart."""
    return request(ttft_s=0.2, seconds_per_token=0.010, output=20, first_chunk=4, per_chunk=4)


def test_br_01_tokens_not_chunks(tmp_path: Path) -> None:
    loaded, rows = one_block(tmp_path, [br_01()])
    row = rows.row(0, named=True)
    assert row["ttft"] == pytest.approx(0.200)
    assert row["itl"] == pytest.approx(0.0100)
    assert row["tpot"] == pytest.approx(0.160 / 19)  # 8.42 ms, by the n-1 rule and named so
    assert 1 / row["itl"] == pytest.approx(100)
    gaps = chunks.gaps(loaded, rows, np.array([0]), 1, 1.0)
    assert gaps.counts.sum() == 4  # and none of them is the 200 ms before the first chunk
    assert chunks.gap_quantile(gaps, np.ones((1, 1)), 0.99)[0] == pytest.approx(0.040)
    assert chunks.peak_in_a_second(chunks.arrivals(loaded, rows, 1.0)) == 20


def test_br_05_reasoning_counts_and_answer_is_apart(tmp_path: Path) -> None:
    thinking, pieces = request(ttft_s=0.1, seconds_per_token=0.01, output=15)
    answered: dict[str, Any] = {"first_answer_ns": START_NS + 200 * MS}
    thought_only = request(session="s1", output=10, first_answer_ns=None)
    record = request(ttft_s=0.1, seconds_per_token=0.01, output=15, **answered)[0]
    _, rows = one_block(tmp_path, [(record, pieces), thought_only])
    assert rows["ttft"].to_list() == pytest.approx([0.1, 0.2])
    assert rows["ttfo"][0] == pytest.approx(0.2)
    assert rows["ttfo"][1] is None  # a success without an answer
    assert rows["itl"][0] == pytest.approx(0.01)
    assert rows["output"].to_list() == [15, 10]
    assert thinking.status == "ok"


def test_br_09_client_counts_are_never_pooled_with_server_counts(tmp_path: Path) -> None:
    by_client: dict[str, Any] = {"output_tokens": None, "output_tokens_client": 30, "token_source": "estimated"}
    _, rows = one_block(tmp_path, [request(output=21), request(session="s1", output=21, **by_client)])
    assert rows["output"].to_list() == [21, None]
    assert rows["why_no_itl"].to_list() == [None, "no token count"]
    alone = measured(load(tmp_path).blocks[0].requests.tail(1), 1.0, "client")
    assert alone["output"].to_list() == [30]
    assert alone["e2e_per_token"][0] == pytest.approx(0.4 / 30)
    assert alone["itl"].to_list() == [None]  # how many of them the first chunk held is not known
    events = measured(load(tmp_path).blocks[0].requests.tail(1), 1.0, "events")
    assert [events[name][0] for name in ("output", "itl", "tpot", "e2e_per_token")] == [None] * 4


def test_count_source_is_client_only_without_any_server_count(tmp_path: Path) -> None:
    by_client: dict[str, Any] = {"output_tokens": None, "output_tokens_client": 21}
    loaded, _ = one_block(tmp_path, [request(**by_client), request(session="s1", per_chunk=4, **by_client)])
    assert count_source(loaded.requests) == "client"
    assert count_source(loaded.requests.filter(pl.col("session") == "s0")) == "events"  # 21 chunks, 21 "tokens"
    assert count_source(loaded.requests.with_columns(output_tokens_client=pl.lit(None, pl.Int64))) is None


def test_br_23_from_scheduled_and_from_sent(tmp_path: Path) -> None:
    """One request in flight at most: ten arrivals 100 ms apart, the first takes 1,000 ms, the rest 10 ms."""
    requests, free = [], START_NS
    for number in range(10):
        due = START_NS + 100 * number * MS
        sent = max(due, free)
        free = sent + (1000 if number == 0 else 10) * MS
        record, pieces = request(at_ns=sent, session=f"s{number}", output=2, ttft_s=0.005, seconds_per_token=0.001)
        requests.append((record, [*pieces[:1], (free, 1)]))
        record.due_ns, record.last_token_ns, record.end_ns = due, free, free
    _, rows = one_block(tmp_path, requests)
    assert (rows.sort("due_ns")["e2e"] * 1000).to_list() == pytest.approx(
        [1000, 910, 820, 730, 640, 550, 460, 370, 280, 190]
    )
    assert rows["e2e"].quantile(0.9, "linear") == pytest.approx(0.919)
    assert rows["e2e_from_sent"].quantile(0.9, "linear") == pytest.approx(0.109)


def test_failures_are_infinite_in_every_measure(tmp_path: Path) -> None:
    _, rows = one_block(tmp_path, [(failed(request()[0]), [])])
    assert all(rows[name].to_list() == [INFINITY] for name in MEASURES)


def test_turns_recorded_without_output_have_no_measure_per_token(tmp_path: Path) -> None:
    record, pieces = request(output=2, zero_output=True)
    _, rows = one_block(tmp_path, [(record, pieces), (failed(request(session="s1", zero_output=True)[0]), [])])
    for name in ("output", "itl", "tpot", "e2e_per_token"):
        assert rows[name].to_list() == [None, None]
    assert rows["why_no_itl"][0] == "recorded without output"
    assert rows["ttft"].to_list() == [pytest.approx(0.2), INFINITY]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"output": 4, "first_chunk": 4}, "single chunk"),
        ({"streamed": False}, "not streamed"),
        ({"first_chunk_tokens": None}, "first chunk unknown"),
        ({"seconds_per_token": 0.0}, "all output at one instant"),
    ],
)
def test_ok_rows_without_a_decode_rate_say_why(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    _, rows = one_block(tmp_path, [request(**changes)])
    assert rows["itl"].to_list() == [None]
    assert rows["why_no_itl"].to_list() == [why]
    assert rows["e2e_per_token"][0] > 0  # kept in the end-to-end-normalised figure


def test_not_streamed_has_no_ttft(tmp_path: Path) -> None:
    _, rows = one_block(tmp_path, [request(streamed=False)])
    assert rows["ttft"].to_list() == rows["ttfo"].to_list() == [None]
    assert rows["e2e"][0] == pytest.approx(0.4)


def test_warm_up_is_left_out(tmp_path: Path) -> None:
    _, rows = one_block(tmp_path, [request(), request(session="s1", phase="warmup")])
    assert rows["session"].to_list() == ["s0"]


def test_times_are_in_seconds_of_the_emulated_hardware(tmp_path: Path) -> None:
    loaded, rows = one_block(tmp_path, [br_01()])
    faster = measured(loaded.requests, 8.0, "server")
    for name in MEASURES:
        assert faster[name][0] == pytest.approx(8 * rows[name][0])
    arrived = chunks.arrivals(loaded, rows, 8.0)
    assert chunks.peak_in_a_second(arrived) == 16  # 40 ms of the client are 320 ms: four chunks fit into a second


def test_uncached_input_skips_what_is_unknown(tmp_path: Path) -> None:
    known = request(asked_input=1000, ideal_cached=400)
    unknown = request(session="s1", cached_tokens=None)
    _, rows = one_block(tmp_path, [known, unknown])
    assert uncached_input(rows) == 600
    assert uncached_input(rows.filter(pl.col("session") == "s1")) is None


def test_every_measure_tells_its_formula() -> None:
    assert all(len(measure.formula) > 15 and measure.label for measure in MEASURES.values())


def test_arrivals_count_tokens_inside_the_window_only(tmp_path: Path) -> None:
    record, pieces = request(ttft_s=0.1, seconds_per_token=0.1, output=11)  # tokens at 0.1, 0.2, ... 1.1 s
    loaded, rows = one_block(tmp_path, [(record, pieces)], ended_ns=START_NS + 650 * MS)
    assert chunks.arrivals(loaded, rows, 1.0).tokens.sum() == 6


def test_peak_slides_and_is_not_a_calendar_second(tmp_path: Path) -> None:
    record, _ = request(output=30)
    at = [(START_NS + ms * MS, 10) for ms in (700, 1300, 1699, 2400)]  # 700..1699 fit into one second, 2400 does not
    loaded, rows = one_block(tmp_path, [(record, at)], ended_ns=START_NS + 3000 * MS)
    assert chunks.peak_in_a_second(chunks.arrivals(loaded, rows, 1.0)) == 30


def test_longest_silence_counts_only_while_something_is_in_flight(tmp_path: Path) -> None:
    def at(ms: int) -> int:
        return START_NS + ms * MS

    first = msgspec.structs.replace(request()[0], sent_ns=at(0), end_ns=at(1000))
    second = msgspec.structs.replace(request(session="s1")[0], sent_ns=at(900), end_ns=at(2000))
    third = msgspec.structs.replace(request(session="s2")[0], sent_ns=at(9000), end_ns=at(9100))
    whole = msgspec.structs.replace(request(session="s3", streamed=False)[0], sent_ns=at(9200), end_ns=at(12000))
    requests: list[tuple[RequestRecord, Chunks]] = [
        (first, [(at(300), 1), (at(1000), 1)]),
        (second, [(at(1300), 1), (at(2000), 1)]),  # silent from 1.3 to 2.0 s; nothing is in flight until 9 s
        (third, [(at(9050), 0)]),  # an event without tokens is a sign of life
        (whole, [(at(12000), 1)]),  # not streamed: it has nothing to say before its end
    ]
    loaded, rows = one_block(tmp_path, requests, workers=2)
    for scale in (1.0, 10.0):
        arrived = chunks.arrivals(loaded, rows, scale)
        assert chunks.longest_silence(loaded, rows, arrived) == pytest.approx(0.7 * scale, abs=0.002 * scale)
    late = requests[2:3]
    loaded, rows = one_block(tmp_path / "late", late)
    assert chunks.longest_silence(loaded, rows, chunks.arrivals(loaded, rows, 1.0)) == pytest.approx(0.05, abs=0.002)


def test_gap_histogram_is_within_one_per_cent(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    requests = []
    for number in range(20):
        times = START_NS + np.cumsum(rng.lognormal(math.log(0.02), 0.8, 50) * 1e9).astype(np.int64)
        requests.append((request(session=f"s{number:02d}", output=50)[0], [(int(t), 1) for t in times]))
    loaded, rows = one_block(tmp_path, requests, ended_ns=START_NS + 60_000 * MS, workers=3)
    found = chunks.gaps(loaded, rows, np.arange(20), 20, 1.0)
    true = np.concatenate([np.diff([t for t, _ in pieces]) for _, pieces in requests]) * 1e-9
    assert found.counts.sum() == len(true)
    for p in (0.5, 0.9, 0.99):
        exact = np.quantile(true, p, method="lower")
        assert chunks.gap_quantile(found, np.ones((1, 20)), p)[0] == pytest.approx(exact, rel=0.01)


def test_slabs_do_not_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request(session=f"s{n}", output=30 + n, at_ns=START_NS + n * MS) for n in range(12)]
    loaded, rows = one_block(tmp_path, requests, workers=2)
    whole = chunks.gaps(loaded, rows, np.arange(12), 12, 1.0), chunks.arrivals(loaded, rows, 1.0)
    monkeypatch.setattr(chunks, "_SLAB", 50)
    pieces = chunks.gaps(loaded, rows, np.arange(12), 12, 1.0), chunks.arrivals(loaded, rows, 1.0)
    assert (whole[0].counts == pieces[0].counts).all()
    assert (whole[1].tokens == pieces[1].tokens).all()
