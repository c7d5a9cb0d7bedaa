"""Which path the decode steps of the exams took, by benchmark and by stratum of context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from evals.records import Answer, TaskPlan
from replay.records import Backend, PathRule
from reports.accuracy.answers import context_tokens
from reports.coverage import SPECIALISED, PathCoverage, Stretch, rule_for, steps_folder, summed, told
from reports.signoff.parts import EvalsPart, Sitting
from reports.signoff.result import ExamPath


class _Timed(msgspec.Struct, frozen=True):
    """The time of a sitting, or of some of its answers, and the ``answers`` that were given in it."""

    stretch: Stretch
    answers: list[Answer]


def exam_paths(evals: EvalsPart) -> list[ExamPath]:
    """The path of every backend (baseline first) in every benchmark: over all of it, then in each bin of context,
    shortest first.

    A bin's steps are those in the time of its answers, from their last attempt's being sent to its end. A share is
    known where a server's own log of its steps tells it; nothing is predicted, since evals refuse more requests at once
    than the specialised path takes. Raises UserError for a damaged log.
    """
    backends = evals.manifest.backends
    return [
        path
        for backend in backends
        for task in evals.plan.tasks
        for path in _paths(evals, backend, rule_for(backend, backends), task)
    ]


def _paths(evals: EvalsPart, backend: Backend, rule: PathRule | None, task: TaskPlan) -> Iterator[ExamPath]:
    on_both = [sitting for sitting in evals.sittings if sitting.repeat.task == task.task]
    bins = {answer.stratum["bin"] for sitting in on_both for answer in sitting.answers if "bin" in answer.stratum}
    sittings = evals.of(backend.name, task.task)
    for stratum in ("", *sorted(bins, key=context_tokens)):
        asked = [answer for sitting in sittings for answer in _of(sitting, stratum)]
        timed = [each for sitting in sittings if (each := _timed(evals.folder, sitting, stratum)) is not None]
        yield _path(backend, rule, task, stratum, asked, timed)


def _of(sitting: Sitting, stratum: str) -> list[Answer]:
    return [answer for answer in sitting.answers if stratum in ("", answer.stratum.get("bin"))]


def _timed(folder: Path, sitting: Sitting, stratum: str) -> _Timed | None:
    """None without answers in the time of which records are kept."""
    repeat = sitting.repeat
    if repeat.started_ns is None or repeat.ended_ns is None:
        return None
    answers, times = [], []
    for answer in _of(sitting, stratum):
        sent_ns, ended_ns = answer.sent_ns, answer.ended_ns
        if sent_ns is not None and ended_ns is not None and repeat.started_ns <= sent_ns <= ended_ns <= repeat.ended_ns:
            answers.append(answer)
            times.append((sent_ns, ended_ns))
    if not answers:
        return None
    stretch = Stretch(
        path=sitting.folder,
        steps=steps_folder(folder, repeat.server, sitting.folder),
        spans=_joined(times) if stratum else [(repeat.started_ns, repeat.ended_ns)],
    )
    return _Timed(stretch, answers)


def _joined(times: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same time as spans in order, none of which touches another."""
    spans: list[tuple[int, int]] = []
    for start, end in sorted(times):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((start, end))
    return spans


def _decoded(answers: Iterable[Answer]) -> int:
    """Output tokens, but for each reply's first, which ends its prefill."""
    return sum(max((answer.completion_tokens or 0) - 1, 0) for answer in answers)


def _path(
    backend: Backend, rule: PathRule | None, task: TaskPlan, stratum: str, asked: list[Answer], timed: list[_Timed]
) -> ExamPath:
    """``asked``: all answers that there are; ``timed``: those of which a log may tell."""
    stretches = [each.stretch for each in timed]
    source, counts = told(stretches, rule, any)
    seen = summed(backend, rule, stretches, source, counts, _decoded(asked))
    total = seen.total if seen.measured else None
    judged = 0
    if total is not None:  # an answer without decode tokens has no steps to find
        for each, found in zip(timed, counts, strict=True):
            judged += len(each.answers) if found is not None or not _decoded(each.answers) else 0
    tells = total is not None or not stratum  # the tables of --cudagraph-metrics are of a whole repeat
    recorded = sum(len(each.answers) for each in timed)
    notes = [*_of_backend(backend, rule, seen), *_of_answers(seen, len(asked), recorded, judged)]
    if total is not None and stratum and task.concurrency > 1:
        notes.append(
            f"With up to {task.concurrency} requests in flight a step counts in every bin that had an answer in flight"
        )
    return ExamPath(
        task=task.task,
        stratum=stratum,
        backend=backend.name,
        source=source if tells else "none",
        counted=seen.counted if tells else "",
        tokens=total.tokens if total else None,
        answers=judged,
        of_answers=len(asked),
        share=total.share_of_tokens if total else None,
        at_least=seen.at_least if total else None,
        at_most=seen.at_most if total else None,
        reasons=total.reasons if total else {},
        note=". ".join(notes),
    )


def _of_backend(backend: Backend, rule: PathRule | None, seen: PathCoverage) -> Iterator[str]:
    """Why none of its steps is called specialised, although it is set so."""
    if backend.decode_backend != SPECIALISED:
        return
    if rule is not None and rule.problems:
        yield f"It cannot run specialised: {'; '.join(rule.problems)}"
    if others := [value for value in seen.set_by_server if value != SPECIALISED]:
        yield f"decode_backend in its server's own configuration: {', '.join(others)}"


def _of_answers(seen: PathCoverage, asked: int, recorded: int, judged: int) -> Iterator[str]:
    """What of the answers is judged, and by what."""
    if not asked:
        yield "No answers"
        return
    if seen.measured:
        yield from seen.notes
    elif seen.total is not None:
        yield (
            f"By the tables of --cudagraph-metrics {seen.total.share:.1%} of the steps were {seen.counted}, those of "
            "prefill among all: they tell nothing of decode tokens, nor of one bin"
        )
    else:
        yield "The server does not tell which path its decode steps took"
    if outside := asked - recorded:
        yield (
            f"{outside:,} of {asked:,} answers are not of the recorded part of their repeat, which after an "
            "interruption is the last one"
        )
    if seen.measured and (silent := recorded - judged):
        yield f"{silent:,} of {asked:,} answers have no log"
