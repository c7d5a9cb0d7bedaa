"""What happened over time, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from reports.analysis import Analysis
from reports.charts.chart import INK, MUTED, WIDTH, Chart, Drawn, colour, data

_ROW_HEIGHT = 64


def draw(analyses: Sequence[Analysis]) -> Drawn | None:
    """For each block, in order: output tokens/s, and the requests in flight over the lanes in a session."""
    analysis = analyses[0]
    blocks = list(dict.fromkeys(point.block for point in analysis.series.time))
    if not blocks:
        return None
    unit, per_minute = ("seconds", 60) if max(p.minute for p in analysis.series.time) < 3 else ("minutes", 1)
    longest = max(point.minute for point in analysis.series.time) * per_minute
    rates = [point.output_tokens_per_s or 0.0 for point in analysis.series.time]
    lanes = [
        lanes
        for point in analysis.series.time
        for lanes in (point.in_flight, point.lanes_in_session)
        if lanes is not None
    ]
    legend = alt.Legend(title=None, orient="top", direction="horizontal")
    rows = []
    for block in blocks:
        points = [point for point in analysis.series.time if point.block == block]
        last = block == blocks[-1]
        x = alt.X(
            "at:Q",
            title=unit if last else None,
            scale=alt.Scale(domain=[0, longest], nice=False),
            axis=alt.Axis(labels=last, tickCount=6),
        )
        state: list[dict[str, Any]] = [
            {"at": point.minute * per_minute, "tokens": point.output_tokens_per_s, "backend": point.backend}
            for point in points
        ]
        title = alt.TitleParams(block, anchor="start", fontSize=11, fontWeight=500, color=INK, offset=4)
        tokens = (
            alt.Chart(data(state), title=title)
            .mark_area(opacity=0.75, interpolate="step")
            .encode(
                x=x,
                y=alt.Y("tokens:Q", title="tokens/s", scale=alt.Scale(domain=[0, max(max(rates), 1)]), axis=_few()),
                color=colour(analysis).legend(None),  # the title above says whose block it is
            )
            .properties(width=WIDTH, height=_ROW_HEIGHT)
        )
        counts = [
            {"at": point.minute * per_minute, "count": count, "what": what}
            for point in points
            for what, count in (("in flight", point.in_flight), ("lanes in a session", point.lanes_in_session))
            if count is not None
        ]
        scale = alt.Scale(domain=["lanes in a session", "in flight"], range=[MUTED, INK])
        in_flight = (
            alt.Chart(data(counts))
            .mark_line(interpolate="step", strokeWidth=1.1)
            .encode(
                x=x,
                y=alt.Y("count:Q", title="requests", scale=alt.Scale(domain=[0, max([*lanes, 1])]), axis=_few()),
                color=alt.Color("what:N", scale=scale, legend=legend if block == blocks[0] else None),
            )
            .properties(width=WIDTH, height=_ROW_HEIGHT)
        )
        rows.append(alt.hconcat(tokens, in_flight).resolve_scale(color="independent"))
    return alt.vconcat(*rows, spacing=6)


def _few() -> alt.Axis:
    return alt.Axis(tickCount=3)


CHART = Chart(
    "time",
    "Over time",
    "Left: output tokens per second by arrival. Right: requests in flight, and lanes that hold a session (pausing "
    "ones too). One row per block, in the order measured.",
    draw,
)
