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
        return []
    missing: list[str] = []
    worst: float | None = None
    for task in evals.plan.tasks:
        answers = [each for sitting in evals.of(evals.names[0], task.task) for each in sitting.answers]
        if not answers:
            continue
        share = sum(each.finish_reason == "length" for each in answers) / len(answers)
        worst = max(worst or 0.0, share)
        if share > LENGTH_STOPS:
            missing.append(
                f"{KINDS[task.task].title}: {share:.1%} of the baseline's answers ended at the limit of "
                f"{task.sampling.get('max_tokens')} tokens: raise evals.sampling.max_tokens."
            )
    title = "Room for the answer"
    if worst is None:
        said = "The baseline has no answers."
        return [gate("length_stops", title, said, [f"{said} Finish the run: decodegate eval EXPERIMENT --resume."])]
    said = f"Of the baseline's answers at most {worst:.1%} of a benchmark ended at the length limit."
    return [
        gate("length_stops", title, said, missing, number=worst, limit=LENGTH_STOPS, limit_is="at most", unit="share")
    ]
