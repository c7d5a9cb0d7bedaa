"""One cell judged: both backends, their ratio, and what is concluded of it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Literal

import msgspec
import polars as pl

from replay.records import Backend, DecodeManifest, Setup, WindowPlace
from reports.blocks import counted
from reports.coverage import SPECIALISED, stretch_of
from reports.decode.acceptance import AGREE, TokensPerStep, weighed
from reports.decode.effects import Estimate, Noise, level, noise_floor, ratio
from reports.decode.paths import DecodePath, path_of
from reports.decode.reasons import grouped
from reports.decode.run import LoadedWindow, Run
from reports.decode.window import Figures
from reports.decode.windows import WindowResult, turns_of
from reports.gates.gate import Thresholds

Outcome = Literal[
    "candidate faster",
    "candidate slower",
    "faster, path unknown",
    "slower, path unknown",
    "no difference shown",
    "acceptance differs",
    "no result",
]

Results = list[tuple[LoadedWindow, WindowResult]]
"""Finished windows, and what was judged of each."""


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """What is not the decode rate and stands apart from it: means over windows of each one's figure."""

    prefill_tokens_per_s: float | None
    ttft_median_s: float | None
    ttft_worst_s: float | None
    tpot_mean_s: float | None
    tpot_median_s: float | None
    output_rate_median: float | None
    e2e_median_s: float | None
    e2e_worst_s: float | None
    share_in_window: float | None
    window_s: float | None
    step_s: float | None


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One backend in one cell."""

    backend: str
    decode_tokens_per_s: Estimate
    decode_tokens_per_s_per_gpu: float | None
    steps_per_s: float | None
    tokens_per_step: TokensPerStep
    columns: Columns
    windows: int
    """With a result."""
    finished: int
    planned: int
    passes: int
    starts: int
    """Of a server, behind those windows; 0 if decodegate started none."""
    without: dict[str, int]
    """Windows without a result, by reason; one may have several."""
    warmup_failures: dict[str, int]
    """Streams of warm-ups before finished windows, by error."""
    token_sources: dict[str, int]
    energy_per_output_token_j: float | None
    path: DecodePath


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """One cell on both backends."""

    number: int
    """From 1."""
    batch: int
    baseline: Side
    candidate: Side
    ratio: Estimate
    """candidate / baseline, of decode rates."""
    steps_ratio: Estimate
    """candidate / baseline, of steps per second: of the rates, over the ratio of tokens per step."""
    noise: Noise
    outcome: Outcome
    reasons: list[str]
    in_range: bool
    """Whether the range of ratios takes it in."""
    marks: list[str]


def cell_of(run: Run, number: int, results: Results, problems: list[str], limits: Thresholds) -> CellResult:
    """Judge a cell by its index. ``results``: of the whole run; ``problems``: of the cell's setup."""
    cell, manifest = run.manifest.cells[number], run.manifest
    setup = run.setups[cell.setup]
    mine = [
        [(loaded, result) for loaded, result in results if result.cell == number and result.backend == backend.name]
        for backend in setup.backends
    ]
    sides = [_side(run, number, backend, setup, own, limits) for backend, own in zip(setup.backends, mine, strict=True)]
    rates = [[result.figures.decode_tokens_per_s for _, result in own if result.figures] for own in mine]
    found = ratio(*rates)
    per_step = [side.tokens_per_step.value for side in sides]
    noise = noise_floor(*(_by_pass(own) for own in mine))
    meant = any(each.under_test and each.key.startswith("speculative-config") for each in setup.differences)
    outcome, reasons = conclude(sides, found, noise, problems, speculation_under_test=meant)
    if specialised_under_test(manifest) and sides[1].path.status == "unknown":
        outcome = _UNPROVEN.get(outcome, outcome)
    specialised = sides[1].path.status == "specialised" or not specialised_under_test(manifest)
    return CellResult(
        number=number + 1,
        batch=cell.batch,
        baseline=sides[0],
        candidate=sides[1],
        ratio=found,
        steps_ratio=_over(found, per_step[1] / per_step[0] if per_step[0] and per_step[1] else None),
        noise=noise,
        outcome=outcome,
        reasons=reasons,
        in_range=specialised and outcome not in ("no result", "acceptance differs"),
        marks=_marks(sides, specialised_under_test(manifest)),
    )


_UNPROVEN: dict[Outcome, Outcome] = {
    "candidate faster": "faster, path unknown",
    "candidate slower": "slower, path unknown",
}
"""What is said of an effect that may be of another path than the one under test."""


def _by_pass(own: Results) -> list[list[float]]:
    passes: dict[int, list[float]] = defaultdict(list)
    for _, result in own:
        if result.figures:
            passes[result.pass_number].append(result.figures.decode_tokens_per_s)
    return list(passes.values())


def _over(estimate: Estimate, divisor: float | None) -> Estimate:
    """The estimate over a number that is taken as exact."""
    if divisor is None or estimate.value is None:
        return Estimate(None, None, None, estimate.n, estimate.reason or "tokens per step are unknown")
    low, high = ((end / divisor if end is not None else None) for end in (estimate.low, estimate.high))
    return Estimate(estimate.value / divisor, low, high, estimate.n, estimate.reason)


