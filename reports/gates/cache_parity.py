"""Neither backend ran on a better cache, and blocks did not feed on one another."""

from __future__ import annotations

import polars as pl

from reports.gates.gate import Evidence, Gate, none_completed, passing


def judge(evidence: Evidence) -> Gate:
    """Hit rate = cached / input tokens on pairs, per backend and its difference; cached share of main agents' prompts
    of which nothing can be cached; each play's cached tokens above what an isolated, unlimited cache would hold."""
    thresholds = evidence.thresholds
    known = evidence.pairs.rows.filter(pl.col("cached_tokens").is_not_null()).with_columns(
        input=pl.coalesce("input_tokens", "asked_input")
    )
    numbers: dict[str, float | None] = {}
    rates: list[float] = []
    problems: list[str] = []
    for name in evidence.names:
        rows = known.filter(pl.col("backend") == name)
        rate = _share(rows["cached_tokens"], rows["input"])
        numbers[f"{name}: hit rate"] = rate
        numbers[f"{name}: achieved / ideal"] = _share(rows["cached_tokens"], rows["ideal_cached"])
        # only of main agents: subagents spawned at one moment may share a prompt, and any of them may come first
        fresh = rows.filter((pl.col("ideal_cached") == 0) & (pl.col("stream") == 0))
        numbers[f"{name}: first turns"] = first = _share(fresh["cached_tokens"], fresh["input"])
        plays = rows.group_by("block", "session", "play").agg(pl.col("cached_tokens", "ideal_cached", "input").sum())
        above = _share((plays["cached_tokens"] - plays["ideal_cached"]).clip(0), plays["input"])
        if rate is not None:
            rates.append(rate)
        if first is not None and first > thresholds.first_turn_cached:
            problems.append(f"first turns of {name} found {first:.1%} of their prompt in the cache: it was not empty")
        if above is not None and above > thresholds.above_ideal_cached:
            problems.append(
                f"{name} had {above:.1%} of its input cached beyond what its own session could have left there"
            )
    difference = abs(rates[0] - rates[1]) if len(rates) == 2 else None
    if difference is not None and difference > thresholds.hit_rate_difference:
        told = " against ".join(f"{rate:.1%} of {name}" for name, rate in zip(evidence.names, rates, strict=True))
        problems.append(f"hit rates differ, {told}: a cheaper prefill, not the decode path, may explain the effect")
    if difference is None and not problems:
        return Gate(
            id="cache_parity",
            title="Cache parity",
            status="unknown",
            required=False,
            number=None,
            limit=thresholds.hit_rate_difference,
            unit="share",
            explanation=none_completed(evidence)
            or "Not both servers report cached tokens (vLLM: --enable-prompt-tokens-details).",
            numbers=numbers,
        )
    return Gate(
        id="cache_parity",
        title="Cache parity",
        status=passing(not problems),
        required=False,
        number=difference,
        limit=thresholds.hit_rate_difference,
        unit="share",
        explanation=_sentence("; ".join(problems) or "hit rates agree and first turns found an empty cache"),
        numbers=numbers,
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _share(part: pl.Series, whole: pl.Series) -> float | None:
    total = int(whole.sum())
    return int(part.sum()) / total if total else None
