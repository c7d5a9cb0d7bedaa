"""Throughput per GPU against P90 interactivity, one point per run: what a deployment trades one against the other."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from reports.analysis import Analysis
from reports.charts.chart import HEIGHT, WIDTH, Chart, Drawn, colour, data


def draw(analyses: Sequence[Analysis]) -> Drawn | None:
    """Needs at least two runs with pairs and declared GPUs; one point is no curve."""
    rows = []
    for analysis in analyses:
        effect = analysis.headlines[0].effect
        if effect is None:
            continue
        for backend, estimate in zip(analysis.backends, (effect.baseline, effect.candidate), strict=True):
            if estimate.value is not None and backend.output_tokens_per_s_per_gpu is not None:
                rows.append(
                    {
                        "backend": backend.role,
                        "lanes": analysis.plan.lanes,
                        "x": estimate.value,
                        "y": backend.output_tokens_per_s_per_gpu,
                    }
                )
    if len({row["lanes"] for row in rows}) < 2:
        return None
    names = dict(zip(("baseline", "candidate"), (backend.name for backend in analyses[0].backends), strict=True))
    rows = [{**row, "backend": names[str(row["backend"])]} for row in rows]
    base = alt.Chart(data(rows)).encode(
        x=alt.X("x:Q", title="P90 interactivity, tokens/s per user", scale=alt.Scale(zero=False)),
        y=alt.Y("y:Q", title="output tokens/s per GPU"),
        color=colour(analyses[0]),
    )
    lines = base.mark_line(point=alt.OverlayMarkDef(size=40)).encode(order="lanes:Q")
    return alt.layer(lines, base.mark_text(dx=9, align="left").encode(text="lanes:N")).properties(
        width=WIDTH, height=HEIGHT
    )


CHART = Chart(
    "frontier",
    "Throughput per GPU against P90 interactivity",
    "One point per run and backend, labelled with its lanes. Up and to the right is better.",
    draw,
)
