"""One layer of both backends, kernel by kernel, under one another on the same axis of time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import altair as alt

from reports.charts.chart import INK, MUTED, Drawn, data
from reports.kernels.analysis import Analysis

ID, TITLE = "timeline", "One layer, kernel by kernel"
CAPTION = (
    "The repetition whose wall is nearest to the median; where a unit holds several layers, all of them. One bar a "
    "kernel, one row a stream, in µs from the start of the unit; the dashed line is where the next unit starts, by "
    "the median. The longest kernels of both are named, the same kernel in the same colour."
)

_WIDTH, _STREAM_HEIGHT = 900, 34
_NAMED = 9
_OTHER = "other"


def draw(analysis: Analysis) -> Drawn:
    """The chart, as wide as the page."""
    longest: dict[str, float] = {}
    for side in analysis.sides:
        for kernel in side.layers.top:
            longest[kernel.display] = max(longest.get(kernel.display, 0.0), kernel.us)
    named = sorted(longest, key=lambda name: (-longest[name], name))[:_NAMED]
    rest = [_OTHER] if len(longest) > len(named) else []
    palette = ["#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d", "#ff9da6"]
    scale = alt.Scale(domain=[*named, *rest], range=[*palette[: len(named)], *[MUTED for _ in rest]])
    walls = [side.layers.wall.median * side.layers.layers_per_unit for side in analysis.sides]
    furthest = max([*walls, *(span.end_us for side in analysis.sides for span in side.layers.timeline)])
    x = alt.X("start:Q", title="µs", scale=alt.Scale(domain=[0, furthest], nice=False))
    rows = []
    for side, wall in zip(analysis.sides, walls, strict=True):
        spans: list[dict[str, Any]] = [
            {
                "start": span.start_us,
                "end": span.end_us,
                "stream": str(span.stream),
                "kernel": span.kernel if span.kernel in named else _OTHER,
                "name": span.name,
            }
            for span in side.layers.timeline
        ]
        streams = [stream for stream, _ in Counter(span["stream"] for span in spans).most_common()]
        title = f"{side.name}: {side.layers.kernels_per_unit} kernels, {wall:,.1f} µs"
        bars = (
            alt.Chart(data(spans))
            .mark_bar(height={"band": 0.8}, stroke=INK, strokeWidth=0.4)
            .encode(
                x=x,
                x2="end:Q",
                y=alt.Y("stream:N", title="stream", sort=streams),
                color=alt.Color("kernel:N", scale=scale, legend=_legend() if side is analysis.sides[0] else None),
                tooltip=["name:N", "start:Q", "end:Q"],
            )
        )
        end = alt.Chart(data([{"start": wall}])).mark_rule(color=MUTED, strokeDash=[4, 3]).encode(x=x)
        rows.append(
            (bars + end).properties(
                width=_WIDTH,
                height=_STREAM_HEIGHT * len(streams),
                title=alt.TitleParams(title, anchor="start", fontSize=11, fontWeight=500, color=INK, offset=4),
            )
        )
    return alt.vconcat(*rows, spacing=10)


def _legend() -> alt.Legend:
    return alt.Legend(title=None, orient="top", direction="horizontal", columns=3, columnPadding=24, labelLimit=280)
