"""The charts, in the order of the report. To add one, write its file and list it here."""

from __future__ import annotations

from reports.charts import context, coverage, frontier, interactivity, pairs, time, ttft
from reports.charts.chart import Chart

CHARTS: list[Chart] = [
    interactivity.CHART,
    pairs.CHART,
    frontier.CHART,
    context.CHART,
    ttft.CHART,
    coverage.CHART,
    time.CHART,
]
