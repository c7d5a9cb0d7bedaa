"""Every part that a sign-off needs was measured."""

from __future__ import annotations

from reports.accuracy.tasks import KINDS
from reports.signoff.gates.evidence import Evidence, gate
from reports.signoff.result import Gate


def judge(evidence: Evidence) -> list[Gate]:
    """A replay, evals with every benchmark, and output parity: what was not measured cannot have passed."""
    parts = evidence.parts
    missing = [f"{name}: {why}." for name, why in parts.missing.items()]
    if parts.evals is not None:
        planned = {task.task for task in parts.evals.plan.tasks}
        missing += [
            f"{kind.title} was not planned: give evals.{name}.data, and run the evals again in a new folder."
            for name, kind in KINDS.items()
            if name not in planned
        ]
    said = "Something was not measured." if missing else "A replay, evals with every benchmark, and output parity."
    return [gate("parts_measured", "Every part was measured", said, missing)]
