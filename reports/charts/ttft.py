"""Distribution of TTFT of both backends."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from reports.analysis import Analysis
from reports.charts.chart import FEW, Chart, Drawn
from reports.charts.shares import shares


def draw(analyses: Sequence[Analysis]) -> Drawn | None:
    """Share of paired turns at or below a TTFT, on a logarithmic axis; None without pairs."""
    points = [
        (curve.backend, seconds * 1e3, share)
        for curve in analyses[0].series.ttft
        for share, seconds in zip(curve.share, curve.seconds, strict=True)
    ]
    x = alt.X("value:Q", title="TTFT, milliseconds (log)", scale=alt.Scale(type="log", nice=False), axis=FEW)
    return shares(analyses[0], points, x, "share of turns at most this late", "ms")


CHART = Chart(
    "ttft",
    "Time to first token",
    "Share of paired turns whose TTFT, from the scheduled time, is at or below a value; the dashed line at 90 % "
    "crosses each curve at its P90.",
    draw,
)
