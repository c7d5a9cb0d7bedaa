"""Which path decode steps took: how many ran specialised, or could have, by concurrency and context, and why the rest
did not.

A backend is judged by the best source that tells of it (paths.py): the step log of a server that we started, the
emulator's own log, the tables of --cudagraph-metrics, or, where the server tells nothing, a prediction from the
client's times; each has a file of its own here. Only steps that gave decode tokens count, and only those of the
measured stretches of time.
"""

from __future__ import annotations

from reports.coverage.classes import (
    ADVICE,
    EAGER,
    NOT_SHOWN,
    OPEN,
    PREFILLING,
    PROMPT,
    RAGGED,
    TOO_MANY,
    UNPREPARED,
)
from reports.coverage.paths import (
    MEASURED,
    SPECIALISED,
    PathCoverage,
    Source,
    coverage,
    covered,
    rule_for,
    summed,
    told,
)
from reports.coverage.step_log import classified
from reports.coverage.strata import CONCURRENCY, CONTEXT, Stratum
from reports.coverage.stretches import Stretch, steps_folder, stretch_of

__all__ = [
    "ADVICE",
    "CONCURRENCY",
    "CONTEXT",
    "EAGER",
    "MEASURED",
    "NOT_SHOWN",
    "OPEN",
    "PREFILLING",
    "PROMPT",
    "RAGGED",
    "SPECIALISED",
    "TOO_MANY",
    "UNPREPARED",
    "PathCoverage",
    "Source",
    "Stratum",
    "Stretch",
    "classified",
    "coverage",
    "covered",
    "rule_for",
    "steps_folder",
    "stretch_of",
    "summed",
    "told",
]