def _side(run: Run, number: int, backend: Backend, setup: Setup, own: Results, limits: Thresholds) -> Side:
    cell = run.manifest.cells[number]
    good = [result for _, result in own if result.figures]
    figures = [result.figures for result in good if result.figures]
    rate = level([each.decode_tokens_per_s for each in figures])
    per_step = weighed(*(_mean([getattr(each, f"from_{way}") for each in good]) for way in _WAYS))
    stretches = [
        stretch_of(run.path, loaded, turns_of(loaded), result.opens_ns, result.closes_ns)
        for loaded, result in own
        if result.figures and result.opens_ns is not None and result.closes_ns is not None
    ]
    count = backend.gpus.count if backend.gpus else None
    cold: Counter[str] = Counter()
    for loaded, _ in own:
        failed = loaded.requests.filter((pl.col("phase") == "warmup") & (pl.col("status") != "ok"))
        cold.update(counted(failed, pl.coalesce("error", "status")))
    sources: Counter[str] = Counter()
    for result in good:
        sources.update(result.token_sources)
    return Side(
        backend=backend.name,
        decode_tokens_per_s=rate,
        decode_tokens_per_s_per_gpu=rate.value / count if rate.value is not None and count else None,
        steps_per_s=rate.value / (cell.batch * per_step.value) if rate.value is not None and per_step.value else None,
        tokens_per_step=per_step,
        columns=Columns(
            **{name: _mean([getattr(each, name) for each in figures]) for name in Columns.__struct_fields__}
        ),
        windows=len(good),
        finished=len(own),
        planned=run.manifest.order.count(WindowPlace(backend=backend.name, cell=number)),
        passes=len({result.pass_number for result in good}),
        starts=len({result.server for result in good} - {None}),
        without=grouped(reason for _, result in own for reason in result.why),
        warmup_failures=dict(sorted(cold.items())),
        token_sources=dict(sorted(sources.items())),
        energy_per_output_token_j=_mean([result.energy_per_output_token_j for result in good]),
        path=path_of(backend, setup.backends, cell, stretches, limits),
    )


_WAYS = ("chunks", "usage", "counters")


assert set(Columns.__struct_fields__) <= set(Figures.__struct_fields__)


def _mean(values: list[float | None]) -> float | None:
    """Null unless every window knows it."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def conclude(
    sides: list[Side], found: Estimate, noise: Noise, problems: list[str], *, speculation_under_test: bool = False
) -> tuple[Outcome, list[str]]:
    """What a cell says of the candidate, and why. ``sides``: baseline's and candidate's; ``found``: ratio of their
    rates; ``problems``: of their setup, which forbid to call an effect."""
    empty = [
        f"{side.backend}: " + (_counted(side.without) if side.without else "not measured")
        for side in sides
        if not side.windows
    ]
    if empty or problems:
        return "no result", empty + problems
    if found.low is None or found.high is None or found.value is None:
        return "no result", [found.reason]
    baseline, candidate = (side.tokens_per_step.value for side in sides)
    if baseline and candidate and not speculation_under_test:
        apart = max(baseline, candidate) / min(baseline, candidate) - 1
        if apart > AGREE:
            return "acceptance differs", [
                f"tokens per step: {baseline:.3f} against {candidate:.3f}, {apart:.1%} apart: drafts that are accepted "
                "more often explain a rate, and are no effect of the backend. Compare steps per second"
            ]
    if noise.relative is None:
        return "no result", [f"the noise floor is unknown: {noise.reason}"]
    if found.low <= 1 <= found.high:
        return "no difference shown", ["the interval of the ratio holds 1"]
    if abs(math.log(found.value)) < math.log1p(noise.relative):
        return "no difference shown", [f"below the noise floor of {noise.relative:.2%} between passes"]
    return "candidate faster" if found.value > 1 else "candidate slower", []


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} x {why}" for why, count in counts.items())


def _marks(sides: list[Side], specialised_under_test: bool) -> list[str]:
    marks = []
    path = sides[1].path
    if specialised_under_test and path.status == "standard decode":
        marks.append(f"standard decode: {path.why}")
    elif specialised_under_test and path.status == "unknown" and sides[1].windows:
        marks.append(f"path unknown: {path.why}")
    for side in sides:
        per_step = side.tokens_per_step
        if side.windows and (per_step.agree is False or (per_step.agree is None and per_step.value)):
            marks.append(f"{side.backend}, tokens per step: {per_step.trusted} are trusted: {per_step.why}")
        if side.finished < side.planned:
            marks.append(f"{side.backend}: {side.finished} of {side.planned} planned windows finished")
        if side.warmup_failures:
            marks.append(f"{side.backend}: streams of the warm-up failed: {_counted(side.warmup_failures)}")
        if side.windows and side.without:
            marks.append(f"{side.backend}: left out {_counted(side.without)}")
        inexact = {source for source in side.token_sources if source == "estimated"}
        if inexact:
            marks.append(f"{side.backend}: tokens of chunks are estimated from the length of their text")
        if len(side.token_sources) > 1:
            marks.append(
                f"{side.backend}: tokens of chunks are known by several means: {', '.join(side.token_sources)}"
            )
    return marks


def specialised_under_test(manifest: DecodeManifest) -> bool:
    """Whether a backend is set to the specialised decode path."""
    return any(backend.decode_backend == SPECIALISED for backend in manifest.backends)
