"""Which path decode tokens took, by how many requests decoded at once."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from reports.analysis import Analysis
from reports.charts.chart import BASELINE, CANDIDATE, HEIGHT, INK, WIDTH, Chart, Drawn, data
from reports.coverage import CONCURRENCY, EAGER, NOT_SHOWN, PREFILLING, PROMPT, RAGGED, TOO_MANY, UNPREPARED

_REASONS = {
    PROMPT: "#5b8db8",
    PREFILLING: "#9fbfd9",
    EAGER: "#c2a23a",
    TOO_MANY: "#8e7cb8",
    RAGGED: "#5fa287",
    UNPREPARED: "#b0717f",
    NOT_SHOWN: "#a3a8ae",
}
_OTHER = "#7c828a"


def draw(analyses: Sequence[Analysis]) -> Drawn | None:
    """A bar for each concurrency and backend, of the shares of its decode tokens; None without any."""
    paths = [path for path in analyses[0].paths if path.by_concurrency]
    if not paths:
        return None
    rows = [
        {"backend": path.backend, "at once": stratum.label, "what": what, "share": share}
        for path in paths
        for stratum in path.by_concurrency
        for what, share in ((path.counted, stratum.share), *stratum.reasons.items())
        if share
    ]
    roles = {backend.name: backend.role for backend in analyses[0].backends}
    counted = {path.counted: CANDIDATE if roles[path.backend] == "candidate" else BASELINE for path in paths}
    shown = list(dict.fromkeys(str(row["what"]) for row in rows))
    shown.sort(key=lambda what: what not in counted)  # counted ones at the bottom of the bars
    colours = [counted.get(what) or _REASONS.get(what, _OTHER) for what in shown]
    present = [label for label in CONCURRENCY if any(row["at once"] == label for row in rows)]
    order = {what: place for place, what in enumerate(shown)}
    rows = [{**row, "place": order[str(row["what"])]} for row in rows]
    bars = []
    for path in paths:
        mine = [row for row in rows if row["backend"] == path.backend]
        bar: alt.Chart = (
            alt.Chart(
                data(mine), title=alt.TitleParams(path.backend, anchor="start", fontSize=11, fontWeight=500, color=INK)
            )
            .mark_bar()
            .encode(
                x=alt.X(
                    "at once:N", scale=alt.Scale(domain=present), title="decoding at once", axis=alt.Axis(labelAngle=0)
                ),
                y=alt.Y("share:Q", title="share of decode tokens", axis=alt.Axis(format="%", tickCount=3)),
                color=alt.Color(
                    "what:N",
                    scale=alt.Scale(domain=shown, range=colours),
                    legend=alt.Legend(title=None, orient="bottom", columns=2, labelLimit=WIDTH // 2),
                ),
                order=alt.Order("place:Q"),
            )
            .properties(width=WIDTH, height=HEIGHT // (len(paths) + 1))
        )
        bars.append(bar)
    return alt.vconcat(*bars, spacing=8)


CHART = Chart(
    "coverage",
    "Decode path",
    "What became of the decode tokens of each backend, by the requests that decoded in the same step.",
    draw,
)
