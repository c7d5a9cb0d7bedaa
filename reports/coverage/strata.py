"""From classified decode steps to sums, and from sums to shares: of all, by concurrency, by context length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import polars as pl

from reports.chunks import Ints, slabs
from reports.coverage.classes import COVERED
from reports.coverage.stretches import Stretch, inside

CONCURRENCY = ("1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "65+")
_CONCURRENCY_FROM = (2, 3, 5, 9, 17, 33, 65)
CONTEXT = ("0-2k", "2k-8k", "8k-32k", "32k-128k", "128k+")
_CONTEXT_FROM = (2 << 10, 8 << 10, 32 << 10, 128 << 10)

COUNTS: dict[str, Any] = {
    "by": pl.String,
    "bin": pl.Int64,
    "class": pl.String,
    "steps": pl.Int64,
    "tokens": pl.Int64,
    "full": pl.Int64,
}
"""One stretch's sums: by "concurrency" (index into CONCURRENCY, -1 if unknown) or "context" (into CONTEXT). ``full``:
tokens of steps in FULL graphs without prompt rows."""


class Stratum(msgspec.Struct, frozen=True, kw_only=True):
    """Decode steps of one concurrency, or decode tokens at one context length, or all of a backend's. ``shares`` are of
    its output tokens (of its steps where tokens are unknown), counted ones left out, by reason, the most frequent
    first: with the share that is counted they add up to 1. Null is unknown."""

    label: str
    steps: int | None
    tokens: int | None
    share_of_steps: float | None
    share_of_tokens: float | None
    reasons: dict[str, float]

    @property
    def share(self) -> float:
        """The share that is counted: of tokens, or of steps where tokens are unknown."""
        known = self.share_of_tokens if self.share_of_tokens is not None else self.share_of_steps
        assert known is not None  # a source knows one of them, and an empty stratum is left out
        return known


def counts_of(stretch: Stretch, steps: pl.DataFrame) -> pl.DataFrame | None:
    """COUNTS over decode steps by concurrency, and over the client's decode chunks by context: a chunk is of the step
    whose tokens came last before it. ``steps`` is as step_log.classified gives it; None if it is empty."""
    if not len(steps):
        return None
    steps = steps.sort("t_ns")
    found = [by_concurrency(steps)]
    came = steps["t_ns"].to_numpy()
    for context, t_ns, tokens in decode_chunks(stretch):
        at = np.maximum(np.searchsorted(came, t_ns, side="right") - 1, 0)
        found.append(by_context(context, steps["class"].gather(at), tokens))
    return pl.concat(found)


def decode_chunks(stretch: Stretch) -> Iterator[tuple[Ints, Ints, Ints]]:
    """(context, t_ns, tokens) of every chunk that arrived in the stretch, first chunks left out. Context: the
    request's tokens before it, prompt and output."""
    if stretch.streams is None:
        return
    rows = stretch.streams.turns
    prompt = rows["input_tokens"].fill_null(rows["asked_input"]).to_numpy()
    for row, t_ns, tokens in slabs(stretch.streams.of, rows):
        starts = np.flatnonzero(np.diff(row, prepend=-1))
        before = np.cumsum(tokens) - tokens
        output = before - np.repeat(before[starts], np.diff(np.append(starts, len(row))))
        kept = inside(stretch.spans, t_ns) & (tokens > 0)
        kept[starts] = False
        yield (prompt[row] + output)[kept], t_ns[kept], tokens[kept]


def by_concurrency(steps: pl.DataFrame) -> pl.DataFrame:
    """COUNTS by the column ``decoding``."""
    bins = np.searchsorted(_CONCURRENCY_FROM, steps["decoding"].to_numpy(), side="right")
    known = "steps" if steps["steps"].null_count() == 0 else None
    return _summed(steps.with_columns(bin=bins), "concurrency", known)


def by_context(context: Ints, classes: pl.Series, tokens: Ints) -> pl.DataFrame:
    """COUNTS by context of decode chunks; the three are parallel."""
    bins = np.searchsorted(_CONTEXT_FROM, context, side="right")
    chunks = pl.DataFrame({"bin": bins, "class": classes, "tokens": tokens}).with_columns(full=pl.lit(False))
    return _summed(chunks, "context", None)


def _summed(rows: pl.DataFrame, by: str, steps: str | None) -> pl.DataFrame:
    sums = rows.group_by("bin", "class").agg(
        steps=pl.col(steps).sum() if steps else pl.lit(None, pl.Int64),
        tokens=pl.col("tokens").sum(),
        full=pl.col("tokens").filter(pl.col("full")).sum(),
    )
    return sums.with_columns(by=pl.lit(by)).select(pl.col(name).cast(kind) for name, kind in COUNTS.items())


def strata(counts: pl.DataFrame, labels: tuple[str, ...]) -> list[Stratum]:
    """COUNTS of one ``by``, a stratum each ``bin`` that occurs."""
    found = ((label, counts.filter(pl.col("bin") == index)) for index, label in enumerate(labels))
    return [stratum(label, part) for label, part in found if len(part)]


def stratum(label: str, counts: pl.DataFrame) -> Stratum:
    """All of these COUNTS, which are of one ``by``, as one stratum."""
    steps, tokens = _known(counts["steps"]), _known(counts["tokens"])
    by_class = counts.group_by("class").agg(pl.col("steps", "tokens").sum())
    unit, whole = ("tokens", tokens) if tokens is not None else ("steps", steps)
    rest = by_class.filter((pl.col("class") != COVERED) & (pl.col(unit) > 0))
    rest = rest.sort([unit, "class"], descending=[True, False])
    covered = counts.filter(pl.col("class") == COVERED)
    return Stratum(
        label=label,
        steps=steps,
        tokens=tokens,
        share_of_steps=ratio(int(covered["steps"].sum()), steps),
        share_of_tokens=ratio(int(covered["tokens"].sum()), tokens),
        reasons={str(name): part / whole for name, part in rest.select("class", unit).iter_rows()} if whole else {},
    )


def _known(values: pl.Series) -> int | None:
    return int(values.sum()) if values.null_count() < len(values) else None


def ratio(part: int, whole: int | None) -> float | None:
    """Null for a part of nothing, or of the unknown."""
    return part / whole if whole else None
