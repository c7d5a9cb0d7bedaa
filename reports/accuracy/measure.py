"""Everything an exam says of the drop, before the tests of all tasks are adjusted for one another."""

from __future__ import annotations

import numpy as np

from evals.records import EvalPlan, TaskPlan
from reports.accuracy import harm, power
from reports.accuracy.answers import Exam, log_context
from reports.accuracy.drop import (
    Floats,
    differences,
    drop,
    equal_weight,
    seed_correlation,
    smoothed_error,
    t_alone,
    t_error,
    within_variance,
)
from reports.accuracy.looks import level_at, overall_p
from reports.accuracy.result import Flips, Measured, Stratum, Table, Test, TestOf
from reports.accuracy.tasks import KINDS

SHARES: dict[TestOf, float] = {"mean score": 12 / 15, "strata": 1 / 15, "trend": 1 / 15, "strata with a drop": 1 / 15}
"""Of a task's share of the level of FAIL; a task without strata gives all to the first."""


def shares(task: TaskPlan) -> dict[TestOf, float]:
    """A task's planned tests of harm."""
    return {"mean score": 1.0} if KINDS[task.task].binary else SHARES


def measure(task: TaskPlan, plan: EvalPlan, look: int, exam: Exam) -> Measured:
    """What the exam says at ``look``."""
    binary, looks = KINDS[task.task].binary, tuple(task.looks)
    level = level_at(plan.alpha_pass, looks, look)
    items, repeats = exam.baseline.shape
    weight = equal_weight(items) if binary else cells_alike(exam.cell)
    found = drop(exam.baseline, exam.candidate, weight, binary=binary, level=level)
    bins = [] if binary else _strata(exam, exam.bin, looks, look, level)
    finer = not binary and len(set(exam.cell)) > len(set(exam.bin))
    within = [each for scores in (exam.baseline, exam.candidate) if (each := within_variance(scores)) is not None]
    needed, smallest = _size(task, exam, weight, level, level_at(plan.alpha_pass, looks, len(looks) - 1))
    return Measured(
        items=items,
        repeats=repeats,
        level=level,
        drop=found,
        tests=_tests(task, exam, weight, bins, look),
        bins=bins,
        cells=_strata(exam, exam.cell, looks, look, level) if finer else [],
        table=_table(exam) if binary else None,
        flips=_flips(exam) if binary else None,
        within=sum(within) / 2 if within else None,
        correlation=seed_correlation(exam.baseline, exam.candidate),
        repeats_needed=needed,
        smallest_drop=smallest,
    )


def cells_alike(cells: list[str]) -> Floats:
    """Weights with which the mean score is the mean over cells of their means."""
    _, which, sizes = np.unique(np.array(cells), return_inverse=True, return_counts=True)
    weight: Floats = 1 / (len(sizes) * sizes[which])
    return weight


def _best_case(exam: Exam) -> tuple[Floats, Floats]:
    """Scores with which requests that got no reply speak for the candidate."""
    return (
        np.where(exam.baseline_outcome == "error", 0.0, exam.baseline),
        np.where(exam.candidate_outcome == "error", 1.0, exam.candidate),
    )


def _tests(task: TaskPlan, exam: Exam, weight: Floats, bins: list[Stratum], look: int) -> list[Test]:
    best = _best_case(exam)
    ps: dict[TestOf, float]
    if KINDS[task.task].binary:
        ps = {"mean score": harm.stratified(*best)}
    else:
        each, cells = differences(*best, weight), np.array(exam.cell)
        ps = {
            "mean score": harm.sign_flip(each),
            "strata": min(harm.holm([stratum.p for stratum in bins])),
            "trend": harm.trend(each, log_context(exam.bin)),
            "strata with a drop": harm.sign_test(np.array([each[cells == name].sum() for name in set(exam.cell)])),
        }
    overall = {of: overall_p(p, tuple(task.looks), look) for of, p in ps.items()}
    if bins:  # looks are accounted for stratum by stratum, before Holm's adjustment
        overall["strata"] = min(stratum.holm_p for stratum in bins)
    return [Test(of, share, ps[of], overall[of]) for of, share in shares(task).items()]


def _strata(exam: Exam, of: list[str], looks: tuple[float, ...], look: int, level: float) -> list[Stratum]:
    """Items by ``of``, in order of context."""
    where, context, best = np.array(of), log_context(exam.bin), _best_case(exam)
    names = sorted(set(of), key=lambda name: (float(context[where == name].min()), name))
    found = []
    for name in names:
        here = where == name
        weight = equal_weight(int(here.sum()))
        size = drop(exam.baseline[here], exam.candidate[here], weight, binary=False, level=level)
        p = harm.sign_flip(differences(best[0][here], best[1][here], weight))
        found.append((name, len(weight), size, p))
    adjusted = harm.holm([overall_p(p, looks, look) for *_, p in found])
    return [Stratum(*each, holm_p) for each, holm_p in zip(found, adjusted, strict=True)]


def _size(task: TaskPlan, exam: Exam, weight: Floats, level: float, last: float) -> tuple[int | None, float | None]:
    """Repeats that the margin needs with the bound that judges, at the ``last`` look's level, and the smallest drop
    that these repeats find at this look's ``level``."""
    repeats = exam.baseline.shape[1]
    error = t_error(differences(exam.baseline, exam.candidate, weight))
    if error is None:
        return None, None
    needed = power.repeats_for_error(error, repeats, task.margin, last)
    if not t_alone(weight, binary=KINDS[task.task].binary):
        means = exam.baseline.mean(axis=1), exam.candidate.mean(axis=1)
        needed = max(needed, power.repeats_for_bound(*means, weight, task.margin, last))
        error = max(error, smoothed_error(*means, weight, repeats))
    return needed, power.smallest_drop(error, level)


def _table(exam: Exam) -> Table:
    mine, theirs = exam.baseline == 1, exam.candidate == 1
    counts = [mine & theirs, mine & ~theirs, ~mine & theirs, ~mine & ~theirs]
    return Table(*(int(each.sum()) for each in counts))


def _flips(exam: Exam) -> Flips:
    before, after = exam.baseline.mean(axis=1) > 0.5, exam.candidate.mean(axis=1) > 0.5
    lost, gained = int((before & ~after).sum()), int((~before & after).sum())
    return Flips(lost, gained, harm.mcnemar(lost, gained))
