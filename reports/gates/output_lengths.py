"""Both backends answered at the same length."""

from __future__ import annotations

import polars as pl

from reports.gates.gate import Evidence, Gate, none_completed, passing
from reports.measures import KEY


def judge(evidence: Evidence) -> Gate:
    """|Σ O candidate / Σ O baseline − 1| over pairs, mean over each backend's blocks. Without a fixed output length
    answers differ, and shorter or longer ones are other work. Turns recorded without output are left out."""
    limit = evidence.thresholds.output_length_difference
    by_turn = evidence.pairs.rows.group_by(KEY).agg(
        *(
            pl.when(pl.col("output").null_count() == 0)
            .then(pl.col("output").filter(pl.col("backend") == name).mean())
            .alias(name)
            for name in evidence.names
        )
    )
    baseline, candidate = (by_turn.drop_nulls()[name] for name in evidence.names)
    total = float(baseline.sum())
    change = float(candidate.sum()) / total - 1 if total else None
    difference = abs(change) if change is not None else None
    return Gate(
        id="output_lengths",
        title="Output lengths",
        status="unknown" if difference is None else passing(difference <= limit),
        number=difference,
        limit=limit,
        unit="share",
        explanation=(none_completed(evidence) or "No pair has output tokens counted in every block.")
        if change is None
        else (
            f"{evidence.names[1]} answered {abs(change):.1%} {'longer' if change > 0 else 'shorter'} than "
            f"{evidence.names[0]}: not the same work; fix the output length. "
            if abs(change) > limit
            else ""
        )
        + "Relative difference of output tokens over pairs.",
        numbers={"mean difference in a turn": float((candidate - baseline).abs().sum()) / total if total else None},
    )
