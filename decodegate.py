"""The command. It composes what each package's cli.py offers, and turns errors into words and exit codes.

Exit codes: 0 done; 2 inconclusive; 3 usage or data error. (1 is kept for a sign-off that fails.)
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter
from cyclopts.types import NonNegativeInt, PositiveInt
from rich.console import Console

import evals.cli
import evals.parity.cli
import replay.cli
import reports.accuracy.cli
import reports.cli
import reports.kernels.cli
import reports.signoff.cli
import workloads.cli
from replay.backends import NAMES
from replay.emulator.cli import emulate
from replay.experiment import json_schema, load_experiment
from replay.profile import Wanted
from replay.rundir import new_folder
from workloads.errors import UserError

app = App(
    name="decodegate",
    version=importlib.metadata.version("decodegate"),
    help="""May we switch on the specialised decode backend?

    Replays recorded agent traffic against two vLLM decode backends at matched GPU counts, and reports P90
    interactivity: the decode rate that 90 % of requests at least reach.

    Start with: decodegate demo. Then write an experiment file, and: decodegate check, decodegate compare.""",
)
app.command(workloads.cli.app)
app.command(replay.cli.check)
app.command(replay.cli.preset)
app.command(reports.cli.report)
app.command(reports.signoff.cli.signoff)
evals.cli.app.command(reports.accuracy.cli.power)
app.command(evals.cli.app)
app.command(evals.parity.cli.app)
app.command(emulate)

decode = App(name="decode", help="Decode tables of both backends: how fast exactly so many streams decode together.")
app.command(decode)
decode.command(reports.kernels.cli.layers)


@app.command
def compare(
    experiment: Path,
    /,
    *,
    run: Path | None = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    allow_unmatched: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Replay the workload against both backends in balanced order, then report.

    Everything measured goes into a run directory as it comes. After a crash or Ctrl-C, --resume goes on at the first
    unfinished block.

    Parameters
    ----------
    experiment
        The experiment file.
    run
        The run directory to make (or, with --resume, to continue). By default runs/NAME-DATE-TIME, or the latest of
        that name.
    resume
        Continue an interrupted run with the same plan.
    dry_run
        Ask both backends the preflight's few questions, print what would be sent and for how long, and stop.
    allow_unmatched
        Measure although the GPUs differ or are not declared. Every page of the report will say so.
    """
    folder = replay.cli.compare(
        load_experiment(experiment), run=run, resume=resume, dry_run=dry_run, allow_unmatched=allow_unmatched
    )
    return 0 if folder is None else reports.cli.report(folder)


