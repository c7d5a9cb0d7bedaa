"""From a run directory to everything that a report says, as plain data. Pure: the same directory gives the same
analysis."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from reports import chunks, gpus
from reports.blocks import BlockSummary, counted, summarise
from reports.conclusion import Conclusion, compared, conclude
from reports.counters import ServerCounters, server_counters
from reports.coverage import PathCoverage, coverage
from reports.gates import GATES
from reports.gates.gate import Evidence, Gate, Thresholds, why_nothing
from reports.gpus import Usage
from reports.intervals import (
    Effect,
    Estimate,
    NoiseFloor,
    carried,
    effects,
    estimate,
    inverse,
    level,
    noise_floor,
    resample,
)
from reports.measures import KEY, MEASURES, CountSource, Measure, count_source, measured
from reports.pairs import Pairs, complete, pair_up
from reports.run import LoadedBlock, Run, SetAside, load
from reports.series import Series, TimePoint, context_points, distributions, pair_points, time_points
from reports.stamps import stamps
from workloads.errors import UserError

PERCENTILES = [0.5, 0.9, 0.99]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One percentile of one measure. Levels are over all of a backend's turns, failures infinite, the mean over its
    blocks; the effect is on pairs only."""

    measure: str
    label: str
    percentile: str
    unit: str
    """"s" or "tok/s"."""
    direction: str
    baseline: Estimate
    candidate: Estimate
    effect: Effect | None


class Headline(msgspec.Struct, frozen=True, kw_only=True):
    """P90 interactivity by one of its two definitions, on pairs; tokens/s per user."""

    id: str
    label: str
    definition: str
    effect: Effect | None


class BackendSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One backend over all its finished blocks. Rates are the mean over its blocks."""

    name: str
    role: str
    decode_backend: str
    emulated: bool
    under_test: dict[str, str | None]
    """Settings that are meant to differ and do; null where this backend does not set one."""
    command: str | None
    """Of a server that decodegate started."""
    gpus: str | None
    gpus_verified: str | None
    """What NVML showed of them, or that it was not asked; null for an emulator's."""
    gpu_count: int | None
    settings: dict[str, str | int | float | bool | None]
    blocks: int
    cut_short: dict[str, int]
    """Attempts at blocks that were not finished, by why they ended."""
    sent: int
    ok: int
    failures: dict[str, int]
    without_itl: dict[str, int]
    """Turns that are ok and have no decode rate, by reason: left out of ITL and interactivity, kept everywhere else."""
    zero_output: int
    """Turns recorded without output: one token was asked for, and no measure per token has them."""
    context_overflows: int
    plays: int
    degraded_plays: int
    """Plays (session trees) with a failed turn."""
    longest_silence_s: float | None
    without_answer: int
    """Turns that are ok and have no answer text (thinking only): left out of TTFO."""
    count_source: CountSource | None
    token_sources: dict[str, int]
    output_tokens_per_s: float | None
    output_tokens_per_s_per_gpu: float | None
    uncached_input_tokens_per_s: float | None
    uncached_input_tokens_per_s_per_gpu: float | None
    peak_tokens_in_a_second: int | None
    cached_tokens: int | None
    ideal_cached_tokens: int | None
    achieved_cached_share: float | None
    """Cached / ideal cached tokens."""
    hit_rate: float | None
    """Cached / input tokens of ok turns that report both."""
    tokens_per_chunk: Estimate
    """After the first chunk, on pairs: the acceptance length as the client sees it."""
    usage: Usage


class PlanSummary(msgspec.Struct, frozen=True):
    """What was planned, as far as a reader of the report needs it."""

    lanes: int
    mode: str
    end: str
    seed: int
    api: str
    sessions: int
    """Different ones that are played."""
    pause_cap_s: float | None
    pause_removed_share: float
    """Of recorded pauses; in open mode of recorded time in which no session at all was active."""
    turns: dict[str, int]
    lost: dict[str, int]


