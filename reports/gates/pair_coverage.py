"""Enough of the planned turns have a decode rate in every block, and neither backend lacks more of them."""

from __future__ import annotations

import polars as pl

from reports.gates.gate import Evidence, Gate, passing


def judge(evidence: Evidence) -> Gate:
    """Pairs with ITL, which the headline is computed on, over the planned turns that can have one; and the difference
    between backends in the share of ok turns (of several tokens) without a decode rate."""
    thresholds, pairs = evidence.thresholds, evidence.pairs
    coverage = pairs.coverage
    without: dict[str, float | None] = {}
    for name in evidence.names:
        ok = evidence.of(name).filter((pl.col("status") == "ok") & (pl.col("asked_output") > 1))
        without[f"{name}: ok without a decode rate"] = ok["itl"].null_count() / len(ok) if len(ok) else None
    known = [share for share in without.values() if share is not None]
    difference = abs(known[0] - known[1]) if len(known) == 2 else None
    uneven = difference is not None and difference > thresholds.decode_rate_difference
    return Gate(
        id="pair_coverage",
        title="Pair coverage",
        status=passing(coverage is not None and coverage >= thresholds.pair_coverage and not uneven),
        number=coverage,
        limit=thresholds.pair_coverage,
        limit_is="at least",
        unit="share",
        explanation=(f"{_uneven(without)} Turns without one drop out of the headline. " if uneven else "")
        + f"{pairs.with_itl} of {pairs.planned - pairs.one_token} planned turns of several tokens have a "
        "decode rate in every block of both backends; only those are compared. The backends may differ by "
        f"{thresholds.decode_rate_difference:.0%} in ok turns without one.",
        numbers=without,
    )


def _uneven(without: dict[str, float | None]) -> str:
    """ "candidate: ok without a decode rate 20.0%, baseline 0.0%." """
    (worse, most), (better, least) = sorted(without.items(), key=lambda each: -(each[1] or 0.0))
    return f"{worse} {most or 0.0:.1%}, {better.split(':')[0]} {least or 0.0:.1%}."
