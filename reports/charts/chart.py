"""What the charts share: colours that follow the page's light or dark scheme, and the way to SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import altair as alt
import msgspec

from reports.analysis import Analysis

WIDTH, HEIGHT = 430, 260

BASELINE, CANDIDATE = "#0a0b01", "#0a0b02"
INK, MUTED, _GRID = "#0a0b03", "#0a0b04", "#0a0b05"
_VARIABLES = {BASELINE: "--baseline", CANDIDATE: "--candidate", INK: "--ink", MUTED: "--muted", _GRID: "--rule"}
"""Colours stand for variables of the page's style sheet; the numbers themselves are never seen."""

FEW = alt.Axis(labelOverlap="greedy", labelSeparation=10)
"""For logarithmic axes: labels that would touch are left out."""

Drawn = alt.Chart | alt.LayerChart | alt.FacetChart | alt.VConcatChart
Draw = Callable[[Sequence[Analysis]], Drawn | None]


class Chart(msgspec.Struct, frozen=True):
    """One chart of the report. ``draw`` gets the analysis and those of further runs; None leaves the chart out."""

    id: str
    title: str
    caption: str
    draw: Draw


def data(rows: list[dict[str, Any]]) -> alt.InlineData:
    """Rows as the chart's own data."""
    return alt.InlineData(values=rows)


def colour(analysis: Analysis) -> alt.Color:
    """Baseline and candidate, always in the same colours."""
    return colours([backend.name for backend in analysis.backends])


def colours(names: Sequence[str]) -> alt.Color:
    """Baseline's and candidate's name in their colours."""
    scale = alt.Scale(domain=list(names), range=[BASELINE, CANDIDATE])
    return alt.Color("backend:N", scale=scale, legend=alt.Legend(title=None, orient="top", direction="horizontal"))


def svg(chart: Chart, analyses: Sequence[Analysis]) -> str | None:
    """The chart as an SVG element to be put into a page; None if it has nothing to draw."""
    drawn = chart.draw(analyses)
    return svg_of(drawn, chart.id, chart.title) if drawn is not None else None


def svg_of(drawn: Drawn, id: str, title: str) -> str:
    """Something drawn as an SVG element to be put into a page, where no other has this id. The same data give the same
    bytes."""
    file = io.StringIO()
    _themed(drawn).save(file, format="svg")
    text = file.getvalue()
    # ids are numbered on through all charts that a process draws, and those of two charts would clash in one page
    ids = {name: f"{id}-{n}" for n, name in enumerate(dict.fromkeys(re.findall(r'\bid="([^"]+)"', text)))}
    text = re.sub(r'(\bid="|url\(#|href="#)([^")]+)', lambda found: found[1] + ids[found[2]], text)
    for shade, variable in _VARIABLES.items():
        text = text.replace(shade, f"var({variable})")
    return text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def _themed(drawn: Drawn) -> Any:
    font = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
    axis = {
        "labelColor": MUTED, "titleColor": INK, "gridColor": _GRID, "domainColor": MUTED, "tickColor": MUTED,
        "labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": 500, "titlePadding": 8,
    }  # fmt: skip
    text = {"labelColor": INK, "titleColor": INK, "labelFontSize": 11, "titleFontSize": 11}
    return drawn.configure(
        background="transparent", font=font,
        padding={"left": 4, "top": 4, "bottom": 4, "right": 14}, axis=axis, legend={**text, "symbolSize": 80},
        header={**text, "labelFontWeight": 500, "title": None}, view={"stroke": "transparent"},
        text={"color": INK, "fontSize": 11},
    )  # fmt: skip
