"""The emulator's own log of its steps (replay/emulator/truth.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from replay.records import PathRule
from reports.coverage.classes import COVERED, PROMPT, RAGGED, TOO_MANY, UNPREPARED
from reports.coverage.strata import counts_of
from reports.coverage.stretches import Stretch
from workloads.errors import UserError

_COLUMNS: dict[str, Any] = {
    "t_ns": pl.Int64,
    "end_ns": pl.Int64,
    "steps": pl.Int64,
    "rows": pl.Int64,
    "prompt_tokens": pl.Int64,
    "decode_tokens": pl.Int64,
    "specialised": pl.Boolean,
    "reason": pl.String,
}
_REASONS = {
    "prompt rows": PROMPT,
    "uneven drafts": RAGGED,
    "over 64 tokens": TOO_MANY,
    "no captured size": UNPREPARED,
    "": "no reason given",
}


def counts(stretch: Stretch, _: PathRule | None) -> pl.DataFrame | None:
    """strata.COUNTS of a stretch; None without a log, or without decode steps in it."""
    file = stretch.path / "server" / "steps.jsonl"
    if not file.exists():
        return None
    lines = file.read_bytes().rpartition(b"\n")[0]  # without what a kill left of the last line
    try:
        log = pl.read_ndjson(lines, schema=_COLUMNS)
    except pl.exceptions.ComputeError as error:
        raise UserError(f"{file} is damaged: {error}. Move it away to judge the run without it") from None
    return counts_of(
        stretch,
        _within(log, stretch.spans).select(
            pl.when("specialised").then(pl.lit(COVERED)).otherwise(pl.col("reason").replace(_REASONS)).alias("class"),
            # when the run's first step had ended, and its tokens came
            t_ns=pl.col("t_ns") + (pl.col("end_ns") - pl.col("t_ns")) // pl.col("steps"),
            steps=pl.col("steps"),
            tokens=pl.col("decode_tokens"),
            decoding=pl.when(pl.col("prompt_tokens") > 0)
            .then(pl.min_horizontal(pl.col("rows") - 1, "decode_tokens"))  # at most: some of its rows are of prompts
            .otherwise(pl.col("rows")),
            full=pl.lit(False),
        ),
    )


def _within(log: pl.DataFrame, spans: list[tuple[int, int]]) -> pl.DataFrame:
    """Decode steps inside the spans; of a run of steps that reaches beyond one, the steps and tokens of its share."""
    log = log.filter(pl.col("end_ns") > pl.col("t_ns"))
    starts, ends = np.array(spans, np.int64).T
    first = np.searchsorted(ends, log["t_ns"].to_numpy(), side="right")
    behind = np.searchsorted(starts, log["end_ns"].to_numpy(), side="left")
    each = np.maximum(behind - first, 0)  # spans that a run reaches into
    run = np.repeat(np.arange(len(log)), each)
    span = np.repeat(first, each) + np.arange(len(run)) - np.repeat(np.cumsum(each) - each, each)
    begins, closes = pl.max_horizontal("t_ns", "from_ns"), pl.min_horizontal("end_ns", "to_ns")
    steps = (pl.col("steps") * (closes - begins) / (pl.col("end_ns") - pl.col("t_ns"))).round()
    cut = log[run].with_columns(from_ns=pl.Series(starts[span], dtype=pl.Int64), to_ns=pl.Series(ends[span]))
    return cut.with_columns(
        steps.cast(pl.Int64),
        (pl.col("decode_tokens") * steps / pl.col("steps")).round().cast(pl.Int64),
        t_ns=begins,
        end_ns=closes,
    ).filter((pl.col("steps") > 0) & (pl.col("decode_tokens") > 0))
