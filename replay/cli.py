"""The verbs of this package: check, compare, decode and preset."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from replay import decode_bench, estimate, matching, presets, profile, rundir, source, speculation
from replay.compare import Planned, make_plan, plan_summary, resume_run, run_blocks, start_run
from replay.experiment import Experiment, load_experiment
from replay.order import block_order
from replay.plan import plan_digest
from replay.preflight import prepare, without_servers
from replay.progress import Event, Finding, Tell
from replay.servers import Servers
from workloads.errors import UserError

_PLAIN_EVERY_S = 10.0


def check(experiment: Path, /, *, offline: bool = False) -> None:
    """Preflight: say whether the two backends can be compared, and what to change if not.

    First what the file alone tells: in what the servers' settings differ, whether the specialised path supports the
    deployment, matched GPUs. Then both servers, started if they are ours, are asked a handful of requests: the model's
    name, one request of each shape that will be sent, streaming, lengths and token counts, prefix caching, keep-alive,
    settings, GPUs. Then what the plan takes: time, disk, GPU hours.

    Parameters
    ----------
    experiment
        The experiment file.
    offline
        Only what needs no server.
    """
    console = Console()
    described = load_experiment(experiment)
    with showing(console) as tell:
        if offline:
            parts = _parts(described)
            found = _check_offline(parts, tell, named=len(parts) > 1)
        else:
            found = _check_servers(described, console, tell)
    impossible = list(dict.fromkeys(reason for matched in found for reason in matched.impossible))
    unmatched = list(dict.fromkeys(reason for matched in found for reason in matched.unmatched))
    for what, reasons in (("cannot be compared", impossible), ("not matched", unmatched)):
        for reason in reasons:
            console.print(f"{what}: {reason}", style="red", highlight=False, markup=False, soft_wrap=True)
    parts_of = {
        "compare": described.workload,
        "decode": described.decode,
        "eval": described.evals,
        "parity": described.parity,
    }
    verbs = " and ".join(verb for verb, given in parts_of.items() if given is not None)
    if impossible:
        raise UserError(f"the backends cannot be compared: {verbs} will refuse them")
    if unmatched:
        raise UserError(f"the backends are not matched: {verbs} will refuse without --allow-unmatched")
    console.print("nothing here speaks against comparing; check again with servers" if offline else f"ready to {verbs}")


def _parts(described: Experiment) -> list[tuple[str, Experiment]]:
    """What is measured with it, each with its name: the comparison, whose servers are those of the evals and of parity
    too, and the decode tables with each speculative setting."""
    named = {"the comparison": described.workload, "the evals": described.evals, "parity": described.parity}
    parts = [(name, described) for name, given in named.items() if given is not None][:1]
    for index, entry in enumerate(described.decode.speculation if described.decode is not None else []):
        parts.append((f"decode tables, {speculation.label(entry)}", speculation.with_speculation(described, index)))
    return parts


def _check_offline(parts: Sequence[tuple[str, Experiment]], tell: Tell, *, named: bool) -> list[matching.Matching]:
    found = []
    for name, part in parts:
        if named:
            tell(Event(text=f"{name}:"))
        found.append(without_servers(part, tell))
        for doubt in found[-1].doubts:
            tell(Event(text=str(Finding("note", f"not verified: {doubt}"))))
    return found


def _check_servers(described: Experiment, console: Console, tell: Tell) -> list[matching.Matching]:
    """Ask the servers of the first part; of the others, what the file tells."""
    (_, first), *others = _parts(described)
    with scratch() as folder:
        if described.workload is not None:
            planned = _plan(described, folder, tell)
            _show(console, estimate.lines(planned.estimated))
            seen = planned.prepared.matching
        else:
            with Servers(first, folder, tell) as servers:
                seen = prepare(first, servers, folder / "check", tell, allow_unmatched=True).matching
    return [seen, *_check_offline(others, tell, named=True)]


def _plan(experiment: Experiment, scratch: Path, tell: Tell) -> Planned:
    """The plan of a comparison that is not to be measured now, with all that would be refused let pass."""
    with Servers(experiment, scratch, tell) as servers:
        return make_plan(experiment, servers, scratch, tell, allow_unmatched=True, room=rundir.RUNS)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for what servers write when no run directory is made; kept if an error names a log in it."""
    folder = Path(tempfile.mkdtemp(prefix="decodegate-"))
    named = False
    try:
        yield folder
    except UserError as error:
        named = str(folder) in str(error)
        raise
    finally:
        if not named:
            shutil.rmtree(folder)


def _show(console: Console, lines: dict[str, str]) -> None:
    for name, text in lines.items():
        console.print(f"{name:<10}{text}", highlight=False, soft_wrap=True, markup=False)


