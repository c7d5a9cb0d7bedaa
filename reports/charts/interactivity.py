"""Distribution of interactivity of both backends, with P90 interactivity marked."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from reports.analysis import Analysis
from reports.charts.chart import Chart, Drawn
from reports.charts.shares import shares


def draw(analyses: Sequence[Analysis]) -> Drawn | None:
    """Share of paired turns that are at least this fast; None without pairs."""
    # ITL is at most t on the same share of turns on which interactivity is at least 1 / t
    points = [
        (curve.backend, 1 / seconds, share)
        for curve in analyses[0].series.itl
        for share, seconds in zip(curve.share, curve.seconds, strict=True)
    ]
    # the fastest per cent (short answers in few chunks) would squeeze the rest to the left
    furthest = max((value for _, value, share in points if share >= 0.01), default=1.0)
    scale = alt.Scale(domain=[0, furthest], clamp=True, nice=False)
    x = alt.X("value:Q", title="interactivity, tokens/s", scale=scale)
    return shares(analyses[0], points, x, "share of turns at least this fast", "tokens/s")


CHART = Chart(
    "interactivity",
    "Interactivity",
    "Share of paired turns whose decode rate is at least a value; the dashed line at 90 % crosses each curve at its "
    "P90 interactivity. Each curve is the mean over its backend's blocks, in time; the fastest 1 % may lie outside.",
    draw,
)
