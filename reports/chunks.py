"""What the chunk files say: when tokens arrived, and the gaps between chunks. Memory stays bounded whatever their
size."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from reports.run import LoadedBlock, Measurement

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_SLAB = 1_000_000  # chunk records in memory at a time
_MOST_BINS = 20_000_000

GAP_EDGES: Floats = np.geomspace(1e-6, 1e3, 2049)
"""Edges of the gap histogram, seconds: 1.02 times apart, so a percentile read from it is within 1 %."""


class Arrivals(msgspec.Struct, frozen=True):
    """Tokens by arrival time: ``tokens[i]`` arrived in the ``step_s`` seconds from ``i * step_s`` after the block's
    start, and ``any[i]`` says whether a chunk did, whatever it carried."""

    step_s: float
    tokens: Ints
    any: npt.NDArray[np.bool_]


class Gaps(msgspec.Struct, frozen=True):
    """Histogram of the gaps between consecutive chunks of one reply, per session: ``counts[session, bin of
    GAP_EDGES]``. A gap has no fixed number of tokens, so it is never called ITL."""

    counts: Ints
    shortest_s: float
    longest_s: float


def slabs(block: Measurement, rows: pl.DataFrame) -> Iterator[tuple[Ints, Ints, Ints]]:
    """(row number in ``rows``, t_ns, tokens) of every chunk of those rows, about _SLAB chunks at a time, rows never
    split."""
    numbered = rows.select("file", "chunk_start", "chunk_count").with_row_index("row").filter(pl.col("chunk_count") > 0)
    for (file,), part in numbered.sort("file", "chunk_start").group_by("file", maintain_order=True):
        chunks = block.chunks[int(str(file))]
        row, start, count = (part[name].to_numpy().astype(np.int64) for name in ("row", "chunk_start", "chunk_count"))
        slab = np.cumsum(count) // _SLAB
        for each in np.unique(slab):
            here = slab == each
            counts = count[here]
            before = np.cumsum(counts) - counts
            first, end = int(start[here][0]), int((start[here] + counts).max())
            index = np.repeat(start[here] - first - before, counts) + np.arange(counts.sum())
            records = chunks.map(first, end)[index]
            yield np.repeat(row[here], counts), records["t_ns"].astype(np.int64), records["tokens"].astype(np.int64)


def disagreeing(block: Measurement, rows: pl.DataFrame) -> int:
    """Rows whose chunks are not those that the row tells of: the first and the last arrive at other times, or their
    tokens do not add up to the server's count, where tokens per chunk are counted and not estimated."""
    first, last = (rows[name].fill_null(-1).to_numpy() for name in ("first_token_ns", "last_token_ns"))
    exact = (
        rows["token_source"].is_in(["usage", "ids", "inferred"]).fill_null(False) & rows["output_tokens"].is_not_null()
    )
    counted, total = exact.to_numpy(), rows["output_tokens"].fill_null(0).to_numpy()
    found = 0
    for row, t_ns, tokens in slabs(block, rows):
        starts = np.flatnonzero(np.diff(row, prepend=-1))
        ends = np.append(starts[1:], len(row)) - 1
        each = row[starts]
        off = (t_ns[starts] != first[each]) | (t_ns[ends] != last[each])
        off |= counted[each] & (np.add.reduceat(tokens, starts) != total[each])
        found += int(off.sum())
    return found


def arrivals(block: LoadedBlock, rows: pl.DataFrame, time_scale: float) -> Arrivals:
    """Tokens of ``rows`` that arrived inside the block's measured window, in steps of 1 ms (coarser in blocks of many
    hours)."""
    started, ended = block.block.started_ns, block.block.ended_ns
    assert ended is not None  # reports.run judges finished blocks only
    step_ns = max(1_000_000 / time_scale, (ended - started) / _MOST_BINS)
    bins = int((ended - started) / step_ns) + 1
    tokens, found = np.zeros(bins, np.int64), np.zeros(bins, np.bool_)
    for _, t_ns, carried in slabs(block, rows):
        inside = (t_ns >= started) & (t_ns <= ended)
        at = ((t_ns[inside] - started) / step_ns).astype(np.int64)
        found[at] = True
        first, last = (int(at.min()), int(at.max())) if len(at) else (0, 0)
        tokens[first : last + 1] += np.bincount(at - first, carried[inside], last + 1 - first).astype(np.int64)
    return Arrivals(step_ns * 1e-9 * time_scale, tokens, found)


