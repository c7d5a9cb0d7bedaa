"""From the profiles of both backends, or from two traces, to everything that a report on layers says. Pure."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

import msgspec

from replay.records import Backend, Cell, Profile, ProfileManifest, Setup, Speculation
from reports import gpus, published
from reports.coverage import SPECIALISED
from reports.kernels.kineto import read_first
from reports.kernels.layers import Layers, Spread, layers
from reports.run import read, read_manifest
from reports.speculation import label
from reports.stamps import stamps
from workloads.errors import UserError

_SLOWED = 1.2
"""A profiled step that is so much longer than one without the profiler is the profiler's work."""

FORMULAS = {
    "Layer": "the unit of kernels that repeats most within decode steps, divided by the layers that it holds",
    "Wall": "start of a unit to the start of the next one in the same step",
    "Busy": "the part of the wall in which a kernel, copy or fill runs on the device, on any stream",
    "Gap": "wall − busy",
    "Overlap": "sum of the durations of a unit’s kernels, copies and fills − busy",
    "Step, profiled": "start to start of a kernel that runs once in each step",
    "Step, without the profiler": "by the client, just before the profiler ran: the time of some decode steps / their "
    "number; good to a few percent",
    "Outside layers": "median profiled step − complete units in a step × median wall of a unit",
}


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One backend's layers."""

    name: str
    role: Literal["baseline", "candidate"]
    decode_backend: str | None
    gpus: str | None
    command: str | None
    step_s: float | None
    """Of a step just before the profiler ran, by the client; null: unknown."""
    trace: str
    traces: int
    """Traces that there were."""
    layers: Layers


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of both sides."""

    label: str
    baseline: Spread | float | None
    candidate: Spread | float | None
    ratio: float | None
    """Candidate's (median) over the baseline's; null where it would say nothing."""


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """A published row; own figures only where nothing differs."""

    row: published.Row
    own_baseline: float | None
    own_candidate: float | None
    differs: list[str]
    unstated: list[str]


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the report says. JSON-able; holds no infinity and no NaN."""

    schema_version: int = 1
    kind: Literal["profile"] = "profile"
    name: str
    created_utc: str | None
    decodegate_version: str | None
    stamps: list[str]
    decoded: str | None
    """What ran while the profilers did."""
    sides: tuple[Side, Side]
    """Baseline first."""
    rows: list[Row]
    published: list[Published]
    differences: list[str]
    notes: list[str]
    formulas: dict[str, str]
    versions: dict[str, str]
    host: dict[str, str]


def analyse(run: Path) -> Analysis:
    """Load a run of layer profiles and compare its layers. Raises UserError if it is none, is not finished, or its
    traces show no layers."""
    manifest = read_manifest(run, ProfileManifest)
    both = [_side(run, backend, index, manifest.layers) for index, backend in enumerate(manifest.setup.backends)]
    sides = (both[0], both[1])
    return Analysis(
        name=manifest.name,
        created_utc=manifest.created_utc,
        decodegate_version=manifest.decodegate_version,
        stamps=stamps(manifest),
        decoded=_decoded(manifest.cell, manifest.setup.speculation),
        sides=sides,
        rows=_rows(*sides),
        published=_published(sides, manifest.setup, manifest.cell),
        differences=[f"{each.key}: {each.values}" for each in manifest.differences],
        notes=[*_notes(sides), *manifest.unverified],
        formulas=FORMULAS,
        versions=dict(sorted(manifest.versions.items())),
        host=dict(sorted(manifest.host.items())),
    )


def analyse_traces(baseline: Path, candidate: Path, model_layers: int | None) -> Analysis:
    """Compare the layers of two traces of which nothing else is known. Raises UserError as ``analyse`` does."""

    def side(role: Literal["baseline", "candidate"], path: Path) -> Side:
        found = layers(read_first([path]), model_layers)
        if model_layers is not None and (found.units_per_step or 0) > model_layers:
            raise UserError(
                f"{path}: {found.units_per_step:g} units repeat in a step, more than a model of {model_layers} layers "
                "has: give --layers as the model has them, or leave it out"
            )
        return Side(
            name=role,
            role=role,
            decode_backend=None,
            gpus=None,
            command=None,
            step_s=None,
            trace=str(path),
            traces=1,
            layers=found,
        )

    sides = (side("baseline", baseline), side("candidate", candidate))
    return Analysis(
        name="two traces",
        created_utc=None,
        decodegate_version=None,
        stamps=["not matched: bare traces do not say under which settings they were made, or how many GPUs served"],
        decoded=None,
        sides=sides,
        rows=_rows(*sides),
        published=[],
        differences=[],
        notes=_notes(sides),
        formulas=FORMULAS,
        versions={},
        host={},
    )


