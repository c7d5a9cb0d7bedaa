"""The client measured what the server did, and not itself, the network or a proxy."""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from reports.counters import ServerCounters
from reports.gates.gate import Evidence, Gate


class Agreement(NamedTuple):
    """Client against server over one backend's turns, in the client's own time."""

    by_turn: bool
    """Turn by turn, with medians below; else the difference of means."""
    itl: float | None
    """Client / server - 1."""
    itl_p90: float | None
    """Of its absolute value over the turns."""
    ttft_ms: float | None
    """Client - server."""
    ttft_p90_ms: float | None


def judge(evidence: Evidence) -> Gate:
    """Turn by turn where the server puts its own times into its replies (vLLM: --enable-per-request-metrics), else by
    the means of its histograms (/metrics): time per output token, and TTFT from the moment of sending. The TTFT may
    exceed the server's by the network and by the server's own front end, which parses and tokenises before its engine
    gets the request. Times per output token are (last − first) / (O − 1) on both sides: the server knows no chunks."""
    thresholds, scale = evidence.thresholds, evidence.run.manifest.time_scale
    numbers: dict[str, float | None] = {}
    tests: list[str] = []
    problems: list[str] = []
    blind: list[str] = []
    itls: list[float] = []
    by_means: list[str] = []
    for name in evidence.names:
        ok = evidence.of(name).filter(
            (pl.col("status") == "ok") & ~pl.col("impossible") & pl.col("output_tokens").is_not_null()
        )
        found = _by_turn(ok, scale) or _by_means(ok, evidence.counters[name], scale)
        if found is None:
            blind.append(name)
            continue
        numbers |= {
            f"{name}: ITL, client / server − 1": found.itl,
            f"{name}: … P90 of its size": found.itl_p90,
            f"{name}: TTFT, client − server, ms": found.ttft_ms,
            f"{name}: TTFT, client − server P90, ms": found.ttft_p90_ms,
        }
        which = "median" if found.by_turn else "mean"
        if not found.by_turn:
            by_means.append(name)
        if found.itl is not None:
            itls.append(found.itl)
            most = thresholds.server_itl_difference if found.by_turn else thresholds.server_itl_means_difference
            tests.append(f"{name} ITL, {which} {found.itl:+.2%}, limit ±{most:.0%}")
            problems += [f"{tests[-1]}."] if abs(found.itl) > most else []
        if found.ttft_ms is not None:
            median_ms = ok.select(pl.col("ttft_from_sent").median()).item() / scale * 1e3
            limit_ms = max(thresholds.server_ttft_excess * median_ms, thresholds.server_ttft_excess_ms)
            tests.append(f"{name} TTFT, {which} {found.ttft_ms:+.1f} ms, limit {limit_ms:.1f} ms")
            problems += [f"{tests[-1]}."] if found.ttft_ms > limit_ms else []
    if problems:
        problems[-1] += (
            " The client (or the network) is slow, or a proxy batches chunks: measure from a host beside the server, "
            "past the proxy."
        )
    return Gate(
        id="server_timing",
        title="Client against server timing",
        status="fail" if problems else "unknown" if blind else "pass",
        required=False,
        number=max(itls, key=abs, default=None),
        number_is="ITL" if itls else "",
        limit=thresholds.server_itl_difference,
        unit="share",
        explanation=f"The server of {' and '.join(blind)} tells no times of its own that can be compared (vLLM: "
        "--enable-per-request-metrics)."
        if blind
        else "The client's times against the server's own, in the client's time; TTFT from sending, and its limit the "
        f"larger of {thresholds.server_ttft_excess:.0%} of the median TTFT and {thresholds.server_ttft_excess_ms:g} ms."
        + (f" {' and '.join(by_means)}: means of the server's histograms only." if by_means else ""),
        numbers=numbers,
        tests=tests,
        problems=problems,
    )


def _by_turn(ok: pl.DataFrame, scale: float) -> Agreement | None:
    """None if no turn has both times."""
    both = ok.select(
        itl=pl.when(pl.col("server_itl_s") > 0).then(pl.col("tpot") / scale / pl.col("server_itl_s") - 1),
        ttft_ms=(pl.col("ttft_from_sent") / scale - pl.col("server_first_token_s")) * 1e3,
    )
    itl, ttft_ms = both["itl"], both["ttft_ms"]
    if not itl.count() and not ttft_ms.count():
        return None
    return Agreement(
        True, _quantile(itl, 0.5), _quantile(itl.abs(), 0.9), _quantile(ttft_ms, 0.5), _quantile(ttft_ms, 0.9)
    )


def _quantile(values: pl.Series, p: float) -> float | None:
    return values.quantile(p, "linear")


def _by_means(ok: pl.DataFrame, counters: ServerCounters, scale: float) -> Agreement | None:
    """Means over all turns against those of the server's histograms. These hold whatever it answered, so they are
    compared only where that is about as many requests."""
    streamed = ok.filter(pl.col("ttft_from_sent").is_not_null())
    count, mean_s = counters.ttft_count, counters.ttft_mean_s
    if not len(streamed) or count is None or mean_s is None or abs(count / len(streamed) - 1) > _AS_MANY:
        return None
    decoded = streamed.filter(pl.col("tpot").is_not_null()).with_columns(later=pl.col("output_tokens") - 1)
    decoding_s, later = decoded.select((pl.col("tpot") * pl.col("later")).sum(), pl.col("later").sum()).row(0)
    return Agreement(
        False,
        decoding_s / later / counters.itl_mean_s - 1 if later and counters.itl_mean_s else None,
        None,
        (streamed.select(pl.col("ttft_from_sent").mean()).item() - mean_s) / scale * 1e3,
        None,
    )


_AS_MANY = 0.01
