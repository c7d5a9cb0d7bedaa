"""The answers are those of the servers that were meant, and nothing went wrong beside them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from scipy import stats

from evals.records import DIED, Answer
from replay.records import MetricsSample, Snapshot
from reports.accuracy.tasks import KINDS
from reports.counters import deltas
from reports.run import read
from reports.signoff.gates.evidence import RETRIED_MORE, Evidence, gate
from reports.signoff.parts import EvalsPart, Sitting
from reports.signoff.result import Gate

_CORRUPTED = "vllm:corrupted_requests"
_PREEMPTED = "vllm:num_preemptions"


def judge(evidence: Evidence) -> list[Gate]:
    """No answer from another server, no server changed or started anew in between, no more retries on the candidate, no
    more logits that are not numbers (FAIL where the baseline is known to have none)."""
    evals = evidence.parts.evals
    if evals is None:
        return []
    readings = [each for sitting in evals.sittings if (each := _readings(sitting)) is not None]
    missing = [*_changed(evals), *_restarted(readings), *_strangers(evals), *_retried(evals), *_repeating(evals)]
    corrupted = [_grown(readings, name, _CORRUPTED) for name in evals.names]
    if corrupted[1] and (corrupted[0] is None or corrupted[1] > corrupted[0]):
        missing.append(
            f"{evals.names[1]}: {corrupted[1]:,} requests had logits that are not numbers ({_CORRUPTED}); "
            f"{evals.names[0]}: {_count(corrupted[0])}."
        )
    preempted = [_grown(readings, name, _PREEMPTED) for name in evals.names]
    if preempted[1] and not preempted[0]:
        missing.append(
            f"{evals.names[1]}: {preempted[1]:,} preemptions, {evals.names[0]}: {_count(preempted[0])}. Its KV cache "
            "is smaller, or more was in it: give both the same, and fewer requests at once."
        )
    died = [_died(evals, name) for name in evals.names]
    if died[1]:
        missing.append(
            f"{evals.names[1]}: its server ended by itself in {died[1]:,} sittings; of {evals.names[0]} in {died[0]:,}."
        )
    harmed = (bool(corrupted[1]) and corrupted[0] == 0) or (died[1] > 0 and died[0] == 0)
    said = "Something went wrong beside the answers." if missing else _said(evals, preempted, corrupted)
    return [gate("hygiene", "Hygiene", said, missing, harmed=harmed)]


def _said(evals: EvalsPart, preempted: list[int | None], corrupted: list[int | None]) -> str:
    retried = [sum(each.attempts > 1 for each in _answers(evals, name)) for name in evals.names]
    said = [f"Requests sent again: {retried[0]:,} against {retried[1]:,}"]
    for what, (first, second) in (("preemptions", preempted), ("requests with NaN logits", corrupted)):
        said.append(f"{what}: {_count(first)} against {_count(second)}")
    return f"{'; '.join(said)}."


def _count(value: int | None) -> str:
    return "not told" if value is None else f"{value:,}"


def _died(evals: EvalsPart, backend: str) -> int:
    """Sittings that ended with their server, and were gone on with."""
    return len(list((evals.folder / backend).glob(f"*/r*/{DIED}")))


def _answers(evals: EvalsPart, backend: str) -> list[Answer]:
    return [each for sitting in evals.sittings if sitting.repeat.backend == backend for each in sitting.answers]


def _repeating(evals: EvalsPart) -> Iterator[str]:
    """Backends that say the same in every repeat, although each has a seed of its own."""
    for task in evals.plan.tasks:
        if task.repeats < 2 or not task.sampling.get("temperature", 1) or task.task == "mrcr":
            continue  # a piece of writing is to be repeated as it is
        for name in evals.names:
            replies: dict[int, set[str]] = {}
            sittings = evals.of(name, task.task)
            for answer in (each for sitting in sittings for each in sitting.answers if each.reply_hash is not None):
                replies.setdefault(answer.item, set()).add(answer.reply_hash or "")
            same = sum(len(each) == 1 for each in replies.values())
            if len(sittings) > 1 and same > len(replies) / 2:
                yield (
                    f"{KINDS[task.task].title}: {name} gave one and the same reply in all repeats to {same:,} of "
                    f"{len(replies):,} items: it ignores seeds, or a cache answers for it. See that neither is so, and "
                    "run the evals again."
                )


def _retried(evals: EvalsPart) -> Iterator[str]:
    counts = []
    for name in evals.names:
        answers = _answers(evals, name)
        again = sum(each.attempts > 1 for each in answers)
        counts.append([again, len(answers) - again])
    if stats.fisher_exact([counts[1], counts[0]], alternative="greater").pvalue <= RETRIED_MORE:
        yield (
            f"{evals.names[1]}: {counts[1][0]:,} of {sum(counts[1]):,} requests were sent again, of {evals.names[0]} "
            f"{counts[0][0]:,} of {sum(counts[0]):,}: see why it turns requests away or fails them."
        )


def _strangers(evals: EvalsPart) -> Iterator[str]:
    """Answers whose fingerprint is not that of the server which was looked at."""
    for backend in evals.manifest.backends:
        expected = backend.settings.get("fingerprint")
        told = [each.fingerprint for each in _answers(evals, backend.name) if each.fingerprint is not None]
        other = sum(each != expected for each in told) if expected is not None else 0
        if other:
            yield (
                f"{backend.name}: {other:,} of {len(told):,} answers carry another fingerprint than the server that "
                "preflight saw: they are another server's, or a cache's. Ask the server itself."
            )
        elif len(set(told)) > 1:
            yield f"{backend.name}: its answers carry {len(set(told))} fingerprints: it was not one deployment."


def _changed(evals: EvalsPart) -> Iterator[str]:
    """What a server said of itself before a sitting and no longer after it."""
    for name in evals.names:
        seen: dict[str, set[object]] = {"version": set(), "fingerprint": set(), "max_model_len": set()}
        for sitting in evals.sittings:
            if sitting.repeat.backend != name:
                continue
            files = (sitting.folder / f"{edge}.json" for edge in ("before", "after"))
            edges = [read(file, Snapshot) if file.exists() else None for file in files]
            for snapshot in edges:
                for what, values in seen.items():
                    if snapshot is not None and (value := getattr(snapshot, what)) is not None:
                        values.add(value)
            digests = {edge.config_digest for edge in edges if edge is not None and edge.config_digest is not None}
            if len(digests) > 1:
                place = f"{sitting.repeat.task} repeat {sitting.repeat.repeat}"
                yield f"{name}: its settings (/server_info) changed during {place}."
        for what, values in seen.items():
            if len(values) > 1:
                yield f"{name}: its {what} changed from sitting to sitting: it was not one deployment."


class _Readings(msgspec.Struct, frozen=True):
    """What a server's /metrics said at both edges of a sitting."""

    sitting: Sitting
    start: MetricsSample
    end: MetricsSample


