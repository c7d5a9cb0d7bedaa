"""Neither backend fails often, nor much more often than the other."""

from __future__ import annotations

import polars as pl

from reports.blocks import counted, failed
from reports.gates.gate import Evidence, Gate, passing


def judge(evidence: Evidence) -> Gate:
    """Turns that are not ok / sent turns, per backend. Turns cut by the end of a timed run are no errors of the
    backend."""
    thresholds = evidence.thresholds
    bad = failed(evidence.run.plan)
    rates: dict[str, float | None] = {}
    found: list[str] = []
    for name in evidence.names:
        rows = evidence.of(name)
        rates[name] = len(rows.filter(bad)) / len(rows) if len(rows) else None
        classes = counted(rows.filter(bad), pl.coalesce("error", "status"))
        if not len(rows):
            found.append(f"{name} sent no turn")
        elif classes:
            error, count = next(iter(classes.items()))
            failures = sum(classes.values())
            found.append(
                f"{name} failed {failures:,} of {len(rows):,} turns ({failures / len(rows):.1%}), "
                + (f"all by {error}" if count == failures else f"most often by {error} ({count:,} x)")
            )
        else:
            found.append(f"{name} failed none of {len(rows):,}")
    found.sort(key=lambda told: " none of " in told)
    known = [rate for rate in rates.values() if rate is not None]
    worst, difference = max(known, default=1.0), (abs(known[0] - known[1]) if len(known) == 2 else None)
    good = difference is not None and worst <= thresholds.error_rate and difference <= thresholds.error_rate_difference
    return Gate(
        id="error_rate",
        title="Error rate",
        status=passing(good),
        number=worst,
        limit=thresholds.error_rate,
        unit="share",
        explanation=("" if good else "; ".join(found) + ". ")
        + "Worst backend's share of turns that were not ok; the two may differ by "
        f"{thresholds.error_rate_difference:.0%} at most, since a server that refuses load looks faster.",
        numbers={**rates, "difference": difference},
    )