def peak_in_a_second(arrived: Arrivals) -> int:
    """The most tokens in any second: the largest sum over a window of 1 s that slides by one step."""
    window = max(1, round(1 / arrived.step_s))
    total = np.concatenate([[0], np.cumsum(arrived.tokens)])
    ends = np.minimum(np.arange(len(arrived.tokens)) + window, len(arrived.tokens))
    return int((total[ends] - total[:-1]).max()) if len(arrived.tokens) else 0


def longest_silence(block: LoadedBlock, rows: pl.DataFrame, arrived: Arrivals) -> float:
    """The longest stretch of the measured window, seconds, with a streamed request in flight all the time and no chunk
    arriving. Good to one step of ``arrived``, which must be that of ``rows``."""
    started, ended = block.block.started_ns, block.block.ended_ns
    assert ended is not None  # reports.run judges finished blocks only
    streamed = rows.filter(pl.col("streamed")).sort("sent_ns")
    window_s = len(arrived.any) * arrived.step_s
    scale = window_s / max(ended - started, 1)
    sent = ((streamed["sent_ns"].to_numpy() - started) * scale).clip(0, window_s)
    end = ((streamed["end_ns"].to_numpy() - started) * scale).clip(0, window_s)
    if not len(sent):
        return 0.0
    # stretches in which something is in flight: a new one starts where all earlier ones have ended
    so_far = np.maximum.accumulate(end)
    starts = np.concatenate([[True], sent[1:] > so_far[:-1]])
    busy_from, busy_to = sent[starts], so_far[np.append(np.flatnonzero(starts)[1:] - 1, len(sent) - 1)]
    marks = np.sort(np.concatenate([(np.flatnonzero(arrived.any) + 0.5) * arrived.step_s, busy_from, busy_to]))
    stretch, middle = np.diff(marks), (marks[1:] + marks[:-1]) / 2
    at = np.searchsorted(busy_from, middle, side="right") - 1
    inside = (at >= 0) & (middle < busy_to[np.maximum(at, 0)])
    return float(stretch[inside].max(initial=0.0))


def gaps(block: LoadedBlock, rows: pl.DataFrame, session: Ints, sessions: int, time_scale: float) -> Gaps:
    """Gaps between consecutive chunks of ``rows``; ``session[row]`` in 0..sessions-1 is the row's session."""
    bins = len(GAP_EDGES) - 1
    counts = np.zeros(sessions * bins, np.int64)
    shortest, longest = np.inf, 0.0
    for row, t_ns, _ in slabs(block, rows):
        same = row[1:] == row[:-1]
        gap = np.diff(t_ns)[same] * 1e-9 * time_scale
        if not len(gap):
            continue
        shortest, longest = min(shortest, float(gap.min())), max(longest, float(gap.max()))
        at = np.clip(np.searchsorted(GAP_EDGES, gap, side="right") - 1, 0, bins - 1)
        counts += np.bincount(session[row[1:][same]] * bins + at, minlength=sessions * bins)
    return Gaps(counts.reshape(sessions, bins), float(shortest), longest)


def gap_quantile(histogram: Gaps, weights: Floats, p: float) -> Floats:
    """The gap, seconds, below which a share ``p`` of gaps lies, once per row of ``weights`` (replicates x sessions)."""
    bins = histogram.counts.any(axis=0)
    if not bins.any():
        return np.full(len(weights), np.nan)
    cumulative = np.cumsum(weights @ histogram.counts[:, bins], axis=1)
    target = (cumulative[:, -1:] - 1) * p
    middle = np.sqrt(GAP_EDGES[:-1] * GAP_EDGES[1:])[bins].clip(histogram.shortest_s, histogram.longest_s)
    value: Floats = middle[np.minimum((cumulative <= target).sum(axis=1), bins.sum() - 1)]
    return value
