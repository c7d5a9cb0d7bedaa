"""The report as Markdown, without charts: for tickets and terminals."""

from __future__ import annotations

from collections.abc import Sequence

from reports.analysis import Analysis
from reports.render.page import fill


def render(analyses: Sequence[Analysis]) -> str:
    """The report of the first analysis."""
    return fill("page.md", analyses)
