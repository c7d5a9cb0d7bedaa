"""What a gate is: a condition under which a comparison means what it says, with the number that decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
import polars as pl

from reports.blocks import BlockSummary, counted
from reports.counters import ServerCounters
from reports.coverage import PathCoverage
from reports.intervals import Effect, Estimate, NoiseFloor
from reports.measures import CountSource
from reports.pairs import Pairs
from reports.run import Run

Status = Literal["pass", "fail", "unknown"]


class Thresholds(msgspec.Struct, frozen=True):
    """Every number that gates and conclusion are judged against. Shares are of 1."""

    equal_within: float = 0.05
    """The largest difference that may be called none: "no difference" needs a whole interval of the ratio between
    1 / (1 + this) and 1 + this."""
    pair_coverage: float = 0.95
    """Pairs with a decode rate / planned turns that can have one, at least."""
    decode_rate_difference: float = 0.02
    """Difference between backends in the share of ok turns without a decode rate, at most: a backend that answers in
    one chunk must not drop out of its own headline."""
    output_length_difference: float = 0.05
    """Relative difference of output tokens over pairs, at most: shorter answers are other work."""
    silence_s: float = 30.0
    """Longest stretch with requests in flight and no token arriving, seconds, at most; or, if that is longer, ..."""
    silence_ttfts: float = 20.0
    """... this many median TTFTs: alone in the server, a request with a long prompt is silent for its whole prefill, so
    a workload of long prompts must be allowed more than a fixed time."""
    error_rate: float = 0.05
    """Of either backend, at most."""
    error_rate_difference: float = 0.02
    """Between the backends, at most: a server that refuses load must not look better for it."""
    hit_rate_difference: float = 0.02
    """Cached / input tokens on pairs, difference between backends, at most."""
    first_turn_cached: float = 0.02
    """Cached share of prompts of which nothing can be cached, at most."""
    above_ideal_cached: float = 0.01
    """Cached tokens beyond the ideal, as a share of input tokens, at most: there the backends share a cache."""
    count_source_share: float = 0.01
    """Difference between backends in the share of rows with estimated, or without, token counts, at most."""
    prompt_length: float = 0.005
    """P99 of |prompt tokens by the server − planned| / planned, at most."""
    send_lag: float = 0.10
    """P99 of the client's own lateness, as a share of the median TTFT, at most."""
    loop_lag: float = 0.02
    """P90 over the seconds of the event loop's P99 lag, as a share of the median decode time of a request, at most."""
    lag_floor_ms: float = 5.0
    """Lags up to this are never held against the client."""
    noise_multiple: float = 2.0
    """The noise floor is this many standard errors of block-to-block noise."""
    acceptance_difference: float = 0.05
    """Relative difference between backends in acceptance length (tokens per chunk, without the servers' counters), at
    most: beyond it the draft model explains the effect."""
    foreign_tokens: float = 0.01
    """Tokens that a server counted beyond those of our own requests, as a share of the latter, at most."""
    server_itl_difference: float = 0.02
    """Median over turns of the client's / the server's own time per output token, less 1: at most this far from 0."""
    server_itl_means_difference: float = 0.05
    """The same for the ratio of means, where turns cannot be compared one by one: a mean follows single stalls."""
    server_ttft_excess: float = 0.25
    """Median over turns of the client's less the server's own TTFT, as a share of the median TTFT, at most; or, if that
    is longer, ..."""
    server_ttft_excess_ms: float = 50.0
    """... this many milliseconds. The server's TTFT leaves out its own front end, which took vLLM 6 to 56 ms on a busy
    host of two cores."""
    specialised_share: float = 0.5
    """Share of decode tokens that ran specialised on a backend that is set so, at least."""
    stray_specialised_share: float = 0.01
    """The same on a backend that is not, at most."""


class Evidence(msgspec.Struct, frozen=True):
    """All that gates look at."""

    run: Run
    thresholds: Thresholds
    requests: pl.DataFrame
    """Measured turns of every finished block, as reports.measures.measured gives them, with `block` (0, 1, ... in
    measured order), `backend`, `candidate` (bool) and `session_index`. Each turn is there once."""
    pairs: Pairs
    blocks: list[BlockSummary]
    interactivity: Effect | None
    noise: NoiseFloor
    count_sources: dict[str, CountSource | None]
    tokens_per_chunk: dict[str, Estimate]
    counters: dict[str, ServerCounters]
    """Each backend's own counters; without blocks if its /metrics were not read."""
    paths: list[PathCoverage]
    """Baseline's and candidate's."""

    @property
    def names(self) -> tuple[str, str]:
        """Baseline's and candidate's name."""
        baseline, candidate = self.run.manifest.backends
        return baseline.name, candidate.name

    def of(self, name: str) -> pl.DataFrame:
        """Measured turns of one backend."""
        return self.requests.filter(pl.col("backend") == name)


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """One gate's finding. ``number`` is held against ``limit``; ``numbers`` are what else one should see.

    ``required``: without knowing this the number means nothing, so that unknown is as good as failed. The others are
    caveats while they are unknown."""

    id: str
    title: str
    status: Status
    required: bool = True
    number: float | None
    limit: float | None
    unit: Literal["share", "turns", "s", "ms", "blocks", ""]
    explanation: str
    numbers: dict[str, float | None] = {}
    number_is: str = ""
    limit_is: str = ""
    """A word to stand before each where it is not plain: "effect", "floor", "at least"."""
    tests: list[str] = []
    """A gate of several tests: each with its value against its limit. They are shown instead of ``numbers``."""
    problems: list[str] = []
    """Those that fail, as reasons, with what to do about it; where there are none, the explanation is the reason."""


def none_completed(evidence: Evidence) -> str:
    """Why no turn completed in every block, in a sentence; empty if one did."""
    for name in evidence.names:
        rows = evidence.of(name)
        if not any(block.backend == name for block in evidence.blocks):
            return f"{name} has no finished block."
        failures = counted(rows.filter(pl.col("status") != "ok"), pl.coalesce("error", "status"))
        if len(rows) == sum(failures.values()):
            most = f", most often by {next(iter(failures))}" if failures else ""
            return f"None of {len(rows):,} turns of {name} completed{most}."
    return "" if evidence.pairs.count else "No turn completed in every block of both backends."


def why_nothing(evidence: Evidence) -> str:
    """Why no turn has a decode rate in every block, with what their turns lack."""
    if none := none_completed(evidence):
        return none
    pairs, lacking = evidence.pairs, []
    for name in evidence.names:
        ok = evidence.of(name).filter(pl.col("status") == "ok")
        without = counted(ok.filter(pl.col("itl").is_null()), pl.col("why_no_itl"))
        lacking += [f"{name} {why} ({count:,} of {len(ok):,} completed)" for why, count in list(without.items())[:2]]
    return (
        f"{pairs.with_itl:,} of {pairs.count:,} turns that completed in every block have a measurable decode rate in "
        f"all of them: {', '.join(lacking)}."
    )


Judge = Callable[[Evidence], Gate]


def passing(condition: bool) -> Status:
    """ "pass" or "fail"."""
    return "pass" if condition else "fail"
