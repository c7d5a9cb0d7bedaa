"""One window judged: whether it has a result, why not, and its figures."""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl

from replay.records import Cell
from reports import gpus
from reports.blocks import counted
from reports.chunks import disagreeing, slabs
from reports.counters import deltas, edge_readings
from reports.decode import acceptance
from reports.decode.emulated import delay_ms
from reports.decode.reasons import Reason
from reports.decode.run import LoadedWindow
from reports.decode.window import FEWEST_STEPS, Common, Figures, Stream, common, figures
from reports.measures import IMPOSSIBLE, KEY, uncached_input
from reports.run import Measurement

CLIENT_LAG = 0.01
"""The event loop's P99 lag, as a share of the common decode window, at most (or half a step, if that is longer): a
stamp that comes so late at an edge changes the rate by as much."""
_SAMPLE_NS = 1_000_000_000
_SURELY_SAMPLED_NS = 3_000_000_000

FORMULAS = {
    "Client lag": "The worst P99 lag of the client's event loop, by its samples of about a second that reach into the "
    f"common decode window, in the client's own time. Limit: {CLIENT_LAG:.0%} of the window, or half a step.",
    "Energy per output token": "Σ (energy after − before) over GPUs, by NVML's counters around the window, over all "
    "output tokens of its streams: their prefill is in it. Power of hosts, network and cooling is not.",
}


class WindowResult(msgspec.Struct, frozen=True, kw_only=True):
    """One finished window. ``figures`` is null without a result, and ``why`` says what stood against it."""

    name: str
    backend: str
    cell: int
    server: str | None
    pass_number: int
    """From 1: passes of its backend over the cells."""
    figures: Figures | None
    why: list[Reason]
    opens_ns: int | None
    """Of the common decode window, as is the close: by the client's clock."""
    closes_ns: int | None
    from_chunks: float | None
    from_usage: float | None
    from_counters: float | None
    """Tokens per step, three ways."""
    client_lag_ms: float | None
    client_lag_limit_ms: float | None
    limit_is: str
    """The limit's rule, in words."""
    emulator_delay_ms: float | None
    """Of the embedded emulator, against its own step times; null: it is none."""
    token_sources: dict[str, int]
    statuses: dict[str, int]
    failures: dict[str, int]
    energy_per_output_token_j: float | None
    notes: list[str]


def turns_of(measured: Measurement) -> pl.DataFrame:
    """Its measured turns, each once."""
    return measured.requests.filter(pl.col("phase") == "measured").unique(KEY, keep="last", maintain_order=True)


def streams_of(measured: Measurement, turns: pl.DataFrame) -> list[Stream]:
    """The streams that have chunks."""
    sent = turns["sent_ns"].to_numpy()
    found = []
    for row, t_ns, tokens in slabs(measured, turns):
        starts = np.flatnonzero(np.diff(row, prepend=-1))
        parts = (row[starts], np.split(t_ns, starts[1:]), np.split(tokens, starts[1:]))
        found += [Stream(int(sent[each]), *pieces) for each, *pieces in zip(*parts, strict=True)]
    return found


