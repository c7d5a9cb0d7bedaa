"""From the experiment's workload section to traces, with their digest."""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Iterator
from pathlib import Path

from replay.experiment import Experiment, Workload
from workloads import formats
from workloads.errors import UserError
from workloads.generate import GeneratorSettings, generate
from workloads.trace import Notes, Trace


class Source:
    """One pass over an experiment's traces."""

    def __init__(self, experiment: Experiment, notes: Notes) -> None:
        self._experiment = experiment
        self._notes = notes
        self._digest = hashlib.sha256()

    def traces(self) -> Iterator[Trace]:
        """Yield the traces, one in memory at a time. Raises UserError for a path or format that cannot be read."""
        return formats.digesting(self._read(), self._digest)

    def digest(self) -> str:
        """Digest of the traces yielded so far, hex."""
        return self._digest.hexdigest()

    def _read(self) -> Iterator[Trace]:
        workload = described(self._experiment)
        if workload.synthetic is not None:
            return generate(GeneratorSettings(**workload.synthetic.model_dump()))
        return formats.read(workload.path or demo_path(), self._notes, format=workload.format)


def described(experiment: Experiment) -> Workload:
    """The experiment's workload. Raises UserError if it has none."""
    if experiment.workload is None:
        has = {"decode": "its decode tables are measured", "evals": "its exams are sat"}
        verbs = {"decode": "decode", "evals": "eval"}
        others = [f"{words} by decodegate {verbs[key]}" for key, words in has.items() if getattr(experiment, key)]
        raise UserError(
            "; ".join(["the experiment has no workload to replay: add workload, for instance {path: traces/}", *others])
        )
    return experiment.workload


def check(experiment: Experiment) -> None:
    """Raises UserError if the workload's path or format cannot be read; looks at its first records only."""
    workload = described(experiment)
    if workload.path is None:
        return
    if not workload.path.exists():
        raise UserError(
            f"workload.path: {workload.path} does not exist (it is taken from the experiment file's folder)"
        )
    if workload.format is None:
        formats.detect(workload.path)


def demo_path() -> Path:
    """The small workload that comes with decodegate."""
    return Path(str(importlib.resources.files("workloads") / "demo.jsonl"))


def source_name(experiment: Experiment) -> str:
    """How the report names the workload. Only the last part of a path: folders may say more than they should."""
    workload = described(experiment)
    if workload.synthetic is not None:
        return f"synthetic, seed {workload.synthetic.seed}, {workload.synthetic.sessions} sessions"
    return workload.path.name if workload.path is not None else "the packaged demo workload"
