"""Pairs: the planned turns that completed in every block of both backends. Effects are computed on these alone."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from reports.measures import KEY

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Pairs(msgspec.Struct, frozen=True):
    """``rows`` holds each pair once per block (columns of reports.measures.measured, plus `block`), sorted by block
    and key."""

    rows: pl.DataFrame
    count: int
    planned: int

    @property
    def coverage(self) -> float | None:
        """Pairs / planned turns; null if nothing was planned."""
        return self.count / self.planned if self.planned else None


def pair_up(requests: pl.DataFrame, blocks: int, planned: int) -> Pairs:
    """Keep the turns, known by (session, play, stream, turn), whose status is ok in each of the ``blocks``.
    ``planned``: turns that the plan sends in a block."""
    rows = _in_every_block(requests.filter(pl.col("status") == "ok"), blocks)
    return Pairs(rows, len(rows) // blocks, planned)


def complete(pairs: Pairs, measure: str, blocks: int) -> tuple[pl.DataFrame, Floats]:
    """The pairs that have ``measure`` in every block: (key columns of each pair, values of shape blocks x pairs)."""
    rows = _in_every_block(pairs.rows.filter(pl.col(measure).is_not_null()), blocks)
    values = rows[measure].to_numpy().astype(np.float64).reshape(blocks, -1)
    return rows.head(len(rows) // blocks).select(*KEY, "session_index"), values


def _in_every_block(rows: pl.DataFrame, blocks: int) -> pl.DataFrame:
    return rows.filter(pl.len().over(KEY) == blocks).sort("block", *KEY)
