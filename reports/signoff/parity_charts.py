"""The charts of output parity: survival of pairs of replies, and KL by batch and context."""

from __future__ import annotations

from typing import Any

import altair as alt

from reports.charts.chart import BASELINE, CANDIDATE, FEW, HEIGHT, WIDTH, Drawn, data
from reports.decode.charts import Figure
from reports.parity.result import CheckVerdict, NamedCurve, Parity

_SCALE = alt.Scale(domain=["baseline against itself", "candidate against baseline"], range=[BASELINE, CANDIDATE])
_OF = alt.Color("of:N", scale=_SCALE, legend=alt.Legend(title=None, orient="top", direction="horizontal"))
_CHARTED = ("P1", "P5", "P6")


def survival(parity: Parity) -> list[Figure]:
    """Curves of first divergence, a chart a variant; none for variants in which nothing diverged."""
    figures = []
    for variant in dict.fromkeys(each.variant for each in parity.curves):
        curves = [each for each in parity.curves if each.variant == variant]
        rows = [row for each in curves for row in _rows(each)]
        if len(rows) <= len(curves):
            continue
        base = alt.Chart(data(rows)).encode(
            x=alt.X("step:Q", title="tokens in common"),
            y=alt.Y("left:Q", title="share of pairs still equal", scale=alt.Scale(domain=[0, 1])),
            color=_OF,
            detail="pair:N",
        )
        spans = base.mark_area(opacity=0.08, interpolate="step-after").encode(
            y="low:Q", y2="high:Q", fill=alt.Fill("of:N", scale=_SCALE, legend=None)
        )
        lines = base.mark_line(strokeWidth=1.6, interpolate="step-after")
        figures.append(
            Figure(
                f"parity-survival-{variant.replace(' ', '-').replace('=', '')}",
                f"First divergence: {variant}",
                "Kaplan-Meier, one line a pair of arms, with 95 % intervals.",
                _sized(spans, lines),
            )
        )
    return figures


def _rows(curve: NamedCurve) -> list[dict[str, Any]]:
    of = "baseline against itself" if curve.pair == "A2-A1" else "candidate against baseline"
    start = {"step": 0, "left": 1.0, "low": 1.0, "high": 1.0}
    points = [
        {"step": step, "left": left, "low": left if low is None else low, "high": left if high is None else high}
        for step, left, low, high in zip(curve.steps, curve.survival, curve.low, curve.high, strict=True)
    ]
    return [{"pair": curve.pair, "of": of, **each} for each in (start, *points)]


def by_stratum(parity: Parity) -> list[Figure]:
    """Mean KL by batch and by context."""
    return [figure for check in parity.checks if check.id in _CHARTED and (figure := _by_stratum(check)) is not None]


def _by_stratum(check: CheckVerdict) -> Figure | None:
    rows: list[dict[str, Any]] = []
    for each in check.strata:
        for of, value in (("baseline against itself", each.floor_kl), ("candidate against baseline", each.kl)):
            if value is not None and value > 0:
                rows.append({"name": each.name, "of": of, "kl": value})
    if len({row["name"] for row in rows}) < 2:
        return None
    by = check.strata[0].by
    chart = (
        alt.Chart(data(rows))
        .mark_point(filled=True, size=48, opacity=1)
        .encode(
            x=alt.X("name:O", title=by, sort=[each.name for each in check.strata], axis=alt.Axis(labelAngle=-35)),
            y=alt.Y("kl:Q", title="mean KL, nats", scale=alt.Scale(type="log"), axis=FEW),
            color=_OF,
        )
    )
    caption = "Of the pair of arms with the most outliers at each."
    return Figure(f"parity-{check.id.lower()}", f"{check.id} {check.title}: KL by {by}", caption, _sized(chart))


def _sized(*layers: Any) -> Drawn:
    chart: Drawn = alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)
    return chart
