"""The answers were not cut off by the length limit."""

from __future__ import annotations

from reports.accuracy.tasks import KINDS
from reports.signoff.gates.evidence import LENGTH_STOPS, Evidence, gate
from reports.signoff.result import Gate


def judge(evidence: Evidence) -> list[Gate]:
    """Share of the baseline's answers of each benchmark that ended at the limit, at most 1 %: a score that counts those
    says how long the model may think, and hardly anything else."""
    evals = evidence.parts.evals
    if evals is None:
        title = "Room for the answer"
    found = gate(
        "length_stops", title, said, missing, number=worst, limit=LENGTH_STOPS, limit_is="at most", unit="share"
    )
    return [found]
