"""Both backends had the same GPUs."""

from __future__ import annotations

from reports.gates.gate import Evidence, Gate, passing


def judge(evidence: Evidence) -> Gate:
    """Count, kind and layout as declared and, where they can be seen, verified by the measuring side."""
    manifest = evidence.run.manifest
    undeclared = manifest.matched_gpus and any(backend.gpus is None for backend in manifest.backends)
    reasons = "; ".join(manifest.unmatched_reasons)
    return Gate(
        id="matched_gpus",
        title="Matched GPUs",
        status="unknown" if undeclared else passing(manifest.matched_gpus),
        number=None,
        limit=None,
        unit="",
        explanation="GPUs were not declared for both backends: add gpus: {count, kind} to the experiment."
        if undeclared
        else "Same count, kind and layout."
        if manifest.matched_gpus
        else f"Not matched: does not isolate the decode path. {reasons}",
    )
