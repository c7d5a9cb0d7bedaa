"""One block in figures: what became of its turns, and its totals. Nothing here compares."""

from __future__ import annotations

import msgspec
import polars as pl

from replay.records import Plan
from reports.chunks import Arrivals, peak_in_a_second
from reports.measures import uncached_input
from reports.run import LoadedBlock


class BlockSummary(msgspec.Struct, frozen=True):
    """Counts are turns unless the name says otherwise. Null is unknown."""

    name: str
    backend: str
    index: int
    window_s: float
    """Measured window, in seconds of the hardware (client seconds x time scale)."""
    planned: int | None
    """Turns of the plan: sent + history + cut + not reached (+ unexplained). Null with end "duration": no fixed
    number."""
    history: int
    cut: int
    sent: int
    not_reached: int | None
    unexplained: int | None
    """Planned turns that nothing accounts for. Must be 0."""
    statuses: dict[str, int]
    """Sent turns by status; they add up to ``sent``."""
    failures: dict[str, int]
    """Turns whose status is not ok, by class."""
    output_tokens_in_window: int
    output_tokens_per_s: float | None
    peak_tokens_in_a_second: int
    input_tokens: int | None
    """Server's count over ok turns that report it; null if none does."""
    uncached_input_tokens: int | None
    cached_tokens: int | None
    ideal_cached_tokens: int | None
    """Over the same turns as ``cached_tokens``."""
    warmup_s: float | None
    warmup_requests: int | None
    in_flight_mean: float | None
    busy_lanes_mean: float | None


def summarise(
    loaded: LoadedBlock, requests: pl.DataFrame, plan: Plan, arrived: Arrivals, time_scale: float
) -> BlockSummary:
    """``requests``: this block's measured turns."""
    block = loaded.block
    assert block.ended_ns is not None  # reports.run judges finished blocks only
    window = (block.ended_ns - block.started_ns) * 1e-9 * time_scale
    statuses = _count(requests, pl.col("status"))
    failed = requests.filter(pl.col("status") != "ok")
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
    tokens = int(arrived.tokens.sum())
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
        statuses=statuses,
        failures=_count(failed, pl.coalesce("error", "status")),
        output_tokens_in_window=tokens,
        output_tokens_per_s=tokens / window if window > 0 else None,
        peak_tokens_in_a_second=peak_in_a_second(arrived),
        input_tokens=int(ok["input_tokens"].sum()) if ok["input_tokens"].count() else None,
        uncached_input_tokens=uncached_input(requests),
        cached_tokens=int(cached["cached_tokens"].sum()) if len(cached) else None,
        ideal_cached_tokens=int(cached["ideal_cached"].sum()) if len(cached) else None,
        warmup_s=block.warmup_s,
        warmup_requests=block.warmup_requests,
        in_flight_mean=_mean_over_workers(loaded, "in_flight"),
        busy_lanes_mean=_mean_over_workers(loaded, "busy_lanes"),
    )


def window_samples(loaded: LoadedBlock) -> list[pl.DataFrame]:
    """Health samples of each worker inside the measured window."""
    block = loaded.block
    return [samples.filter(pl.col("t_ns").is_between(block.started_ns, block.ended_ns)) for samples in loaded.health]


def _count(rows: pl.DataFrame, by: pl.Expr) -> dict[str, int]:
    counted = rows.group_by(by.alias("class")).len().sort(["len", "class"], descending=[True, False])
    return {str(name): int(count) for name, count in counted.iter_rows()}


def _mean_over_workers(loaded: LoadedBlock, column: str) -> float | None:
    """Sum over the workers of each one's mean: workers run side by side."""
    sampled = sorted((int(samples[column].sum()), len(samples)) for samples in window_samples(loaded) if len(samples))
    return sum(total / count for total, count in sampled) if sampled else None