class PairSummary(msgspec.Struct, frozen=True):
    """Counts of turns, as in reports.pairs.Pairs."""

    count: int
    planned: int
    one_token: int
    with_itl: int
    coverage: float | None
    """Pairs with a decode rate / planned turns that can have one."""


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a report says. JSON-able; holds no infinity and no NaN, nulls have their reason beside them."""

    schema_version: int = 1
    name: str
    created_utc: str
    decodegate_version: str
    stamps: list[str]
    """To be shown on every page and section."""
    emulated: bool
    matched_gpus: bool
    time_scale: float
    plan_digest: str
    workload_digest: str
    workload_source: str
    conclusion: Conclusion
    headlines: list[Headline]
    noise: NoiseFloor
    thresholds: Thresholds
    gates: list[Gate]
    backends: list[BackendSummary]
    counters: list[ServerCounters]
    """The servers' own counters, baseline's first; without blocks where /metrics were not read."""
    paths: list[PathCoverage]
    """Which path decode steps took, baseline's first."""
    rows: list[Row]
    pairs: PairSummary
    blocks: list[BlockSummary]
    set_aside: list[SetAside]
    notes: list[str]
    plan: PlanSummary
    formulas: dict[str, str]
    series: Series
    versions: dict[str, str]
    host: dict[str, str]


def analyse_all(first: Path, *further: Path) -> list[Analysis]:
    """Judge several runs whose figures may stand in one report. Raises UserError for a run of other backends, of
    another workload, or of another stamp: one point would then be taken for what it is not."""
    analyses = [analyse(path) for path in (first, *further)]
    for path, other in zip(further, analyses[1:], strict=True):
        for what, one, another in zip(_ALIKE, _alike(analyses[0]), _alike(other), strict=True):
            if one != another:
                raise UserError(f"{path} cannot be shown beside {first}: {what} {another} against {one}")
    return analyses


_ALIKE = ("backends", "workload digest", "matched GPUs", "emulated")


def _alike(analysis: Analysis) -> tuple[object, ...]:
    backends = [(each.name, each.decode_backend, each.gpus, each.settings.get("model")) for each in analysis.backends]
    return backends, analysis.workload_digest, analysis.matched_gpus, analysis.emulated


def analyse(path: Path, thresholds: Thresholds | None = None) -> Analysis:
    """Load a run directory and judge it. Raises UserError if there is nothing to judge."""
    return analyse_run(load(path), thresholds or Thresholds())


def analyse_run(run: Run, thresholds: Thresholds) -> Analysis:
    """Judge a loaded run."""
    scale = run.manifest.time_scale
    names = (run.manifest.backends[0].name, run.manifest.backends[1].name)
    candidate = np.array([loaded.block.backend == names[1] for loaded in run.blocks])
    sources, requests, twice = _requests(run, names)
    both = bool(candidate.any() and not candidate.all())
    pairs = pair_up(requests if both else requests.clear(), len(run.blocks), run.plan)
    weights = resample(max(1, requests["session"].n_unique()))
    by_block = [requests.filter(pl.col("block") == index) for index in range(len(run.blocks))]
    blocks: list[BlockSummary] = []
    time: list[TimePoint] = []
    for loaded, turns, again in zip(run.blocks, by_block, twice, strict=True):
        arrived = chunks.arrivals(loaded, turns, scale)
        source = sources[loaded.block.backend]
        blocks.append(summarise(loaded, turns, run.plan, arrived, scale, source, again))
        time += time_points(loaded, arrived, scale, counted=source in ("server", "client"))
    rows = [row for measure in MEASURES.values() for row in _rows(measure, by_block, pairs, candidate, weights)]
    rows += _gap_rows(run.blocks, by_block, candidate, weights, scale)
    headlines = [
        _headline(rows, "itl", "Decode", "1 / P90(ITL)"),
        _headline(rows, "e2e_per_token", "End-to-end-normalised", "1 / P90(E2E / O)"),
    ]
    interactivity = headlines[0].effect
    position = np.array([float(loaded.block.index) for loaded in run.blocks])
    noise = noise_floor(interactivity.blocks if interactivity else [], candidate, position, thresholds.noise_multiple)
    per_chunk = {name: _tokens_per_chunk(pairs, name, weights) for name in names}
    counters = {name: server_counters(run, requests, name) for name in names}
    paths = coverage(run, by_block)
    evidence = Evidence(
        run, thresholds, requests, pairs, blocks, interactivity, noise, sources, per_chunk, counters, paths
    )
    gates = [judge(evidence) for judge in GATES]
    return Analysis(
        name=run.manifest.name,
        created_utc=run.manifest.created_utc,
        decodegate_version=run.manifest.decodegate_version,
        stamps=stamps(run.manifest),
        emulated=run.manifest.emulated,
        matched_gpus=run.manifest.matched_gpus,
        time_scale=scale,
        plan_digest=run.manifest.plan_digest,
        workload_digest=run.manifest.workload_digest,
        workload_source=run.manifest.workload_source,
        conclusion=conclude(interactivity, gates, thresholds, why_nothing(evidence), compared(run.manifest, gates)),
        headlines=headlines,
        noise=noise,
        thresholds=thresholds,
        gates=gates,
        backends=[_backend(evidence, index) for index in range(2)],
        counters=list(counters.values()),
        paths=paths,
        rows=rows,
        pairs=PairSummary(pairs.count, pairs.planned, pairs.one_token, pairs.with_itl, pairs.coverage),
        blocks=blocks,
        set_aside=run.set_aside,
        notes=run.notes,
        plan=_plan(run),
        formulas={measure.label: measure.formula for measure in MEASURES.values()} | _OTHER_FORMULAS | gpus.FORMULAS,
        series=Series(
            itl=distributions(pairs, "itl", names, candidate),
            ttft=distributions(pairs, "ttft", names, candidate),
            pairs=pair_points(pairs, candidate),
            contexts=context_points(pairs, names, candidate),
            time=time,
        ),
        versions=dict(sorted(run.manifest.versions.items())),
        host=dict(sorted(run.manifest.host.items())),
    )


