"""Both backends answered at the same length."""

from __future__ import annotations

import polars as pl

from reports.gates.gate import Evidence, Gate, passing
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
    difference = abs(float(candidate.sum()) / total - 1) if total else None
    return Gate(
        id="output_lengths",
        title="Output lengths",
        status="unknown" if difference is None else passing(difference <= limit),
        number=difference,
        limit=limit,
        unit="share",
        explanation="No pair has output tokens counted in every block."
        if difference is None
        else "Relative difference of output tokens over pairs."
        + ("" if difference <= limit else " The backends did not do the same work: fix the output length."),
        numbers={"mean difference in a turn": float((candidate - baseline).abs().sum()) / total if total else None},
    )
