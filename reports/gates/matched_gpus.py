"""Both backends had the same GPUs."""

from __future__ import annotations

from reports.gates.gate import Evidence, Gate, passing


def judge(evidence: Evidence) -> Gate:
    """Count, kind and layout as the experiment declares them; backends without a declaration are not matched."""
    manifest = evidence.run.manifest
    return Gate(
        id="matched_gpus",
        title="Matched GPUs",
        status=passing(manifest.matched_gpus),
        number=None,
        limit=None,
        unit="",
        explanation="Same count, kind and layout, as declared."
        if manifest.matched_gpus
        else f"{'; '.join(manifest.unmatched_reasons) or 'Not the same'}. Not matched: does not isolate the decode "
        "path.",
    )
