"""The verbs of this package: check and compare."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from replay import backends, gpus, host
from replay.compare import block_order, make_plan, plan_summary, resume_run, run_blocks, start_run
from replay.experiment import Experiment, load_experiment
from replay.plan import plan_digest
from replay.preflight import prepare
from replay.progress import Event, Tell
from workloads.errors import UserError

_RUNS = Path("runs")
_PLAIN_EVERY_S = 10.0


def check(experiment: Path, /) -> None:
    """Preflight: send both backends a handful of requests and say whether they can be compared.

    Looks at: the model's name, streaming, whether answers keep the asked length and by which field, token counts, what
    the chat template adds, prompt lengths, matched GPUs, and this client's own limits.

    Parameters
    ----------
    experiment
        The experiment file.
    """
    console = Console()
    described = load_experiment(experiment)
    reasons = _mismatches(described)
    with tempfile.TemporaryDirectory() as scratch, showing(console) as tell:
        for finding in host.check_client(described.replay.lanes):
            tell(Event(text=str(finding)))
        prepared = prepare(described, Path(scratch) / "servers", tell)
        plan, _ = make_plan(described, prepared, Path(scratch))
        tell(Event(text=f"ok: plan {plan_digest(plan)[:12]}: {plan_summary(plan)}"))
    for reason in reasons:
        console.print(f"[red]not matched[/red]: {reason}")
    if reasons:
        raise UserError("GPUs are not matched: compare will refuse without --allow-unmatched")
    console.print("ready to compare")


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
    console = Console()
    with showing(console) as tell:
        if dry_run:
            _dry_run(experiment, console, tell)
            return None
        if resume:
            folder = run or _latest(experiment.name)
            manifest = resume_run(experiment, folder)
        else:
            stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
            folder = run or _RUNS / f"{_slug(experiment.name)}-{stamp}"
            manifest = start_run(experiment, folder, allow_unmatched=allow_unmatched, tell=tell)
        tell(Event(text=f"run directory: {folder}"))
        try:
            run_blocks(experiment, folder, manifest, tell)
        except KeyboardInterrupt:
            raise UserError(f"interrupted; what was measured is kept: continue with --resume --run {folder}") from None
    return folder


def demo(run: Path | None) -> Path:
    """Run the demo's comparison; returns the run directory."""
    folder = compare(load_experiment(Path(__file__).parent / "demo.yaml"), run=run)
    assert folder is not None
    return folder


def _dry_run(experiment: Experiment, console: Console, tell: Tell) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        prepared = prepare(experiment, Path(scratch) / "servers", tell)
        plan, digest = make_plan(experiment, prepared, Path(scratch))
    order = block_order(experiment)
    block_s = plan.duration_s if plan.duration_s is not None else plan.estimated_s
    block_s /= prepared.facts["baseline"].time_scale
    lost = "; ".join(f"{reason}: {count:,}" for reason, count in plan.lost.items()) or "nothing"
    lines = {
        "plan": plan_digest(plan)[:12],
        "workload": digest[:12],
        "what": plan_summary(plan),
        "left out": lost,
        "pauses": f"{plan.pause_removed_share:.1%} of recorded pause time taken out",
        "blocks": f"{len(order)}: {', '.join(order)}",
        "how long": f"{_span(block_s)} a block, {_span(len(order) * block_s)} in all, if these servers were as slow as "
        "the recorded ones and the longest lane decides; warm-up comes on top",
    }
    for name, text in lines.items():
        console.print(f"{name:<10}{text}", highlight=False, soft_wrap=True, markup=False)
    for reason in _mismatches(experiment):
        console.print(f"[red]not matched[/red]: {reason}: compare will refuse without --allow-unmatched")


def _span(seconds: float) -> str:
    """A length of time in words."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _mismatches(experiment: Experiment) -> list[str]:
    return gpus.mismatches(*[backends.described(experiment, name) for name in backends.NAMES])


def _latest(name: str) -> Path:
    found = sorted(_RUNS.glob(f"{_slug(name)}-*/manifest.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError(f"--resume: no run of {name!r} in {_RUNS}/: name it with --run")
    return found[-1].parent


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name).strip("-") or "run"


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
