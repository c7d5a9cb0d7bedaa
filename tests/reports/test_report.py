"""The whole way from a run directory to the three files."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replay.records import Backend, RequestRecord
from reports.analysis import Analysis, analyse
from reports.charts import CHARTS
from reports.charts.chart import svg
from reports.cli import report
from reports.render import html, markdown
from reports.render import json as as_json
from tests.reports.make_run import BASELINE, CANDIDATE, MS, failed, make_run, write_frame
from workloads.errors import UserError

OTHERS = [
    Backend(name=name, decode_backend="auto", url=None, gpus=None, emulated=False) for name in (BASELINE, CANDIDATE)
]


def small(path: Path, **options: Any) -> Path:
    return make_run(path, **{"sessions": 6, "turns": 5, **options})


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Analysis, str, str]:
    """One emulated run, analysed and rendered as HTML and Markdown."""
    folder = tmp_path_factory.mktemp("emulated")
    found = analyse(make_run(folder, sessions=10, turns=8, emulated=True, specialised_share=0.7))
    return found, html.render([found]), markdown.render([found])


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_known_ratio_is_found(tmp_path: Path) -> None:
    found = analyse(make_run(tmp_path, ratio=1.3, sessions=15, turns=12))
    effect = found.headlines[0].effect
    assert effect is not None
    assert effect.ratio.low is not None
    assert effect.ratio.high is not None
    assert effect.ratio.low <= 1.3 <= effect.ratio.high
    assert effect.ratio.high / effect.ratio.low < 1.1
    assert effect.ratio.n == 180
    assert effect.ratio.sessions == 15


def test_two_reports_of_one_directory_are_byte_equal(tmp_path: Path) -> None:
    run = small(tmp_path / "run", emulated=True)
    written = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        report(run, output=folder)
        written.append({file.name: file.read_bytes() for file in sorted(folder.iterdir())})
    assert written[0] == written[1]
    assert list(written[0]) == ["report.html", "report.json", "report.md"]


def test_report_does_not_depend_on_the_order_of_rows_or_workers(tmp_path: Path) -> None:
    run = small(tmp_path, workers=2)
    before = as_json.render([analyse(run)])
    for block in (run / "blocks").iterdir():
        for file in block.glob("w*.requests.jsonl"):
            lines = file.read_bytes().splitlines(keepends=True)
            random.Random(7).shuffle(lines)
            file.write_bytes(b"".join(lines))
        for kind in ("requests.jsonl", "chunks.bin", "health.jsonl"):
            (block / f"w0.{kind}").rename(block / "aside")
            (block / f"w1.{kind}").rename(block / f"w0.{kind}")
            (block / "aside").rename(block / f"w1.{kind}")
    assert as_json.render([analyse(run)]) == before


def test_br_17_all_refused_is_strict_json_with_nulls_and_a_code(tmp_path: Path) -> None:
    def refuse(_: int, __: str, record: RequestRecord) -> RequestRecord:
        return failed(record)

    run = small(tmp_path, change=refuse)
    assert report(run) == 2
    found = strict((run / "report.json").read_text())
    assert found["conclusion"]["outcome"] == "INCONCLUSIVE"
    assert all(row["baseline"]["value"] is None and row["baseline"]["reason"] for row in found["rows"])
    assert found["headlines"][0]["effect"] is None
    assert found["backends"][0]["failures"] == {"http 503": 60}
    assert "nothing to compare" in (run / "report.html").read_text()


def test_exit_code_zero_when_it_can_be_concluded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small(tmp_path)
    assert report(run) == 0
    shown = capsys.readouterr().out
    assert "candidate faster" in shown
    assert "report.html" in shown
    strict((run / "report.json").read_text())


def test_the_conclusion_comes_first_and_the_page_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small(tmp_path)

    def abort(_: object) -> str:
        assert "candidate faster" in capsys.readouterr().out
        raise SystemExit("the chart engine aborted")

    monkeypatch.setattr(html, "render", abort)
    with pytest.raises(SystemExit):
        report(run)
    strict((run / "report.json").read_text())
    assert "candidate faster" in (run / "report.md").read_text()
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("when", ["write", "replace", "folder"])
def test_a_full_disk_costs_no_conclusion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    run, output = small(tmp_path / "run"), tmp_path / "out"

    def full(path: Path, *_: object, **__: object) -> None:
        if when == "write":
            with path.open("w") as file:
                file.write("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    if when == "folder":
        output.write_text("a file, no folder")
    else:
        monkeypatch.setattr(*((Path, "write_text") if when == "write" else (os, "replace")), full)
    with pytest.raises(
        UserError, match=r"report\.json cannot be written: .*conclusion is printed.*--output names another"
    ):
        report(run, output=output)
    assert "candidate faster" in capsys.readouterr().out
    assert when == "folder" or list(output.iterdir()) == []


def test_json_reads_back_as_the_analysis(tmp_path: Path) -> None:
    found = analyse(small(tmp_path))
    assert msgspec.json.decode(as_json.render([found]), type=Analysis) == found


class _Outside(HTMLParser):
    """Collects whatever a browser would load from elsewhere, and unbalanced tags."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [
            f"{tag} {key}={value}"
            for key, value in attrs
            if key in ("src", "href") and not (value or "").startswith("#")
        ]
        if tag in ("link", "script", "iframe", "img"):
            self.loads.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Closed at once."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_needs_nothing_else(emulated: tuple[Analysis, str, str]) -> None:
    page = emulated[1]
    parsed = _Outside()
    parsed.feed(page)
    assert parsed.loads == []
    assert parsed.open == []
    assert "url(http" not in page
    assert "@import" not in page
    assert page.count("<svg ") == len(CHARTS) - 1  # one run is no frontier
    assert len(page) < 2_000_000


