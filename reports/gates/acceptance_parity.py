"""Both backends got equally many tokens accepted a step."""

from __future__ import annotations

from reports.gates.gate import Evidence, Gate, passing


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
        explanation="No turn with several chunks and known token counts."
        if difference is None
        else f"Relative difference in tokens per chunk, {baseline:.3f} against {candidate:.3f}."
        + ("" if difference <= limit else " Not a backend effect: the drafts accepted differ."),
    )
