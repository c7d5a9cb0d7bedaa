"""From a run of decode tables to everything that its report says, as plain data. Pure: the same directory gives the
same analysis."""

from __future__ import annotations

import math
import shlex
from collections import Counter, defaultdict
from pathlib import Path
from typing import Literal

import msgspec

from replay.records import Backend, Cell, DecodeManifest, Difference, Setup, Speculation
from reports import gpus, published
from reports.coverage import SPECIALISED, Stretch, steps_folder
from reports.decode import acceptance, effects, window, windows
from reports.decode.acceptance import AGREE, TokensPerStep, weighed
from reports.decode.effects import Estimate, Noise, level, noise_floor, ratio
from reports.decode.paths import Path as DecodePath
from reports.decode.paths import path_of
from reports.decode.run import LoadedWindow, Run, load
from reports.decode.window import Figures
from reports.decode.windows import WindowResult, judge, turns_of
from reports.gates import matched_gpus, server_unchanged
from reports.gates.gate import Thresholds
from reports.published import Beside, Setting
from reports.run import SetAside

Outcome = Literal["candidate faster", "candidate slower", "no difference shown", "acceptance differs", "no result"]

METRIC: published.Metric = "total decode tokens/s"


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
    passes: int
    starts: int
    """Of a server, behind those windows; 0 if decodegate started none."""
    without: dict[str, int]
    """Windows without a result, by reason."""
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


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Cells of one speculative setting and one length, by batch."""

    title: str
    setup: int
    input_tokens: int
    output_tokens: int
    cells: list[CellResult]


class SetupResult(msgspec.Struct, frozen=True, kw_only=True):
    """Both backends with one speculative setting, as they were seen."""

    label: str
    speculation: Speculation
    problems: list[str]
    """Why what differs may not be the decode path, or the servers were not one deployment; no effect is called then."""
    unverified: list[str]
    differences: list[Difference]
    backends: list[BackendFacts]


class BackendFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One backend of a setup, in words."""

    name: str
    role: str
    decode_backend: str
    emulated: bool
    command: str | None
    url: str | None
    gpus: str | None
    gpus_seen: str | None
    """By NVML."""
    settings: dict[str, str | int | float | bool | None]
    rule: str | None
    """Whose rule says which steps run specialised."""


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """The least and the greatest ratio of some cells: the only thing said of several cells together."""

    of: str
    low: float
    high: float
    cells: int


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """A published row beside the one own cell that is nearest to its setting. The own figures are given only where
    nothing differs."""

    row: published.Row
    cell: int | None
    """Its number; null: the row is of another metric."""
    own_baseline: Estimate | None
    own_candidate: Estimate | None
    own_ratio: Estimate | None
    differs: list[str]
    unstated: list[str]


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the report says. JSON-able; holds no infinity and no NaN, nulls have their reason beside them."""

    schema_version: int = 1
    kind: Literal["decode"] = "decode"
    name: str
    created_utc: str
    decodegate_version: str
    stamps: list[str]
    emulated: bool
    time_scale: float
    names: tuple[str, str]
    """Baseline's and candidate's."""
    compared: str
    """What the ratios are of."""
    ratios: Range | None
    tables: list[Table]
    setups: list[SetupResult]
    published: list[Published]
    windows: list[WindowResult]
    set_aside: list[SetAside]
    missing: int
    """Planned windows that were not finished."""
    notes: list[str]
    repeats: int
    warmup_tokens: int
    order: str
    formulas: dict[str, str]
    versions: dict[str, str]
    host: dict[str, str]

    @property
    def cells(self) -> list[CellResult]:
        """Of all tables."""
        return [cell for table in self.tables for cell in table.cells]

    @property
    def has_result(self) -> bool:
        """Whether any cell has one."""
        return any(cell.outcome != "no result" for cell in self.cells)


def analyse(path: Path, limits: Thresholds | None = None) -> Analysis:
    """Load a run directory of decode tables and judge it. Raises UserError if there is nothing to judge."""
    return analyse_run(load(path), limits or Thresholds())


def analyse_run(run: Run, limits: Thresholds) -> Analysis:
    """Judge a loaded run."""
    manifest = run.manifest
    results = _judged(run)
    setups = [_setup(run, number) for number in range(len(run.setups))]
    cells = [_cell(run, number, results, setups, limits) for number in range(len(manifest.cells))]
    return Analysis(
        name=manifest.name,
        created_utc=manifest.created_utc,
        decodegate_version=manifest.decodegate_version,
        stamps=_stamps(run),
        emulated=manifest.emulated,
        time_scale=manifest.time_scale,
        names=(manifest.backends[0].name, manifest.backends[1].name),
        compared=_compared(manifest),
        ratios=_range(cells, _specialised_under_test(manifest)),
        tables=_tables(manifest, cells, setups),
        setups=setups,
        published=_published(run, cells),
        windows=[result for _, result in results],
        set_aside=run.set_aside,
        missing=len(manifest.order) - len(results),
        notes=run.notes,
        repeats=manifest.repeats,
        warmup_tokens=manifest.warmup_tokens,
        order=_order(manifest),
        formulas=window.FORMULAS | acceptance.FORMULAS | effects.FORMULAS | windows.FORMULAS,
        versions=dict(sorted(manifest.versions.items())),
        host=dict(sorted(manifest.host.items())),
    )


_Results = list[tuple[LoadedWindow, WindowResult]]


def _judged(run: Run) -> _Results:
    manifest = run.manifest
    pass_of: dict[int, int] = {}  # by index of the window
    so_far: Counter[tuple[str, int]] = Counter()
    for index, place in enumerate(manifest.order, 1):
        pass_of[index] = so_far[place.backend, place.cell] // manifest.repeats + 1
        so_far[place.backend, place.cell] += 1
    return [
        (loaded, judge(loaded, manifest.cells[loaded.window.cell], pass_of[loaded.window.index], manifest.time_scale))
        for loaded in run.windows
    ]


def label(speculation: Speculation) -> str:
    """ "dspark, 7 draft tokens, synthetic acceptance length 6"."""
    if not speculation.draft_tokens:
        return "no speculation"
    parts = [speculation.method or "speculation", f"{speculation.draft_tokens} draft tokens"]
    if speculation.acceptance_length is not None:
        parts.append(f"synthetic acceptance length {speculation.acceptance_length:g}")
    if speculation.acceptance_rates is not None:
        parts.append(f"synthetic acceptance rates {' '.join(f'{rate:g}' for rate in speculation.acceptance_rates)}")
    return ", ".join(parts)


def _setup(run: Run, number: int) -> SetupResult:
    setup = run.setups[number]
    seen: dict[str, list[gpus.Edges]] = {backend.name: [] for backend in setup.backends}
    for loaded in run.windows:
        if run.manifest.cells[loaded.window.cell].setup == number:
            seen[loaded.window.backend].append(gpus.edges_of(loaded))
    problems = list(setup.unmatched_reasons) or ([] if setup.matched_gpus else ["the GPUs are not the same"])
    problems += matched_gpus.unequal(setup.backends, seen)
    for backend in setup.backends:
        if not (backend.emulated and backend.url is None):
            problems += server_unchanged.changes(backend.name, seen[backend.name])
    return SetupResult(
        label=label(setup.speculation),
        speculation=setup.speculation,
        problems=problems,
        unverified=setup.unverified,
        differences=setup.differences,
        backends=[
            BackendFacts(
                name=backend.name,
                role=role,
                decode_backend=backend.decode_backend,
                emulated=backend.emulated,
                command=shlex.join(backend.command) or None,
                url=backend.url,
                gpus=gpus.declared(backend),
                gpus_seen=gpus.told(seen[backend.name]),
                settings=dict(sorted(backend.settings.items())),
                rule=f"{backend.path.model} ({backend.path.source})" if backend.path else None,
            )
            for role, backend in zip(("baseline", "candidate"), setup.backends, strict=True)
        ],
    )


def _cell(run: Run, number: int, results: _Results, setups: list[SetupResult], limits: Thresholds) -> CellResult:
    cell, manifest = run.manifest.cells[number], run.manifest
    setup, checked = run.setups[cell.setup], setups[cell.setup]
    mine = [
        [(loaded, result) for loaded, result in results if result.cell == number and result.backend == backend.name]
        for backend in setup.backends
    ]
    sides = [_side(run, cell, backend, setup, own, limits) for backend, own in zip(setup.backends, mine, strict=True)]
    rates = [[result.figures.decode_tokens_per_s for _, result in own if result.figures] for own in mine]
    found = ratio(*rates)
    per_step = [side.tokens_per_step.value for side in sides]
    noise = noise_floor(*(_by_pass(own) for own in mine))
    meant = any(each.under_test and each.key.startswith("speculative-config") for each in setup.differences)
    outcome, reasons = conclude(sides, found, noise, checked.problems, speculation_under_test=meant)
    specialised = sides[1].path.status == "specialised" or not _specialised_under_test(manifest)
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
        marks=_marks(sides, _specialised_under_test(manifest)),
    )


def _by_pass(own: _Results) -> list[list[float]]:
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


def _side(run: Run, cell: Cell, backend: Backend, setup: Setup, own: _Results, limits: Thresholds) -> Side:
    good = [result for _, result in own if result.figures]
    figures = [result.figures for result in good if result.figures]
    rate = level([each.decode_tokens_per_s for each in figures])
    per_step = weighed(*(_mean([getattr(each, f"from_{way}") for each in good]) for way in _WAYS))
    stretches = [
        Stretch(loaded, turns_of(loaded), steps_folder(run.path, loaded), result.opens_ns, result.closes_ns)
        for loaded, result in own
        if result.figures and result.opens_ns is not None and result.closes_ns is not None
    ]
    count = backend.gpus.count if backend.gpus else None
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
        passes=len({result.pass_number for result in good}),
        starts=len({result.server for result in good} - {None}),
        without=dict(Counter("; ".join(result.why) for _, result in own if not result.figures).most_common()),
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


def _specialised_under_test(manifest: DecodeManifest) -> bool:
    return any(backend.decode_backend == SPECIALISED for backend in manifest.backends)


def _compared(manifest: DecodeManifest) -> str:
    if _specialised_under_test(manifest):
        return "the specialised decode path against standard decode"
    told = [f"{each.key} ({each.values})" for each in manifest.differences if each.under_test]
    others = [name for name in manifest.under_test if not name.endswith("decode_backend")]
    return f"{', '.join(told or others) or 'two deployments'}: neither backend is set to the specialised decode path"


def _range(cells: list[CellResult], specialised_under_test: bool) -> Range | None:
    ratios = [cell.ratio.value for cell in cells if cell.in_range and cell.ratio.value is not None]
    if not ratios:
        return None
    of = "cells whose candidate ran specialised" if specialised_under_test else "cells with a result"
    return Range(of=of, low=min(ratios), high=max(ratios), cells=len(ratios))


def _tables(manifest: DecodeManifest, cells: list[CellResult], setups: list[SetupResult]) -> list[Table]:
    grouped: dict[tuple[int, int, int], list[CellResult]] = defaultdict(list)
    for plan, cell in zip(manifest.cells, cells, strict=True):
        grouped[plan.setup, plan.input_tokens, plan.output_tokens].append(cell)
    return [
        Table(
            title=f"{setups[setup].label}; {given:,} input and {asked:,} output tokens",
            setup=setup,
            input_tokens=given,
            output_tokens=asked,
            cells=sorted(rows, key=lambda cell: cell.batch),
        )
        for (setup, given, asked), rows in grouped.items()
    ]


def _order(manifest: DecodeManifest) -> str:
    """Passes in measured order, setup by setup: "no speculation: baseline, candidate, candidate, baseline"."""
    runs: list[tuple[int, str, int]] = []
    for place in manifest.order:
        setup = manifest.cells[place.cell].setup
        if runs and runs[-1][:2] == (setup, place.backend):
            runs[-1] = (setup, place.backend, runs[-1][2] + 1)
        else:
            runs.append((setup, place.backend, 1))
    parts: dict[int, list[str]] = defaultdict(list)
    for setup, name, count in runs:
        parts[setup].append(f"{name} ({count})")
    return "; ".join(f"{label(manifest.setups[setup].speculation)}: {', '.join(each)}" for setup, each in parts.items())


def _published(run: Run, cells: list[CellResult]) -> list[Published]:
    """Every published row, with the cell whose setting is nearest to it."""
    seen = {
        cell.number: _beside(run.setups[plan.setup], plan, cell)
        for plan, cell in zip(run.manifest.cells, cells, strict=True)
    }
    found = []
    for row in published.ROWS:
        near = [
            (len(beside.differs), cells[number - 1], beside)
            for number, rows in seen.items()
            for beside in rows
            if beside.row.id == row.id
        ]
        if not near:
            differs = [row.not_comparable] if row.not_comparable else [f"another metric: {row.metric}"]
            found.append(
                Published(
                    row=row, cell=None, own_baseline=None, own_candidate=None, own_ratio=None, differs=differs,
                    unstated=[],
                )
            )  # fmt: skip
            continue
        _, cell, beside = min(near, key=lambda each: (each[0], each[1].number))
        same = not beside.differs
        found.append(
            Published(
                row=row,
                cell=cell.number,
                own_baseline=cell.baseline.decode_tokens_per_s if same else None,
                own_candidate=cell.candidate.decode_tokens_per_s if same else None,
                own_ratio=cell.ratio if same else None,
                differs=beside.differs,
                unstated=beside.unstated,
            )
        )
    return found


def _beside(setup: Setup, plan: Cell, cell: CellResult) -> list[Beside]:
    both = [published.beside(_setting(setup, backend, plan), METRIC) for backend in setup.backends]
    found = []
    for theirs, ours in zip(*both, strict=True):
        differs = list(dict.fromkeys(ours.differs + theirs.differs)) + _other_work(setup, cell)
        found.append(msgspec.structs.replace(ours, differs=differs))
    return found


def _other_work(setup: Setup, cell: CellResult) -> list[str]:
    """What keeps a cell from being the published comparison, besides its setting."""
    baseline, candidate = setup.backends
    differs = []
    if candidate.decode_backend != SPECIALISED or baseline.decode_backend == SPECIALISED:
        differs.append(f"decode backends: {baseline.decode_backend} and {candidate.decode_backend} here")
    elif cell.candidate.path.status != "specialised":
        differs.append(f"the candidate's decode path: {cell.candidate.path.status} here")
    if cell.outcome == "no result":
        differs.append("this cell has no result here")
    return differs


def _setting(setup: Setup, backend: Backend, plan: Cell) -> Setting:
    served = backend.settings.get("model")
    rule = next((each.path.model for each in setup.backends if each.path), None)
    speculation = setup.speculation
    return Setting(
        model=" ".join(str(name) for name in (served, rule) if name) or None,
        gpu_kind=backend.gpus.kind if backend.gpus else None,
        gpus=backend.gpus.count if backend.gpus else None,
        layout=backend.gpus.layout if backend.gpus else {},
        batch=plan.batch,
        method=speculation.method,
        draft_tokens=speculation.draft_tokens,
        acceptance_length=speculation.acceptance_length,
        input_tokens=plan.input_tokens,
        output_tokens=plan.output_tokens,
    )


def _stamps(run: Run) -> list[str]:
    stamps = []
    manifest = run.manifest
    if manifest.emulated:
        faster = f", clock {manifest.time_scale:g} times as fast" if manifest.time_scale != 1 else ""
        stamps.append(
            f"EMULATED: these figures come from the embedded emulator{faster}; they say nothing about hardware"
        )
    if not manifest.matched_gpus or not all(setup.matched_gpus for setup in run.setups):
        stamps.append("not matched: does not isolate the decode path")
    return stamps