_OTHER_FORMULAS = {
    "Chunk gap": "Time between the arrivals of consecutive chunks of one reply. A chunk may carry several tokens, so "
    "this is not ITL. Read from a histogram with bins of 1 %.",
    "Decode throughput": "Output tokens that arrived inside the measured window, whatever became of their request, "
    "over its length; per GPU: over the GPU count too.",
    "Uncached-input throughput": "Σ (I − cached tokens) over ok turns, over the length of the measured window. Cached "
    "input is no work and is not counted as throughput.",
    "Peak tokens in a second": "The most output tokens that arrived in any second (a window that slides by 1 ms): "
    "tokens, not chunks.",
    "Longest silence": "The longest stretch of the measured window with a streamed request in flight all the time and "
    "no chunk arriving; good to 1 ms. Hardware's time.",
    "Peak in flight": "The most requests between being sent and their end at once, from the requests' own times.",
    "Tokens per chunk": "Σ (O − c1) / Σ (chunks − 1) over pairs with several chunks.",
    "Achieved / ideal cached": "Cached tokens by the server's report, over the tokens that an unlimited prefix cache, "
    "isolated to this play of the session, would hold.",
    "Percentile": "Linear interpolation at (n − 1)·p of the sorted values, per block. A backend's figure is the "
    "arithmetic mean of that over its blocks, in time, so that a linear drift cancels in a balanced order. Rates are "
    "inverted last.",
}


def _requests(run: Run, names: tuple[str, str]) -> tuple[dict[str, CountSource | None], pl.DataFrame, list[int]]:
    """Whose token counts each backend offers, the measured turns of all finished blocks, and each block's rows that
    another of the same turn replaces."""
    by_name: dict[str, list[pl.DataFrame]] = {name: [] for name in names}
    for loaded in run.blocks:
        by_name[loaded.block.backend].append(loaded.requests)
    sources = {name: count_source(pl.concat(frames)) if frames else None for name, frames in by_name.items()}
    frames = []
    twice = []
    for index, loaded in enumerate(run.blocks):
        name = loaded.block.backend
        rows = measured(loaded.requests, run.manifest.time_scale, sources[name])
        once = rows.unique(KEY, keep="last", maintain_order=True)
        twice.append(len(rows) - len(once))
        frames.append(once.with_columns(block=pl.lit(index), backend=pl.lit(name), candidate=pl.lit(name == names[1])))
    requests = pl.concat(frames)
    numbers = requests.select(pl.col("session").unique().sort()).with_row_index("session_index")
    requests = requests.join(
        numbers.with_columns(pl.col("session_index").cast(pl.Int64)), on="session", maintain_order="left"
    )
    return sources, requests, twice


