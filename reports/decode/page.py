"""The report of decode tables as text: what HTML, Markdown and the console share is made here, in words."""

from __future__ import annotations

from collections import Counter

import msgspec

from reports.charts.chart import svg_of
from reports.decode.analysis import Analysis, Published, Table
from reports.decode.cells import CellResult, Side
from reports.decode.charts import drawn
from reports.decode.effects import Estimate
from reports.decode.windows import WindowResult
from reports.render import words
from reports.render.page import TEMPLATES, template_of


class Grid(msgspec.Struct, frozen=True):
    """A table in words: cells are (text, what stands below it in smaller print)."""

    head: list[str]
    rows: list[list[tuple[str, str]]]


def markdown(analysis: Analysis) -> str:
    """Without charts."""
    return template_of("decode/page.md").render(**_context(analysis))


def html(analysis: Analysis) -> str:
    """One file that needs nothing else."""
    css = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    charts = [(each, svg_of(each.chart, each.id, each.title)) for each in drawn(analysis)]
    return template_of("decode/page.html").render(css=css, charts=charts, **_context(analysis))


def _context(analysis: Analysis) -> dict[str, object]:
    return {
        "a": analysis,
        "w": words,
        "tags": [stamp.split(":")[0] for stamp in analysis.stamps],
        "summary": summary(analysis),
        "tables": [(table, rates(analysis, table), _steps(table), _columns(table)) for table in analysis.tables],
        "published": _published(analysis),
        "windows": _windows(analysis),
        "setups": [(setup.label, setup, _facts(analysis, number)) for number, setup in enumerate(analysis.setups)],
        "provenance": _provenance(analysis),
    }


def summary(analysis: Analysis) -> str:
    """The one thing that is said of several cells together."""
    found = analysis.ratios
    if found is None:
        unproven = any(cell.ratio.value is not None and cell.outcome not in _NO_EFFECT for cell in analysis.cells)
        if unproven:
            return "No cell's candidate is known to have run specialised: no ratio is named here."
        return "No cell has a ratio to be named here."
    which = f"{found.cells} {found.of}" if found.cells > 1 else found.of.replace("cells", "the one cell")
    if found.cells == 1:
        return f"Ratio candidate / baseline in {which}: {found.low:.3f}."
    return (
        f"Ratio candidate / baseline over {which}: {found.low:.3f} to {found.high:.3f}. No average is taken over cells."
    )


_NO_EFFECT = ("no result", "acceptance differs")


def finished(analysis: Analysis) -> str:
    """ "11 of 12 windows finished"."""
    return f"{len(analysis.windows)} of {len(analysis.windows) + analysis.missing} windows finished"


def notes(analysis: Analysis) -> list[str]:
    """What was set aside or dropped while reading, and what windows say of themselves, those that say the same
    together."""
    said = Counter(note for window in analysis.windows for note in window.notes)
    return [
        *(f"{each.name}: not judged, {each.why}" for each in analysis.set_aside),
        *analysis.notes,
        *(f"{_many(count, 'window')}: {note}" for note, count in said.items()),
    ]


def brief(table: Table) -> Grid:
    """The same as ``rates``, as narrow as a terminal asks for: baseline's above candidate's in the last columns."""
    head = ["batch", "base", "cand.", "ratio", "outcome", "per step", "path"]
    rows = []
    for cell in table.cells:
        sides = (cell.baseline, cell.candidate)
        rows.append(
            [
                (str(cell.batch), ""),
                *((_level(rate), _narrow(_interval(rate))) for rate in (side.decode_tokens_per_s for side in sides)),
                (_ratio(cell.ratio), _narrow(_between(cell.ratio))),
                (cell.outcome, ""),
                ("\n".join(_per_step(side.tokens_per_step.value) for side in sides), ""),
                ("\n".join(_brief_path(side) for side in sides), ""),
            ]
        )
    return Grid(head, rows)


def _narrow(interval: str) -> str:
    return interval.replace(" to ", "–")


def _brief_path(side: Side) -> str:
    """ "specialised 100%", "FULL 98%", "standard"."""
    path = side.path
    if path.share is not None and path.counted == "specialised":
        return f"specialised {path.share:.0%}"
    if path.status == "specialised":
        return "spec., predicted"
    if path.full_graphs is not None:
        return f"FULL {path.full_graphs:.0%}"
    return path.status.removesuffix(" decode")


