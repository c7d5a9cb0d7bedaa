"""One block in figures: what became of its turns, and its totals. Nothing here compares."""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl

from replay.records import Plan
from reports.chunks import Arrivals, disagreeing, longest_silence, peak_in_a_second
from reports.measures import CountSource, uncached_input
from reports.run import LoadedBlock


class BlockSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Counts are turns unless the name says otherwise; times are seconds of the hardware (client seconds x time scale).
    Null is unknown."""

    name: str
    backend: str
    index: int
    window_s: float
    """Length of the measured window."""
    planned: int | None
    """Turns of the plan: sent + history + cut + not reached (+ unexplained). Null with end "duration": no fixed
    number."""
    history: int
    cut: int
    sent: int
    not_reached: int | None
    unexplained: int | None
    """Planned turns that nothing accounts for. Must be 0."""
    unrecorded: int | None
    """Turns that the workers say they sent, less the rows there are. Must be 0."""
    recorded_twice: int
    """Rows of turns that have another; the last one counts. Must be 0."""
    impossible: int
    """Turns whose times are in no possible order (reports.measures.IMPOSSIBLE): left out of speed. Must be 0."""
    chunks_disagree: int
    """Turns whose chunks are not those that their row tells of. Must be 0."""
    statuses: dict[str, int]
    """Sent turns by status; they add up to ``sent``."""
    failures: dict[str, int]
    """Turns whose status is not ok, by class."""
    output_tokens_per_s: float | None
    peak_tokens_in_a_second: int | None
    uncached_input_tokens: int | None
    cached_tokens: int | None
    ideal_cached_tokens: int | None
    """Over the same turns as ``cached_tokens``."""
    warmup_s: float | None
    """Client seconds."""
    warmup_requests: int | None
    """Warm-up requests that succeeded, of ``warmup_planned``."""
    warmup_planned: int | None
    pool_wait_p99_s: float | None
    """Wait for a free connection, P99; client seconds."""
    peak_in_flight: int
    longest_silence_s: float
    """Longest stretch with streamed requests in flight and no token arriving."""
    plays: int
    """Plays of sessions that sent a turn."""
    plays_ended: int | None
    plays_cut: int | None
    most_plays_of_a_session: int
    degraded_plays: int
    """Plays with a failed turn anywhere in their tree (cut by the end of a timed run is no failure)."""


def summarise(
    loaded: LoadedBlock,
    requests: pl.DataFrame,
    plan: Plan,
    arrived: Arrivals,
    time_scale: float,
    source: CountSource | None,
    twice: int,
) -> BlockSummary:
    """``requests``: this block's measured turns, each once; ``source``: whose token counts its backend offers;
    ``twice``: rows left out because their turn has another."""
    block = loaded.block
    assert block.ended_ns is not None  # reports.run judges finished blocks only
    window = (block.ended_ns - block.started_ns) * 1e-9 * time_scale
    history = plan.turns.get("history", 0)
    cut = sum(count for fate, count in plan.turns.items() if fate.startswith("cut"))
    planned = sum(plan.turns.values()) if plan.end == "work" else None
    not_reached = block.not_reached if plan.end == "work" else None
    if planned is not None and not_reached is None:
        not_reached = max(0, plan.turns.get("send", 0) - len(requests))
    unexplained = (
        planned - history - cut - len(requests) - not_reached
        if planned is not None and not_reached is not None
        else None
    )
    ok = requests.filter(pl.col("status") == "ok")
    cached = ok.filter(pl.col("cached_tokens").is_not_null())
    counted_tokens = source in ("server", "client")
    pool_wait = requests["pool_wait_ns"].quantile(0.99, "linear")
    plays = requests.group_by("session", "play").agg(degraded=failed(plan).any())
    most_plays = plays.group_by("session").len()["len"].max()
    return BlockSummary(
        name=loaded.name,
        backend=block.backend,
        index=block.index,
        window_s=window,
        planned=planned,
        history=history,
        cut=cut,
        sent=len(requests),
        not_reached=not_reached,
        unexplained=unexplained,
        unrecorded=block.sent - len(requests) if block.sent is not None else None,
        recorded_twice=twice,
        impossible=int(requests["impossible"].sum()),
        chunks_disagree=disagreeing(loaded, requests),
        statuses=counted(requests, pl.col("status")),
        failures=counted(requests.filter(pl.col("status") != "ok"), pl.coalesce("error", "status")),
        output_tokens_per_s=int(arrived.tokens.sum()) / window if window > 0 and counted_tokens else None,
        peak_tokens_in_a_second=peak_in_a_second(arrived) if counted_tokens else None,
        uncached_input_tokens=uncached_input(requests),
        cached_tokens=int(cached["cached_tokens"].sum()) if len(cached) else None,
        ideal_cached_tokens=int(cached["ideal_cached"].sum()) if len(cached) else None,
        warmup_s=block.warmup_s,
        warmup_requests=block.warmup_requests,
        warmup_planned=block.warmup_planned,
        pool_wait_p99_s=pool_wait * 1e-9 if pool_wait is not None else None,
        peak_in_flight=_peak_in_flight(requests),
        longest_silence_s=longest_silence(loaded, requests, arrived),
        plays=len(plays),
        plays_ended=block.plays_ended,
        plays_cut=block.plays_cut,
        most_plays_of_a_session=most_plays if isinstance(most_plays, int) else 0,
        degraded_plays=int(plays["degraded"].sum()),
    )


def window_samples(loaded: LoadedBlock) -> list[pl.DataFrame]:
    """Health samples of each worker inside the measured window."""
    block = loaded.block
    return [samples.filter(pl.col("t_ns").is_between(block.started_ns, block.ended_ns)) for samples in loaded.health]


def counted(rows: pl.DataFrame, by: pl.Expr) -> dict[str, int]:
    """Rows by class, the most frequent first."""
    counts = rows.group_by(by.alias("class")).len().sort(["len", "class"], descending=[True, False])
    return {str(name): int(count) for name, count in counts.iter_rows()}


def failed(plan: Plan) -> pl.Expr:
    """Turns that are not ok; those cut by the end of a timed run are no failures."""
    bad = pl.col("status") != "ok"
    return bad & (pl.col("status") != "cut") if plan.end == "duration" else bad


def _peak_in_flight(requests: pl.DataFrame) -> int:
    """The most requests between being sent and their end at once, exactly; one that ends as another is sent is over."""
    at = np.concatenate([requests["end_ns"].to_numpy(), requests["sent_ns"].to_numpy()])
    change = np.repeat([-1, 1], len(requests))
    return int(np.cumsum(change[np.lexsort((change, at))]).max(initial=0))
