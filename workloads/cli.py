"""decodegate workload: look at recorded sessions, and make synthetic ones."""

from __future__ import annotations

import hashlib
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from cyclopts import App, Parameter
from rich import box
from rich.console import Console
from rich.table import Table

from workloads import formats
from workloads.errors import UserError
from workloads.formats import weka
from workloads.generate import GeneratorSettings, generate
from workloads.statistics import REWIND_SIZES, Statistics, statistics
from workloads.trace import Notes

app = App(
    name="workload",
    help="Look at recorded agent sessions before they are replayed, or generate synthetic ones.",
)

_WIDE = 110
"""Columns of a terminal that all percentiles fit into."""
_SPARE = {"p25", "p75", "p95"}
"""Left out on narrower ones; --json and --html have them."""

LABELS = {
    "requests_per_session": "requests / session",
    "input_tokens": "input tokens / request",
    "output_tokens": "output tokens / request",
    "uncached_tokens": "uncached tokens / request (ideal cache)",
    "input_growth_tokens": "growth of input between requests",
    "first_input_tokens": "first input of a session",
    "peak_context_tokens": "peak context of a session",
    "unique_tokens": "unique tokens of a session",
    "declared_prefix_tokens": "tools + system prompt, tokens",
    "rewind_blocks": "blocks lost by a rewind",
    "idle_gap_s": "idle gap, end to start, s",
    "idle_gap_after_tool_s": "... after a tool call",
    "idle_gap_after_user_s": "... after a user turn",
    "start_to_start_s": "start to start, s",
    "service_s": "recorded service time, s",
    "ttft_s": "recorded TTFT, s",
    "decode_tok_s": "recorded decode rate, tokens/s",
    "e2e_tok_s": "recorded output rate, tokens/s",
    "session_span_s": "session span, s",
    "session_service_s": "session service time, s",
    "session_reuse_share": "session prefix reuse, share",
    "peak_in_flight": "most requests at once in a session",
    "subagents_per_session": "subagents / session",
    "requests_per_subagent": "requests / subagent",
    "subagent_duration_s": "subagent duration, s",
}


COUNT_LABELS = {"input_multiple_of_block": "inputs that end on a block's edge"}
"""Where the name with spaces says too little."""

SUMMARY_CAP_S = 60.0
"""The pause cap whose duty cycle the summary gives."""


class Sheet(NamedTuple):
    """A table to print or to put on a page: what it says, its columns, its rows (first column left, rest right)."""

    title: str
    about: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@app.command
def inspect(
    path: Path,
    /,
    *,
    format: str | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
    html: Path | None = None,
) -> None:
    """Say what a workload is: lengths, pauses, prefix reuse, context need, and how busy it keeps a lane.

    Look here before you replay: whether the prompts fit the server's context (context need), how large a pause cap
    must be for lanes to be busy (lane duty cycle), how much a prefix cache can save (prefix reuse), and what reading
    the files dropped or guessed (notes).

    Example: decodegate workload inspect traces/ --html workload.html

    Parameters
    ----------
    path
        A folder of *.json or *.jsonl files, or one such file.
    format
        Name of the format, if it is not recognised (weka).
    json
        Print everything as JSON instead of tables. What is unknown is null.
    html
        Also write a page with charts to this file; it opens without a network.
    """
    notes = Notes()
    digest = hashlib.sha256()
    found = statistics(formats.digesting(formats.read(path, notes, format=format), digest))
    for kind in (kind for kind in notes.counts if "skipped" in kind):
        Console(stderr=True, soft_wrap=True).print(
            f"{notes.counts[kind]:,} x {kind}; the first: {notes.first[kind]}", markup=False, highlight=False
        )
    if html is not None:
        _write(html, _page(path, digest.hexdigest(), found, notes))
    if json:
        document = {"path": str(path), "digest": digest.hexdigest(), "notes": notes, "statistics": found}
        print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
        return
    console = Console() if Console().is_terminal else Console(width=_WIDE)
    console.print(f"[bold]{path}[/]  content digest {digest.hexdigest()[:16]}", highlight=False)
    for line in summary(found, notes):
        console.print(f"  {line}", highlight=False, markup=False)
    console.print()
    for sheet in sheets(found, notes):
        table = Table(
            title=sheet.title, caption=sheet.about, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0)
        )
        table.title_style, table.caption_style, table.caption_justify = "bold", "dim", "left"
        shown = [place for place, column in enumerate(sheet.columns) if console.width >= _WIDE or column not in _SPARE]
        for place in shown:
            table.add_column(sheet.columns[place], justify="right" if place else "left", no_wrap=0 < place < 10)
        for row in sheet.rows:
            table.add_row(*[row[place] for place in shown])
        console.print(table)
    if html is not None:
        console.print(f"charts: {html}")


