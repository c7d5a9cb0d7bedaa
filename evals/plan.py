"""What is decided before anything is asked: the plan of the evals, who is asked when, and what that may take."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from evals import registration
from evals.data import Data, load
from evals.records import DataFacts, EvalPlan, Repeat, TaskPlan
from evals.tasks.items import Item
from replay.backends import NAMES
from replay.eligibility import read_config
from replay.experiment import Evals, Exam, Experiment, Mrcr
from replay.matching import Settings
from replay.records import Backend
from workloads.errors import UserError

UNFIT = "do not fit the context, thoughts included"
"""Reason of DataFacts.dropped for items that a backend's context does not hold beside the longest reply."""

_K3 = re.compile(r"kimi[-_ ]?k3", re.IGNORECASE)
_PARSER = ("reasoning-parser", "structured-outputs-config.reasoning_parser", "reasoning-config.reasoning_parser")
"""Settings that name it: of a command, and as /server_info shows it."""

_RATE = 100
"""Tokens per second and stream, for an idea of the time before any is known."""
_HOURS = 3
"""From so many on, minutes say no more."""


class Sitting(NamedTuple):
    """One repeat of one task on one backend: one run of lm-eval."""

    backend: str
    task: str
    repeat: int


def described(experiment: Experiment) -> Evals:
    """The experiment's evals. Raises UserError if it has none."""
    if experiment.evals is None:
        raise UserError("the experiment has no evals: give at least evals.aime25.data")
    return experiment.evals


def registered(experiment: Experiment, *, limit: int | None = None) -> EvalPlan:
    """The plan, with its data read and hashed. Raises UserError for data that are other than agreed on, or not fit."""
    evals = described(experiment)
    sampling = evals.sampling.model_dump()
    tasks = [
        msgspec.convert(
            {
                "task": name,
                "data": _facts(load(name, exam.data, sha256=exam.sha256, subset=exam.subset), exam),
                "repeats": exam.repeats,
                "seed": evals.seed,
                "sampling": sampling,
                "concurrency": exam.concurrency,
                "margin": exam.margin,
                "looks": exam.looks,
            },
            TaskPlan,
        )
        for name, exam in evals.exams.items()
    ]
    return EvalPlan(registered_utc=registration.now(), tasks=tasks, limit=limit)


def places(exam: Exam, items: Sequence[Item], limit: int | None = None, unfit: Sequence[int] = ()) -> list[int]:
    """Which items are asked, by their places: those short enough and not of the rows ``unfit``, and the first ``limit``
    of them."""
    most = exam.max_context if isinstance(exam, Mrcr) else None
    fit = [place for place, item in enumerate(items) if most is None or item.tokens is None or item.tokens <= most]
    left_out = set(unfit)
    return [place for place in fit if items[place].row not in left_out][:limit]


def without(plan: EvalPlan, unfit: Mapping[str, Sequence[int]]) -> EvalPlan:
    """The plan without these rows of its tasks' data, which do not fit the context."""

    def cut(data: DataFacts, rows: Sequence[int]) -> DataFacts:
        if not rows:
            return data
        dropped = data.dropped | {UNFIT: len(rows)}
        return msgspec.structs.replace(data, items=data.items - len(rows), dropped=dropped, unfit=list(rows))

    tasks = [msgspec.structs.replace(task, data=cut(task.data, unfit.get(task.task, ()))) for task in plan.tasks]
    return msgspec.structs.replace(plan, tasks=tasks)


def unfit(plan: EvalPlan) -> dict[str, list[int]]:
    """The rows that the plan leaves out so, by task."""
    return {task.task: task.data.unfit for task in plan.tasks}


def _facts(data: Data, exam: Exam) -> DataFacts:
    count = len(places(exam, data.items))
    if count == 0:
        raise UserError(f"{exam.data}: no item is short enough: raise max_context")
    if count == len(data.items):
        return data.facts
    dropped = data.facts.dropped | {"longer than max_context": len(data.items) - count}
    return msgspec.structs.replace(data.facts, items=count, dropped=dropped)


def sittings(plan: EvalPlan, repeats_per_start: int = 1) -> list[Sitting]:
    """Who sits what, in order: baseline, candidate, candidate, baseline, and so on, so that drift hits both alike and
    servers that take turns start once a repeat. All tasks are sat by repeat; ``repeats_per_start`` repeats follow each
    other on one backend."""
    most = max(task.repeats for task in plan.tasks)
    order = []
    for turn, first in enumerate(range(0, most, repeats_per_start)):
        for backend in NAMES if turn % 2 == 0 else reversed(NAMES):
            order += [
                Sitting(backend, task.task, repeat)
                for repeat in range(first, min(first + repeats_per_start, most))
                for task in plan.tasks
                if repeat < task.repeats
            ]
    return order


def refuse_synthetic(settings: Mapping[str, Settings]) -> None:
    """Raises UserError for a backend that accepts draft tokens whatever its model says: its text is no answer,
    and its tokens are not the model's."""
    for name, told in settings.items():
        if told.get("speculative-config.rejection_sample_method") == "synthetic":
            raise UserError(
                f"{name}: speculative-config.rejection_sample_method is synthetic: draft tokens pass unchecked, and "
                "its text is not the model's. Evals and parity need real verification: leave it and "
                "synthetic_acceptance_* out"
            )


