"""A curve for each backend: what share of turns lies on one side of a value; the 90 % line, and where it is crossed."""

from __future__ import annotations

from typing import Any

import altair as alt

from reports.analysis import Analysis
from reports.charts.chart import HEIGHT, MUTED, WIDTH, Drawn, colour, data
from reports.render.words import number

Point = tuple[str, float, float]
"""(backend, value, share of turns)."""


def shares(analysis: Analysis, points: list[Point], x: alt.X, y_title: str, unit: str) -> Drawn | None:
    """None without points. ``x`` encodes "value:Q"."""
    if not points:
        return None
    rows: list[dict[str, Any]] = [
        {"backend": backend, "value": value, "share": share} for backend, value, share in points
    ]
    ninety = [row for row in rows if row["share"] == 0.9]
    y = alt.Y("share:Q", title=y_title, axis=alt.Axis(format="%"))
    lines = alt.Chart(data(rows)).mark_line(strokeWidth=1.8, clip=True).encode(x=x, y=y, color=colour(analysis))
    rule = alt.Chart(data([{"share": 0.9}])).mark_rule(strokeDash=[3, 3], color=MUTED).encode(y="share:Q")
    crossings = (
        alt.Chart(data(ninety)).mark_point(filled=True, size=55, opacity=1).encode(x=x, y=y, color=colour(analysis))
    )
    # labels on the outer sides of the two points, so that neither hides the other or a curve
    right = max(ninety, key=lambda row: float(row["value"]))
    mine = [row for row in rows if row["backend"] == rows[0]["backend"]]
    falling = mine[0]["value"] > mine[-1]["value"]
    labels = [
        alt.Chart(data([{**row, "label": f"P90 {number(row['value'])} {unit}"}]))
        .mark_text(
            align="left" if row is right else "right",
            baseline="top" if (row is right) != falling else "bottom",
            dx=7 if row is right else -7,
            dy=5 if (row is right) != falling else -5,
        )
        .encode(x=x, y=y, text="label:N")
        for row in ninety
    ]
    return alt.layer(rule, lines, crossings, *labels).properties(width=WIDTH, height=HEIGHT)
