"""Both backends got equally many tokens accepted a step."""

from __future__ import annotations

from reports.gates.gate import Evidence, Gate, none_completed, passing


def judge(evidence: Evidence) -> Gate:
    """Tokens per chunk after the first chunk, on pairs. Where they differ, a luckier draft model explains the speed,
    not the backend."""
    limit = evidence.thresholds.acceptance_difference
    found = evidence.tokens_per_chunk
    baseline, candidate = (found[name].value for name in evidence.names)
    difference = abs(candidate / baseline - 1) if baseline and candidate else None
    return Gate(
        id="acceptance_parity",
        title="Acceptance parity",
        status="unknown" if difference is None else passing(difference <= limit),
        number=difference,
        limit=limit,
        unit="share",
        explanation=(none_completed(evidence) or "No turn has several chunks and known token counts.")
        if difference is None
        else f"Tokens per chunk: {evidence.names[0]} {baseline:.3f}, {evidence.names[1]} {candidate:.3f}, "
        f"{difference:.1%} apart."
        + ("" if difference <= limit else " Not a backend effect: the drafts accepted differ."),
    )
