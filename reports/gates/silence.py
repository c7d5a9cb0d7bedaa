"""No server fell silent while requests were in flight."""

from __future__ import annotations

from reports.gates.gate import Evidence, Gate, passing


def judge(evidence: Evidence) -> Gate:
    """Longest stretch with streamed requests in flight and no token arriving, the worst block. A freeze that no single
    request's timeout notices still spoils a block. Limit: the larger of a fixed time and a multiple of the median TTFT,
    since one long prompt alone in the server is silent for its whole prefill."""
    thresholds = evidence.thresholds
    ttft = evidence.requests.filter(evidence.requests["status"] == "ok")["ttft"].median()
    limit = max(thresholds.silence_s, thresholds.silence_ttfts * ttft if isinstance(ttft, float) else 0.0)
    longest: dict[str, float | None] = {
        name: max((block.longest_silence_s for block in evidence.blocks if block.backend == name), default=None)
        for name in evidence.names
    }
    worst = max((seconds for seconds in longest.values() if seconds is not None), default=0.0)
    return Gate(
        id="silence",
        title="No long silence",
        status=passing(worst <= limit),
        number=worst,
        limit=limit,
        unit="s",
        explanation=(
            ""
            if worst <= limit
            else "; ".join(
                f"{name}: no token for {seconds:.3g} s with requests in flight"
                for name, seconds in longest.items()
                if seconds is not None and seconds > limit
            )
            + ". The server stood still. "
        )
        + "Longest stretch with requests in flight and no token arriving. Limit: the larger of "
        f"{thresholds.silence_s:g} s and {thresholds.silence_ttfts:g} times the median TTFT.",
        numbers={f"{name}: longest, s": seconds for name, seconds in longest.items()},
    )
