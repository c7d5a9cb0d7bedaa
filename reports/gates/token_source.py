"""Token counts of both backends come from the same kind of source, and are counts of tokens."""

from __future__ import annotations

import polars as pl

from reports.gates.gate import Evidence, Gate, passing
from reports.measures import CountSource


def judge(evidence: Evidence) -> Gate:
    """Whose counts (reports.measures.CountSource), and the share of ok turns whose tokens per chunk are estimated or
    whose count is missing. Fails if either backend's counts are of events: what would be called ITL then is a gap
    between chunks."""
    limit = evidence.thresholds.count_source_share
    sources = evidence.count_sources
    loose: dict[str, float] = {}
    for name in evidence.names:
        ok = evidence.of(name).filter((pl.col("status") == "ok") & ~pl.col("zero_output"))
        inexact = ok.filter((pl.col("token_source") == "estimated").fill_null(True) | pl.col("output").is_null())
        if len(ok):
            loose[name] = len(inexact) / len(ok)
    difference = abs(loose[evidence.names[0]] - loose[evidence.names[1]]) if len(loose) == 2 else None
    same, events = len(set(sources.values())) == 1, "events" in sources.values()
    described = ", ".join(f"{name}: {source or 'none'}" for name, source in sources.items())
    return Gate(
        id="token_source",
        title="Token counts from the same source",
        status="fail" if events else "unknown" if difference is None else passing(same and difference <= limit),
        number=difference,
        limit=limit,
        unit="share",
        explanation=_found(sources, loose, difference, limit)
        + f"Counts by {described}. Number: difference in the share of turns without an exact count per "
        "chunk. Server and client counts are never compared with one another.",
        numbers={f"{name}: not exact": share for name, share in loose.items()},
    )


def _found(
    sources: dict[str, CountSource | None], loose: dict[str, float], difference: float | None, limit: float
) -> str:
    """What is wrong, as whole sentences; empty if nothing is."""
    if events := [name for name, source in sources.items() if source == "events"]:
        return (
            f"{' and '.join(events)}: one for each event is no count of tokens; let the server report usage "
            "(stream_options.include_usage), or give the client a tokenizer. "
        )
    if missing := [name for name in sources if name not in loose]:
        return f"No turn of {' or '.join(missing)} completed with an output to count. "
    if difference is not None and difference > limit:
        return "Turns without an exact count: " + ", ".join(f"{n} {share:.1%}" for n, share in loose.items()) + ". "
    return ""
