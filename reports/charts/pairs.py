"""Each paired turn: candidate against baseline."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from reports.analysis import Analysis
from reports.charts.chart import CANDIDATE, FEW, HEIGHT, MUTED, WIDTH, Chart, Drawn, data


def draw(analyses: Sequence[Analysis]) -> Drawn | None:
    """Scatter of interactivity with the line of equality; None without pairs."""
    points = analyses[0].series.pairs
    if not points:
        return None
    low, high = min(min(pair) for pair in points), max(max(pair) for pair in points)
    baseline, candidate = (backend.name for backend in analyses[0].backends)
    scale = alt.Scale(type="log", domain=[low * 0.95, high * 1.05], nice=False)
    x = alt.X("x:Q", scale=scale, title=f"{baseline}, tokens/s", axis=FEW)
    y = alt.Y("y:Q", scale=scale, title=f"{candidate}, tokens/s", axis=FEW)
    ends = [{"x": end, "y": end} for end in (low * 0.95, high * 1.05)]
    diagonal = alt.Chart(data(ends)).mark_line(color=MUTED, strokeDash=[3, 3], strokeWidth=1).encode(x=x, y=y)
    dots = (
        alt.Chart(data([{"x": x_value, "y": y_value} for x_value, y_value in points]))
        .mark_circle(size=12, opacity=0.45, color=CANDIDATE)
        .encode(x=x, y=y)
    )
    return alt.layer(diagonal, dots).properties(width=WIDTH, height=HEIGHT)


CHART = Chart(
    "pairs",
    "Turn by turn",
    "Interactivity of the same turn on both backends; above the diagonal the candidate is faster. At most 1,000 evenly "
    "chosen pairs.",
    draw,
)
