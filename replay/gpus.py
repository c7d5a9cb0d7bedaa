"""Matched GPUs: what the experiment declares of both backends, and whether the comparison isolates the decode path."""

from __future__ import annotations

from replay.records import Backend


def mismatches(baseline: Backend, candidate: Backend) -> list[str]:
    """Reasons why the two are not matched; empty if they are. Only what is declared is compared here."""
    reasons = [
        f"{backend.name}: GPUs are not declared (gpus: {{count: N, kind: ...}})"
        for backend in (baseline, candidate)
        if backend.gpus is None
    ]
    if baseline.gpus is None or candidate.gpus is None:
        return reasons
    for what in ("count", "kind", "layout"):
        one, other = getattr(baseline.gpus, what), getattr(candidate.gpus, what)
        if one != other:
            reasons.append(f"GPU {what}: baseline {one}, candidate {other}")
    return reasons
