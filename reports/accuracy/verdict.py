"""PASS, FAIL or INCONCLUSIVE: may the candidate's answers be called as good as the baseline's?

**PASS**, of a task: the whole exam was sat, and the upper bound of the drop is within the margin. Of the plan: every
task passes, each at its own level; as all must, together they pass a harmful candidate no more often than one of them
would (intersection-union).

**FAIL**: a test of harm is significant at the family's level, by Holm over all tests of all planned tasks. Each task
has an equal share of the level. Where a task has strata, twelve fifteenths of it go to the mean score, and one each to
the strata (Holm within), to a drop that grows with context, and to the number of strata with a drop: so a drop
everywhere is found nearly as often as without the other three.

**INCONCLUSIVE**: all else, with what is missing. A request without a reply is no answer: it stands against PASS, and
FAIL needs harm that remains if the candidate had answered it right and the baseline wrong.

A run with planned looks is judged at the last look that both backends reached, whatever came after it; one without, or
stopped before its first look, when it is whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec
import polars as pl

from evals.records import EvalPlan, TaskPlan
from reports.accuracy import harm
from reports.accuracy.answers import COLUMNS, Exam, ended, frame, pair, read_answers
from reports.accuracy.measure import measure, shares
from reports.accuracy.reasons import why_fail, why_not_pass, why_pass
from reports.accuracy.result import Accuracy, Counts, Measured, Outcome, TaskVerdict
from reports.accuracy.tasks import KINDS
from reports.run import read


class _Sat(msgspec.Struct, frozen=True):
    """A task's exam at a look."""

    look: int
    exam: Exam
    measured: Measured


def judge(
    plan: EvalPlan,
    baseline: Mapping[str, pl.DataFrame],
    candidate: Mapping[str, pl.DataFrame],
    names: tuple[str, str] = ("baseline", "candidate"),
) -> Accuracy:
    """Judge both backends' answers (by task, frames of ``answers.COLUMNS``) by the plan. ``names`` are the backends'.
    What cannot be compared is INCONCLUSIVE, with the reason. Raises UserError for a bin of context whose name says no
    size."""
    nothing = pl.DataFrame(schema=COLUMNS)
    answers = [(baseline.get(task.task, nothing), candidate.get(task.task, nothing)) for task in plan.tasks]
    sat = [_sit(task, plan, of, names) for task, of in zip(plan.tasks, answers, strict=True)]
    adjusted = _adjust(plan, [None if isinstance(each, list) else each.measured for each in sat])
    tasks = []
    for task, of, each, measured in zip(plan.tasks, answers, sat, adjusted, strict=True):
        outcome: Outcome = "INCONCLUSIVE"
        if isinstance(each, list):
            reasons = each
        else:
            assert measured is not None
            outcome, reasons = _conclude(task, plan, each.look, each.exam, measured, names)
        tasks.append(
            TaskVerdict(
                task=task.task,
                title=KINDS[task.task].title,
                outcome=outcome,
                reasons=reasons,
                margin=task.margin,
                planned_repeats=task.repeats,
                ended_repeats={name: ended(each) for name, each in zip(names, of, strict=True)},
                counts={name: _count(each) for name, each in zip(names, of, strict=True)},
                measured=measured,
            )
        )
    outcomes = {each.outcome for each in tasks}
    outcome = "FAIL" if "FAIL" in outcomes else "PASS" if outcomes == {"PASS"} else "INCONCLUSIVE"
    deciding = [f"{each.title}: {reason}" for each in tasks if each.outcome == outcome for reason in each.reasons]
    return Accuracy(outcome, deciding or ["No task was planned."], tasks)


def judge_folder(folder: Path, names: tuple[str, str]) -> tuple[EvalPlan, Accuracy, list[str]]:
    """Judge RUN/evals: its plan, the result, and what was not counted. ``names`` are the baseline's and the
    candidate's. Raises UserError for a folder without a plan, and for damaged files."""
    plan, notes = read(folder / "plan.json", EvalPlan), list[str]()
    first, second = (
        {str(task.task): frame(read_answers(folder, name, task.task, notes)) for task in plan.tasks} for name in names
    )
    return plan, judge(plan, first, second, names), notes


def _sit(
    task: TaskPlan, plan: EvalPlan, answers: tuple[pl.DataFrame, pl.DataFrame], names: tuple[str, str]
) -> _Sat | list[str]:
    """A task's exam at the last look that both backends reached, measured; or why there is none to judge."""
    done = [ended(each) for each in answers]
    repeats = [math.ceil(look * task.repeats - 1e-9) for look in task.looks]
    reached = [look for look, count in enumerate(repeats) if count <= min(done)]
    if not reached:
        return [
            f"{names[0]} ended {done[0]} and {names[1]} {done[1]} of {task.repeats} repeats; the result may be looked "
            f"at from {repeats[0]} on. Finish the run."
        ]
    exam = pair(task, plan.items(task), repeats[reached[-1]], answers, names)
    if isinstance(exam, list):
        return exam
    for name, outcome in zip(names, (exam.baseline_outcome, exam.candidate_outcome), strict=True):
        if (outcome == "error").all():
            return [f"{name} answered nothing: none of {outcome.size:,} requests got a reply."]
    return _Sat(reached[-1], exam, measure(task, plan, reached[-1], exam))


def _adjust(plan: EvalPlan, measured: list[Measured | None]) -> list[Measured | None]:
    """Holm over all planned tests of all planned tasks; one that could not be made keeps its share of the level."""
    ps, weights = [], []
    for task, each in zip(plan.tasks, measured, strict=True):
        made = {test.of: test.overall_p for test in each.tests} if each else {}
        for of, share in shares(task).items():
            ps.append(made.get(of, 1.0))
            weights.append(share)
    adjusted = iter(harm.holm(ps, weights))
    found: list[Measured | None] = []
    for task, each in zip(plan.tasks, measured, strict=True):
        mine = [next(adjusted) for _ in shares(task)]
        if each is None:
            found.append(None)
            continue
        tests = [msgspec.structs.replace(test, holm_p=p) for test, p in zip(each.tests, mine, strict=True)]
        found.append(msgspec.structs.replace(each, tests=tests))
    return found


def _conclude(
    task: TaskPlan, plan: EvalPlan, look: int, exam: Exam, measured: Measured, names: tuple[str, str]
) -> tuple[Outcome, list[str]]:
    harmed = [test for test in measured.tests if test.holm_p <= plan.alpha_fail]
    if harmed:
        return "FAIL", why_fail(measured, harmed, plan)
    if missing := why_not_pass(task, plan, look, exam, measured, names):
        return "INCONCLUSIVE", missing
    return "PASS", why_pass(task, measured)


def _count(answers: pl.DataFrame) -> Counts:
    outcome = answers["outcome"]
    return Counts(
        **{name: int((outcome == name).sum()) for name in ("right", "wrong", "unparsed", "truncated", "error")},
        retried=int((answers["attempts"] > 1).sum()),
    )
