"""Each benchmark: did the candidate's answers stay as good?"""

from __future__ import annotations

from reports.signoff.gates.evidence import Evidence
from reports.signoff.result import Gate


def judge(evidence: Evidence) -> list[Gate]:
    """The verdicts of reports.accuracy, one gate a benchmark; its bound against its margin."""
    evals = evidence.parts.evals
    if evals is None:
        return []
    found = []
    for task in evals.accuracy.tasks:
        drop = task.measured.drop if task.measured is not None else None
        passed = task.outcome == "PASS"
        said = ""
        if drop is not None:
            said = f"The candidate's mean score is {drop.candidate:.1%}, the baseline's {drop.baseline:.1%}."
        found.append(
            Gate(
                id=task.task,
                title=task.title,
                outcome=task.outcome,
                said=" ".join([said, *task.reasons]) if passed else said or "There is nothing to compare.",
                number=drop.bound * 100 if drop is not None and drop.bound is not None else None,
                limit=task.margin * 100,
                limit_is="at most",
                unit="points",
                reasons=[] if passed else list(task.reasons),
            )
        )
    return found
