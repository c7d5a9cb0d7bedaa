"""The charts of a sign-off: the drops against their margins, and scores and drops by context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from reports.accuracy.drop import Drop
from reports.accuracy.reasons import STRATUM_MARGIN
from reports.accuracy.result import TaskVerdict
from reports.charts.chart import CANDIDATE, HEIGHT, INK, MUTED, WIDTH, Drawn, colours, data
from reports.decode.charts import Figure

_ROW = 46
_WIDE = 700


def forest(tasks: Sequence[TaskVerdict]) -> Figure | None:
    """Each benchmark's drop, interval, bound and margin; None where nothing could be compared."""
    rows = [
        {
            "task": each.title,
            "margin": each.margin * 100,
            "margin_is": f"margin {each.margin * 100:g}",
            **_points(each.measured.drop),
        }
        for each in tasks
        if each.measured is not None
    ]
    if not rows:
        return None
    y = alt.Y("task:N", title=None, sort=None, axis=alt.Axis(ticks=False, domain=False, labelFontSize=12))
    base = alt.Chart(data(rows)).encode(y=y)
    title = "drop of the mean score, points (right of 0: the candidate is worse)"
    x = alt.X("drop:Q", title=title, axis=alt.Axis(tickCount=8))
    height = alt.Y("task:N", sort=None, bandPosition=0.08), alt.Y2("task:N", bandPosition=0.92)
    margin = alt.Chart(data(rows)).encode(x="margin:Q", y=height[0])
    chart = alt.layer(
        _zero("x"),
        margin.mark_rule(color=INK, strokeWidth=1.6).encode(y2=height[1]),
        base.mark_text(align="left", dx=5, dy=-13, fontSize=10.5).encode(x="margin:Q", text="margin_is:N"),
        base.mark_rule(color=CANDIDATE, strokeWidth=1.6).encode(x="low:Q", x2="high:Q"),
        base.mark_tick(color=CANDIDATE, thickness=2.5, size=18, opacity=1).encode(x="bound:Q"),
        base.mark_point(color=CANDIDATE, filled=True, size=70, opacity=1).encode(x=x),
    ).properties(width=_WIDE, height=_ROW * len(rows))
    caption = (
        "Dot: the drop. Line: its 95 % interval. Tick: the one-sided upper bound, which has to lie left of the margin. "
        "Numbers stand in the table above."
    )
    return Figure("forest", "Drop of the mean score against the margin", caption, chart)


def by_context(task: TaskVerdict, names: Sequence[str]) -> list[Figure]:
    """Scores of both backends, and the drop, by bin of context; none for a task without bins. ``names`` are the
    baseline's and the candidate's."""
    if task.measured is None or not task.measured.bins:
        return []
    bins = [each.name for each in task.measured.bins]
    figures = []
    scores, drops = _scores(task, bins, names), _drops(task, bins)
    figures.append(
        Figure(
            f"{task.task}-scores",
            f"{task.title}: mean score by context",
            "Mean over the items of a bin and all repeats.",
            scores,
        )
    )
    figures.append(
        Figure(
            f"{task.task}-drops",
            f"{task.title}: drop by context",
            f"With 95 % intervals. Dashed: {STRATUM_MARGIN * 100:g} points, which no bin may be shown to lose.",
            drops,
        )
    )
    return figures


def _scores(task: TaskVerdict, bins: list[str], names: Sequence[str]) -> Drawn:
    assert task.measured is not None
    found = [(bin, rest, each.drop) for each in task.measured.cells if (bin := (of := _parts(each.name)).pop("bin", ""))
             for rest in [", ".join(f"{value} {name}" for name, value in of.items())]]  # fmt: skip
    found = found or [(each.name, "", each.drop) for each in task.measured.bins]
    rows: list[dict[str, Any]] = [
        {"bin": bin, "of": rest, "backend": name, "score": score * 100}
        for bin, rest, drop in found
        for name, score in zip(names, (drop.baseline, drop.candidate), strict=True)
    ]
    base = alt.Chart(data(rows)).encode(
        x=_bin(bins), y=alt.Y("score:Q", title="mean score, %", scale=alt.Scale(zero=False)), color=colours(names)
    )
    lines = base.mark_line(strokeWidth=1.8)
    if any(row["of"] for row in rows):
        legend = alt.Legend(
            title=None, orient="top", direction="horizontal", symbolType="stroke", symbolStrokeColor=INK, symbolSize=300
        )
        lines = lines.encode(strokeDash=alt.StrokeDash("of:N", legend=legend, sort=None))
    return _sized(lines, base.mark_point(filled=True, size=34, opacity=1))


def _drops(task: TaskVerdict, bins: list[str]) -> Drawn:
    assert task.measured is not None
    base = alt.Chart(data([{"bin": each.name, **_points(each.drop)} for each in task.measured.bins])).encode(
        x=_bin(bins)
    )
    limit = alt.Chart(data([{"y": STRATUM_MARGIN * 100}])).mark_rule(color=INK, strokeDash=[4, 3]).encode(y="y:Q")
    return _sized(
        _zero("y"),
        limit,
        base.mark_rule(color=CANDIDATE, strokeWidth=1.6).encode(y="low:Q", y2="high:Q"),
        base.mark_point(color=CANDIDATE, filled=True, size=55, opacity=1).encode(
            y=alt.Y("drop:Q", title="drop, points (up: worse)")
        ),
    )


def _parts(cell: str) -> dict[str, str]:
    """ "bin 4k-8k, needles 2" by name."""
    return dict(part.split(" ", 1) for part in cell.split(", "))


def _bin(bins: list[str]) -> alt.X:
    return alt.X("bin:O", title="context, tokens", sort=bins, axis=alt.Axis(labelAngle=-35))


def _points(of: Drop) -> dict[str, float | None]:
    """In points; an interval that is not known is left out of the chart."""
    values = {"drop": of.value, "low": of.low, "high": of.high, "bound": of.bound}
    return {name: None if value is None else value * 100 for name, value in values.items()}


def _zero(axis: str) -> alt.Chart:
    encoded: Any = alt.X("zero:Q") if axis == "x" else alt.Y("zero:Q")
    chart: alt.Chart = alt.Chart(data([{"zero": 0}])).mark_rule(color=MUTED).encode(encoded)
    return chart


def _sized(*layers: Any) -> Drawn:
    chart: Drawn = alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)
    return chart
