"""From a run of decode tables to everything that its report says, as plain data. Pure: the same directory gives the
same analysis."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Literal

import msgspec

from replay.records import Cell, DecodeManifest, Setup
from reports import published
from reports.coverage import SPECIALISED
from reports.decode import acceptance, effects, emulated, window, windows
from reports.decode.cells import CellResult, Results, cell_of, specialised_under_test
from reports.decode.effects import Estimate
from reports.decode.run import Run, load
from reports.decode.setups import SetupResult, setup_of
from reports.decode.windows import WindowResult, judge
from reports.gates.gate import Thresholds
from reports.published import Beside
from reports.run import SetAside
from reports.speculation import label
from reports.stamps import stamps

METRIC: published.Metric = "total decode tokens/s"


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Cells of one speculative setting and one length, by batch."""

    title: str
    setup: int
    input_tokens: int
    output_tokens: int
    cells: list[CellResult]


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
    setups = [setup_of(run, number) for number in range(len(run.setups))]
    cells = [
        cell_of(run, number, results, setups[cell.setup].problems, limits) for number, cell in enumerate(manifest.cells)
    ]
    return Analysis(
        name=manifest.name,
        created_utc=manifest.created_utc,
        decodegate_version=manifest.decodegate_version,
        stamps=stamps(manifest, run.setups),
        emulated=manifest.emulated,
        time_scale=manifest.time_scale,
        names=(manifest.backends[0].name, manifest.backends[1].name),
        compared=_compared(manifest),
        ratios=_range(cells, specialised_under_test(manifest)),
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
        formulas=window.FORMULAS
        | acceptance.FORMULAS
        | effects.FORMULAS
        | windows.FORMULAS
        | (emulated.FORMULAS if manifest.emulated else {}),
        versions=dict(sorted(manifest.versions.items())),
        host=dict(sorted(manifest.host.items())),
    )


def _judged(run: Run) -> Results:
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


def _compared(manifest: DecodeManifest) -> str:
    if specialised_under_test(manifest):
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
    both = [published.beside(published.setting(setup, backend, plan), METRIC) for backend in setup.backends]
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
