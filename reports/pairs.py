"""Pairs: the planned turns that completed in every block of both backends. Effects are computed on these alone."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from replay.records import Plan
from reports.measures import KEY

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Pairs(msgspec.Struct, frozen=True):
    """``rows`` holds each pair once per block (columns of reports.measures.measured, plus `block`), sorted by block
    and key."""

    rows: pl.DataFrame
    count: int
    planned: int
    one_token: int
    """Planned turns that asked for one token, or were recorded without output: they cannot have a decode rate."""
    with_itl: int
    """Pairs that have a decode rate in every block, which the headline is computed on."""

    @property
    def coverage(self) -> float | None:
        """Pairs with a decode rate / planned turns that can have one; null if there are none."""
        possible = self.planned - self.one_token
        return self.with_itl / possible if possible > 0 else None


def pair_up(requests: pl.DataFrame, blocks: int, plan: Plan) -> Pairs:
    """Keep the turns, known by (session, play, stream, turn), whose status is ok in each of the ``blocks``.

    A plan that runs for a time has no fixed number of turns: planned are then the turns that the slower backend ended
    in each of its blocks, so that a faster one that gets further sinks no coverage, and turns under way when the time
    was up are nobody's loss.
    """
    rows = _in_every_block(requests.filter(pl.col("status") == "ok"), blocks)
    with_itl = _in_every_block(rows.filter(pl.col("itl").is_not_null()), blocks)
    sent = _reached_by_the_slower(requests) if plan.end == "duration" else requests
    one_token = sent.filter((pl.col("asked_output") <= 1) | pl.col("zero_output")).select(KEY).n_unique()
    planned = plan.turns.get("send", 0) if plan.end == "work" else sent.select(KEY).n_unique()
    return Pairs(rows, len(rows) // blocks, planned, one_token, len(with_itl) // blocks)


def _reached_by_the_slower(requests: pl.DataFrame) -> pl.DataFrame:
    """The slower backend's turns that ended by themselves in each of its blocks."""
    ended = [rows for _, rows in requests.filter(pl.col("status") != "cut").group_by("backend", maintain_order=True)]
    if not ended:
        return requests.clear()
    slower = min(ended, key=lambda rows: len(rows) / rows["block"].n_unique())
    return _in_every_block(slower, slower["block"].n_unique())


def complete(pairs: Pairs, measure: str, blocks: int) -> tuple[pl.DataFrame, Floats]:
    """The pairs that have ``measure`` in every block: (key columns of each pair, values of shape blocks x pairs)."""
    rows = _in_every_block(pairs.rows.filter(pl.col(measure).is_not_null()), blocks)
    values = rows[measure].to_numpy().astype(np.float64).reshape(blocks, -1)
    return rows.head(len(rows) // blocks).select(*KEY, "session_index"), values


def _in_every_block(rows: pl.DataFrame, blocks: int) -> pl.DataFrame:
    return rows.filter(pl.len().over(KEY) == blocks).sort("block", *KEY)