@decode.default
def decode_tables(
    experiment: Path,
    /,
    *,
    run: Path | None = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    allow_unmatched: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Measure every cell of the experiment's decode tables on both backends in balanced order, then report.

    A cell is a batch of streams that are sent at once, each with so many prompt and output tokens, with or without
    speculation. Everything measured goes into a run directory as it comes. After a crash or Ctrl-C, --resume goes on at
    the first unfinished window.

    Parameters
    ----------
    experiment
        The experiment file, with its decode section.
    run
        The run directory to make (or, with --resume, to continue). By default runs/NAME-DATE-TIME, or the latest of
        that name.
    resume
        Continue an interrupted run.
    dry_run
        Print the cells, how many windows and starts of servers they take, and stop. Nothing is started.
    allow_unmatched
        Measure although the GPUs differ or are not declared. Every page of the report will say so.
    """
    folder = replay.cli.decode(
        load_experiment(experiment), run=run, resume=resume, dry_run=dry_run, allow_unmatched=allow_unmatched
    )
    return 0 if folder is None else reports.cli.report(folder)


@decode.command
def profile(
    experiment: Path,
    /,
    *,
    run: Path | None = None,
    speculation: NonNegativeInt = 0,
    batch: PositiveInt | None = None,
    steps: PositiveInt = 50,
    traces: Path | None = None,
    allow_unmatched: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Profile decode steps of both backends, one after the other, then report the kernels of a layer.

    Servers that decodegate starts get a torch profiler. One at a url must have been started with vLLM's
    --profiler-config '{"profiler": "torch", "torch_profiler_dir": ..., "torch_profiler_with_stack": false}', and its
    traces must be within reach. A profile takes minutes, most of them to write traces, and cannot be resumed: start a
    new run.

    Parameters
    ----------
    experiment
        The experiment file, with its decode section: the streams have its first input_tokens and output_tokens.
    run
        The run directory to make. By default runs/NAME-profile-DATE-TIME.
    speculation
        Which entry of decode.speculation, counted from 0.
    batch
        Streams that decode together. By default the first batch size of the tables.
    steps
        Decode steps to profile, about. Traces grow with them.
    traces
        Of servers at a url: the folder into which they write their traces, as this host sees it, or one above.
    allow_unmatched
        Measure although the GPUs differ or are not declared. Every page of the report will say so.
    """
    wanted = Wanted(speculation=speculation, batch=batch, steps=steps, traces=traces)
    folder = replay.cli.profile_layers(load_experiment(experiment), wanted, run=run, allow_unmatched=allow_unmatched)
    return reports.cli.report(folder)


@evals.cli.app.default
def sit_exams(
    experiment: Path,
    /,
    *,
    run: Path | None = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    limit: PositiveInt | None = None,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    allow_unmatched: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Sit the experiment's exams on both backends, with the same questions and seeds, then say whether the candidate's
    answers stayed as good.

    The plan is registered before the first request. Answers go into RUN/evals as they come; after a crash or Ctrl-C,
    --resume asks only what has no answer. Exit code 0 for PASS, 1 for FAIL, 2 for INCONCLUSIVE.

    Parameters
    ----------
    experiment
        The experiment file, with its evals section.
    run
        The run directory to make, or that of a replay to add to (or, with --resume, to continue). By default
        runs/NAME-DATE-TIME, or the latest of that name.
    resume
        Continue an interrupted run with the same plan.
    limit
        Only the first so many items of each task: a smoke test, which can pass nothing.
    dry_run
        Read the data, print what would be asked, and stop. Nothing is started.
    allow_unmatched
        Measure although the GPUs differ or are not declared. Every page of the report will say so.
    """
    folder = evals.cli.sit(
        load_experiment(experiment),
        run=run,
        resume=resume,
        limit=limit,
        dry_run=dry_run,
        allow_unmatched=allow_unmatched,
    )
    return 0 if folder is None else _say_accuracy(folder)


def _say_accuracy(run: Path) -> int:
    from reports.accuracy.verdict import judge_folder  # scipy costs a moment that the other verbs do without

    _, judged, notes = judge_folder(run / "evals", NAMES)
    console = Console(highlight=False, soft_wrap=True)
    for task in judged.tasks:
        console.print(f"{task.title}: {task.outcome}", style="bold", markup=False)
        for reason in task.reasons:
            console.print(f"  {reason}", markup=False)
    for note in notes:
        console.print(note, markup=False)
    console.print(f"accuracy: {judged.outcome}", style="bold", markup=False)
    console.print(f"the whole verdict, with its document: decodegate signoff {run}", markup=False)
    return reports.signoff.cli.EXIT[judged.outcome]


@evals.parity.cli.app.default
def ask_battery(
    experiment: Path,
    /,
    *,
    run: Path | None = None,
    budget: Literal["quick", "standard", "full"] | None = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    fault: str | None = None,
    checks: str | None = None,
    allow_unmatched: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Ask both backends the output-parity battery, each started twice, and record every token: the baseline's two arms
    set the noise floor before the candidate is asked.

    The plan is registered before the first request. Everything goes into RUN/parity as it comes; after a crash or
    Ctrl-C, --resume asks only the checks that had not ended. Exit code 0 for PASS, 1 for FAIL, 2 for INCONCLUSIVE.

    Parameters
    ----------
    experiment
        The experiment file.
    run
        The run directory to make, or that of a replay or of evals to add to (or, with --resume, to continue). By
        default runs/NAME-DATE-TIME, or the latest of that name.
    budget
        quick: minutes, finds what is plainly broken. standard (the default): what a sign-off needs. full: with a soak
        of a million steps.
    resume
        Continue an interrupted run with the same plan.
    dry_run
        Ask both backends what they offer, print what would be asked and what it would take, and stop.
    fault
        Prove that the battery can fail: one more arm, the baseline behind a proxy that injects this fault, NAME or
        NAME:NUMBER.
    checks
        Only these, by their ids with commas between: P1,D3.
    allow_unmatched
        Measure although the GPUs differ or are not declared. Every page of the report will say so.
    """
    folder = evals.parity.cli.ask(
        load_experiment(experiment),
        run=run,
        budget=budget,
        checks=checks,
        fault=fault,
        resume=resume,
        dry_run=dry_run,
        allow_unmatched=allow_unmatched,
    )
    return 0 if folder is None else _say_parity(folder)


def _say_parity(run: Path) -> int:
    from reports.parity.verdict import judge_parity  # scipy costs a moment that the other verbs do without

    judged = judge_parity(run / "parity")
    console = Console(highlight=False, soft_wrap=True)
    for check in judged.checks:
        console.print(f"{check.outcome:<12} {check.id} {check.title}: {check.said}", markup=False)
    console.print(f"parity: {judged.outcome}", style="bold", markup=False)
    for reason in judged.reasons:
        console.print(f"  {reason}", markup=False)
    console.print(f"the whole verdict, with its document: decodegate signoff {run}", markup=False)
    return reports.signoff.cli.EXIT[judged.outcome]


@app.command
def schema(of: Literal["experiment", "signoff"] = "experiment", /) -> None:
    """Print a JSON Schema: of the experiment file, for editors, or of signoff.json, for what reads it.

    Parameters
    ----------
    of
        Which of the two.
    """
    print(json_schema() if of == "experiment" else reports.signoff.cli.json_schema())


@app.command
def demo(*, run: Path | None = None) -> int:
    """Try everything without a GPU, in two minutes: replay A/B on two emulated servers, exams, and sign-off.

    Every figure it gives is EMULATED. The exams' questions are invented; they go into a folder beside, RUN-exams.
    Output parity is left out, so that the verdict is INCONCLUSIVE and says how to add it. Exit code 0 unless it fails.

    Parameters
    ----------
    run
        The run directory to make. By default runs/demo-DATE-TIME.
    """
    from evals.demo import experiment  # polars costs a moment that the other verbs do without

    folder = run or new_folder("demo")
    described = experiment(folder.with_name(f"{folder.name}-exams"))
    replay.cli.compare(described, run=folder)
    sat = evals.cli.demo(described, folder)
    replayed = reports.cli.report(folder)
    return int(reports.signoff.cli.signoff(folder) == 1) if sat else replayed


def _complain(text: str) -> None:
    Console(stderr=True).print(f"decodegate: {text}", style="red", highlight=False, markup=False, soft_wrap=True)


def main() -> None:
    """Entry point: errors become words, results become exit codes."""
    try:
        code = app(exit_on_error=False, print_error=True, result_action="return_value")
    except UserError as error:
        _complain(str(error))
        sys.exit(3)
    except CycloptsError:
        sys.exit(3)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _complain(f"{where}{error.strerror or error}: choose another place, or mend it")
        sys.exit(3)
    except KeyboardInterrupt:
        Console(stderr=True).print("decodegate: interrupted")
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
