"""Controls of the accuracy verdict, made from the records themselves.

**A backend against itself**: its even repeats against its odd ones, by the tests that judge harm. A difference there
says that repeats are not alike (a server that changed, a cache that answers), and that no difference between the
backends can be trusted. Two-sided, Holm over all benchmarks and both backends at the level of FAIL.

**A drop that was put in**: of a benchmark that passes, right answers of the candidate are struck out, drawn by the
plan's seed, until its mean score is twice the margin below the baseline's; the same verdict must then be FAIL. (That it
would not be PASS is no control: a drop beyond the margin has a bound beyond it.)
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import polars as pl

from evals.records import TaskPlan
from reports.accuracy import harm
from reports.accuracy.answers import frame
from reports.accuracy.drop import Floats
from reports.accuracy.tasks import KINDS
from reports.accuracy.verdict import judge
from reports.parity.result import Parity
from reports.signoff.parts import EvalsPart, Parts
from reports.signoff.result import Control

_STRUCK = 2
"""Margins that are put in."""


def controls(parts: Parts) -> list[Control]:
    """All controls of what was measured."""
    found = [_start_up(parts)]
    if parts.evals is not None:
        found += [*_against_itself(parts.evals), *_put_in(parts.evals)]
    if parts.parity is not None:
        found.append(_behind_a_fault(parts.parity.parity))
    return found


def _start_up(parts: Parts) -> Control:
    told = (part.manifest.start_up_control for part in (parts.evals, parts.replay) if part is not None)
    said = next(filter(None, told), "")
    return Control(
        name="start with a decode_backend that does not exist",
        expected="the candidate's server refuses to start",
        seen=f"refused: {said}" if said else "not run: only a server that decodegate starts can be asked",
        n=1 if said else None,
        holds=True if said else None,
    )


def _behind_a_fault(parity: Parity) -> Control:
    fault = parity.fault
    if fault is None:
        return Control(
            name="output parity of the baseline behind a fault",
            expected="the checks see it",
            seen="not run: decodegate parity EXPERIMENT --fault NAME",
            n=None,
            holds=None,
        )
    return Control(
        name=f"output parity of the baseline behind {fault.fault}",
        expected=f"seen by {' or '.join(fault.expected)}" if fault.expected else "seen by no check",
        seen=f"seen by {', '.join(fault.seen) or 'no check'}",
        n=fault.n,
        holds=fault.holds,
    )


def _against_itself(evals: EvalsPart) -> list[Control]:
    names: list[str] = []
    ps: list[float | None] = []
    counts: list[int] = []
    for backend in evals.names:
        for task in evals.plan.tasks:
            scores = _scores(evals, backend, task)
            names.append(f"{KINDS[task.task].title}: {backend}'s even repeats against its odd ones")
            counts.append(scores.size)
            ps.append(_two_sided(scores, task) if scores.shape[1] > 1 else None)
    adjusted = iter(harm.holm([p for p in ps if p is not None]))
    found = []
    for name, n, p in zip(names, counts, ps, strict=True):
        overall = next(adjusted) if p is not None else None
        found.append(
            Control(
                name=name,
                expected="no difference",
                seen=f"p = {overall:.2g} after Holm's adjustment" if overall is not None else "not run: one repeat",
                n=n,
                holds=overall > evals.plan.alpha_fail if overall is not None else None,
            )
        )
    return found


def _scores(evals: EvalsPart, backend: str, task: TaskPlan) -> Floats:
    """Scores of items x repeats, of the items that every ended repeat has."""
    by_repeat = [{each.item: each.score for each in sitting.answers} for sitting in evals.of(backend, task.task)]
    items = sorted(set.intersection(*(set(each) for each in by_repeat))) if by_repeat else []
    return np.array([[each[item] for each in by_repeat] for item in items]).reshape(len(items), len(by_repeat))


def _two_sided(scores: Floats, task: TaskPlan) -> float:
    pairs = scores.shape[1] // 2
    even, odd = scores[:, 0 : 2 * pairs : 2], scores[:, 1 : 2 * pairs : 2]
    if KINDS[task.task].binary:
        ps = harm.stratified(even, odd), harm.stratified(odd, even)
    else:
        each = even.mean(axis=1) - odd.mean(axis=1)
        ps = harm.sign_flip(each), harm.sign_flip(-each)
    return min(1.0, 2 * min(ps))


def _put_in(evals: EvalsPart) -> Iterator[Control]:
    for task, verdict in zip(evals.plan.tasks, evals.accuracy.tasks, strict=True):
        if verdict.outcome != "PASS":
            continue
        first, second = (
            frame(answer for sitting in evals.of(name, task.task) for answer in sitting.answers) for name in evals.names
        )
        plan = msgspec.structs.replace(evals.plan, tasks=[task])
        least = float(first["score"].to_numpy().mean()) - _STRUCK * task.margin
        outcome = judge(plan, {task.task: first}, {task.task: _struck(second, least, task.seed)}, evals.names).outcome
        yield Control(
            name=f"{KINDS[task.task].title}: right answers of the candidate struck out until it is "
            f"{_STRUCK * task.margin * 100:g} points below the baseline",
            expected="FAIL",
            seen=outcome,
            n=len(second),
            holds=outcome == "FAIL",
        )


def _struck(answers: pl.DataFrame, least: float, seed: int) -> pl.DataFrame:
    """The answers with some of them, drawn at random, turned wrong, so that the mean is ``least`` or just below."""
    scores = answers["score"].to_numpy().copy()
    order = np.random.default_rng(seed).permutation(len(scores))
    taken = np.cumsum(scores[order])
    struck = order[: int(np.searchsorted(taken, taken[-1] - least * len(scores))) + 1]
    scores[struck] = 0.0
    wrong = (pl.col("outcome") == "right") & (pl.Series(scores) == 0)
    return answers.with_columns(
        score=pl.Series(scores), outcome=pl.when(wrong).then(pl.lit("wrong")).otherwise("outcome")
    )
