"""Reports on layers: of a run of profiles, and of two traces."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reports.console import console, write

if TYPE_CHECKING:
    from reports.kernels.analysis import Analysis


def report(run: Path, output: Path | None) -> int:
    """Compare the layers of a run of profiles: print them, and write report.json, report.md and report.html. Returns
    the exit code."""
    from reports.kernels.analysis import analyse

    _say(analyse(run), run, output or run)
    return 0


def layers(
    baseline: Path,
    candidate: Path,
    /,
    *,
    layers: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
) -> int:
    """Compare kernels per layer of two traces of torch's profiler (*.pt.trace.json.gz) that are there already.

    Parameters
    ----------
    baseline
        The trace of the baseline's worker, of decode steps only.
    candidate
        That of the candidate's.
    layers
        How many layers the model has. Without it, a repeating unit is taken for one layer; a model with layers of
        several kinds repeats several at once.
    output
        Folder to write report.json, report.md and report.html to. By default they are only printed.
    """
    from reports.kernels.analysis import analyse_traces

    _say(analyse_traces(baseline, candidate, layers), baseline.parent, output)
    return 0


def _say(analysis: Analysis, run: Path, output: Path | None) -> None:
    from reports.kernels import render

    to = console()
    _print(analysis, to)
    if output is not None:
        files = {"report.json": render.json, "report.md": render.markdown, "report.html": render.html}
        write(run, output, {name: partial(each, analysis) for name, each in files.items()}, to)


def _print(analysis: Analysis, to: Console) -> None:
    from reports.kernels import render
    from reports.render import words

    for stamp in analysis.stamps:
        to.print(f"[black on yellow] {escape(stamp)} [/]")
    to.print(f"[bold]{escape(render.headline(analysis))}[/]")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column()
    for side in analysis.sides:
        table.add_column(side.name, justify="right")
    table.add_column("candidate / baseline", justify="right")
    for row in analysis.rows:
        ratio = f"{row.ratio:.3f}" if row.ratio is not None else ""
        table.add_row(row.label, render.figure(row.baseline), render.figure(row.candidate), ratio)
    to.print(table)
    for side in analysis.sides:
        to.print(f"{side.name}, longest kernels of a layer ({side.trace}, of {side.traces}):", markup=False)
        for kernel in side.layers.top[:5]:
            amount = f"{words.number(kernel.us):>7} µs  {words.share(kernel.share):>6}"
            to.print(f"  {amount}  {kernel.count:g} x {kernel.display}", markup=False)
    for note in analysis.notes:
        to.print(f"  {note}", markup=False)
    for each in analysis.published:
        if each.differs:
            to.print(f"published {each.row.metric}: not beside these ({'; '.join(each.differs)})", markup=False)
        else:
            to.print(
                f"published {each.row.metric}: {each.row.standard:g} standard, {each.row.specialised:g} specialised",
                markup=False,
            )
