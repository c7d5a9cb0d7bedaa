"""What the client's own times let expect, where the server tells nothing."""

from __future__ import annotations

import numpy as np
import polars as pl

from replay.records import PathRule
from reports.coverage.classes import PREFILLING, TOO_MANY, UNPREPARED, class_of
from reports.coverage.strata import by_concurrency, by_context, decode_chunks
from reports.coverage.stretches import Stretch


def counts(stretch: Stretch, rule: PathRule | None) -> pl.DataFrame | None:
    """strata.COUNTS of the client's decode chunks, each classified by the requests in flight at its arrival, as the
    client knows them. None without streams or a rule."""
    if rule is None or stretch.streams is None:
        return None
    rows = stretch.streams.turns
    streamed = rows.filter(pl.col("first_token_ns").is_not_null() & pl.col("last_token_ns").is_not_null())
    first, last = (np.sort(streamed[name].to_numpy()) for name in ("first_token_ns", "last_token_ns"))
    sent = np.sort(rows["sent_ns"].to_numpy())
    answered = np.sort(rows["first_token_ns"].fill_null(rows["end_ns"]).to_numpy())
    reasons = [
        (pl.col("decoding") > rule.max_requests, TOO_MANY),
        (pl.col("decoding") * rule.tokens_per_request > max(rule.sizes, default=0), UNPREPARED),
        (pl.col("prefilling") > 0, PREFILLING),
    ]
    found = []
    for context, t_ns, tokens in decode_chunks(stretch):
        decoding = np.searchsorted(first, t_ns, side="right") - np.searchsorted(last, t_ns, side="left")
        prefilling = np.searchsorted(sent, t_ns, side="right") - np.searchsorted(answered, t_ns, side="right")
        chunks = pl.DataFrame({"decoding": decoding, "prefilling": prefilling, "tokens": tokens})
        chunks = chunks.with_columns(class_of(reasons), steps=pl.lit(None, pl.Int64), full=pl.lit(False))
        found += [by_concurrency(chunks), by_context(context, chunks["class"], tokens)]
    return pl.concat(found) if found else None