def test_ids_in_the_page_are_unique(emulated: tuple[Analysis, str, str]) -> None:
    page = emulated[1]
    ids = [part.split('"')[0] for part in page.split(' id="')[1:]]
    assert len(ids) == len(set(ids)) > 0


def test_emulated_is_stamped_on_every_section(emulated: tuple[Analysis, str, str]) -> None:
    _, page, text = emulated
    assert page.count('<span class="tag">EMULATED</span>') == page.count("<h2>") > 4
    assert page.count('class="stamp"') == 1
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert len(headings) > 4
    assert all("[EMULATED]" in line for line in headings)


def test_unmatched_is_stamped_on_every_section(tmp_path: Path) -> None:
    stamp = "not matched: does not isolate the decode path"
    found = analyse(small(tmp_path, matched_gpus=False, unmatched_reasons=["16 against 8 GPUs"]))
    page, text = html.render([found]), markdown.render([found])
    assert stamp in page
    assert stamp in text
    assert page.count('<span class="tag">not matched</span>') == page.count("<h2>")
    assert "EMULATED" not in page


def test_what_servers_say_is_escaped(tmp_path: Path) -> None:
    def evil(_: int, backend: str, record: RequestRecord) -> RequestRecord:
        return failed(record, error="<script>alert(1)</script> | x") if backend == CANDIDATE else record

    found = analyse(small(tmp_path, change=evil))
    assert "<script>" not in html.render([found])
    assert "</script> | x" not in markdown.render([found])


def test_markdown_tables_have_equal_columns(emulated: tuple[Analysis, str, str]) -> None:
    tables = [block for block in emulated[2].split("\n\n") if block.startswith("|")]
    assert len(tables) == 8
    for table in tables:
        assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1


def test_charts_are_the_same_bytes_each_time(emulated: tuple[Analysis, str, str]) -> None:
    found, page, _ = emulated
    for chart in CHARTS:
        again = svg(chart, [found])
        assert again is None if chart.id == "frontier" else again is not None and again in page


