"""The answers are those of the servers that were meant, and nothing went wrong beside them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from scipy import stats

from evals.records import Answer
from replay.records import MetricsSample, Snapshot
from reports.signoff.gates.evidence import RETRIED_MORE, Evidence, gate
from reports.signoff.parts import EvalsPart, Sitting
from reports.signoff.result import Gate

_CORRUPTED = "vllm:corrupted_requests"
_PREEMPTED = "vllm:num_preemptions"


def judge(evidence: Evidence) -> list[Gate]:
    """No answer from another server, no server changed in between, no more retries on the candidate, no logits that
    are not numbers there and not on the baseline (which is FAIL)."""
    evals = evidence.parts.evals
    if evals is None:
        return []
    missing = [*_changed(evals), *_strangers(evals), *_retried(evals)]
    corrupted = [_grown(evals, name, _CORRUPTED) for name in evals.names]
    harmed = bool(corrupted[1]) and not corrupted[0]
    if harmed:
        missing.append(
            f"{evals.names[1]}: {corrupted[1]:,} requests had logits that are not numbers ({_CORRUPTED}); "
            f"{evals.names[0]} had none."
        )
    preempted = [_grown(evals, name, _PREEMPTED) for name in evals.names]
    if preempted[1] and not preempted[0]:
        missing.append(
            f"{evals.names[1]}: {preempted[1]:,} preemptions, {evals.names[0]} none: its KV cache is smaller, or more "
            "was in it. Give both the same, and fewer requests at once."
        )
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


def _answers(evals: EvalsPart, backend: str) -> list[Answer]:
    return [each for sitting in evals.sittings if sitting.repeat.backend == backend for each in sitting.answers]


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
            edges = [_snapshot(sitting, edge) for edge in ("before", "after")]
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


def _snapshot(sitting: Sitting, edge: str) -> Snapshot | None:
    try:
        return msgspec.json.decode((sitting.folder / f"{edge}.json").read_bytes(), type=Snapshot)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _grown(evals: EvalsPart, backend: str, counter: str) -> int | None:
    """By how much a counter of a backend grew over all sittings; None where none tells it."""
    found = [
        after - before
        for sitting in evals.sittings
        if sitting.repeat.backend == backend and (edges := _edges(sitting, counter)) is not None
        for before, after in [edges]
    ]
    return round(sum(found)) if found else None


def _edges(sitting: Sitting, counter: str) -> tuple[float, float] | None:
    path = sitting.folder / "metrics.jsonl"
    if not path.exists():
        return None
    at: dict[str, float] = {}
    for line in path.read_bytes().splitlines():
        try:
            sample = msgspec.json.decode(line, type=MetricsSample)
        except msgspec.MsgspecError:  # a last line that was torn
            continue
        values = [value for name, _, value in sample.samples if name in (counter, f"{counter}_total")]
        if sample.at != "between" and values:
            at[sample.at] = sum(values)
    return (at["start"], at["end"]) if len(at) == 2 else None