def _side(run: Path, backend: Backend, index: int, model_layers: int | None) -> Side:
    folder = run / "profiles" / backend.name
    if not (folder / "profile.json").exists():
        raise UserError(f"{run} has no finished profile of {backend.name}: run decodegate decode profile again")
    profile = read(folder / "profile.json", Profile)
    activity = read_first([folder / trace for trace in profile.traces])
    return Side(
        name=backend.name,
        role=("baseline", "candidate")[index],
        decode_backend=backend.decode_backend,
        gpus=gpus.declared(backend),
        command=shlex.join(backend.command) or None,
        step_s=profile.step_s,
        trace=str(activity.path.relative_to(run)),
        traces=len(profile.traces),
        layers=layers(activity, model_layers),
    )


def _decoded(cell: Cell, speculation: Speculation) -> str:
    tokens = f"{cell.input_tokens:,} input and {cell.output_tokens:,} output tokens each"
    return f"batch {cell.batch}, {tokens}, {label(speculation)}"


def _rows(baseline: Side, candidate: Side) -> list[Row]:
    one, other = baseline.layers, candidate.layers

    def row(label: str, here: Spread | float | None, there: Spread | float | None, *, compared: bool = True) -> Row:
        below, above = (value.median if isinstance(value, Spread) else value for value in (here, there))
        ratio = above / below if compared and below and above is not None else None
        return Row(label=label, baseline=here, candidate=there, ratio=ratio)

    rows = [
        row("Kernels per layer", one.kernels, other.kernels),
        row("µs per layer, wall", one.wall, other.wall),
        row("µs per layer, busy", one.busy, other.busy),
        row("µs per layer, gap", one.gap, other.gap),
        row("µs per layer, overlap", one.overlap, other.overlap, compared=False),
        row("µs per step, profiled", one.step, other.step),
        row("µs per step, without the profiler", *(_us(side.step_s) for side in (baseline, candidate))),
        row("µs per step, outside layers", one.outside_us, other.outside_us),
        row("Kernels per repeating unit", one.kernels_per_unit, other.kernels_per_unit, compared=False),
        row("Layers per repeating unit", one.layers_per_unit, other.layers_per_unit, compared=False),
        row("Units per step", one.units_per_step, other.units_per_step, compared=False),
        row("Repetitions of the unit", one.repetitions, other.repetitions, compared=False),
        row("Steps", one.steps, other.steps, compared=False),
        row("Kernels in the trace", one.kernels_in_trace, other.kernels_in_trace, compared=False),
    ]
    if one.copies or other.copies:
        rows.insert(1, row("Copies and fills per layer", one.copies, other.copies, compared=False))
    return rows


def _us(seconds: float | None) -> float | None:
    return seconds * 1e6 if seconds is not None else None


def _notes(sides: tuple[Side, Side]) -> list[str]:
    one, other = (side.layers for side in sides)
    notes = [f"{side.name}: {note}" for side in sides for note in side.layers.notes]
    for side in sides:
        profiled, before = side.layers.step, _us(side.step_s)
        if profiled and before and profiled.median > _SLOWED * before:
            notes.append(
                f"{side.name}: the profiler made a step {profiled.median / before:.1f} times as long, as it slows "
                "launches of kernels outside CUDA graphs: walls and gaps are those of a profiled step, busy is not"
            )
    if one.layers_per_unit == other.layers_per_unit and one.units_per_step != other.units_per_step:
        notes.append(
            f"units per step differ, {_known(one.units_per_step)} against {_known(other.units_per_step)}: the two may "
            "not be the same part of the model; compare their kernels before their times"
        )
    if one.gpu != other.gpu:
        notes.append(f"the traces name other GPUs: {one.gpu or 'none'} against {other.gpu or 'none'}")
    return notes


def _known(value: float | None) -> str:
    return f"{value:g}" if value is not None else "not known"


def _published(sides: tuple[Side, Side], setup: Setup, cell: Cell) -> list[Published]:
    own: dict[published.Metric, list[float]] = {
        "kernels per layer": [side.layers.kernels for side in sides],
        "µs per layer": [side.layers.wall.median for side in sides],
    }
    backends = [side.decode_backend or "not known" for side in sides]
    as_published = backends[1] == SPECIALISED != backends[0]
    other = [] if as_published else [f"decode backends: {backends[0]} and {backends[1]} here"]
    found = []
    for metric, (here, there) in own.items():
        seen = [published.beside(published.setting(setup, backend, cell), metric) for backend in setup.backends]
        for first, second in zip(*seen, strict=True):
            differs = list(dict.fromkeys(first.differs + second.differs)) + other
            found.append(
                Published(
                    row=first.row,
                    own_baseline=None if differs else here,
                    own_candidate=None if differs else there,
                    differs=differs,
                    unstated=first.unstated,
                )
            )
    return found
