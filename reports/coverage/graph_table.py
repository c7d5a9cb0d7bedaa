"""The tables of --cudagraph-metrics, which a server printed into its log."""

from __future__ import annotations

import msgspec
import polars as pl

from replay.records import GraphTable, PathRule
from reports.coverage.classes import EAGER, RAGGED, TOO_MANY, UNPREPARED, class_of, counted_modes
from reports.coverage.strata import COUNTS
from reports.coverage.stretches import Stretch
from workloads.errors import UserError


def counts(stretch: Stretch, rule: PathRule | None) -> pl.DataFrame | None:
    """strata.COUNTS of all steps that the tables count while the stretch's folder was recorded, in steps; None without
    tables."""
    file = stretch.path / "graph_table.json"
    if not file.exists():
        return None
    try:
        table = msgspec.json.decode(file.read_bytes(), type=GraphTable)
    except msgspec.MsgspecError as error:
        raise UserError(f"{file} is damaged: {error}. Move it away to judge the run without it") from None
    schema = {"unpadded": pl.Int64, "padded": pl.Int64, "mode": pl.String, "count": pl.Int64}
    rows = [msgspec.structs.astuple(each) for each in table.counts if each.count > 0]
    steps = pl.DataFrame(rows, schema=schema, orient="row")
    reasons = [(~pl.col("mode").is_in(counted_modes(rule)), EAGER)]
    if rule is not None:
        each = rule.tokens_per_request
        reasons += [
            (pl.col("unpadded") > rule.max_requests * each, TOO_MANY),
            (pl.col("unpadded") % each != 0, RAGGED),
            (~pl.col("padded").is_in(rule.sizes), UNPREPARED),
        ]
    sums = steps.group_by(class_of(reasons)).agg(steps=pl.col("count").sum())
    unknown = {"by": pl.lit("concurrency"), "bin": pl.lit(-1), "tokens": pl.lit(None), "full": pl.lit(0)}
    return sums.with_columns(**unknown).select(pl.col(name).cast(kind) for name, kind in COUNTS.items())