def test_several_runs_make_the_frontier(tmp_path: Path) -> None:
    analyses = [analyse(small(tmp_path / str(lanes), lanes=lanes)) for lanes in (1, 8)]
    frontier = next(chart for chart in CHARTS if chart.id == "frontier")
    assert frontier.draw(analyses[:1]) is None
    drawn = svg(frontier, analyses)
    assert drawn is not None
    assert ">8<" in drawn


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"workload_digest": "x" * 64}, "workload digest"),
        ({"matched_gpus": False, "unmatched_reasons": ["16 against 8 GPUs"]}, "matched GPUs"),
        ({"emulated": True}, "emulated"),
        ({"backends": OTHERS}, "backends"),
    ],
)
def test_runs_that_are_not_alike_do_not_share_a_report(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    one, other = small(tmp_path / "one"), small(tmp_path / "other", lanes=8, **changes)
    with pytest.raises(UserError, match=f"cannot be shown beside .*: {what} "):
        report(one, other)


def test_a_run_is_not_shown_beside_itself(tmp_path: Path) -> None:
    run = small(tmp_path / "run")
    (tmp_path / "other").symlink_to(run)
    for again in (run, tmp_path / "other"):
        with pytest.raises(UserError, match="is given 2 times"):
            report(run, again)
    assert not (run / "report.html").exists()


def test_too_few_turns_have_a_p99_without_an_interval(tmp_path: Path) -> None:
    found = analyse(make_run(tmp_path, sessions=8, turns=7))
    for row in found.rows:
        few = row.percentile == "P99" and row.measure != "chunk_gap"
        for side in (row.baseline, row.candidate, row.effect.ratio if row.effect else None):
            assert side is None or side.value is not None
            assert side is None or not few or (side.low, side.high) == (None, None)
    p99 = next(row for row in found.rows if row.measure == "itl" and row.percentile == "P99")
    assert p99.baseline.reason == "no interval: P99 needs 500 turns of either backend, there are 112"
    assert found.conclusion.outcome == "candidate faster"  # P90 needs 50
    for text in (html.render([found]), markdown.render([found])):
        assert "P90 needs 50 turns, P99 500" in text


def test_without_a_conclusion_the_verdict_comes_before_a_subdued_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small(tmp_path, block={"loop_lag_ms": 40.0}, time_scale=2.0, emulated=True)
    assert report(run) == 2
    shown = [capsys.readouterr().out, (run / "report.md").read_text()]
    for text in shown:
        assert (
            text.index("INCONCLUSIVE") < text.index("baseline loop lag P90 40.0 ms, limit ") < text.index("ot a resul")
        )
        assert "lower time_scale" in text
    page = (run / "report.html").read_text()
    assert page.index('<div class="outcome bad">') < page.index('class="subdued"') < page.index('<div class="number">')
    clear = html.render([analyse(small(tmp_path / "clear"))])
    assert '<div class="subdued">' not in clear
    assert "not a result" not in clear


def test_measures_that_are_another_are_one_line(tmp_path: Path) -> None:
    def thinks(_: int, __: str, record: RequestRecord) -> RequestRecord:
        return msgspec.structs.replace(record, first_answer_ns=(record.first_token_ns or 0) + 50 * MS)

    same, other = analyse(small(tmp_path / "same")), analyse(small(tmp_path / "other", change=thinks))
    for render in (html.render, markdown.render):
        assert "= TTFT: no reasoning" in render([same])
        assert "= ITL: first chunks hold one token" in render([same])
        assert "= TTFT: no reasoning" not in render([other])


def test_settings_are_words_without_nulls(tmp_path: Path) -> None:
    settings = {"acceptance_length": None, "faults": "", "draft_tokens": 2, "max_model_len": 8192, "eager": True}
    backends = [msgspec.structs.replace(each, settings=settings) for each in OTHERS]
    text = markdown.render([analyse(small(tmp_path, backends=backends))])
    assert "| draft tokens 2, eager on, max model len 8,192 |" in text
    assert "None" not in text


def test_short_runs_are_drawn_in_seconds(tmp_path: Path) -> None:
    chart = next(chart for chart in CHARTS if chart.id == "time")
    drawn = svg(chart, [analyse(small(tmp_path))])
    assert drawn is not None
    assert ">seconds<" in drawn
    assert ">minutes<" not in drawn


def test_stamps_of_all_runs_are_shown(tmp_path: Path) -> None:
    runs = [small(tmp_path / str(scale), lanes=int(scale), emulated=True, time_scale=scale) for scale in (1.0, 10.0)]
    report(*runs)
    for name in ("report.html", "report.md"):
        text = (runs[0] / name).read_text()
        assert "embedded emulator; they" in text
        assert "clock 10 times as fast" in text
        assert "EMULATED EMULATED" not in text


def test_every_turn_is_accounted_for(tmp_path: Path) -> None:
    run = small(tmp_path, block={"not_reached": 2})
    write_frame(run, send=32, order=["baseline", "candidate"], turns={"send": 32, "history": 7, "cut: context": 3})
    found = analyse(run)
    for block in found.blocks:
        assert (block.planned, block.sent, block.history, block.cut, block.not_reached) == (42, 30, 7, 3, 2)
        assert block.unexplained == 0
        assert sum(block.statuses.values()) == block.sent
    assert found.pairs.coverage == pytest.approx(30 / 32)


def test_a_timed_plan_has_no_fixed_number_of_turns(tmp_path: Path) -> None:
    found = analyse(small(tmp_path, end="duration", duration_s=60.0))
    assert found.blocks[0].planned is None
    assert found.pairs.planned == 30
    assert next(gate for gate in found.gates if gate.id == "turns_accounted").status == "pass"


def test_single_chunk_answers_are_counted_not_dropped(tmp_path: Path) -> None:
    def at_once(_: int, __: str, record: RequestRecord) -> RequestRecord:
        return msgspec.structs.replace(record, first_chunk_tokens=record.output_tokens) if record.turn == 0 else record

    found = analyse(small(tmp_path, change=at_once))
    assert found.backends[0].without_itl == {"single chunk": 12}
    assert (found.pairs.count, found.pairs.with_itl) == (30, 24)
    normalised = found.headlines[1].effect
    assert normalised is not None
    assert normalised.ratio.n == 30


def test_turns_recorded_without_output_are_counted_and_left_out(tmp_path: Path) -> None:
    def silent(_: int, __: str, record: RequestRecord) -> RequestRecord:
        return record if record.turn else msgspec.structs.replace(record, zero_output=True, asked_output=1)

    found = analyse(small(tmp_path, change=silent))
    assert found.backends[0].zero_output == 12
    assert found.backends[0].without_itl == {"recorded without output": 12}
    assert found.pairs.one_token == 6
    assert found.pairs.coverage == 1.0
    ends = {row.measure: row.baseline.n for row in found.rows}
    assert (ends["itl"], ends["e2e_per_token"], ends["ttft"]) == (48, 48, 60)


def test_blocks_tell_of_load_warm_up_and_plays(tmp_path: Path) -> None:
    def spoil(block: int, _: str, record: RequestRecord) -> RequestRecord:
        if block == 1 and record.session in ("s00", "s01") and record.turn == 1:
            return failed(record, error="context overflow" if record.session == "s00" else "http 503")
        if block == 1 and record.session == "s05":
            return msgspec.structs.replace(record, session="s04", play=1)
        return msgspec.structs.replace(record, pool_wait_ns=3 * MS) if block == 1 else record

    found = analyse(small(tmp_path, change=spoil, block={"plays_ended": 4, "plays_cut": 2}))
    block = found.blocks[0]
    assert (block.warmup_requests, block.warmup_planned, block.warmup_s) == (1, 2, 1.0)
    assert (block.plays, block.plays_ended, block.plays_cut) == (6, 4, 2)
    assert (block.most_plays_of_a_session, block.degraded_plays) == (2, 2)
    assert block.peak_in_flight == 6  # six sessions side by side, sent 1 ms after one another
    assert block.pool_wait_p99_s == pytest.approx(0.003)
    assert 0.04 < block.longest_silence_s < 0.06
    baseline = found.backends[0]
    assert (baseline.context_overflows, baseline.degraded_plays, baseline.plays) == (1, 2, 12)
    for text in (html.render([found]), markdown.render([found])):
        assert "1 of 2, 1,000 ms" in text
        assert "4 / 2" in text
        assert "2 / 6 (33.3%)" in text


def test_peak_in_flight_is_exact_and_ends_come_before_starts(tmp_path: Path) -> None:
    found = analyse(small(tmp_path, sessions=1, turns=5))
    assert found.blocks[0].peak_in_flight == 1  # health samples say 2

    def without_a_pause(_: int, __: str, record: RequestRecord) -> RequestRecord:
        return msgspec.structs.replace(record, end_ns=record.end_ns + 100 * MS)

    assert analyse(small(tmp_path / "b", sessions=1, change=without_a_pause)).blocks[0].peak_in_flight == 1


def test_interactivity_chart_crosses_90_per_cent_at_p90_interactivity(tmp_path: Path) -> None:
    found = analyse(small(tmp_path))
    chart = next(chart for chart in CHARTS if chart.id == "interactivity")
    drawn = chart.draw([found])
    assert drawn is not None
    spec = drawn.to_dict()
    layers, rows = spec["layer"], spec["datasets"]
    assert layers[1]["encoding"]["x"]["title"] == "interactivity, tokens/s"
    assert layers[1]["encoding"]["y"]["title"] == "share of turns at least this fast"
    effect = found.headlines[0].effect
    assert effect is not None
    crossings = {row["backend"]: row["value"] for row in rows[layers[2]["data"]["name"]]}
    assert crossings["baseline"] == pytest.approx(effect.baseline.value, rel=1e-4)
    assert crossings["candidate"] == pytest.approx(effect.candidate.value, rel=1e-4)
    curve = [row for row in rows[layers[1]["data"]["name"]] if row["backend"] == "baseline"]
    assert all(a["value"] >= b["value"] and a["share"] < b["share"] for a, b in itertools.pairwise(curve))


@pytest.mark.parametrize(
    ("mode", "told"), [("closed", "of recorded pause time"), ("open", "of recorded time with no session active")]
)
def test_time_taken_out_is_called_what_it_is(tmp_path: Path, mode: str, told: str) -> None:
    found = analyse(small(tmp_path, mode=mode))
    assert f"25.0% {told} taken out" in markdown.render([found])


def test_throughput_is_per_gpu_and_counts_no_cached_input(tmp_path: Path) -> None:
    found = analyse(small(tmp_path))
    for backend in found.backends:
        block = next(block for block in found.blocks if block.backend == backend.name)
        assert block.cached_tokens == 6 * (1000 + 1500 + 2000 + 2500)
        assert block.uncached_input_tokens == 6 * 1000 + 6 * 4 * 500
        assert block.output_tokens_per_s is not None
        assert block.output_tokens_per_s * block.window_s == pytest.approx(6 * (40 + 41 + 42 + 43 + 44))
        assert backend.output_tokens_per_s is not None
        assert backend.output_tokens_per_s_per_gpu == pytest.approx(backend.output_tokens_per_s / 8)


def test_emulated_time_is_scaled_back(tmp_path: Path) -> None:
    real, fast = (analyse(small(tmp_path / str(scale), time_scale=scale)) for scale in (1.0, 10.0))
    for row, faster in zip(real.rows, fast.rows, strict=True):
        assert row.baseline.value is not None
        factor = 10 if row.unit == "s" else 0.1
        tolerance = 0.02 if row.measure == "chunk_gap" else 1e-9
        assert faster.baseline.value == pytest.approx(row.baseline.value * factor, rel=tolerance)
    assert real.headlines[0].effect is not None
    assert fast.headlines[0].effect is not None
    assert fast.headlines[0].effect.ratio.value == pytest.approx(real.headlines[0].effect.ratio.value)
    assert fast.headlines[0].effect.ratio.low == pytest.approx(real.headlines[0].effect.ratio.low)


def test_client_lag_is_held_against_the_clients_own_time(tmp_path: Path) -> None:
    """8 ms of lag are little beside a TTFT of 80 ms or more, however fast the emulated hardware's clock runs."""

    def late(_: int, __: str, record: RequestRecord) -> RequestRecord:
        return msgspec.structs.replace(record, due_ns=record.sent_ns - 9 * MS)

    statuses = set()
    for scale in (1.0, 10.0):
        found = analyse(small(tmp_path / str(scale), time_scale=scale, change=late))
        statuses.add(next(gate.status for gate in found.gates if gate.id == "client_health"))
    assert statuses == {"fail"}  # the median TTFT is 70 ms of the client: 7 ms are allowed, at either scale
