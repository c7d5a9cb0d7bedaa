"""The specialised decode path really ran, where it should and only there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from reports.gates.gate import Evidence, Gate, passing


class _Steps(msgspec.Struct):
    """A line of the emulator's server/steps.jsonl: one step, or a run of equal ones."""

    t_ns: int
    decode_tokens: int
    specialised: bool
    reason: str = ""
    steps: int = 1


class Coverage(msgspec.Struct):
    """Decode steps and tokens of one backend, and how many of them ran specialised."""

    steps: int = 0
    tokens: int = 0
    specialised_steps: int = 0
    specialised_tokens: int = 0
    reasons: Counter[str] = msgspec.field(default_factory=Counter)
    """Tokens of the other steps by reason."""


def judge(evidence: Evidence) -> Gate:
    """Share of decode tokens (and steps) inside the measured windows that ran specialised: at least the floor on a
    backend set to latency_specialized, about none elsewhere. Unknown where the server keeps no log of its steps:
    then only two deployments are compared, which the conclusion says first (reports.conclusion)."""
    thresholds = evidence.thresholds
    numbers: dict[str, float | None] = {}
    problems: list[str] = []
    judged: float | None = None
    found = [(backend, _coverage(evidence, backend.name)) for backend in evidence.run.manifest.backends]
    silent = [backend.name for backend, covered in found if covered is None or not covered.tokens]
    if silent:
        who = f"The servers of {silent[0]} and {silent[1]} do" if len(silent) > 1 else f"The server of {silent[0]} does"
        their = "their" if len(silent) > 1 else "its"
        return Gate(
            id="path_proof",
            title="Proof of path",
            status="unknown",
            required=False,
            number=None,
            limit=thresholds.specialised_share,
            limit_is="at least",
            unit="share",
            explanation=f"{who} not tell which path {their} decode steps took.",
        )
    for backend, covered in found:
        assert covered is not None  # such a backend is silent
        share = covered.specialised_tokens / covered.tokens
        numbers[f"{backend.name}: decode tokens"] = share
        numbers[f"{backend.name}: decode steps"] = covered.specialised_steps / covered.steps
        if backend.decode_backend == "latency_specialized":
            judged = share if judged is None else min(judged, share)
            if share < thresholds.specialised_share:
                why = ", ".join(
                    f"{reason} ({count / covered.tokens:.0%})" for reason, count in covered.reasons.most_common(3)
                )
                problems.append(f"only {share:.1%} of {backend.name}'s decode tokens ran specialised; the rest: {why}")
        elif share > thresholds.stray_specialised_share:
            problems.append(
                f"{share:.1%} of {backend.name}'s decode tokens ran specialised although it is set to "
                f"{backend.decode_backend}"
            )
    good = "; ".join(problems) or (
        "specialised where it was asked for, by the server's own log of steps"
        if judged is not None
        else "no backend is set to latency_specialized"
    )
    return Gate(
        id="path_proof",
        title="Proof of path",
        status=passing(not problems),
        required=False,
        number=judged,
        limit=thresholds.specialised_share,
        limit_is="at least",
        unit="share",
        explanation=good[0].upper() + good[1:] + ".",
        numbers=numbers,
    )


def _coverage(evidence: Evidence, name: str) -> Coverage | None:
    covered = Coverage()
    for loaded in evidence.run.blocks:
        if loaded.block.backend != name:
            continue
        log = loaded.path / "server" / "steps.jsonl"
        if not log.exists() or loaded.block.ended_ns is None:
            return None
        _add(covered, log, loaded.block.started_ns, loaded.block.ended_ns)
    return covered


def _add(covered: Coverage, log: Path, start_ns: int, end_ns: int) -> None:
    decode = msgspec.json.Decoder(_Steps).decode
    with log.open("rb") as lines:
        for line in lines:
            try:
                step = decode(line)
            except msgspec.MsgspecError:
                break  # torn by a kill: the last line
            if not start_ns <= step.t_ns <= end_ns or not step.decode_tokens:
                continue
            covered.steps += step.steps
            covered.tokens += step.decode_tokens
            if step.specialised:
                covered.specialised_steps += step.steps
                covered.specialised_tokens += step.decode_tokens
            else:
                covered.reasons[step.reason or "no reason given"] += step.decode_tokens
