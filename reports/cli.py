"""The verb `report`: a run directory becomes report.html, report.md and report.json."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from reports.console import console, write
from workloads.errors import UserError

if TYPE_CHECKING:
    from reports.analysis import Analysis


def report(run: Path, /, *more: Path, output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None) -> int:
    """Judge a run directory: print the conclusion, and write report.json, report.md and report.html.

    It may be one of compare, decode, or decode profile. Exit code 0; 2 if the result is INCONCLUSIVE, or no cell of
    decode tables has one.

    Parameters
    ----------
    run
        The run directory.
    more
        With compare: further runs of the same backends and workload at other numbers of lanes: they add their points to
        the chart of throughput per GPU against P90 interactivity. Runs of others are refused.
    output
        Folder to write to, instead of the run directory.
    """
    kind = _kind(run)
    if kind != "compare" and more:
        raise UserError(f"{run} is a run of kind {kind}: its report takes no further runs")
    # a second of imports that the command's other verbs, and its client workers, do without
    if kind == "decode":
        from reports.decode.cli import report as of_tables

        return of_tables(run, output)
    if kind == "profile":
        from reports.kernels.cli import report as of_profiles

        return of_profiles(run, output)
    from reports.analysis import analyse_all
    from reports.render import html, json, markdown

    runs = [path.resolve() for path in (run, *more)]
    if twice := [path for path, resolved in zip((run, *more), runs, strict=True) if runs.count(resolved) > 1]:
        raise UserError(f"{twice[0]} is given {len(twice)} times: name each run once")
    analyses = analyse_all(run, *more)
    to = console()
    _print(analyses, to)
    # what may fail comes last: a disk that is full costs no conclusion, a chart engine that aborts none of the others
    files = {"report.json": json.render, "report.md": markdown.render, "report.html": html.render}
    write(run, output, {name: partial(render, analyses) for name, render in files.items()}, to)
    return 2 if analyses[0].conclusion.outcome == "INCONCLUSIVE" else 0


class _Kind(msgspec.Struct):
    kind: str = "compare"


def _kind(run: Path) -> str:
    """What kind of run a directory holds, by its manifest; one that cannot be read is left to the kind's own reader."""
    try:
        return msgspec.json.decode((run / "manifest.json").read_bytes(), type=_Kind).kind
    except (OSError, msgspec.MsgspecError):
        return "compare"


def _print(analyses: Sequence[Analysis], console: Console) -> None:
    from reports.render import words

    analysis = analyses[0]
    for stamp in words.stamps(analyses):
        console.print(f"[black on yellow] {escape(stamp)} [/]")
    colour = {"candidate faster": "green", "candidate slower": "red", "INCONCLUSIVE": "red"}
    outcome = analysis.conclusion.outcome
    concluded = outcome != "INCONCLUSIVE"
    said = f"  {escape(words.headline(analysis))}" if concluded else ""
    console.print(f"[bold {colour.get(outcome, 'default')}]{outcome}[/]{said}")
    for reason in analysis.conclusion.reasons:
        console.print(f"  {reason}", markup=False)
    if not concluded:
        console.print(f"[dim]  not a result: {escape(words.headline(analysis))}[/]")
    for line in analysis.headlines:
        if line.effect:
            sides = (
                f"{backend.name} {words.level(estimate, 'tok/s')}"
                for backend, estimate in zip(
                    analysis.backends, (line.effect.baseline, line.effect.candidate), strict=True
                )
            )
            console.print(
                f"  {line.label}, {line.definition}: {', '.join(sides)} tokens/s",
                markup=False,
                style=None if concluded else "dim",
            )
    passed = sum(gate.status == "pass" for gate in analysis.gates)
    unknown = [gate.title for gate in analysis.gates if gate.status == "unknown"]
    console.print(
        f"  gates: {passed} of {len(analysis.gates)} pass" + (f"; unknown: {', '.join(unknown)}" if unknown else ""),
        markup=False,
    )