@app.command(name="generate")
def generate_command(
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    settings: Annotated[GeneratorSettings | None, Parameter(name="*")] = None,
) -> None:
    """Write synthetic agent sessions whose lengths, pauses, rewinds and subagents follow measured ones.

    The same settings give the same sessions on every machine. The file is in the Weka format, one session a line, which
    other replay tools read too. Without options the sessions are as long as recorded ones (a median prompt of 100k
    tokens, pauses of up to hours); scale them down for a small server:

    Example: decodegate workload generate -o small.jsonl --sessions 40 --input-scale 0.1 --max-context 30000

    Parameters
    ----------
    output
        File to write (.jsonl).
    """
    if output.suffix not in (".jsonl", ".ndjson"):
        raise UserError(f"{output}: one session is written a line, so name the file something.jsonl")
    if output.exists():
        raise UserError(f"{output} exists, and is not overwritten: remove it, or name another file")
    try:
        written = weka.write(generate(settings or GeneratorSettings()), output)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}") from None
    print(f"{written} sessions written to {output}; see: decodegate workload inspect {output}")


def summary(found: Statistics, notes: Notes) -> list[str]:
    """What to know first, a line each: size, context, pauses, reuse, and what reading dropped."""
    sessions, requests = found.counts["sessions"], found.counts["requests"]
    context, gaps = found.distributions["peak_context_tokens"], found.distributions["idle_gap_s"]
    duty = next(duty.duty for duty in found.duty if duty.cap_s == SUMMARY_CAP_S)
    dropped = [f"{count:,} x {kind}" for kind, count in notes.counts.items()]
    return [
        f"size: {sessions:,} sessions, {requests:,} requests ({_number(requests / sessions if sessions else None)} a "
        "session)",
        f"context needed, tokens a session: P50 {_number(context.p50)}, P90 {_number(context.p90)}, "
        f"max {_number(context.max)}",
        f"pauses: P50 {_seconds(gaps.p50)}, P90 {_seconds(gaps.p90)}; with a cap of {SUMMARY_CAP_S:g} s a lane has a "
        f"request in service {_percent(duty)} of the time",
        f"prefix reuse: an unlimited cache holds {_percent(found.reuse.tokens)} of the prompt tokens",
        f"reading dropped or guessed: {', '.join(dropped) or 'nothing'}",
    ]


def _in_order(kind: str, of_kind: dict[str, int]) -> list[tuple[str, int]]:
    """Labels by frequency, as they come; sizes by size."""
    sizes = [size for _, size in REWIND_SIZES]
    return (
        sorted(of_kind.items(), key=lambda item: sizes.index(item[0]))
        if kind == "rewind_blocks"
        else [*of_kind.items()]
    )