def compare(
    experiment: Experiment,
    *,
    run: Path | None,
    resume: bool = False,
    dry_run: bool = False,
    allow_unmatched: bool = False,
) -> Path | None:
    """Run or continue a comparison, showing progress; returns the run directory, or None after a dry run.

    Raises UserError when interrupted, naming the way to go on.
    """
    source.described(experiment)  # before anything starts
    console = Console()
    with showing(console) as tell:
        if dry_run:
            _dry_run(experiment, console, tell)
            return None
        folder = run or (rundir.latest(experiment.name, "compare") if resume else rundir.new_folder(experiment.name))
        with _interruptible(folder), Servers(experiment, folder, tell) as servers:
            if resume:
                manifest = resume_run(experiment, folder)
            else:
                manifest = start_run(experiment, servers, folder, allow_unmatched=allow_unmatched, tell=tell)
            tell(Event(text=f"run directory: {folder}"))
            run_blocks(experiment, servers, folder, manifest, tell)
    return folder


def decode(
    experiment: Experiment,
    *,
    run: Path | None,
    resume: bool = False,
    dry_run: bool = False,
    allow_unmatched: bool = False,
) -> Path | None:
    """Measure decode tables or go on with them, a line for each window; returns the run directory, or None after a dry
    run.

    Raises UserError when interrupted, naming the way to go on.
    """
    console = Console()
    tell = _plain(console)  # a live line would be drawn by this process, which measures
    if dry_run:
        _show(console, decode_bench.lines(decode_bench.planned(experiment, tell, allow_unmatched=allow_unmatched)))
        return None
    folder = run or (rundir.latest(experiment.name, "decode") if resume else rundir.new_folder(experiment.name))
    with _interruptible(folder):
        decode_bench.measure(experiment, folder, tell, resume=resume, allow_unmatched=allow_unmatched)
    return folder


@contextmanager
def _interruptible(folder: Path) -> Iterator[None]:
    """Ctrl-C becomes a UserError that says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if (folder / "manifest.json").exists():
            raise UserError(f"interrupted; what was measured is kept: continue with --resume --run {folder}") from None
        raise UserError("interrupted before anything was measured: start it again") from None


def profile_layers(experiment: Experiment, wanted: profile.Wanted, *, run: Path | None, allow_unmatched: bool) -> Path:
    """Profile both backends' decode steps, showing progress; returns the run directory."""
    folder = run or rundir.new_folder(f"{experiment.name}-profile")
    with showing(Console()) as tell:
        tell(Event(text=f"run directory: {folder}"))
        profile.measure(experiment, folder, wanted, tell, allow_unmatched=allow_unmatched)
    return folder


def preset(name: str | None = None, /) -> None:
    """Print an experiment file to start from: decodegate preset NAME > mine.yaml, then change what its first lines say.

    Parameters
    ----------
    name
        Which one. Left out: a list of all.
    """
    if name is not None:
        print(presets.read(name), end="")
        return
    width = max(map(len, presets.names()))
    for each in presets.names():
        print(f"{each:<{width}}  {presets.summary(each)}")


def _dry_run(experiment: Experiment, console: Console, tell: Tell) -> None:
    with scratch() as folder:
        planned = _plan(experiment, folder, tell)
    plan, order = planned.plan, block_order(experiment)
    lost = "; ".join(f"{reason}: {count:,}" for reason, count in plan.lost.items()) or "nothing"
    _show(
        console,
        {
            "plan": plan_digest(plan)[:12],
            "workload": planned.workload_digest[:12],
            "what": plan_summary(plan),
            "left out": lost,
            "pauses": f"{plan.pause_removed_share:.1%} of recorded pause time taken out",
            "blocks": f"{len(order)}: {', '.join(order)}",
        }
        | estimate.lines(planned.estimated),
    )
    for reason in planned.prepared.matching.unmatched:
        words = f"not matched: {reason}: compare will refuse without --allow-unmatched"
        console.print(words, style="red", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def showing(console: Console) -> Iterator[Tell]:
    """Yield a function that shows events: a live line on a terminal, now and then a plain one elsewhere."""
    if not console.is_terminal:
        yield _plain(console)
        return
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} turns"),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=False) as progress:
        bars: dict[int, TaskID] = {}

        def tell(event: Event) -> None:
            if event.text:
                progress.console.print(event.text, highlight=False, markup=False)
            if event.counts is None:
                return
            if event.block not in bars:
                bars[event.block] = progress.add_task(
                    f"block {event.block}/{event.blocks} {event.backend}", total=event.planned, state=""
                )
            progress.update(
                bars[event.block],
                completed=event.counts.ended,
                state=f"{event.in_flight} in flight, {event.counts.failed} failed",
            )

        yield tell


def _plain(console: Console) -> Tell:
    last = {"block": 0, "at": 0.0}

    def tell(event: Event) -> None:
        if event.text:
            console.print(event.text, highlight=False, soft_wrap=True, markup=False)
        if event.counts is None:
            return
        ended = event.counts.ended >= event.planned
        if event.block == last["block"] and not ended and time.monotonic() - last["at"] < _PLAIN_EVERY_S:
            return
        last.update(block=event.block, at=time.monotonic())
        console.print(
            f"block {event.block}/{event.blocks} {event.backend}: {event.counts.ended}/{event.planned} turns, "
            f"{event.in_flight} in flight, {event.counts.failed} failed, {event.elapsed_s:.0f} s",
            highlight=False,
            soft_wrap=True,
        )

    return tell
