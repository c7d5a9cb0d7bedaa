"""Runs of decode tables: outcomes of cells, what is left out and why, and the pages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from replay.records import Cell, GpuReading, Snapshot, Speculation, Window
from reports.cli import report
from reports.decode.analysis import Analysis, analyse
from reports.decode.cells import CellResult
from reports.decode.page import summary
from reports.decode.reasons import Reason, grouped
from tests.reports.decode.make_tables import (
    BASELINE,
    CANDIDATE,
    Streams,
    add_step_logs,
    make_tables,
    rule,
)
from tests.reports.make_run import MS, failed, request, write_snapshots

DSPARK = Speculation(draft_tokens=7, method="dspark", acceptance_length=6.0)


def only(analysis: Analysis) -> CellResult:
    (cell,) = analysis.cells
    return cell


def test_rates_ratio_and_columns_are_the_known_ones(tmp_path: Path) -> None:
    analysis = analyse(make_tables(tmp_path, batches=(1, 4), noise=0.0, path=rule()))
    one, four = analysis.cells
    assert one.baseline.decode_tokens_per_s.value == pytest.approx(100.0)
    assert four.candidate.decode_tokens_per_s.value == pytest.approx(600.0, rel=1e-4)
    assert four.candidate.decode_tokens_per_s_per_gpu == pytest.approx(37.5, rel=1e-4)
    assert (four.ratio.value, four.outcome) == (pytest.approx(1.5, rel=1e-4), "candidate faster")
    assert (four.candidate.windows, four.candidate.passes, four.candidate.starts) == (6, 2, 2)
    assert four.baseline.columns.tpot_mean_s == pytest.approx(0.010)
    assert four.baseline.columns.ttft_worst_s == pytest.approx(0.100003)
    assert four.baseline.steps_per_s == pytest.approx(100.0, rel=1e-4)
    assert analysis.ratios is not None
    assert (analysis.ratios.cells, analysis.ratios.high) == (2, pytest.approx(1.5, rel=1e-4))
    assert analysis.has_result


def test_no_difference_is_not_called_one(tmp_path: Path) -> None:
    cell = only(analyse(make_tables(tmp_path, batches=(2,), ratio=1.0, noise=0.01)))
    assert cell.outcome == "no difference shown"


def test_an_effect_below_the_noise_between_passes_is_not_called(tmp_path: Path) -> None:
    """The candidate is 2 % faster in every window; passes of a backend differ by 6 %."""

    def drift(index: int, backend: str, cell: Cell, rows: Streams) -> Streams:
        later = index > 6  # the second half of ABBA
        return [stretched(row, 1.06 if later else 1.0) for row in rows]

    cell = only(analyse(make_tables(tmp_path, batches=(1,), ratio=1.02, noise=0.0, change=drift, repeats=3)))
    assert cell.noise.relative is not None
    assert cell.noise.relative > 0.05
    assert cell.outcome == "no difference shown"


def stretched(row: tuple, by: float) -> tuple:  # type: ignore[type-arg]
    """A stream whose decoding takes ``by`` times as long."""
    record, chunks = row
    first = chunks[0][0]
    moved = [(first + round((t - first) * by), tokens) for t, tokens in chunks]
    last = moved[-1][0]
    return msgspec.structs.replace(record, last_token_ns=last, end_ns=last + MS), moved


def test_a_window_with_a_failed_stream_is_no_result_and_is_told(tmp_path: Path) -> None:
    def fail(index: int, backend: str, cell: Cell, rows: Streams) -> Streams:
        return [(failed(rows[0][0]), []), *rows[1:]] if index == 1 else rows

    analysis = analyse(make_tables(tmp_path, batches=(4,), change=fail, path=rule()))
    cell = only(analysis)
    assert (cell.baseline.windows, cell.baseline.without) == (5, {"http 503, 1 of 4 streams": 1})
    assert cell.outcome == "candidate faster"
    assert any("left out 1 x http 503, 1 of 4 streams" in mark for mark in cell.marks)
    assert analysis.windows[0].figures is None


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ({"token_source": None}, "no token count"),
        ({"status": "stalled", "error": "stalled"}, "stalled"),
        ({"sent_ns": 1}, "impossible times"),
        ({"output_tokens": 7}, "chunks that are not those"),
    ],
)
def test_what_spoils_a_window(tmp_path: Path, spoil: dict[str, object], why: str) -> None:
    def change(index: int, backend: str, cell: Cell, rows: Streams) -> Streams:
        (record, chunks), *rest = rows
        late = {"due_ns": record.end_ns * 2, "sent_ns": record.end_ns * 2} if "sent_ns" in spoil else spoil
        return [(msgspec.structs.replace(record, **late), chunks), *rest] if backend == CANDIDATE else rows

    cell = only(analyse(make_tables(tmp_path, batches=(2,), change=change)))
    assert cell.outcome == "no result"
    assert cell.candidate.windows == 0
    assert why in cell.reasons[0]


def test_a_missing_stream_and_short_streams_spoil_a_window(tmp_path: Path) -> None:
    def drop(index: int, backend: str, cell: Cell, rows: Streams) -> Streams:
        return rows[1:] if backend == CANDIDATE else rows

    cell = only(analyse(make_tables(tmp_path / "a", batches=(4,), change=drop)))
    assert "not recorded, 1 of 4 streams" in cell.reasons[0]
    cell = only(analyse(make_tables(tmp_path / "b", batches=(4,), output=9)))
    assert "its streams all decoded at once for too few steps, 8 of at least 10: raise decode.out" in cell.reasons[0]


def test_what_is_too_short_in_a_batch_of_one(tmp_path: Path) -> None:
    cell = only(analyse(make_tables(tmp_path / "a", batches=(1,), output=9)))
    assert "its stream decoded for too few steps, 8 of at least 10: raise decode.output_tokens" in cell.reasons[0]

    def at_once(index: int, backend: str, cell: Cell, rows: Streams) -> Streams:
        ((record, chunks),) = rows
        first = chunks[0][0]
        return [(msgspec.structs.replace(record, last_token_ns=first, first_chunk_tokens=9), [(first, 9)])]

    cell = only(analyse(make_tables(tmp_path / "b", batches=(1,), output=9, change=at_once)))
    assert "all tokens of its stream came at one moment: raise decode.output_tokens" in cell.reasons[0]


def test_a_client_that_was_too_busy_is_no_result(tmp_path: Path) -> None:
    cell = only(analyse(make_tables(tmp_path, batches=(1,), loop_lag_ms=30.0)))
    assert cell.outcome == "no result"
    assert "event loop was late, 30.0 ms of 10.0 allowed (1% of the window)" in cell.reasons[0]


def test_one_window_or_one_pass_is_not_enough(tmp_path: Path) -> None:
    cell = only(analyse(make_tables(tmp_path / "a", batches=(1,), order="AB", repeats=1)))
    assert (cell.outcome, cell.ratio.low) == ("no result", None)
    assert "decode.repeats" in cell.reasons[0]
    cell = only(analyse(make_tables(tmp_path / "b", batches=(1,), order="AB")))
    assert cell.outcome == "no result"
    assert "decode.rounds" in cell.reasons[0]


def test_br_31_other_acceptance_is_no_effect_of_the_backend(tmp_path: Path) -> None:
    """Steps take as long on both, but the candidate's yield 4 tokens and the baseline's 2."""
    run = make_tables(
        tmp_path,
        batches=(1,),
        output=401,
        ratio=1.0,
        noise=0.001,
        speculation=DSPARK,
        per_step={BASELINE: 2, CANDIDATE: 4},
    )
    analysis = analyse(run)
    cell = only(analysis)
    assert cell.outcome == "acceptance differs"
    assert cell.ratio.value == pytest.approx(2.0, rel=0.01)
    assert cell.steps_ratio.value == pytest.approx(1.0, rel=0.01)
    assert not cell.in_range
    assert analysis.ratios is None


def test_counters_are_trusted_where_chunks_carry_several_steps(tmp_path: Path) -> None:
    cell = only(analyse(make_tables(tmp_path, batches=(2,), output=201, per_chunk=10, path=rule())))
    per_step = cell.candidate.tokens_per_step
    assert (per_step.chunks, per_step.usage, per_step.counters) == (10.0, 10.0, 1.0)
    assert (per_step.trusted, per_step.value, per_step.agree) == ("counters", 1.0, False)
    assert cell.outcome == "candidate faster"
    assert any("--stream-interval" in mark for mark in cell.marks)


def test_three_counts_agree_with_synthetic_acceptance_although_the_last_step_is_cut(tmp_path: Path) -> None:
    both = {BASELINE: 6, CANDIDATE: 6}
    cell = only(analyse(make_tables(tmp_path, batches=(1,), output=1000, speculation=DSPARK, per_step=both)))
    per_step = cell.candidate.tokens_per_step
    assert per_step.agree
    assert per_step.counters == pytest.approx(999 / 167)


def test_cells_beyond_the_rule_are_standard_decode_and_out_of_the_range(tmp_path: Path) -> None:
    both = {BASELINE: 6, CANDIDATE: 6}
    run = make_tables(
        tmp_path, batches=(8, 16), output=601, speculation=DSPARK, per_step=both, path=rule(draft_tokens=7)
    )
    analysis = analyse(run)
    eight, sixteen = analysis.cells
    assert (eight.candidate.path.status, eight.candidate.path.measured) == ("specialised", False)
    assert sixteen.candidate.path.status == "standard decode"
    assert any("more than the 8 requests" in mark for mark in sixteen.marks)
    assert analysis.ratios is not None
    assert analysis.ratios.cells == 1


def test_the_step_log_goes_over_the_rule(tmp_path: Path) -> None:
    """By the rule it fits; by its log every step was PIECEWISE."""
    run = make_tables(tmp_path / "full", batches=(4,), path=rule())
    add_step_logs(run)
    path = only(analyse(run)).candidate.path
    assert (path.status, path.measured, path.share) == ("specialised", True, 1.0)
    run = make_tables(tmp_path / "piecewise", batches=(4,), path=rule())
    add_step_logs(run, mode="PIECEWISE")
    cell = only(analyse(run))
    assert (cell.candidate.path.status, cell.candidate.path.share) == ("standard decode", 0.0)
    assert not cell.in_range
    assert any("eager or PIECEWISE 100%" in mark for mark in cell.marks)


def test_without_the_specialised_path_under_test_all_cells_with_results_are_in_the_range(tmp_path: Path) -> None:
    run = make_tables(tmp_path, batches=(1, 4), candidate="auto", under_test=["compilation-config.cudagraph_mode"])
    analysis = analyse(run)
    assert analysis.ratios is not None
    assert (analysis.ratios.cells, analysis.ratios.of) == (2, "cells with a result")
    assert "cudagraph_mode" in analysis.compared
    assert all(not cell.marks for cell in analysis.cells)


def test_published_rows_stand_beside_the_same_setting_only(tmp_path: Path) -> None:
    analysis = analyse(make_tables(tmp_path, batches=(1, 2, 64), path=rule()))
    rows = {each.row.id: each for each in analysis.published}
    assert (rows["nospec-b1"].cell, rows["nospec-b64"].cell) == (1, 3)
    assert rows["nospec-b64"].own_candidate == analysis.cells[2].candidate.decode_tokens_per_s
    assert not rows["nospec-b64"].differs
    assert rows["headline"].own_candidate is None
    assert any("draft tokens" in why for why in rows["headline"].differs)
    assert rows["agentx"].cell is None
    assert "16 GPUs against 8" in rows["agentx"].differs[0]


def test_gpus_that_differ_forbid_to_call_an_effect(tmp_path: Path) -> None:
    run = make_tables(tmp_path, batches=(1,))
    for folder in (run / "windows").glob("*"):
        name = "H200" if folder.name.endswith(CANDIDATE) else "H100"
        gpu = [GpuReading(index=0, uuid=name, name=name, energy_mj=0)]
        after = [msgspec.structs.replace(gpu[0], energy_mj=202_000)]
        write_snapshots(folder, Snapshot(t_ns=0, gpus=gpu), Snapshot(t_ns=10**9, gpus=after))
    cell = only(analyse(run))
    assert cell.outcome == "no result"
    assert any("GPU name" in reason for reason in cell.reasons)
    assert cell.candidate.energy_per_output_token_j == pytest.approx(2.0)


def test_an_unfinished_window_is_set_aside_and_a_cell_without_any_is_told(tmp_path: Path) -> None:
    run = make_tables(tmp_path, batches=(1, 2))
    for folder in sorted((run / "windows").glob("*")):
        window = msgspec.json.decode((folder / "window.json").read_bytes(), type=Window)
        if window.cell == 1:
            changed = msgspec.structs.replace(window, finished=False, cut_short="server gone")
            (folder / "window.json").write_bytes(msgspec.json.encode(changed))
    analysis = analyse(run)
    assert (len(analysis.set_aside), analysis.missing) == (12, 12)
    assert analysis.set_aside[0].why == "server gone"
    assert analysis.cells[1].outcome == "no result"
    assert analysis.cells[1].reasons == ["baseline: not measured", "candidate: not measured"]


def test_emulated_runs_are_stamped_everywhere_and_told_in_the_hardwares_time(tmp_path: Path) -> None:
    run = make_tables(tmp_path, batches=(1, 2), emulated=True, time_scale=10.0)
    report(run)
    page, text = (run / "report.html").read_text(), (run / "report.md").read_text()
    titles = [line for line in text.splitlines() if line.startswith(("# ", "## "))]
    assert titles
    assert all("[EMULATED]" in title for title in titles)
    assert page.count("<h2>") == page.count('<h2><span class="tag">EMULATED</span>')
    assert analyse(run).cells[0].baseline.decode_tokens_per_s.value == pytest.approx(10.0, rel=0.01)


def test_the_same_run_gives_the_same_bytes_and_strict_json(tmp_path: Path) -> None:
    run = make_tables(tmp_path / "run", batches=(1, 4), path=rule())
    add_step_logs(run)
    assert report(run, output=tmp_path / "a") == 0
    assert report(run, output=tmp_path / "b") == 0
    for name in ("report.json", "report.md", "report.html"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    plain = json.loads((tmp_path / "a" / "report.json").read_text(), parse_constant=refuse)
    assert plain["kind"] == "decode"
    page = (tmp_path / "a" / "report.html").read_text()
    assert page.count("<svg") == 2
    assert "src=" not in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_without_any_result_the_exit_code_is_2(tmp_path: Path) -> None:
    assert report(make_tables(tmp_path, batches=(1,), output=9)) == 2


def test_files_are_written_although_the_reader_of_the_output_has_left(tmp_path: Path) -> None:
    """`decodegate report RUN | head -0`: the pipe is closed before the first line."""
    run = make_tables(tmp_path, batches=(1,))
    reading, writing = os.pipe()
    os.close(reading)
    code = "import sys; from pathlib import Path; from reports.cli import report; sys.exit(report(Path(sys.argv[1])))"
    ended = subprocess.run([sys.executable, "-c", code, str(run)], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (run / "report.html").exists()


@pytest.mark.parametrize(("ratio", "outcome"), [(1.5, "faster, path unknown"), (0.7, "slower, path unknown")])
def test_an_effect_whose_path_is_unknown_is_told_so(tmp_path: Path, ratio: float, outcome: str) -> None:
    analysis = analyse(make_tables(tmp_path, batches=(1,), ratio=ratio))  # no rule, no log
    assert only(analysis).outcome == outcome
    assert analysis.ratios is None
    assert "No cell's candidate is known to have run specialised" in summary(analysis)


def test_what_is_missing_is_told_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_tables(tmp_path, batches=(1,))
    first, second, third, *_ = sorted((run / "windows").glob("*"))
    (first / "window.json").write_bytes(b'{"index": 1, "back')
    (second / "window.json").unlink()
    (third / "w0.health.jsonl").unlink()
    report(run)
    shown = capsys.readouterr().out
    assert "10 of 12 windows finished" in shown
    assert "baseline: 4 of 6 planned windows finished" in shown
    assert f"{first.name}: not judged, its window.json is damaged" in shown
    assert f"{second.name}: not judged, never started" in shown
    assert "1 window: no sample of the client's event loop is left (w0.health.jsonl)" in shown


def test_failed_streams_of_a_warm_up_are_told(tmp_path: Path) -> None:
    run = make_tables(tmp_path, batches=(1,))
    for folder in (run / "windows").glob(f"*-{CANDIDATE}"):
        cold = failed(request(session="7", phase="warmup")[0])
        with (folder / "w0.requests.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(cold) + b"\n")
    cell = only(analyse(run))
    assert (cell.baseline.warmup_failures, cell.candidate.warmup_failures) == ({}, {"http 503": 6})
    assert "candidate: streams of the warm-up failed: 6 x http 503" in cell.marks


@pytest.mark.parametrize(("slower", "judged"), [(1.0, True), (1.005, True), (1.065, False), (0.9, False)])
def test_an_emulator_that_was_off_its_own_step_times_is_no_result(tmp_path: Path, slower: float, judged: bool) -> None:
    """Its log has steps of 10 ms (of the client's), its writes come ``slower`` times as far apart."""

    def change(index: int, backend: str, cell: Cell, rows: Streams) -> Streams:
        return [stretched(row, slower) for row in rows]

    run = make_tables(tmp_path, batches=(1,), noise=0.0, ratio=1.0, change=change, emulated=True, time_scale=60.0)
    for folder in (run / "windows").glob("*"):
        record = msgspec.json.decode((folder / "w0.requests.jsonl").read_bytes().splitlines()[1])
        first = record["first_token_ns"]
        server = folder / "server"
        server.mkdir()
        step = {"t_ns": first, "end_ns": first + 1000 * MS, "steps": 100, "rows": 1, "prompt_tokens": 0,
                "decode_tokens": 100, "specialised": True, "reason": "", "late_ns": 0}  # fmt: skip
        writes = [[first + round(number * 10 * MS * slower), 1] for number in range(101)]
        (server / "steps.jsonl").write_bytes(msgspec.json.encode(step) + b'\n{"torn')
        (server / "emissions.jsonl").write_bytes(msgspec.json.encode({"emissions": writes}) + b"\n")
    analysis = analyse(run)
    assert [window.figures is not None for window in analysis.windows] == [judged] * 12
    for window in analysis.windows:
        assert window.emulator_delay_ms == pytest.approx(1000 * (slower - 1), abs=0.01)
    if not judged:
        assert "the emulator was off its own step times" in only(analysis).reasons[0]
        assert "lower time_scale" in only(analysis).reasons[0]


def test_reasons_that_differ_only_in_numbers_are_one() -> None:
    late = [Reason("it was late", ms / 50, f"{ms} ms of 50 allowed", "use idle cores") for ms in (60, 81, 70)]
    assert grouped([*late, Reason("http 503", 1, "1 of 4 streams"), Reason("http 500", 1, "1 of 4 streams")]) == {
        "it was late, worst 81 ms of 50 allowed: use idle cores": 3,
        "http 503, 1 of 4 streams": 1,
        "http 500, 1 of 4 streams": 1,
    }


def test_the_table_fits_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = make_tables(tmp_path, batches=(1, 64), path=rule())
    add_step_logs(run)
    add_step_logs(run, backend=BASELINE)
    report(run)
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "specialised 100%" in shown
    assert "FULL 100%" in shown