def rates(analysis: Analysis, table: Table) -> Grid:
    """Decode rates by batch."""
    levels = [f"{name}, tokens/s" for name in analysis.names]
    head = ["batch", *levels, "candidate / baseline", "outcome", "tokens per step", "decode path", "marks"]
    return Grid(head, [_rate_row(cell) for cell in table.cells])


def _rate_row(cell: CellResult) -> list[tuple[str, str]]:
    sides = (cell.baseline, cell.candidate)
    ratio, below = _ratio(cell.ratio), _between(cell.ratio)
    if cell.outcome == "acceptance differs":
        ratio = f"not a backend effect: {ratio}"
        below += f"; of steps per second {_ratio(cell.steps_ratio)} ({_between(cell.steps_ratio)})"
    return [
        (str(cell.batch), ""),
        *((_level(side.decode_tokens_per_s), _behind(side)) for side in sides),
        (ratio, below),
        (cell.outcome, "; ".join(cell.reasons)),
        (" / ".join(_per_step(side.tokens_per_step.value) for side in sides), ""),
        (" / ".join(_path(side) for side in sides), ""),
        ("; ".join(cell.marks) or words.DASH, ""),
    ]


def _level(estimate: Estimate) -> str:
    return words.number(estimate.value, 4) if estimate.value is not None else words.DASH


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{words.number(estimate.low, 4)} to {words.number(estimate.high, 4)}"


def _ratio(estimate: Estimate) -> str:
    return f"{estimate.value:.3f}" if estimate.value is not None else words.DASH


def _between(estimate: Estimate) -> str:
    return f"{estimate.low:.3f} to {estimate.high:.3f}" if estimate.low is not None else ""


def _behind(side: Side) -> str:
    """ "840 to 844; 6 windows, 2 passes, 2 starts"."""
    starts = f", {_many(side.starts, 'start')}" if side.starts else ""
    found = f"{_many(side.windows, 'window')}, {_many(side.passes, 'pass', 'passes')}{starts}"
    return "; ".join(filter(None, [_interval(side.decode_tokens_per_s), found]))


def _many(count: int, one: str, several: str = "") -> str:
    return f"{count} {one if count == 1 else several or one + 's'}"


def _per_step(value: float | None) -> str:
    return f"{value:.3f}" if value is not None else words.DASH


def _path(side: Side) -> str:
    """ "98.2% specialised"; the status where no log tells."""
    path = side.path
    if path.share is not None and path.counted == "specialised":
        return f"{words.share(path.share)} specialised"
    shares = [(path.share, path.counted), (path.full_graphs, "in FULL graphs without prompts")]
    told = next((f": {words.share(share)} {what}" for share, what in shares if share is not None), "")
    predicted = ", predicted" if path.status == "specialised" and not path.measured else ""
    return f"{path.status}{predicted}{told}"


def _steps(table: Table) -> Grid:
    head = [
        "batch",
        "backend",
        "steps/s",
        "tokens per step",
        "from chunks",
        "from usage",
        "from counters",
        "agree",
        "trusted",
    ]
    rows = []
    for cell in table.cells:
        for side in (cell.baseline, cell.candidate):
            per_step = side.tokens_per_step
            agree = {True: "yes", False: "no", None: words.DASH}[per_step.agree]
            rows.append(
                [
                    (str(cell.batch), ""),
                    (side.backend, ""),
                    (words.number(side.steps_per_s, 4), ""),
                    *(
                        (_per_step(value), "")
                        for value in (per_step.value, per_step.chunks, per_step.usage, per_step.counters)
                    ),
                    (agree, ""),
                    (per_step.trusted or words.DASH, per_step.why if side.windows else ""),
                ]
            )
    return Grid(head, rows)


def _columns(table: Table) -> Grid:
    head = ["batch", "backend", "prefill, tokens/s", "TTFT median (worst)", "TPOT mean (median)",
            "output rate, tokens/s", "E2E median (worst)", "in the window", "per GPU, tokens/s",
            "energy per token, J"]  # fmt: skip
    rows = []
    for cell in table.cells:
        for side in (cell.baseline, cell.candidate):
            c = side.columns
            rows.append(
                [
                    (str(cell.batch), ""),
                    (side.backend, ""),
                    (words.number(c.prefill_tokens_per_s), ""),
                    (words.seconds(c.ttft_median_s), words.seconds(c.ttft_worst_s)),
                    (words.seconds(c.tpot_mean_s), words.seconds(c.tpot_median_s)),
                    (words.number(c.output_rate_median, 4), ""),
                    (words.seconds(c.e2e_median_s), words.seconds(c.e2e_worst_s)),
                    (words.share(c.share_in_window), words.seconds(c.window_s)),
                    (words.number(side.decode_tokens_per_s_per_gpu, 4), ""),
                    (words.number(side.energy_per_output_token_j), ""),
                ]
            )
    return Grid(head, rows)