def _readings(sitting: Sitting) -> _Readings | None:
    """None where /metrics was not read at one of the edges."""
    path = sitting.folder / "metrics.jsonl"
    if not path.exists():
        return None
    at: dict[str, MetricsSample] = {}
    for line in path.read_bytes().splitlines():
        try:
            sample = msgspec.json.decode(line, type=MetricsSample)
        except msgspec.MsgspecError:  # a last line that was torn
            continue
        if sample.samples:
            at[sample.at] = sample
    return _Readings(sitting, at["start"], at["end"]) if {"start", "end"} <= at.keys() else None


def _restarted(readings: list[_Readings]) -> Iterator[str]:
    """Sittings in which a counter fell: the server, or one of its engines, was started anew."""
    for each in readings:
        if any(delta.reset for delta in deltas(each.start.samples, each.end.samples)):
            repeat = each.sitting.repeat
            yield (
                f"{repeat.backend}: its server was started anew during {repeat.task} repeat {repeat.repeat}: see why "
                "in its log."
            )


def _grown(readings: list[_Readings], backend: str, counter: str) -> int | None:
    """By how much a counter of a backend grew over all sittings; None where none tells it."""
    found = []
    for each in readings:
        if each.sitting.repeat.backend == backend:
            before, after = _value(each.start, counter), _value(each.end, counter)
            if before is not None and after is not None:
                found.append(after - before if after >= before else after)
    return round(sum(found)) if found else None


def _value(sample: MetricsSample, counter: str) -> float | None:
    """A counter, its series added up."""
    values = [value for name, _, value in sample.samples if name in (counter, f"{counter}_total")]
    return sum(values) if values else None
