"""decodegate eval: look at benchmark data."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import App, Parameter
from rich.console import Console

from workloads.errors import UserError

app = App(name="eval", help="AIME25, GPQA-Diamond and MRCR on both backends: the accuracy half of a sign-off.")
data_app = App(name="data", help="Benchmark data: you bring them, decodegate checks them.")
app.command(data_app)

_SHOWN = 10


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