def sheets(found: Statistics, notes: Notes) -> list[Sheet]:
    """Everything in the statistics, as tables."""
    counts, labels, reuse = found.counts, found.labels, found.reuse
    result = [
        Sheet(
            "Counts",
            "",
            ("", "number"),
            [
                *((COUNT_LABELS.get(name, name.replace("_", " ")), f"{value:,}") for name, value in counts.items()),
                ("input : output tokens", _ratio(counts["input_tokens"], counts["output_tokens"])),
                ("uncached input : output tokens", _ratio(counts["uncached_tokens"], counts["output_tokens"])),
            ],
        ),
        Sheet(
            "Distributions",
            "Percentiles of all values of a kind; '-': no value is recorded. Tools + system prompt: tool definitions "
            "and system prompt at the front of a session, at the length that the recording declares.",
            ("", "n", "mean", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "max"),
            [
                (
                    LABELS[name],
                    f"{d.n:,}",
                    *map(_number, (d.mean, d.p10, d.p25, d.p50, d.p75, d.p90, d.p95, d.p99, d.max)),
                )
                for name, d in found.distributions.items()
            ],
        ),
        Sheet(
            "Prefix reuse",
            "Share of prompt blocks that an unlimited cache holds, each session on its own.",
            ("against", "share"),
            [
                ("the previous request of the stream", _percent(reuse.previous, 2)),
                ("blocks seen in the session (leading run)", _percent(reuse.set, 2)),
                ("prefix tree of the session", _percent(reuse.trie, 2)),
                ("prefix tree, share of prompt tokens", _percent(reuse.tokens, 2)),
            ],
        ),
        Sheet(
            "Context need",
            "Input and output together. A server with less context cannot take these.",
            ("above, tokens", "requests", "share", "sessions with any", "share"),
            [
                (
                    f"{limit.limit:,}",
                    f"{limit.requests:,}",
                    _percent(limit.requests_share),
                    f"{limit.sessions:,}",
                    _percent(limit.sessions_share),
                )
                for limit in found.context_limits
            ],
        ),
        Sheet(
            "Idle gaps",
            "",
            ("longer than", "share of gaps", "share of idle time"),
            [(f"{idle.above_s:g} s", _percent(idle.gaps_share), _percent(idle.time_share)) for idle in found.idle],
        ),
        Sheet(
            "Lane duty cycle",
            "Share of a lane's time with a request in service, at recorded service times, if no pause is longer "
            "than the cap.",
            ("pause cap", "duty", "lane hours / session"),
            [
                (
                    "none" if duty.cap_s is None else f"{duty.cap_s:g} s",
                    _percent(duty.duty),
                    _number(duty.hours_per_session),
                )
                for duty in found.duty
            ],
        ),
        Sheet(
            "Labels",
            "",
            ("kind", "label", "number"),
            [
                (kind.replace("_", " "), label or "(empty)", f"{number:,}")
                for kind, of_kind in labels.items()
                for label, number in _in_order(kind, of_kind)
            ],
        ),
    ]
    if notes.counts:
        kinds = sorted(notes.counts, key=lambda kind: -notes.counts[kind])
        rows = [(kind, f"{notes.counts[kind]:,}", notes.first[kind]) for kind in kinds]
        result.append(Sheet("Notes from reading", "", ("what", "times", "first"), rows))
    return result


def _page(path: Path, digest: str, found: Statistics, notes: Notes) -> str:
    from workloads import charts  # costs a second, and most calls draw nothing

    lines = "".join(f"<li>{html.escape(line)}</li>" for line in summary(found, notes))
    parts = [f"<p>Content digest {digest}</p><ul>{lines}</ul>"]
    for sheet in sheets(found, notes):
        head = "".join(f"<th>{html.escape(column)}</th>" for column in sheet.columns)
        rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in sheet.rows)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        parts.append(f"<h2>{html.escape(sheet.title)}</h2><p>{html.escape(sheet.about)}</p>")
        parts.append(f"<table><tr>{head}</tr>{body}</table>")
    return charts.page(f"Workload {path}", found, "\n".join(parts))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def _number(value: float | None) -> str:
    """Three figures and a unit (k, M, G) from 10,000 on; '-' for what is not known."""
    if value is None:
        return "-"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= max(size, 1e4):
            scaled = value / size
            return f"{scaled:.0f}{unit}" if abs(scaled) >= 100 else f"{scaled:.3g}{unit}"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _seconds(value: float | None) -> str:
    return f"{_number(value)} s" if value is not None else "-"


def _percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def _ratio(part: float, whole: float) -> str:
    return f"{part / whole:.1f} : 1" if whole else "-"
