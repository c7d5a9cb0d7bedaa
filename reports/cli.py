"""The verb `report`: a run directory becomes report.html, report.md and report.json."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from workloads.errors import UserError

if TYPE_CHECKING:
    from reports.analysis import Analysis


def report(run: Path, /, *more: Path, output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None) -> int:
    """Judge a run directory: print the conclusion, and write report.json, report.md and report.html.

    Exit code 0, or 2 if the result is INCONCLUSIVE.

    Parameters
    ----------
    run
        The run directory.
    more
        Further runs of the same backends and workload at other numbers of lanes: they add their points to the chart of
        throughput per GPU against P90 interactivity. Runs of others are refused.
    output
        Folder to write to, instead of the run directory.
    """
    # a second of imports that the command's other verbs, and its client workers, do without
    from reports.analysis import analyse_all
    from reports.render import html, json, markdown

    runs = [path.resolve() for path in (run, *more)]
    if twice := [path for path, resolved in zip((run, *more), runs, strict=True) if runs.count(resolved) > 1]:
        raise UserError(f"{twice[0]} is given {len(twice)} times: name each run once")
    # what may fail comes last: a disk that is full costs no conclusion, a chart engine that aborts none of the others
    files = {"report.json": json.render, "report.md": markdown.render, "report.html": html.render}
    analyses = analyse_all(run, *more)
    folder = output or run
    console = Console(highlight=False, soft_wrap=True)
    _print(analyses, console)
    console.file.flush()
    for name, render in files.items():
        text = render(analyses)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _replace(folder / name, text)
        except OSError as error:
            raise UserError(
                f"{folder / name} cannot be written: {error.strerror or error}. The conclusion is printed; --output "
                f"names another folder: decodegate report {run} --output FOLDER"
            ) from error
    console.print(f"report: {folder / 'report.html'}", markup=False)
    return 2 if analyses[0].conclusion.outcome == "INCONCLUSIVE" else 0


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


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
