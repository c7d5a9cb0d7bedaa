"""The step log of a server: STEP records, written by replay/step_log.py inside vLLM."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import polars as pl

from replay.records import SCHEMA_VERSION, STEP, STEP_MODES, PathRule, StepLog
from reports.coverage.classes import EAGER, NOT_SHOWN, PROMPT, RAGGED, TOO_MANY, UNPREPARED, class_of, counted_modes
from reports.coverage.strata import counts_of
from reports.coverage.stretches import Stretch, inside
from workloads.errors import UserError

_COLUMNS = (
    "t_ns", "prompt_tokens", "first_tokens", "decode_tokens", "unpadded", "padded", "draft_requests", "draft_tokens",
    "accepted_tokens", "mode",
)  # fmt: skip


def logs(folder: Path) -> list[tuple[StepLog, Path]]:
    """Heads and record files, one of each engine and process. Raises UserError for a damaged head."""
    found = []
    for head in sorted(folder.glob("*.json")):
        try:
            read = msgspec.json.decode(head.read_bytes(), type=StepLog)
        except msgspec.MsgspecError as error:
            raise UserError(f"{head} is damaged: {error}. Move it away to judge the run without it") from None
        if read.schema_version > SCHEMA_VERSION:
            raise UserError(f"{head} has schema_version {read.schema_version}: upgrade decodegate")
        found.append((read, head.with_suffix(".bin")))
    return found


def counts(stretch: Stretch, rule: PathRule | None) -> pl.DataFrame | None:
    """strata.COUNTS of a stretch; None without records, or without decode steps in it."""
    parts = []
    for _, file in logs(stretch.steps):
        records = file.stat().st_size // STEP.itemsize if file.exists() else 0
        if not records:
            continue
        steps = np.memmap(file, dtype=STEP, mode="r", shape=(records,))  # a torn last record is left out
        parts.append(steps[inside(stretch.spans, steps["t_ns"]) & (steps["decode_tokens"] > 0)])
    if not parts:
        return None
    log = np.concatenate(parts)
    columns = {name: log[name].astype(np.int64) for name in _COLUMNS}
    return counts_of(stretch, classified(pl.DataFrame(columns), rule))


def classified(log: pl.DataFrame, rule: PathRule | None) -> pl.DataFrame:
    """Decode steps from STEP records (fields as columns) with ``t_ns``, ``steps``, ``tokens``, ``decoding`` (requests),
    ``class`` and ``full`` (FULL graph without prompt rows).

    By ``rule`` a step is counted if it is a FULL graph, holds no prompt rows, no more requests than the rule allows,
    every one with as many tokens, and was padded to one of its sizes; without a rule the first two alone.
    """
    known = log.with_columns(pl.col("draft_requests", "draft_tokens", "accepted_tokens").clip(lower_bound=0))
    # Either is exact but for a case of its own: requests without drafts, and drafts beyond a reply's last token.
    decoding = pl.max_horizontal("draft_requests", pl.col("decode_tokens") - pl.col("accepted_tokens"))
    shown = pl.col("unpadded") >= 0
    prompt = (pl.col("prompt_tokens") > 0) | (pl.col("first_tokens") > 0)
    full = pl.col("mode") == STEP_MODES.index("FULL")
    others = [STEP_MODES.index(mode) for mode in ("NONE", "PIECEWISE") if mode not in counted_modes(rule)]
    reasons = [(prompt, PROMPT), (pl.col("mode").is_in(others), EAGER)]
    if rule is not None:
        each = rule.tokens_per_request
        # With async scheduling a request that ended in the step before takes a row once more, and yields nothing.
        rows = pl.max_horizontal("decoding", pl.col("unpadded") // each)
        even = (
            (pl.col("unpadded") == rows * each)
            & (pl.col("draft_tokens") == pl.col("draft_requests") * (each - 1))
            & ((pl.col("draft_requests") > 0) | (each == 1))
        )
        reasons += [
            (rows > rule.max_requests, TOO_MANY),
            (shown & ~even, RAGGED),
            (shown & ~pl.col("padded").is_in(rule.sizes), UNPREPARED),
        ]
    return known.with_columns(decoding=decoding).select(
        "t_ns",
        "decoding",
        class_of([*reasons, (~shown | (pl.col("mode") == STEP_MODES.index("unknown")), NOT_SHOWN)]),
        steps=pl.lit(1, pl.Int64),
        tokens=pl.col("decode_tokens"),
        full=full & ~prompt,
    )
