"""The parts of a run directory, loaded, and what each says by itself."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import msgspec
import polars as pl

from evals.records import Answer, EvalManifest, EvalPlan, Repeat
from replay.records import Manifest
from reports.accuracy.answers import frame, read_answers
from reports.accuracy.result import Accuracy
from reports.accuracy.verdict import judge
from reports.analysis import Analysis, analyse
from reports.run import read, read_manifest
from workloads.errors import UserError

_REPEAT = re.compile(r"r(\d{3,})$")


class Sitting(msgspec.Struct, frozen=True, kw_only=True):
    """One repeat of one benchmark on one backend, that has ended."""

    repeat: Repeat
    answers: list[Answer]
    folder: Path
    """rNNN/: what was recorded of the server meanwhile."""
    interrupted: int
    """How often it was interrupted before."""


class ReplayPart(msgspec.Struct, frozen=True):
    """An A/B replay, judged."""

    manifest: Manifest
    analysis: Analysis


class EvalsPart(msgspec.Struct, frozen=True, kw_only=True):
    """Accuracy evals, judged."""

    folder: Path
    """RUN/evals."""
    manifest: EvalManifest
    plan: EvalPlan
    plan_sha256: str
    """Of plan.json as it is."""
    sittings: list[Sitting]
    """By backend (baseline first), benchmark as planned, repeat."""
    accuracy: Accuracy
    notes: list[str]
    """What was not counted."""

    @property
    def names(self) -> tuple[str, str]:
        """Baseline's and candidate's name."""
        baseline, candidate = self.manifest.backends
        return baseline.name, candidate.name

    def of(self, backend: str, task: str) -> list[Sitting]:
        """The sittings of one backend in one benchmark, by repeat."""
        return [each for each in self.sittings if (each.repeat.backend, each.repeat.task) == (backend, task)]


class Parts(msgspec.Struct, frozen=True):
    """What a run directory holds; null for a part that was not measured. ``missing``: why not, by part."""

    run: Path
    replay: ReplayPart | None
    evals: EvalsPart | None
    missing: dict[str, str]


def load(run: Path) -> Parts:
    """Load and judge all parts of a run directory. Raises UserError if it holds none, and for damaged ones."""
    if not run.is_dir():
        raise UserError(f"{run} is not a run directory: name the folder that decodegate eval or compare wrote")
    missing: dict[str, str] = {}
    replay = _replay(run, missing)
    evals = _evals(run / "evals", missing)
    if replay is None and evals is None:
        raise UserError(f"{run} holds nothing to sign off: {'; '.join(missing.values())}")
    return Parts(run, replay, evals, missing)


class _Kind(msgspec.Struct):
    kind: str = "compare"


def _replay(run: Path, missing: dict[str, str]) -> ReplayPart | None:
    if not (run / "manifest.json").exists():
        missing["replay"] = f"no replay was measured: decodegate compare EXPERIMENT --run {run.name}"
        return None
    kind = read(run / "manifest.json", _Kind).kind
    if kind != "compare":
        missing["replay"] = f"it is a run of {kind}, not of a replay: use decodegate compare with a folder of its own"
        return None
    return ReplayPart(read_manifest(run, Manifest), analyse(run))


def _evals(folder: Path, missing: dict[str, str]) -> EvalsPart | None:
    if not (folder / "manifest.json").exists():
        missing["evals"] = f"no evals were measured: decodegate eval EXPERIMENT --run {folder.parent.name}"
        return None
    manifest, plan, notes = read_manifest(folder, EvalManifest), read(folder / "plan.json", EvalPlan), list[str]()
    names = (manifest.backends[0].name, manifest.backends[1].name)
    answers = {name: {task.task: read_answers(folder, name, task.task, notes) for task in plan.tasks} for name in names}
    frames: list[dict[str, pl.DataFrame]] = [{task: frame(of) for task, of in answers[name].items()} for name in names]
    return EvalsPart(
        folder=folder,
        manifest=manifest,
        plan=plan,
        plan_sha256=hashlib.sha256((folder / "plan.json").read_bytes()).hexdigest(),
        sittings=[
            sitting
            for name in names
            for task in plan.tasks
            for sitting in _sittings(folder / name / task.task, answers[name][task.task])
        ],
        accuracy=judge(plan, frames[0], frames[1], names),
        notes=notes,
    )


def _sittings(folder: Path, answers: list[Answer]) -> list[Sitting]:
    by_repeat: dict[int, list[Answer]] = {}
    for answer in answers:
        by_repeat.setdefault(answer.repeat, []).append(answer)
    return [
        Sitting(
            repeat=read(path, Repeat),
            answers=by_repeat.get(int(match[1]), []),
            folder=path.with_suffix(""),
            interrupted=len(list(folder.glob(f"{path.stem}.interrupted-*"))),
        )
        for path in sorted(folder.glob("r*.json"))
        if (match := _REPEAT.match(path.stem)) is not None
    ]