def _rows(
    measure: Measure,
    by_block: list[pl.DataFrame],
    pairs: Pairs,
    candidate: npt.NDArray[np.bool_],
    weights: chunks.Floats,
) -> list[Row]:
    """A measure's percentiles: as a time, and as its rate where it has one."""
    values = [_values(rows, measure.id) for rows in by_block]
    sides = [[each for each, mine in zip(values, candidate, strict=True) if mine == side] for side in (False, True)]
    levels = [level(blocks, weights, PERCENTILES) if blocks else [_nothing()] * len(PERCENTILES) for blocks in sides]
    keys, paired = complete(pairs, measure.id, len(by_block))
    session = keys["session_index"].to_numpy()

    def table(rate: bool) -> list[Row]:
        found = effects(paired, session, candidate, weights, PERCENTILES, rate=rate) if len(keys) else None
        return [
            Row(
                measure=f"{measure.id}_rate" if rate else measure.id,
                label=measure.rate if rate else measure.label,
                percentile=_percentile(p),
                unit="tok/s" if rate else "s",
                direction=_direction(p, "higher" if rate else "lower"),
                baseline=inverse(levels[0][index]) if rate else levels[0][index],
                candidate=inverse(levels[1][index]) if rate else levels[1][index],
                effect=found[index] if found else None,
            )
            for index, p in enumerate(PERCENTILES)
        ]

    return (table(rate=True) if measure.rate else []) + table(rate=False)


def _gap_rows(
    blocks: list[LoadedBlock],
    by_block: list[pl.DataFrame],
    candidate: npt.NDArray[np.bool_],
    weights: chunks.Floats,
    scale: float,
) -> list[Row]:
    sides: list[list[Estimate]] = []
    for side in (False, True):
        found, turns, gaps = [], np.zeros(weights.shape[1], np.int64), 0
        least, most = math.inf, 0.0
        for loaded, rows, mine in zip(blocks, by_block, candidate, strict=True):
            if mine != side:
                continue
            ok = rows.filter((pl.col("status") == "ok") & pl.col("streamed") & ~pl.col("impossible"))
            session = ok["session_index"].to_numpy()
            histogram = chunks.gaps(loaded, ok, session, weights.shape[1], scale)
            if histogram.counts.any():
                gaps += int(histogram.counts.sum())
                least, most = min(least, histogram.shortest_s), max(most, histogram.longest_s)
            turns += np.bincount(session[ok["chunk_count"].to_numpy() > 1], minlength=weights.shape[1])
            found.append([chunks.gap_quantile(histogram, weights, p) for p in PERCENTILES])
        means = np.mean(found, axis=0) if found else np.full((len(PERCENTILES), len(weights)), np.nan)
        estimates = [estimate(each, weights, turns) for each in means]
        sides.append([carried(each, p, gaps, least, most) for each, p in zip(estimates, PERCENTILES, strict=True)])
    return [
        Row(
            measure="chunk_gap",
            label="Chunk gap",
            percentile=_percentile(p),
            unit="s",
            direction=_direction(p, "lower"),
            baseline=sides[0][index],
            candidate=sides[1][index],
            effect=None,
        )
        for index, p in enumerate(PERCENTILES)
    ]


def _values(rows: pl.DataFrame, measure: str) -> tuple[chunks.Floats, chunks.Ints]:
    known = rows.filter(pl.col(measure).is_not_null())
    return known[measure].to_numpy().astype(np.float64), known["session_index"].to_numpy()


def _nothing() -> Estimate:
    return Estimate(None, None, None, 0, 0, "no finished block of this backend")


def _percentile(p: float) -> str:
    return f"P{p * 100:g}"


def _direction(p: float, better: str) -> str:
    """Which tail a percentile is. Rates are inverted times, so the slow tail is P90 and P99 for both."""
    if p == 0.5:
        return f"{better} is better; median"
    at_least = "at least" if better == "higher" else "at most"
    return f"{better} is better; slow tail: {p:.0%} of turns have {at_least} this"


def _headline(rows: list[Row], measure: str, label: str, definition: str) -> Headline:
    row = next(row for row in rows if row.measure == f"{measure}_rate" and row.percentile == "P90")
    return Headline(id=measure, label=label, definition=definition, effect=row.effect)


