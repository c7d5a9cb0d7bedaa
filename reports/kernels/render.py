"""The report on layers as HTML, Markdown and JSON."""

from __future__ import annotations

from reports.charts.chart import svg_of
from reports.kernels import timeline
from reports.kernels.analysis import Analysis
from reports.kernels.layers import Spread
from reports.render import words
from reports.render.json import strict
from reports.render.page import TEMPLATES, template_of


def html(analysis: Analysis) -> str:
    """One file that needs nothing else."""
    css = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    chart = svg_of(timeline.draw(analysis), timeline.ID, timeline.TITLE)
    return _fill("kernels/page.html", analysis, css=css, chart=chart)


def markdown(analysis: Analysis) -> str:
    """Without the chart."""
    return _fill("kernels/page.md", analysis)


def json(analysis: Analysis) -> str:
    """Strict: no NaN, no Infinity."""
    return strict(analysis)


def figure(value: Spread | float | None) -> str:
    """A median, or the number itself."""
    if isinstance(value, Spread):
        return words.number(value.median)
    return words.count(round(value)) if value is not None and value == round(value) else words.number(value)


def quartiles(value: Spread | float | None) -> str:
    """ "low to high"; empty for what has none."""
    return words.between(words.number(value.lower), words.number(value.upper)) if isinstance(value, Spread) else ""


def headline(analysis: Analysis) -> str:
    """Both sides' kernels and µs per layer, in a sentence."""
    sides = [
        f"{side.name} {figure(side.layers.kernels)} kernels and {words.number(side.layers.wall.median)} µs"
        for side in analysis.sides
    ]
    return f"Per layer: {', '.join(sides)}"


def _fill(template: str, analysis: Analysis, **more: object) -> str:
    provenance = [
        ("Measured", f"{analysis.created_utc} with decodegate {analysis.decodegate_version}")
        if analysis.created_utc
        else ("Measured", "not known: bare traces"),
        ("Decoded", analysis.decoded or "not known"),
        ("Client host", ", ".join(f"{key} {value}" for key, value in analysis.host.items()) or words.DASH),
        ("Versions", ", ".join(f"{key} {value}" for key, value in analysis.versions.items()) or words.DASH),
    ]
    backend_rows = [
        ("Decode backend", [side.decode_backend or words.DASH for side in analysis.sides]),
        ("GPUs", [side.gpus or "not declared" for side in analysis.sides]),
        (
            "GPU in the trace",
            [f"{side.layers.gpu or 'not named'}, device {side.layers.device}" for side in analysis.sides],
        ),
        ("Streams with GPU activity", [words.count(side.layers.streams) for side in analysis.sides]),
        ("In complete units, of GPU activity", [words.share(side.layers.covered) for side in analysis.sides]),
        ("Trace", [f"{side.trace}, of {side.traces}" for side in analysis.sides]),
        ("Started as", [side.command or words.DASH for side in analysis.sides]),
    ]
    return template_of(template).render(
        a=analysis,
        w=words,
        figure=figure,
        quartiles=quartiles,
        headline=headline(analysis),
        tags=list(dict.fromkeys(stamp.split(":")[0] for stamp in analysis.stamps)),
        backend_rows=backend_rows,
        provenance=provenance,
        timeline=timeline,
        **more,
    )
