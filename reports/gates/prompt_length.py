"""Prompts were as long as planned, by the servers' own counts."""

from __future__ import annotations

import polars as pl

from reports.gates.gate import Evidence, Gate, none_completed, passing


def judge(evidence: Evidence) -> Gate:
    """P99 over ok turns of |prompt tokens − planned| / planned, the worse backend."""
    limit = evidence.thresholds.prompt_length
    off: dict[str, float | None] = {}
    for name in evidence.names:
        known = evidence.of(name).filter((pl.col("status") == "ok") & pl.col("input_tokens").is_not_null())
        relative = ((known["input_tokens"] - known["asked_input"]).abs() / known["asked_input"]).quantile(
            0.99, "linear"
        )
        off[name] = relative
    known_off = [value for value in off.values() if value is not None]
    return Gate(
        id="prompt_length",
        title="Prompt length as planned",
        required=False,  # prompts are compared by their digests too
        status="unknown" if len(known_off) < 2 else passing(max(known_off) <= limit),
        number=max(known_off, default=None),
        limit=limit,
        unit="share",
        explanation=(f"Off by more than planned: {_listed(off, limit)}. " if max(known_off) > limit else "")
        + "P99 of the difference between the server's prompt tokens and the plan, the worse backend."
        if len(known_off) == 2
        else none_completed(evidence) or "Not both servers report prompt tokens.",
        numbers=off,
    )


def _listed(off: dict[str, float | None], limit: float) -> str:
    return ", ".join(f"{name} {value:.2%}" for name, value in off.items() if value is not None and value > limit)
