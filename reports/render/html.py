"""One HTML file that needs nothing else: styles and charts (SVG) are inside."""

from __future__ import annotations

from collections.abc import Sequence

from reports.analysis import Analysis
from reports.charts import CHARTS
from reports.charts.chart import svg
from reports.render.page import TEMPLATES, fill


def render(analyses: Sequence[Analysis]) -> str:
    """The report of the first analysis; the others add points to the chart over runs."""
    drawn = [(chart, svg(chart, analyses)) for chart in CHARTS]
    css = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    return fill("page.html", analyses, css=css, charts=[(chart, text) for chart, text in drawn if text])
