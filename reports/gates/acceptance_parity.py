"""Both backends got equally many tokens accepted a step."""

from __future__ import annotations

from reports.gates.gate import Evidence, Gate, none_completed, passing


def judge(evidence: Evidence) -> Gate:
    """Acceptance length by the servers' own counters, 1 + accepted / drafts, over the measured windows; where not both
    backends have them, tokens per chunk after the first chunk, on pairs, as the client sees them. Where they differ, a
    luckier draft model explains the speed, not the backend."""
    limit = evidence.thresholds.acceptance_difference
    if reason := _meant(evidence):
        return Gate(
            id="acceptance_parity",
            title="Acceptance parity",
            status="pass",
            number=None,
            limit=limit,
            unit="share",
            explanation=reason,
        )
    lengths = [evidence.counters[name].acceptance_length for name in evidence.names]
    per_chunk = [evidence.tokens_per_chunk[name].value for name in evidence.names]
    exact = None not in lengths
    baseline, candidate = lengths if exact else per_chunk
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
        else ("Acceptance length, by the servers' counters" if exact else "Tokens per chunk")
        + f": {evidence.names[0]} {baseline:.3f}, {evidence.names[1]} {candidate:.3f}, {difference:.1%} apart"
        + (f" (tokens per chunk at the client: {_told(per_chunk[0])}, {_told(per_chunk[1])})." if exact else ".")
        + ("" if difference <= limit else " Not a backend effect: the drafts accepted differ."),
    )


def _meant(evidence: Evidence) -> str:
    """Why nothing is to be held against the backends; empty if something may be. Several tokens in a chunk need no
    drafts: a busy server sends what piled up together."""
    if all(evidence.counters[name].without_speculation for name in evidence.names):
        return "Neither server speculates, by its counters."
    if any(each.under_test and each.key.startswith("speculative-config") for each in evidence.run.manifest.differences):
        return "Speculation is what is under test."
    return ""


def _told(value: float | None) -> str:
    return f"{value:.3f}" if value is not None else "unknown"
