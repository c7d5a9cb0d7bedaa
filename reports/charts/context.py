"""P90 interactivity against the length of the context."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import msgspec

from reports.analysis import Analysis
from reports.charts.chart import FEW, HEIGHT, WIDTH, Chart, Drawn, colour, data


def draw(analyses: Sequence[Analysis]) -> Drawn | None:
    """Both backends over bins of equally many pairs; None where there are too few pairs for two bins."""
    points = analyses[0].series.contexts
    if len(points) < 4:
        return None
    chart: alt.Chart = (
        alt.Chart(data([msgspec.structs.asdict(point) for point in points]))
        .mark_line(point=alt.OverlayMarkDef(size=35), strokeWidth=1.8)
        .encode(
            x=alt.X(
                "context:Q", title="context, input tokens (log)", scale=alt.Scale(type="log", nice=False), axis=FEW
            ),
            y=alt.Y("p90_interactivity:Q", title="P90 interactivity, tokens/s", scale=alt.Scale(zero=True)),
            color=colour(analyses[0]),
        )
        .properties(width=WIDTH, height=HEIGHT)
    )
    return chart


CHART = Chart(
    "context",
    "Against context length",
    "P90 interactivity of pairs binned by input tokens, equally many in each bin.",
    draw,
)
