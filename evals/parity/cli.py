"""decodegate parity: ask both backends the battery; ask one case again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cyclopts import App
from rich.console import Console

from evals.showing import Standing, showing
from replay import rundir
from replay.cli import scratch
from replay.experiment import Experiment, load_experiment
from replay.progress import Event
from workloads.errors import UserError

if TYPE_CHECKING:
    from evals.parity.harness import Progress
    from evals.parity.plan import Wanted

app = App(name="parity", help="Output parity: whether both backends emit the same tokens, within the noise of one.")

Budget = Literal["quick", "standard", "full"]


def ask(
    experiment: Experiment,
    *,
    run: Path | None,
    budget: Budget | None = None,
    checks: str | None = None,
    fault: str | None = None,
    resume: bool = False,
    dry_run: bool = False,
    allow_unmatched: bool = False,
) -> Path | None:
    """Run the battery or go on with it, showing progress; returns the run directory, or None after a dry run.

    ``checks``: ids with commas between. Raises UserError when interrupted, naming the way to go on.
    """
    try:
        from evals.parity import harness, plan  # an extra; slow to import
    except ImportError as error:
        raise UserError(f"parity needs {error.name}: pip install 'decodegate[evals]'") from None

    console = Console(highlight=False, soft_wrap=True)

    def tell(event: Event) -> None:
        console.print(event.text, markup=False)

    ids = None if checks is None else tuple(id.strip().upper() for id in checks.split(","))
    wanted = plan.Wanted(budget=budget, checks=ids, fault=fault)
    if dry_run:
        _state(experiment, wanted, console, allow_unmatched=allow_unmatched)
        return None
    latest = rundir.latest(experiment.name, "parity", "parity") if resume and run is None else None
    folder = run or latest or rundir.new_folder(experiment.name)
    try:
        with showing(console) as show:
            harness.measure(
                experiment,
                folder,
                tell,
                lambda at: show(_standing(at)),
                wanted,
                resume=resume,
                allow_unmatched=allow_unmatched,
            )
    except KeyboardInterrupt:
        if not (folder / "parity" / "manifest.json").exists():
            raise
        words = f"interrupted; the checks that had ended are kept: continue with --resume --run {folder}"
        raise UserError(words) from None
    return folder


def _state(experiment: Experiment, wanted: Wanted, console: Console, *, allow_unmatched: bool) -> None:
    from evals.parity import harness

    with scratch() as folder:
        lines = harness.stated(
            experiment,
            folder,
            lambda event: console.print(event.text, markup=False),
            wanted,
            allow_unmatched=allow_unmatched,
        )
    for name, text in lines.items():
        console.print(f"{name:<7}{text}", markup=False)


def _standing(at: Progress) -> Standing:
    return Standing(
        at.number, f"{at.number}/{at.numbers} {at.check} on {at.arm}", at.replied, at.cases, "cases", at.errors
    )


@app.command
def reproduce(
    run: Path,
    check: str,
    case: int,
    /,
    *,
    backend: Literal["baseline", "candidate"] = "candidate",
    experiment: Path | None = None,
) -> None:
    """Ask one case of a battery again, with its batch, and say where the reply begins to differ from those on record.

    The prompt is made again from its seed. A server of ours is started for it, and stopped after.

    Example: decodegate parity reproduce runs/k3-20261201-120000 P6 117

    Parameters
    ----------
    run
        The run directory with the battery.
    check
        The check's id.
    case
        The case's number in it, as the verdict names it.
    backend
        Which one is asked.
    experiment
        The experiment file, where the run's own copy has keys left out.
    """
    from evals.parity import reproduce as again

    console = Console(highlight=False, soft_wrap=True)
    described = None if experiment is None else load_experiment(experiment)
    with scratch() as folder:
        found = again.reproduce(
            run,
            check.upper(),
            case,
            folder,
            lambda event: console.print(event.text, markup=False),
            backend=backend,
            experiment=described,
        )
    for line in again.lines(found):
        console.print(line, markup=False)
