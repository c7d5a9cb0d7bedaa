"""Both backends got the same prompts, turn by turn, by the plan that was recorded."""

from __future__ import annotations

import polars as pl

from reports.gates.gate import Evidence, Gate, passing
from reports.measures import KEY


def judge(evidence: Evidence) -> Gate:
    """Turns sent in two blocks or more whose prompt digest or asked lengths are not the same in all of them; and
    whether plan.json and sessions.jsonl still are the files whose digests were recorded."""
    asked = ("prompt_digest", "asked_input", "asked_output")
    turns = evidence.requests.group_by(KEY).agg(pl.len().alias("blocks"), *(pl.col(name).n_unique() for name in asked))
    compared = turns.filter(pl.col("blocks") > 1)
    different = len(compared.filter(pl.any_horizontal(pl.col(name) > 1 for name in asked)))
    changed = evidence.run.changed
    return Gate(
        id="same_work",
        title="Same work",
        status="fail" if changed else passing(different == 0) if len(compared) else "unknown",
        number=different if len(compared) else None,
        limit=0,
        unit="turns",
        explanation="".join(
            f"{name} is not the file whose digest was recorded: what was planned is unknown. " for name in changed
        )
        + (
            f"{different} of {len(compared)} turns sent in several blocks differ in prompt digest or asked lengths."
            if len(compared)
            else "No turn was sent in two blocks."
        ),
    )