def _published(analysis: Analysis) -> Grid:
    baseline, candidate = analysis.names
    head = [
        "published row",
        "standard",
        "specialised",
        "ratio, as published",
        "cell here",
        baseline,
        candidate,
        "candidate / baseline",
    ]
    return Grid(head, [_published_row(analysis, each) for each in analysis.published])


def _published_row(analysis: Analysis, each: Published) -> list[tuple[str, str]]:
    row = each.row
    derived = " (from the ratio)" if row.standard_derived else ""
    told = f"{row.source}{f', {row.date}' if row.date else ''}. {row.note}".strip()
    shown = [
        (f"{row.id}: {row.metric}", told),
        (f"{row.standard:g}{derived}", ""),
        (f"{row.specialised:g}", ""),
        (f"{row.ratio:g}" if row.ratio is not None else words.DASH, ""),
    ]
    if each.own_baseline is None or each.own_candidate is None or each.own_ratio is None:
        near = f"nearest: cell {each.cell}" if each.cell is not None else "none"
        why = "; ".join(each.differs)
        return [*shown, (near, f"not side by side: {why}"), *[(words.DASH, "")] * 3]
    unstated = f"not stated by the source: {', '.join(each.unstated)}" if each.unstated else ""
    stamped = f"cell {each.cell}" + (" (EMULATED)" if analysis.emulated else "")
    return [
        *shown,
        (stamped, unstated),
        *((_level(own), _interval(own)) for own in (each.own_baseline, each.own_candidate)),
        (_ratio(each.own_ratio), _between(each.own_ratio)),
    ]


def _windows(analysis: Analysis) -> Grid:
    head = [
        "window",
        "cell",
        "pass",
        "tokens/s",
        "window",
        "steps",
        "step",
        "client lag",
        "tokens per chunk by",
        "streams",
    ]
    return Grid(head, [_window_row(each) for each in analysis.windows])


def _window_row(each: WindowResult) -> list[tuple[str, str]]:
    found = each.figures
    lag = f"{each.client_lag_ms:.2f} ms" if each.client_lag_ms is not None else words.DASH
    limit = f"limit {each.client_lag_limit_ms:.2f} ms, {each.limit_is}" if each.client_lag_limit_ms is not None else ""
    return [
        (each.name, "; ".join(each.notes)),
        (str(each.cell + 1), ""),
        (str(each.pass_number), ""),
        (words.number(found.decode_tokens_per_s, 4), "") if found else ("no result", "; ".join(map(str, each.why))),
        (words.seconds(found.window_s) if found else words.DASH, ""),
        (words.count(found.steps) if found else words.DASH, ""),
        (words.seconds(found.step_s) if found else words.DASH, ""),
        (lag, limit),
        (words.counted(each.token_sources), ""),
        (words.counted(each.statuses), words.counted(each.failures) if each.failures else ""),
    ]


def _facts(analysis: Analysis, number: int) -> list[tuple[str, list[str]]]:
    def line(index: int) -> list[tuple[str, str]]:
        b = analysis.setups[number].backends[index]
        seen = None if b.emulated else f"{b.gpus_seen}, verified through NVML" if b.gpus_seen else "not verified"
        return [
            ("Decode backend", b.decode_backend),
            ("Started as", b.command or (f"at {b.url}" if b.url else words.DASH)),
            ("GPUs", "; ".join(filter(None, [b.gpus or "not declared", seen]))),
            ("Settings", words.settings(b.settings)),
            ("Rule of the specialised path", b.rule or "none is known"),
        ]

    return [(one[0], [one[1], other[1]]) for one, other in zip(line(0), line(1), strict=True)]


def _provenance(analysis: Analysis) -> list[tuple[str, str]]:
    def listed(values: dict[str, str]) -> str:
        return ", ".join(f"{key} {value}" for key, value in values.items()) or words.DASH

    return [
        ("Order of windows", analysis.order),
        ("Windows of a cell in one pass", str(analysis.repeats)),
        (
            "Warm-up before each window",
            f"the same batch, {analysis.warmup_tokens} output tokens a stream, not measured",
        ),
        ("Measured", f"{analysis.created_utc} with decodegate {analysis.decodegate_version}"),
        ("Client host", listed(analysis.host)),
        ("Versions", listed(analysis.versions)),
    ]
