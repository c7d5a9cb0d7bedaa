"""What the charts draw: thinned, plain numbers, computed once with the rest of the analysis."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from reports.chunks import Arrivals
from reports.intervals import quantiles
from reports.pairs import Pairs, complete
from reports.run import LoadedBlock

Floats = npt.NDArray[np.float64]

_MOST_POINTS = 1000
_TIME_STEPS = 240
_GRID = np.concatenate([np.linspace(0, 0.98, 99), np.linspace(0.981, 1, 20)])


class Distribution(msgspec.Struct, frozen=True):
    """A backend's quantile function on pairs: at share ``share[i]`` the mean over its blocks of that quantile,
    seconds."""

    backend: str
    share: list[float]
    seconds: list[float]


class ContextPoint(msgspec.Struct, frozen=True):
    """P90 interactivity (tokens/s) of the pairs whose prompts have about ``context`` tokens."""

    backend: str
    context: float
    p90_interactivity: float
    n: int


class TimePoint(msgspec.Struct, frozen=True):
    """The state of one block at ``minute`` from its start."""

    block: str
    backend: str
    minute: float
    in_flight: int | None
    lanes_in_session: int | None
    output_tokens_per_s: float | None
    """Null where the backend's tokens are not counted."""


class Series(msgspec.Struct, frozen=True):
    """Everything that charts need beyond the tables."""

    itl: list[Distribution]
    ttft: list[Distribution]
    pairs: list[tuple[float, float]]
    """Interactivity of each pair, tokens/s: (baseline, candidate); the mean over blocks in time, inverted. Thinned to
    1,000."""
    contexts: list[ContextPoint]
    time: list[TimePoint]


def distributions(
    pairs: Pairs, measure: str, names: tuple[str, str], candidate: npt.NDArray[np.bool_]
) -> list[Distribution]:
    """Quantile functions of both backends; empty without pairs."""
    _, values = complete(pairs, measure, len(candidate))
    if not values.size:
        return []
    found = []
    for name, mine in zip(names, (~candidate, candidate), strict=True):
        curve = np.quantile(values[mine], _GRID, axis=1).mean(axis=1)
        found.append(Distribution(name, _rounded(_GRID), _rounded(curve)))
    return found


def pair_points(pairs: Pairs, candidate: npt.NDArray[np.bool_]) -> list[tuple[float, float]]:
    """Every k-th pair in the order of keys, so that at most 1,000 are left."""
    _, values = complete(pairs, "itl", len(candidate))
    if not values.size:
        return []
    both = np.column_stack([1 / values[~candidate].mean(axis=0), 1 / values[candidate].mean(axis=0)])
    thinned = both[:: math.ceil(len(both) / _MOST_POINTS)]
    return [(_round(x), _round(y)) for x, y in thinned]


def context_points(
    pairs: Pairs, names: tuple[str, str], candidate: npt.NDArray[np.bool_], most_bins: int = 8, fewest: int = 20
) -> list[ContextPoint]:
    """Bins of equally many pairs by asked input; too few pairs make fewer bins."""
    with_itl = pairs.rows.filter(pl.col("itl").is_not_null())
    keys, values = complete(pairs, "itl", len(candidate))
    if not values.size:
        return []
    context = keys.join(
        with_itl.filter(pl.col("block") == 0).select("session", "play", "stream", "turn", "asked_input"),
        on=["session", "play", "stream", "turn"],
        how="left",
        maintain_order="left",
    )["asked_input"].to_numpy()
    bins = max(1, min(most_bins, len(context) // fewest))
    found = []
    for part in np.array_split(np.argsort(context, kind="stable"), bins):
        for name, mine in zip(names, (~candidate, candidate), strict=True):
            one = np.ones((1, 1))
            at = [quantiles(block[part], np.zeros(len(part), np.int64), one, [0.9])[0, 0] for block in values[mine]]
            found.append(
                ContextPoint(name, _round(float(np.median(context[part]))), _round(float(1 / np.mean(at))), len(part))
            )
    return found


def time_points(loaded: LoadedBlock, arrived: Arrivals, time_scale: float, *, counted: bool) -> list[TimePoint]:
    """A point about every 240th of the block: mean token rate in the step, state of the client at its end.
    ``counted``: whether its chunks' tokens are counts of tokens."""
    per_step = max(1, math.ceil(len(arrived.tokens) / _TIME_STEPS))
    step_s = per_step * arrived.step_s
    tokens = np.add.reduceat(arrived.tokens, np.arange(0, len(arrived.tokens), per_step))
    ends_ns = loaded.block.started_ns + (np.arange(1, len(tokens) + 1) * step_s * 1e9 / time_scale).astype(np.int64)
    in_flight = _state(loaded, "in_flight", ends_ns)
    in_session = _state(loaded, "lanes_in_session", ends_ns)
    lengths = np.full(len(tokens), step_s)
    lengths[-1] = (len(arrived.tokens) - (len(tokens) - 1) * per_step) * arrived.step_s
    return [
        TimePoint(
            loaded.name,
            loaded.block.backend,
            _round((i + 1) * step_s / 60),
            in_flight[i],
            in_session[i],
            _round(float(tokens[i] / lengths[i])) if counted else None,
        )
        for i in range(len(tokens))
    ]


def _state(loaded: LoadedBlock, column: str, at_ns: npt.NDArray[np.int64]) -> list[int | None]:
    """Sum over workers of each one's last sample before each time; null where a worker has none yet."""
    total = np.zeros(len(at_ns), np.int64)
    known = np.full(len(at_ns), bool(loaded.health))
    for samples in loaded.health:
        last = np.searchsorted(samples["t_ns"].to_numpy(), at_ns, side="right") - 1
        known &= last >= 0
        if len(samples):
            total += samples[column].to_numpy()[np.maximum(last, 0)]
    return [int(value) if is_known else None for value, is_known in zip(total, known, strict=True)]


def _rounded(values: Floats) -> list[float]:
    return [_round(float(value)) for value in values]


def _round(value: float) -> float:
    """Six significant digits: more than any chart shows."""
    return float(f"{value:.6g}")
