"""Why a task ended as it did, in sentences that say what is missing."""

from __future__ import annotations

from evals.records import EvalPlan, TaskPlan
from reports.accuracy.answers import Exam
from reports.accuracy.result import Measured, Test
from reports.accuracy.tasks import KINDS

STRATUM_MARGIN = 0.05
"""No stratum may be worse by this much, shown after adjustment, in a task that passes."""
EARLIEST_PASS = 0.5
"""Share of the repeats from which on a look may pass."""

_SHOWN_BY = {
    "mean score": "the mean score",
    "strata": "single strata",
    "trend": "a drop that grows with context",
    "strata with a drop": "the number of strata with a drop",
}


def points(share: float) -> str:
    """Hundredths of 1, as "2.1 points"."""
    return f"{share * 100:z.1f} points"


def why_fail(measured: Measured, harmed: list[Test], plan: EvalPlan) -> list[str]:
    """Which of the tests show harm, and where."""
    found = measured.drop
    shown = ", ".join(f"{_SHOWN_BY[test.of]} (p = {test.holm_p:.2g})" for test in harmed)
    reasons = [
        f"The candidate answers worse, shown by {shown}, after Holm's adjustment at {plan.alpha_fail:g}. The mean "
        f"score is {found.candidate:.1%}, the baseline's {found.baseline:.1%}: a drop of {points(found.value)}."
    ]
    worse = [f"{each.name} (by {points(each.drop.value)})" for each in measured.bins if each.holm_p <= plan.alpha_fail]
    return reasons + ([f"It is worse in {', '.join(worse)}."] if worse else [])


def why_pass(task: TaskPlan, measured: Measured) -> list[str]:
    found = measured.drop
    assert found.bound is not None
    return [
        f"The drop is {points(found.value)}, at most {points(found.bound)} (one-sided bound at "
        f"{1 - measured.level:.2%}); the margin is {points(task.margin)}."
    ]


def why_not_pass(
    task: TaskPlan, plan: EvalPlan, look: int, exam: Exam, measured: Measured, names: tuple[str, str]
) -> list[str]:
    """What is missing for PASS; empty if nothing is."""
    found, reasons = measured.drop, []
    if plan.limit is not None and plan.limit < task.data.items:
        reasons.append(f"Only the first {plan.limit} of {task.data.items} items were asked: a smoke test.")
    for name, outcome in zip(names, (exam.baseline_outcome, exam.candidate_outcome), strict=True):
        if errors := int((outcome == "error").sum()):
            reasons.append(
                f"{errors:,} of {outcome.size:,} requests to {name} got no reply: decodegate eval --resume asks them "
                "again."
            )
    if task.sampling.get("temperature") == 0:
        reasons.append(
            "The answers are greedy, so that repeats say nothing of how often an item is answered right: set "
            "evals.sampling.temperature to what is served, and run the evals again in a new folder."
        )
    if found.baseline <= task.margin:
        reasons.append(
            f"{names[0]} itself scores {found.baseline:.1%}: a drop of {points(task.margin)} could not be seen."
        )
    if task.looks[look] < EARLIEST_PASS:
        reasons.append(f"{measured.repeats} of {task.repeats} repeats are too few to pass early: finish the run.")
    reasons += [
        f"{each.name} is worse by {points(each.drop.value)}, shown after adjustment; a stratum of a task that passes "
        f"may be by less than {points(STRATUM_MARGIN)}."
        for each in measured.bins
        if each.drop.value >= STRATUM_MARGIN and each.holm_p <= plan.alpha_fail
    ]
    if found.bound is None or measured.repeats_needed is None:
        reasons.append("One item cannot tell how far items differ: ask more.")
    elif found.bound > task.margin:
        reasons.append(
            f"The drop is {points(found.value)} and may be as much as {points(found.bound)}; the margin is "
            f"{points(task.margin)}. {_enough(task, measured, measured.repeats_needed)}"
        )
    return reasons


def _enough(task: TaskPlan, measured: Measured, needed: int) -> str:
    if needed > task.repeats:
        return (
            f"Needs {needed:,} repeats of {KINDS[task.task].title} for {points(task.margin)} at the observed variance, "
            f"{task.repeats:,} were planned: a new run, with other seeds, that discloses this one."
        )
    if measured.repeats < task.repeats:
        return f"{measured.repeats:,} of {task.repeats:,} repeats were judged: finish the run."
    return (
        f"{needed:,} repeats pass equal backends nine times of ten: what stands against PASS is the drop that was seen."
    )
