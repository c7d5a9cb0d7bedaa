"""Enough of the planned turns completed in every block to be compared."""

from __future__ import annotations

from reports.gates.gate import Evidence, Gate, passing


def judge(evidence: Evidence) -> Gate:
    """Pairs / planned turns."""
    pairs, limit = evidence.pairs, evidence.limits.pair_coverage
    coverage = pairs.coverage
    return Gate(
        id="pair_coverage",
        title="Pair coverage",
        status=passing(coverage is not None and coverage >= limit),
        number=coverage,
        limit=limit,
        unit="share",
        explanation=f"{pairs.count} of {pairs.planned} planned turns completed in every block of both backends; "
        "only those are compared.",
    )
