"""decodegate eval: sit the exams; look at benchmark data."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter
from rich.console import Console

from evals.showing import Standing, showing
from replay import rundir
from replay.experiment import Experiment
from replay.progress import Event
from workloads.errors import UserError

if TYPE_CHECKING:
    from evals import harness

app = App(name="eval", help="AIME25, GPQA-Diamond and MRCR on both backends: the accuracy half of a sign-off.")
data_app = App(name="data", help="Benchmark data: you bring them, decodegate checks them.")
app.command(data_app)

_SHOWN = 10


def sit(
    experiment: Experiment,
    *,
    run: Path | None,
    resume: bool = False,
    limit: int | None = None,
    dry_run: bool = False,
    allow_unmatched: bool = False,
) -> Path | None:
    """Sit the exams or go on with them, showing progress; returns the run directory, or None after a dry run.

    Raises UserError when interrupted, naming the way to go on.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval's bars would be drawn through ours; read when it is imported
    try:
        from evals import harness, plan  # an extra; slow to import
    except ImportError as error:
        raise UserError(f"the evals need {error.name}: pip install 'decodegate[evals]'") from None

    console = Console(highlight=False, soft_wrap=True)

    def tell(event: Event) -> None:
        console.print(event.text, markup=False)

    if dry_run:
        planned = harness.planned(experiment, tell, limit=limit, allow_unmatched=allow_unmatched)
        for name, text in plan.lines(planned, plan.sittings(planned, experiment.serving.blocks_per_start)).items():
            console.print(f"{name:<13}{text}", markup=False)
        return None
    folder = run or (rundir.latest(experiment.name, "eval", "evals") if resume else rundir.new_folder(experiment.name))
    try:
        with showing(console) as show:
            harness.measure(
                experiment,
                folder,
                tell,
                lambda at: show(_standing(at)),
                resume=resume,
                limit=limit,
                allow_unmatched=allow_unmatched,
            )
    except KeyboardInterrupt:
        if not (folder / "evals" / "manifest.json").exists():
            raise
        words = f"interrupted; what was answered is kept: continue with --resume --run {folder}"
        raise UserError(words) from None
    return folder


def demo(experiment: Experiment, run: Path) -> bool:
    """Sit the demo's exams into its run directory; returns whether they were sat, and says why not."""
    from evals.demo import hurried

    if importlib.util.find_spec("lm_eval") is None:
        print("no exams: they need lm-eval: pip install 'decodegate[evals]'")
        return False
    sit(hurried(experiment), run=run)
    return True


def _standing(at: harness.Progress) -> Standing:
    sitting = at.sitting
    words = f"{at.number}/{at.sittings} {sitting.task} repeat {sitting.repeat}, {sitting.backend}"
    return Standing(at.number, words, at.answered, at.items, "answered", at.errors)


@data_app.command
def check(
    task: Literal["aime25", "gpqa_diamond", "mrcr"],
    source: str,
    /,
    *,
    sha256: str | None = None,
    subset: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Say what a file of benchmark data holds, and what is wrong with it; never quote it.

    Number of items, hash, gold answers in range, duplicates, columns; of MRCR the bins of length too. Exit code 3 if
    anything is wrong.

    Example: decodegate eval data check aime25 aime25.jsonl

    Parameters
    ----------
    task
        The benchmark.
    source
        A .jsonl, .json, .csv or .parquet file with the columns of the hub's copy, a folder of such files, or
        hub:OWNER/NAME@REVISION.
    sha256
        The hash that the data must have; of a folder, that of: sha256sum * (in the folder).
    subset
        Fewer items than the whole benchmark has are meant, and will be stated wherever results are.
    """
    from evals.data import inspect  # polars costs a moment that the command's other verbs do without
    from evals.tasks import TASKS

    data = inspect(task, source, sha256=sha256, subset=subset)
    facts = data.facts
    revision = f" at revision {facts.revision}" if facts.revision else ""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{task}: {facts.items:,} of {TASKS[task].COUNT:,} items in {facts.name}{revision}", markup=False)
    lines = [f"SHA-256 {facts.sha256}", *TASKS[task].summary(data.items)]
    lines += [f"{count:,} {reason}" for reason, count in facts.dropped.items()]
    for line in lines:
        console.print(f"  {line}", markup=False)
    for fault in data.faults[:_SHOWN]:
        console.print(fault, style="red", markup=False)
    if data.faults:
        raise UserError(
            f"{source}: {len(data.faults):,} faults (the first {_SHOWN} are above)"
            if len(data.faults) > _SHOWN
            else f"{source}: not fit for use, see above"
        )
    console.print("fit for use")
