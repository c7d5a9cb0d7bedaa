"""The charts of decode tables: rates, and their ratio, against the batch."""

from __future__ import annotations

from typing import Any

import altair as alt
import msgspec

from reports.charts.chart import CANDIDATE, FEW, HEIGHT, MUTED, WIDTH, Drawn, colours, data
from reports.decode.analysis import Analysis, Table


class Figure(msgspec.Struct, frozen=True):
    """One chart, ready to be put into the page."""

    id: str
    title: str
    caption: str
    chart: Drawn


def drawn(analysis: Analysis) -> list[Figure]:
    """Two charts for each table with results at several batch sizes."""
    found = []
    for number, table in enumerate(analysis.tables):
        rate, ratio = _rates(analysis, table), _ratios(table)
        if rate is not None:
            caption = "Total tokens/s over the common decode window; 95 % intervals over windows."
            found.append(Figure(f"rate-{number}", f"Decode rate: {table.title}", caption, rate))
        if ratio is not None:
            caption = (
                "Of the decode rates, with 95 % intervals. Hollow: cells that are not in the range of ratios (standard "
                "decode, another acceptance, no result)."
            )
            found.append(Figure(f"ratio-{number}", f"Candidate / baseline: {table.title}", caption, ratio))
    return found


def _batch(batches: list[int]) -> alt.X:
    axis = alt.Axis(values=batches, labelExpr="datum.value")
    return alt.X("batch:Q", title="batch (log)", scale=alt.Scale(type="log", base=2, nice=False), axis=axis)


def _rates(analysis: Analysis, table: Table) -> Drawn | None:
    rows = [
        {"batch": cell.batch, "backend": side.backend, "rate": found.value, "low": found.low, "high": found.high}
        for cell in table.cells
        for side in (cell.baseline, cell.candidate)
        if (found := side.decode_tokens_per_s).value is not None
    ]
    batches = sorted({int(str(row["batch"])) for row in rows})
    if len(batches) < 2:
        return None
    base = alt.Chart(data(rows)).encode(x=_batch(batches), color=colours(analysis.names))
    lines = base.mark_line(point=alt.OverlayMarkDef(size=40), strokeWidth=1.8).encode(
        y=alt.Y("rate:Q", title="decode rate, tokens/s (log)", scale=alt.Scale(type="log", base=2), axis=FEW)
    )
    return _layered(lines, base.mark_rule(strokeWidth=1.4).encode(y="low:Q", y2="high:Q"))


def _ratios(table: Table) -> Drawn | None:
    rows = [
        {
            "batch": cell.batch,
            "ratio": cell.ratio.value,
            "low": cell.ratio.low,
            "high": cell.ratio.high,
            "fill": CANDIDATE if cell.in_range else "transparent",
        }
        for cell in table.cells
        if cell.ratio.value is not None
    ]
    batches = [int(str(row["batch"])) for row in rows]
    if len(batches) < 2:
        return None
    base = alt.Chart(data(rows)).encode(x=_batch(batches))
    points = base.mark_point(size=50, color=CANDIDATE, opacity=1).encode(
        y=alt.Y("ratio:Q", title="candidate / baseline", scale=alt.Scale(zero=False)),
        fill=alt.Fill("fill:N", scale=None),
    )
    spans = base.mark_rule(color=CANDIDATE, strokeWidth=1.4).encode(y="low:Q", y2="high:Q")
    even = alt.Chart(data([{"y": 1}])).mark_rule(color=MUTED, strokeDash=[4, 3]).encode(y="y:Q")
    return _layered(even, spans, points)


def _layered(*layers: Any) -> Drawn:
    chart: Drawn = alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)
    return chart
