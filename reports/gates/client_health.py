"""The client was fast enough to measure what it claims to have measured."""

from __future__ import annotations

import polars as pl

from reports.blocks import window_samples
from reports.gates.gate import Evidence, Gate, passing


def judge(evidence: Evidence) -> Gate:
    """Send lag: P99 of sent − due − wait for a connection − connecting, over turns sent at the first attempt; it goes
    into TTFT. Loop lag: P90 over the seconds of the event loop's P99 lag; it goes into the decode time. Both are held
    against medians measured here, in the client's own time. In a closed loop nothing may wait for a free connection
    either. Unknown if a worker left no health sample although it measured for longer than 3 s: the one that was too
    busy to take samples would be left out."""
    thresholds, scale = evidence.thresholds, evidence.run.manifest.time_scale
    ok = evidence.requests.filter((pl.col("status") == "ok") & ~pl.col("impossible"))
    decode = ((ok["last_token_ns"] - ok["first_token_ns"]) * 1e-6).median()
    ttft = ok["ttft_from_sent"].median()
    numbers: dict[str, float | None] = {}
    lags: list[float] = []
    for name in evidence.names:
        own = (
            pl.col("sent_ns")
            - pl.col("due_ns")
            - pl.col("pool_wait_ns").fill_null(0)
            - pl.col("connect_ns").fill_null(0)
        )
        first_tries = evidence.of(name).filter(
            (pl.col("attempts") == 1) & (pl.col("status") == "ok") & ~pl.col("impossible")
        )
        sending = first_tries.select((own * 1e-6).quantile(0.99, "linear")).item()
        waiting = first_tries.select((pl.col("pool_wait_ns") * 1e-6).quantile(0.99, "linear")).item()
        samples = [
            each.select("loop_lag_ms_p99")
            for loaded in evidence.run.blocks
            if loaded.block.backend == name
            for each in window_samples(loaded)
        ]
        looping = pl.concat(samples)["loop_lag_ms_p99"].quantile(0.9, "linear") if samples else None
        numbers |= {f"{name}: send lag P99, ms": sending, f"{name}: loop lag P90, ms": looping}
        if evidence.run.plan.mode == "closed":
            numbers[f"{name}: connection wait P99, ms"] = waiting
        lags += [lag for lag in (sending, waiting if evidence.run.plan.mode == "closed" else None) if lag is not None]
    loops = [lag for name, lag in numbers.items() if "loop lag" in name and lag is not None]
    if not lags or not loops or not isinstance(decode, float) or not isinstance(ttft, float):
        return Gate(
            id="client_health",
            title="Client health",
            status="unknown",
            number=None,
            limit=None,
            unit="ms",
            explanation=_why_unknown(evidence, bool(lags), bool(loops)),
            numbers=numbers,
        )
    # all in the client's own time: lags and decode are not scaled, ttft is scaled back
    send_limit = max(thresholds.send_lag * ttft / scale * 1e3, thresholds.lag_floor_ms)
    loop_limit = max(thresholds.loop_lag * decode, thresholds.lag_floor_ms)
    tests = [
        (lag, loop_limit if "loop lag" in name else send_limit, name.removesuffix(", ms").replace(": ", " "))
        for name, lag in numbers.items()
        if lag is not None
    ]
    worst, its_limit, _ = max(tests, key=lambda test: test[0] / test[1])
    problems = [_told(*test) + "." for test in tests if test[0] > test[1]]
    if problems:
        problems[-1] += (
            " The client was too busy for the emulator's fast clock: lower time_scale."
            if scale != 1
            else " Use fewer lanes, more workers, or another host."
        )
    silent = _without_samples(evidence)
    if silent and not problems:
        return Gate(
            id="client_health",
            title="Client health",
            status="unknown",
            number=worst,
            limit=its_limit,
            unit="ms",
            explanation=f"No health sample of {', '.join(silent)}, which measured for longer than "
            f"{_SURELY_SAMPLED_S:g} s: how busy that client was is not known.",
            numbers=numbers,
            tests=[_told(*test) for test in tests],
        )
    return Gate(
        id="client_health",
        title="Client health",
        status=passing(not problems),
        number=worst,
        limit=its_limit,
        unit="ms",
        explanation=f"In the client's own time. Limits: {thresholds.send_lag:.0%} of the median TTFT for sending and "
        f"connections, {thresholds.loop_lag:.0%} of the median decode time for the event loop, but at least "
        f"{thresholds.lag_floor_ms:g} ms.",
        numbers=numbers,
        tests=[_told(*test) for test in tests],
        problems=problems,
    )


_SURELY_SAMPLED_S = 3.0
"""A worker takes a sample each second until its last lane has ended."""


def _without_samples(evidence: Evidence) -> list[str]:
    found = []
    for loaded in evidence.run.blocks:
        for number, samples in enumerate(loaded.health):
            last_ns = loaded.requests.filter(pl.col("file") == number)["end_ns"].max()
            lasted_s = (last_ns - loaded.block.started_ns) * 1e-9 if isinstance(last_ns, int) else 0.0
            if samples.is_empty() and lasted_s > _SURELY_SAMPLED_S:
                found.append(f"{loaded.name}/{loaded.chunks[number].path.name.split('.')[0]}")
    return found


def _why_unknown(evidence: Evidence, lags: bool, loops: bool) -> str:
    if not loops:
        return "No worker left a health sample inside a measured window, so how late its event loop ran is not known."
    for name in evidence.names:
        rows = evidence.of(name)
        if len(rows) and not len(rows.filter(pl.col("status") == "ok")):
            return (
                f"None of {len(rows):,} turns of {name} completed: there is no time to hold the client's lag against."
            )
    if not lags:
        return "No turn completed at its first attempt, so how late the client sent is not known."
    return "No completed turn was streamed with its times known: there is no TTFT to hold the client's lag against."


def _told(lag: float, limit: float, name: str) -> str:
    """ "baseline send lag P99 6.6 ms, limit 5.0 ms"."""
    return f"{name} {lag:.1f} ms, limit {limit:.1f} ms"