def judge(loaded: LoadedWindow, cell: Cell, pass_number: int, time_scale: float) -> WindowResult:
    """A finished window. Any stream that failed, or was not as asked, leaves it without a result."""
    turns = turns_of(loaded)
    streams = streams_of(loaded, turns)
    why = _spoilt(loaded, turns, cell)
    found = common(streams) if streams and not why else None
    if not why and (found is None or found.steps < FEWEST_STEPS):
        why.append(_too_short(found, cell.batch))
    limit, limit_is = _limit(found) if found else (None, "")
    lag = _lag(loaded, found) if found else None
    delay = delay_ms(loaded.path / "server", found.opens_ns, found.closes_ns) if found else None
    slower = ", or lower time_scale" if time_scale != 1 else ""
    notes: list[str] = []
    if lag is not None and limit is not None and lag > limit:
        advice = f"use a host with idle cores{slower}"
        why.append(Reason("the client's event loop was late", lag / limit, _of(lag, limit, limit_is), advice))
    elif found is not None and lag is None:
        missing = "no sample of the client's event loop is left (w0.health.jsonl): how late it ran is not known"
        if found.length_ns > _SURELY_SAMPLED_NS:
            why.append(Reason(missing))
        else:
            notes.append(missing)
    if delay is not None and limit is not None and abs(delay) > limit:
        advice = f"use a host with idle cores{slower}"
        kind = "the emulator was off its own step times"
        why.append(Reason(kind, abs(delay) / limit, _of(delay, limit, limit_is), advice))
    edges = edge_readings(loaded)
    if isinstance(edges, str):
        counters = None
        notes.append(edges)
    else:
        grown = deltas(edges[0].samples, edges[1].samples)
        counters = acceptance.from_counters(grown, cell.batch)
        if any(delta.reset for delta in grown):
            counters = None
            why.append(Reason("the server's counters were reset: it was started anew inside the window"))
    spent = gpus.energy(gpus.edges_of(loaded))
    output = sum(stream.output for stream in streams)
    judged = found if not why else None
    return WindowResult(
        name=loaded.name,
        backend=loaded.window.backend,
        cell=loaded.window.cell,
        server=loaded.server,
        pass_number=pass_number,
        figures=figures(streams, judged, uncached_all(turns), time_scale) if judged else None,
        why=why,
        opens_ns=found.opens_ns if found else None,
        closes_ns=found.closes_ns if found else None,
        from_chunks=acceptance.from_chunks(judged) if judged else None,
        from_usage=acceptance.from_usage(streams) if judged else None,
        from_counters=counters if judged else None,
        client_lag_ms=lag,
        client_lag_limit_ms=limit,
        limit_is=limit_is,
        emulator_delay_ms=delay,
        token_sources=counted(turns, pl.col("token_source").fill_null("unknown")),
        statuses=counted(turns, pl.col("status")),
        failures=counted(turns.filter(pl.col("status") != "ok"), pl.coalesce("error", "status")),
        energy_per_output_token_j=spent[0] / output if spent and output and judged else None,
        notes=notes,
    )


def _of(figure_ms: float, limit_ms: float, limit_is: str) -> str:
    return f"{figure_ms:.1f} ms of {limit_ms:.1f} allowed ({limit_is})"


def _spoilt(loaded: LoadedWindow, turns: pl.DataFrame, cell: Cell) -> list[Reason]:
    """Why the window's streams are not those of the cell."""

    def reason(kind: str, count: int, advice: str = "") -> list[Reason]:
        return [Reason(kind, count, f"{count} of {cell.batch} streams", advice)] if count else []

    ok = turns.filter(pl.col("status") == "ok")
    uncounted = pl.col("token_source").is_null() | pl.col("output_tokens").is_null() | (pl.col("chunk_count") == 0)
    why = reason("not recorded", abs(cell.batch - len(turns)))
    for error, count in counted(turns.filter(pl.col("status") != "ok"), pl.coalesce("error", "status")).items():
        why += reason(error, count)
    why += reason("no token count by the server", len(ok.filter(uncounted)))
    why += reason("one token only", len(ok.filter(pl.col("output_tokens") < 2)), _LONGER)
    why += reason("impossible times", len(ok.filter(IMPOSSIBLE)))
    return why + reason("chunks that are not those of their record", disagreeing(loaded, ok))


_LONGER = "raise decode.output_tokens"


def _too_short(found: Common | None, batch: int) -> Reason:
    if found is None:
        never = "its streams never all decoded at once" if batch > 1 else "all tokens of its stream came at one moment"
        return Reason(never, advice=_LONGER)
    decoded = "its streams all decoded at once" if batch > 1 else "its stream decoded"
    told = f"{found.steps} of at least {FEWEST_STEPS}"
    return Reason(f"{decoded} for too few steps", FEWEST_STEPS - found.steps, told, _LONGER)


def uncached_all(turns: pl.DataFrame) -> int | None:
    """Prompt tokens that no cache held, of all turns; None unless each reports them."""
    known = turns["cached_tokens"].null_count() + turns["input_tokens"].null_count() == 0
    return uncached_input(turns) if known else None


def _limit(found: Common) -> tuple[float, str]:
    """Milliseconds of the client, and the rule that gives them."""
    share, half = CLIENT_LAG * found.length_ns * 1e-6, found.gap_ns / 2 * 1e-6
    return (share, f"{CLIENT_LAG:.0%} of the window") if share >= half else (half, "half a step")


def _lag(loaded: LoadedWindow, found: Common) -> float | None:
    """Worst P99 lag of the event loop, ms of the client; None: unknown."""
    inside = pl.col("t_ns").is_between(found.opens_ns, found.closes_ns + _SAMPLE_NS)
    lags = [samples.filter(inside)["loop_lag_ms_p99"].max() for samples in loaded.health]
    return max((lag for lag in lags if isinstance(lag, float)), default=None)