def _tokens_per_chunk(pairs: Pairs, name: str, weights: chunks.Floats) -> Estimate:
    several = pairs.rows.filter(
        (pl.col("backend") == name) & (pl.col("chunk_count") > 1) & (pl.col("output") > pl.col("first_chunk_tokens"))
    )
    session, size = several["session_index"].to_numpy(), weights.shape[1]
    tokens = np.bincount(session, (several["output"] - several["first_chunk_tokens"]).to_numpy(), size)
    later_chunks = np.bincount(session, several["chunk_count"].to_numpy() - 1, size)
    with np.errstate(invalid="ignore"):
        statistic = (weights @ tokens) / (weights @ later_chunks)
    return estimate(statistic, weights, np.bincount(session, minlength=size))


def _backend(evidence: Evidence, index: int) -> BackendSummary:
    backend = evidence.run.manifest.backends[index]
    blocks = [block for block in evidence.blocks if block.backend == backend.name]
    rows = evidence.of(backend.name)
    ok = rows.filter(pl.col("status") == "ok")
    count = backend.gpus.count if backend.gpus else None
    edges = gpus.edges(evidence.run, backend.name)
    seen = gpus.told(edges)
    known = ok.filter(pl.col("cached_tokens").is_not_null() & pl.col("input_tokens").is_not_null())
    cached = _sum([block.cached_tokens for block in blocks])
    ideal = _sum([block.ideal_cached_tokens for block in blocks])
    rate = _mean([block.output_tokens_per_s for block in blocks])
    uncached = _mean(
        [
            block.uncached_input_tokens / block.window_s
            if block.uncached_input_tokens is not None and block.window_s > 0
            else None
            for block in blocks
        ]
    )
    return BackendSummary(
        name=backend.name,
        role=("baseline", "candidate")[index],
        decode_backend=backend.decode_backend,
        emulated=backend.emulated,
        under_test={
            each.key: (each.baseline, each.candidate)[index]
            for each in evidence.run.manifest.differences
            if each.under_test
        },
        command=shlex.join(backend.command) or None,
        gpus=gpus.declared(backend),
        gpus_verified=None if backend.emulated else f"{seen}, verified through NVML" if seen else "not verified",
        gpu_count=count,
        settings=dict(sorted(backend.settings.items())),
        blocks=len(blocks),
        cut_short=evidence.run.cut_short(backend.name),
        sent=len(rows),
        ok=len(ok),
        failures=counted(rows.filter(pl.col("status") != "ok"), pl.coalesce("error", "status")),
        without_itl=counted(ok.filter(pl.col("itl").is_null()), pl.col("why_no_itl")),
        zero_output=int(rows["zero_output"].sum()),
        context_overflows=len(rows.filter(pl.col("error") == "context overflow")),
        plays=sum(block.plays for block in blocks),
        degraded_plays=sum(block.degraded_plays for block in blocks),
        longest_silence_s=max((block.longest_silence_s for block in blocks), default=None),
        without_answer=int(ok.filter(pl.col("streamed"))["ttfo"].null_count()),
        count_source=evidence.count_sources[backend.name],
        token_sources=counted(ok, pl.col("token_source").fill_null("unknown")),
        output_tokens_per_s=rate,
        output_tokens_per_s_per_gpu=rate / count if rate is not None and count else None,
        uncached_input_tokens_per_s=uncached,
        uncached_input_tokens_per_s_per_gpu=uncached / count if uncached is not None and count else None,
        peak_tokens_in_a_second=max(
            (block.peak_tokens_in_a_second for block in blocks if block.peak_tokens_in_a_second is not None),
            default=None,
        ),
        cached_tokens=cached,
        ideal_cached_tokens=ideal,
        achieved_cached_share=cached / ideal if cached is not None and ideal else None,
        hit_rate=int(known["cached_tokens"].sum()) / int(known["input_tokens"].sum()) if len(known) else None,
        tokens_per_chunk=evidence.tokens_per_chunk[backend.name],
        usage=gpus.usage(backend, edges, blocks),
    )


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _plan(run: Run) -> PlanSummary:
    plan = run.plan
    return PlanSummary(
        lanes=len(plan.lanes),
        mode=plan.mode,
        end=plan.end,
        seed=plan.seed,
        api=plan.api,
        sessions=len({play.session for lane in plan.lanes for play in lane}),
        pause_cap_s=plan.pause_cap_s,
        pause_removed_share=plan.pause_removed_share,
        turns=plan.turns,
        lost=plan.lost,
    )
