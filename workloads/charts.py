"""Charts of a workload, as one HTML page that needs no network: the drawings are inline SVG."""

from __future__ import annotations

import html
from typing import Any

import altair as alt
import vl_convert

from workloads.statistics import Statistics

BLUE, ORANGE, GREY = "#2563eb", "#d97706", "#6b7280"
Chart = alt.LayerChart | alt.FacetChart
"""What alt.layer gives."""

FORMATS = {"tokens": "~s", "seconds": "~r", "share": "%"}
WIDTH, HEIGHT = 400, 210


def charts(statistics: Statistics) -> dict[str, Chart]:
    """A chart for each question, by its title. Those that have nothing to show are left out."""
    found: dict[str, Chart] = {}
    curves = statistics.curves
    lengths = {"input": "input_tokens", "uncached input": "uncached_tokens", "output": "output_tokens"}
    pauses = {"after a tool call": "idle_gap_after_tool_s", "after a user turn": "idle_gap_after_user_s"}
    _add(found, "Tokens per request", _cumulative(curves, lengths, "tokens", 1.0, "requests"))
    _add(found, "Pause before a request", _cumulative(curves, pauses, "seconds", 0.1, "pauses"))
    reuse = {"sessions": "session_reuse_share"}
    _add(found, "Prompt tokens that a prefix cache can hold", _cumulative(curves, reuse, "share", 0.0, "sessions"))
    if statistics.counts["sessions"]:
        found["Context that is needed"] = _context(statistics)
        found["Lane time with a request in service"] = _duty(statistics)
    return found


def svg(chart: Chart) -> str:
    """The chart as SVG text."""
    drawn = vl_convert.vegalite_to_svg(_spec(chart))
    return str(drawn)


def page(title: str, statistics: Statistics, tables: str) -> str:
    """A self-contained HTML page: the charts, then ``tables`` (HTML) below them."""
    figures = "\n".join(
        f"<figure><figcaption>{html.escape(name)}</figcaption>{svg(chart)}</figure>"
        for name, chart in charts(statistics).items()
    )
    return PAGE.format(title=html.escape(title), figures=figures, tables=tables)


def _add(found: dict[str, Chart], title: str, chart: Chart | None) -> None:
    if chart is not None:
        found[title] = chart


def _spec(chart: Chart) -> dict[str, Any]:
    drawn = chart.properties(width=WIDTH, height=HEIGHT).configure(
        font="sans-serif",
        background="white",
        axis=alt.AxisConfig(labelFontSize=11, titleFontSize=12, titleFontWeight="normal", gridColor="#e5e7eb"),
        legend=alt.LegendConfig(labelFontSize=11, orient="top", title=None),
        view=alt.ViewConfig(stroke=None),
    )
    spec: dict[str, Any] = drawn.to_dict()
    return spec


def _cumulative(
    curves: dict[str, list[float]], series: dict[str, str], unit: str, least: float, of: str
) -> Chart | None:
    """Share of values at or below x, from 101 quantiles each, with the slow or costly tail marked: the 90th percentile,
    of shares the 10th. ``least`` above 0 makes x logarithmic, and is where values below it are drawn."""
    tail = 10 if unit == "share" else 90
    # the tail's values stand in the legend: beside their points they would hide one another
    told = {
        name: f"{name}, P{tail} {_short(curves[curve][tail], unit)}"
        for name, curve in series.items()
        if curve in curves
    }
    rows = [
        {"series": told[name], "x": max(value, least), "share": percent / 100}
        for name, curve in series.items()
        for percent, value in enumerate(curves.get(curve, []))
    ]
    if not rows:
        return None
    names = list(told.values())
    scale = alt.Scale(type="log" if least else "linear", nice=not least, zero=False)
    axis = alt.Axis(format=FORMATS[unit], tickCount=6)
    if least:
        axis.values = [10**power for power in range(-1, 8)]
    colour = alt.Color(
        "series:N",
        sort=names,
        scale=alt.Scale(domain=names, range=[BLUE, ORANGE, GREY][: len(names)]),
        legend=alt.Legend(),
    )
    x = alt.X("x:Q", scale=scale, axis=axis, title=unit)
    y = alt.Y("share:Q", axis=alt.Axis(format="%", tickCount=5), title=f"share of {of} at or below")
    base = alt.Chart(alt.InlineData(values=rows)).encode(x=x, y=y, color=colour)
    marks = alt.Chart(alt.InlineData(values=[row for row in rows if row["share"] == tail / 100])).encode(
        x=x, y=y, color=colour
    )
    return alt.layer(base.mark_line(strokeWidth=2), marks.mark_point(filled=True, size=45, opacity=1))


def _short(value: float, unit: str) -> str:
    """Three figures with a unit: "992", "6.02k", "31 s", "87 %"."""
    if unit == "share":
        return f"{value:.0%}"
    for letter, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{letter}" + (" s" if unit == "seconds" else "")
    return f"{value:.3g}" + (" s" if unit == "seconds" else "")


def _context(statistics: Statistics) -> Chart:
    rows = [
        {"limit": f"{limit.limit:,}", "of": of, "share": share}
        for limit in statistics.context_limits
        for of, share in (("requests", limit.requests_share), ("sessions with any", limit.sessions_share))
    ]
    order = [f"{limit.limit:,}" for limit in statistics.context_limits]
    return _bars(rows, "limit", order, "context limit, tokens", ["requests", "sessions with any"], "share above it")


def _duty(statistics: Statistics) -> Chart:
    rows = [
        {"cap": "none" if duty.cap_s is None else f"{duty.cap_s:g} s", "of": "duty", "share": duty.duty}
        for duty in statistics.duty
    ]
    return _bars(rows, "cap", [str(row["cap"]) for row in rows], "cap on every pause", ["duty"], "share of lane time")


def _bars(rows: list[dict[str, Any]], field: str, order: list[str], title: str, series: list[str], of: str) -> Chart:
    x = alt.X(f"{field}:N", sort=order, title=title, axis=alt.Axis(labelAngle=0))
    y = alt.Y(
        "share:Q", title=of, axis=alt.Axis(format="%", tickCount=5), scale=alt.Scale(domain=[0, 1.08], nice=False)
    )
    offset = alt.XOffset("of:N", sort=series)
    colour = alt.Color(
        "of:N",
        sort=series,
        scale=alt.Scale(domain=series, range=[BLUE, ORANGE][: len(series)]),
        legend=alt.Legend() if len(series) > 1 else None,
    )
    base = alt.Chart(alt.InlineData(values=rows)).encode(x=x, y=y, xOffset=offset)
    labels = base.transform_calculate(label="format(datum.share, '.0%')").encode(text="label:N")
    return alt.layer(base.mark_bar().encode(color=colour), labels.mark_text(dy=-6, fontSize=10))


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #111827; margin: 2rem auto; max-width: 1080px; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.1rem; margin: 2rem 0 .5rem; }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 1.5rem; }}
figure {{ margin: 0; }}
figcaption {{ font-weight: 600; margin-bottom: .3rem; }}
svg {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .2rem .7rem; border-bottom: 1px solid #e5e7eb; text-align: right; }}
th:first-child, td:first-child {{ text-align: left; }}
p {{ color: #4b5563; max-width: 75ch; }}
</style>
<h1>{title}</h1>
<div class="figures">
{figures}
</div>
{tables}
</html>
"""
