"""Distribution of TTFT of both backends."""

from __future__ import annotations

from collections.abc import Sequence

from reports.analysis import Analysis
from reports.charts.chart import Chart, Drawn
from reports.charts.interactivity import ecdf


def draw(analyses: Sequence[Analysis]) -> Drawn | None:
    """ECDF of TTFT on a logarithmic axis; None without pairs."""
    return ecdf(analyses[0], analyses[0].series.ttft, "TTFT, milliseconds (log)", log=True)


CHART = Chart(
    "ttft",
    "Time to first token",
    "Share of paired turns whose TTFT, from the scheduled time, is at or below a value.",
    draw,
)