def refuse_no_parser(settings: Mapping[str, Settings]) -> None:
    """Raises UserError for a Kimi K3 whose server does not tell thoughts from answers: it would say both as one. A
    --config file that lies in the server's container may name a parser."""
    for name, told in settings.items():
        if _is_k3(told.get("model", "")) and not any(told.get(key) for key in (*_PARSER, "config")):
            raise UserError(
                f"{name}: its server has no reasoning parser, so that thoughts come as text, where a draft could be "
                "scored: start it with --reasoning-parser kimi_k3"
            )


def refuse_telling(settings: Mapping[str, Settings]) -> None:
    """Raises UserError for a server that would write prompts and replies into its log, which is kept in the run
    directory: texts of benchmarks belong into private/ alone."""
    for name, told in settings.items():
        if on := [key for key in ("enable-log-requests", "enable-log-outputs") if told.get(key) not in (None, "false")]:
            raise UserError(f"{name}: its log would hold texts of the benchmarks: leave {' and '.join(on)} out")


def _is_k3(model: str) -> bool:
    return _K3.search(model) is not None or (read_config(model) or {}).get("model_type") == "kimi_k3"


def refuse_stock(plan: EvalPlan, candidate: Backend) -> None:
    """Raises UserError for more requests at once than the candidate's specialised path takes: it would sit the exam on
    standard decode."""
    rule = candidate.path
    if rule is None or rule.problems or candidate.decode_backend != "latency_specialized":
        return
    for task in plan.tasks:
        if task.concurrency > rule.max_requests:
            raise UserError(
                f"evals.{task.task}.concurrency is {task.concurrency}, but the specialised path takes steps of at most "
                f"{rule.max_requests} requests, by the rule of {rule.model} in {rule.source}: beyond that the exam "
                f"would test standard decode. Set it to {rule.max_requests} or less"
            )


def refuse_no_room(plan: EvalPlan, max_model_len: Mapping[str, int | None]) -> None:
    """Raises UserError for replies longer than a backend's context."""
    for name, length in max_model_len.items():
        for task in plan.tasks:
            most = most_tokens(task)
            if length is not None and most >= length:
                raise UserError(
                    f"evals.sampling.max_tokens is {most:,}, but the {name} has room for {length:,} tokens, prompt "
                    "included: lower it, or raise max-model-len"
                )


def lines(plan: EvalPlan, order: Iterable[Sitting], ended: Iterable[Repeat] = ()) -> dict[str, str]:
    """What the sittings of ``order`` will take, by name. Times are those of repeats that have ``ended``."""
    tasks: dict[str, TaskPlan] = {task.task: task for task in plan.tasks}
    order = list(order)
    requests = {sitting: plan.items(tasks[sitting.task]) for sitting in order}
    tokens = sum(count * most_tokens(tasks[sitting.task]) for sitting, count in requests.items())
    shown: dict[str, str] = {
        task.task: f"{plan.items(task):,} items x {task.repeats} repeats on each backend, {task.concurrency} at once; "
        f"margin {task.margin:.1%}"
        for task in plan.tasks
    }
    shown["requests"] = f"{sum(requests.values()):,} in {len(order):,} runs of lm-eval"
    shown["tokens"] = f"{tokens:,} output tokens at most"
    minutes = _minutes(order, ended)
    shown["time"] = _beforehand(plan, order) if minutes is None else f"about {minutes:,.0f} minutes"
    if plan.limit is not None:
        shown["limit"] = f"the first {plan.limit:,} items of each task only: a smoke test, which can pass nothing"
    return shown


def _beforehand(plan: EvalPlan, order: list[Sitting]) -> str:
    """What is known of the time while no repeat of some task has ended: as many replies at once as planned, all of the
    greatest length."""
    tasks: dict[str, TaskPlan] = {task.task: task for task in plan.tasks}
    steps = sum(
        math.ceil(plan.items(task) / task.concurrency) * most_tokens(task)
        for task in (tasks[sitting.task] for sitting in order)
    )
    minutes = steps / _RATE / 60
    most = f"{minutes:,.0f} minutes" if minutes < _HOURS * 60 else f"{minutes / 60:,.0f} hours"
    return (
        f"at {_RATE} tokens/s and stream about {most} at most, besides reading prompts in; known once each task has "
        "ended a repeat"
    )


def most_tokens(task: TaskPlan) -> int:
    """Output tokens of a reply at most."""
    most = task.sampling["max_tokens"]
    assert isinstance(most, int)
    return most


def _minutes(order: list[Sitting], ended: Iterable[Repeat]) -> float | None:
    """Minutes for the sittings at the mean time of those that ended; None if there is none of a task."""
    times = defaultdict(list)
    for repeat in ended:
        times[repeat.task].append(repeat.ended_unix_s - repeat.started_unix_s)
    if any(sitting.task not in times for sitting in order):
        return None
    return sum(sum(times[each.task]) / len(times[each.task]) for each in order) / 60
