"""Which path a cell's decode steps took on one backend: measured where the server tells, else predicted."""

from __future__ import annotations

from typing import Literal

import msgspec

from replay.records import Backend, Cell, PathRule
from reports.coverage import SPECIALISED, PathCoverage, Stretch, covered, rule_for
from reports.gates.gate import Thresholds

Status = Literal["specialised", "standard decode", "unknown"]


class DecodePath(msgspec.Struct, frozen=True, kw_only=True):
    """``share``: of decode tokens in the common decode windows that are ``counted``; null where no log tells.
    ``full_graphs``: of decode tokens, those of steps in FULL graphs; null where it is unknown."""

    status: Status
    measured: bool
    share: float | None
    counted: str
    full_graphs: float | None
    why: str


def path_of(
    backend: Backend, both: list[Backend], cell: Cell, stretches: list[Stretch], limits: Thresholds
) -> DecodePath:
    """The path of one backend's common decode windows. ``both``: baseline and candidate with the cell's speculation.
    Raises UserError for a damaged log."""
    rule = rule_for(backend, both)
    seen = covered(backend, rule, stretches) if stretches else None
    log = seen if seen is not None and seen.measured else None
    status, measured, why = _status(backend, rule, cell, log, limits)
    return DecodePath(
        status=status,
        measured=measured,
        share=log.total.share if log and log.total else None,
        counted=log.counted if log else "",
        full_graphs=log.full_graphs if log else None,
        why=why,
    )


def _status(
    backend: Backend, rule: PathRule | None, cell: Cell, log: PathCoverage | None, limits: Thresholds
) -> tuple[Status, bool, str]:
    if backend.decode_backend != SPECIALISED:
        return "standard decode", False, f"set to {backend.decode_backend}"
    others = [value for value in log.set_by_server if value != SPECIALISED] if log else []
    if others:
        return "standard decode", True, f"decode_backend in its server's own configuration: {', '.join(others)}"
    if log is not None and log.counted == "specialised" and log.at_least is not None and log.at_most is not None:
        reasons = ", ".join(f"{why} {share:.0%}" for why, share in log.total.reasons.items()) if log.total else ""
        if log.at_least >= limits.specialised_share:
            return "specialised", True, reasons
        if log.at_most < limits.specialised_share:
            return "standard decode", True, reasons
        return "unknown", True, reasons
    return predicted(rule, cell.batch)


def predicted(rule: PathRule | None, batch: int) -> tuple[Status, bool, str]:
    """By the rule alone: ``batch`` requests in every step, all of them decoding."""
    if rule is None:
        return "unknown", False, "no rule of a specialised path is known for this deployment"
    if rule.problems:
        return "standard decode", False, "; ".join(rule.problems)
    if batch > rule.max_requests:
        return "standard decode", False, f"more than the {rule.max_requests} requests in a step that it takes"
    tokens = batch * rule.tokens_per_request
    if tokens > max(rule.sizes, default=0):
        return "standard decode", False, f"no size that it runs holds a step of {tokens} tokens"
    return "specialised", False, "predicted, not measured"
