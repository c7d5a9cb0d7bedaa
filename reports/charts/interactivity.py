"""Distribution of seconds per token (ITL) of both backends, with the P90 marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from reports.analysis import Analysis
from reports.charts.chart import HEIGHT, MUTED, WIDTH, Chart, Drawn, colour, data
from reports.series import Distribution


def draw(analyses: Sequence[Analysis]) -> Drawn | None:
    """ECDF of ITL; None without pairs."""
    return ecdf(analyses[0], analyses[0].series.itl, "ITL, milliseconds per token", log=False)


def ecdf(analysis: Analysis, curves: list[Distribution], title: str, *, log: bool) -> Drawn | None:
    """Share of pairs at or below a time, from the quantile functions; a rule at 90 % and points where it is met."""
    if not curves:
        return None
    rows: list[dict[str, Any]] = [
        {"backend": curve.backend, "ms": seconds * 1e3, "share": share}
        for curve in curves
        for share, seconds in zip(curve.share, curve.seconds, strict=True)
    ]
    ninety = [row for row in rows if row["share"] == 0.9]
    # the slowest per cent would squeeze the rest to the left
    furthest = max(row["ms"] for row in rows if row["share"] <= 0.991)
    scale = alt.Scale(type="log", nice=False) if log else alt.Scale(domain=[0, furthest], clamp=True, nice=False)
    x = alt.X("ms:Q", title=title, scale=scale)
    y = alt.Y("share:Q", title="share of turns", axis=alt.Axis(format="%"))
    lines = alt.Chart(data(rows)).mark_line(strokeWidth=1.8, clip=True).encode(x=x, y=y, color=colour(analysis))
    rule = alt.Chart(data([{"share": 0.9}])).mark_rule(strokeDash=[3, 3], color=MUTED).encode(y="share:Q")
    points = (
        alt.Chart(data(ninety)).mark_point(filled=True, size=55, opacity=1).encode(x=x, y=y, color=colour(analysis))
    )
    slower = max(ninety, key=lambda row: row["ms"])
    labels = [
        # the faster curve's label above and left of its point, the slower one's below and right: neither hides a curve
        alt.Chart(data([{**row, "label": f"P90 {row['ms']:.3g} ms"}]))
        .mark_text(
            align="left" if row is slower else "right",
            baseline="top" if row is slower else "bottom",
            dx=7 if row is slower else -7,
            dy=5 if row is slower else -5,
        )
        .encode(x=x, y=y, text="label:N")
        for row in ninety
    ]
    return alt.layer(rule, lines, points, *labels).properties(width=WIDTH, height=HEIGHT)


CHART = Chart(
    "ecdf",
    "Seconds per token",
    "Share of paired turns whose ITL is at or below a value; P90 interactivity is 1 / the marked P90. Each curve is "
    "the mean over its backend's blocks; the slowest 1 % may lie outside.",
    draw,
)
