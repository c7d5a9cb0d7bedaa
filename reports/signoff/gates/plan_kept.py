"""What was to be measured, and what would count as harm, was fixed before the candidate was asked anything."""

from __future__ import annotations

from datetime import UTC, datetime

from reports.signoff.gates.evidence import Evidence, gate
from reports.signoff.parts import EvalsPart
from reports.signoff.result import Gate


def judge(evidence: Evidence) -> list[Gate]:
    """plan.json has the hash that was recorded, and its time lies before the candidate's first request."""
    evals = evidence.parts.evals
    if evals is None:
        return []
    missing = []
    if evals.plan_sha256 != evals.manifest.plan_sha256:
        missing.append(
            "plan.json is not the plan that was registered (its SHA-256 differs from manifest.json's): what it says "
            "now may have been chosen after the answers were seen. Run the evals again, in a new folder."
        )
    first = first_request(evals, evals.names[1])
    if untimed := _untimed(evals, evals.names[1]):
        missing.append(
            f"{untimed:,} answers of {evals.names[1]} do not say when they were asked for: that the plan was there "
            "before is not shown. Run the evals again, in a new folder."
        )
    registered = datetime.fromisoformat(evals.plan.registered_utc)
    if first is not None and registered > first:
        missing.append(
            f"The plan says that it was registered at {registered.isoformat()}, after the candidate's first request "
            f"({first.isoformat(timespec='seconds')}). Run the evals again, in a new folder."
        )
    said = "The plan is not the one that was registered." if missing else _said(registered, first)
    return [gate("plan_kept", "The plan was registered first, and kept", said, missing)]


def _said(registered: datetime, first: datetime | None) -> str:
    asked = f", the candidate's first request sent at {first.isoformat(timespec='seconds')}" if first else ""
    return f"Registered at {registered.isoformat()}{asked}; its hash is the recorded one."


def _untimed(evals: EvalsPart, backend: str) -> int:
    return sum(
        answer.sent_unix_s is None
        for sitting in evals.sittings
        if sitting.repeat.backend == backend
        for answer in sitting.answers
    )


def first_request(evals: EvalsPart, backend: str) -> datetime | None:
    """When a backend was first asked a question of an exam; None if that is not known."""
    sent = [
        answer.sent_unix_s
        for sitting in evals.sittings
        if sitting.repeat.backend == backend
        for answer in sitting.answers
        if answer.sent_unix_s is not None
    ]
    return datetime.fromtimestamp(min(sent), UTC) if sent else None
