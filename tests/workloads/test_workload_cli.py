"""The workload command: tables, JSON, the page with charts, and generated files."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import workloads
from tests.workloads.weka_sessions import call, read
from workloads import charts
from workloads.cli import LABELS, app, sheets
from workloads.errors import UserError
from workloads.formats import read as read_path
from workloads.statistics import DISTRIBUTIONS, statistics
from workloads.trace import Notes

DEMO = Path(workloads.__file__).parent / "demo.jsonl"


def _run(*words: str) -> None:
    app(list(words), result_action="return_value", exit_on_error=False, print_error=False)


def test_inspect_prints_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _run("inspect", str(DEMO))
    out = capsys.readouterr().out
    for text in (
        "sessions",
        "Distributions",
        "Prefix reuse",
        "Context need",
        "Lane duty cycle",
        "input tokens / request",
    ):
        assert text in out
    assert re.search(r"requests / session +12 ", out)


def test_summary_comes_first_and_says_what_was_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(DEMO.read_text() + "{broken\n" + DEMO.read_text())
    _run("inspect", str(path))
    told = capsys.readouterr()
    lines = [line.strip() for line in told.out.splitlines()]
    starts = ("size: 24 sessions, 202 requests", "context needed", "pauses", "prefix reuse", "reading dropped")
    first = next(place for place, line in enumerate(lines) if line.startswith("size:"))
    for start, line in zip(starts, lines[first:], strict=False):
        assert line.startswith(start)
    assert first < lines.index("Counts")
    assert "1 x unreadable session skipped" in lines[first + 4]
    assert told.err.startswith("1 x unreadable session skipped; the first: ")


def test_rewind_sizes_stand_in_order_of_size() -> None:
    found = statistics([])
    found.labels["rewind_blocks"].update({"over 512": 9, "1": 3, "17-512": 5})
    rows = next(sheet for sheet in sheets(found, Notes()) if sheet.title == "Labels").rows
    assert [row[1] for row in rows if row[0] == "rewind blocks"] == ["1", "17-512", "over 512"]


def test_inspect_json_is_strict_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    _run("inspect", str(DEMO), "--json")
    document = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert document["statistics"]["counts"]["sessions"] == 12
    assert set(document["statistics"]["distributions"]) == set(DISTRIBUTIONS) == set(LABELS)
    assert re.fullmatch(r"[0-9a-f]{64}", document["digest"])
    assert document["notes"] == {"counts": {}, "first": {}}


def test_inspect_html_is_self_contained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    _run("inspect", str(DEMO), "--html", str(page))
    assert str(page) in capsys.readouterr().out.replace("\n", "")
    text = page.read_text()
    assert text.count("<svg") == text.count("<figure>") == 5
    assert not re.search(r"<(script|link|img|iframe)|url\(|@import", text)
    assert set(re.findall(r"https?://[^\"' <]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawing)
    assert "Lane duty cycle" in text


def test_charts_leave_out_what_is_not_there() -> None:
    trace, _ = read(call(0, 25, [1, 2]))
    found = charts.charts(statistics([trace]))
    assert "Pause before a request" not in found
    assert charts.charts(statistics([])) == {}
    for chart in found.values():
        assert charts.svg(chart).startswith("<svg")


def test_sheets_show_unknown_as_unknown_and_notes_worst_first() -> None:
    trace, _ = read(call(0, 25, [1, 2]))
    notes = Notes()
    notes.add("rare", "here")
    notes.add("frequent", "there", 7)
    found = {sheet.title: sheet for sheet in sheets(statistics([trace]), notes)}
    pauses = next(row for row in found["Distributions"].rows if row[0] == LABELS["idle_gap_s"])
    assert set(pauses[2:]) == {"-"}
    assert [row[:2] for row in found["Notes from reading"].rows] == [("frequent", "7"), ("rare", "1")]
    assert all(len(row) == len(sheet.columns) for sheet in found.values() for row in sheet.rows)


def test_generate_writes_what_inspect_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made.jsonl"
    _run(
        "generate", "-o", str(path), "--sessions", "4", "--seed", "7", "--input-scale", "0.1", "--max-context", "30000"
    )
    assert "4 sessions" in capsys.readouterr().out
    assert len(list(read_path(path, Notes()))) == 4
    before = path.read_bytes()
    with pytest.raises(UserError, match="exists, and is not overwritten"):
        _run("generate", "-o", str(path), "--sessions", "1")
    assert path.read_bytes() == before


def test_user_errors_say_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        _run("inspect", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"something\.jsonl"):
        _run("generate", "-o", str(tmp_path / "made.parquet"))
    with pytest.raises(UserError, match="cannot be written"):
        _run("generate", "-o", str(tmp_path / "no" / "made.jsonl"))
    with pytest.raises(UserError, match="cannot be written"):
        _run("inspect", str(DEMO), "--html", str(tmp_path / "no" / "page.html"))


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    _run("inspect", "--help")
    _run("generate", "--help")
    out = " ".join(capsys.readouterr().out.split())
    assert "decodegate workload inspect traces/" in out
    assert "--subagent-share" in out
    assert "GENERATORSETTINGS" not in out
