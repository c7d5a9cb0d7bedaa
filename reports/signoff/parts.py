"""The parts of a run directory, loaded, and what each says by itself."""

from __future__ import annotations

import hashlib
import re
from datetime import datetime
from pathlib import Path

import msgspec
import polars as pl

from evals.records import Answer, EvalManifest, EvalPlan, ParityManifest, ParityPlan, Repeat
from replay.records import Manifest
from reports.accuracy.answers import frame, read_answers
from reports.accuracy.result import Accuracy
from reports.accuracy.verdict import judge
from reports.analysis import Analysis, analyse
from reports.parity.result import Parity
from reports.parity.verdict import judge_parity
from reports.run import read, read_manifest
from reports.signoff.result import PartName
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


class ParityPart(msgspec.Struct, frozen=True):
    """Output parity, judged."""

    manifest: ParityManifest
    plan: ParityPlan
    parity: Parity


class Parts(msgspec.Struct, frozen=True):
    """What a run directory holds; null for a part that was not measured. ``missing``: why not, by part."""

    run: Path
    replay: ReplayPart | None
    evals: EvalsPart | None
    parity: ParityPart | None
    missing: dict[str, str]

    @property
    def measured(self) -> dict[PartName, ReplayPart | EvalsPart | ParityPart]:
        """Those that were, by name."""
        of: dict[PartName, ReplayPart | EvalsPart | ParityPart | None] = {
            "replay": self.replay,
            "evals": self.evals,
            "parity": self.parity,
        }
        return {name: part for name, part in of.items() if part is not None}


def load(run: Path) -> Parts:
    """Load and judge all parts of a run directory. Raises UserError if it holds none, and for damaged ones."""
    if not run.is_dir():
        raise UserError(f"{run} is not a run directory: name the folder that decodegate compare, eval or parity wrote")
    missing: dict[str, str] = {}
    replay = _replay(run, missing)
    evals = _evals(run / "evals", missing)
    parity = _parity(run / "parity", missing)
    if replay is None and evals is None and parity is None:
        raise UserError(f"{run} holds nothing to sign off: {'; '.join(missing.values())}")
    return Parts(run, replay, evals, parity, missing)


class _Kind(msgspec.Struct):
    kind: str = "compare"


def _replay(run: Path, missing: dict[str, str]) -> ReplayPart | None:
    if not (run / "manifest.json").exists():
        missing["replay"] = "no replay was measured: decodegate compare EXPERIMENT --run RUN"
        return None
    kind = read(run / "manifest.json", _Kind).kind
    if kind != "compare":
        missing["replay"] = f"it is a run of {kind}, not of a replay: use decodegate compare with a folder of its own"
        return None
    return ReplayPart(read_manifest(run, Manifest), analyse(run))


def _evals(folder: Path, missing: dict[str, str]) -> EvalsPart | None:
    if not (folder / "manifest.json").exists():
        missing["evals"] = "no evals were measured: decodegate eval EXPERIMENT --run RUN"
        return None
    manifest, plan, notes = read_manifest(folder, EvalManifest), _plan(folder / "plan.json"), list[str]()
    names = (manifest.backends[0].name, manifest.backends[1].name)
    if names[0] == names[1]:
        raise UserError(f"{folder}/manifest.json is damaged: both backends are called {names[0]}")
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
            for sitting in _sittings(folder, name, task.task, answers[name][task.task])
        ],
        accuracy=judge(plan, frames[0], frames[1], names),
        notes=notes,
    )


def _plan(path: Path) -> EvalPlan:
    """Raises UserError for a plan that no eval can have registered."""
    plan = read(path, EvalPlan)
    tasks = [task.task for task in plan.tasks]
    if len(tasks) != len(set(tasks)):
        raise UserError(f"{path} is damaged: a benchmark is planned twice")
    if any(task.looks != sorted(set(task.looks)) or task.looks[-1] != 1 for task in plan.tasks):
        raise UserError(f"{path} is damaged: looks must rise, and the last must be 1")
    try:
        zone = datetime.fromisoformat(plan.registered_utc).tzinfo
    except ValueError:
        zone = None
    if zone is None:
        raise UserError(f"{path} is damaged: registered_utc is no time with a zone")
    return plan


def _parity(folder: Path, missing: dict[str, str]) -> ParityPart | None:
    if not (folder / "manifest.json").exists():
        missing["parity"] = "no output parity was measured: decodegate parity EXPERIMENT --run RUN"
        return None
    manifest, plan = read_manifest(folder, ParityManifest), read(folder / "plan.json", ParityPlan)
    return ParityPart(manifest, plan, judge_parity(folder))


def _sittings(folder: Path, name: str, task: str, answers: list[Answer]) -> list[Sitting]:
    """Raises UserError for a repeat that says it is another: records of one backend in the place of the other's would
    turn the verdict round."""
    by_repeat: dict[int, list[Answer]] = {}
    for answer in answers:
        by_repeat.setdefault(answer.repeat, []).append(answer)
    found = []
    for path in sorted((folder / name / task).glob("r*.json")):
        if (match := _REPEAT.match(path.stem)) is None:
            continue
        repeat, number = read(path, Repeat), int(match[1])
        if (repeat.backend, repeat.task, repeat.repeat) != (name, task, number):
            what = f"repeat {repeat.repeat} of {repeat.task} on {repeat.backend}"
            raise UserError(f"{path} is {what}, by what it says itself: put every file back where it was")
        found.append(
            Sitting(
                repeat=repeat,
                answers=by_repeat.get(number, []),
                folder=path.with_suffix(""),
                interrupted=len(list(path.parent.glob(f"{path.stem}.interrupted-*"))),
            )
        )
    return found
