"""The verb `report` for a run of decode tables."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reports.console import console, write
from reports.decode.analysis import Analysis, analyse
from reports.decode.page import Grid, brief, finished, html, markdown, notes, summary
from reports.render import json


def report(run: Path, output: Path | None = None) -> int:
    """Judge a run of decode tables: print them, and write report.json, report.md and report.html. Exit code 0, or 2 if
    no cell has a result."""
    analysis = analyse(run)
    to = console()
    _print(analysis, to)
    files = {
        "report.json": partial(json.strict, analysis),
        "report.md": partial(markdown, analysis),
        "report.html": partial(html, analysis),
    }
    write(run, output, files, to)
    return 0 if analysis.has_result else 2


def _print(analysis: Analysis, to: Console) -> None:
    for stamp in analysis.stamps:
        to.print(f"[black on yellow] {escape(stamp)} [/]")
    to.print(f"Compared: {analysis.compared}.", markup=False)
    for table in analysis.tables:
        to.print(f"\n[bold]{escape(table.title)}[/]")
        to.print(_table(brief(table)))
        for cell in table.cells:
            for line in (*cell.reasons, *cell.marks):
                to.print(f"  batch {cell.batch}: {line}", markup=False)
    base, candidate = analysis.names
    means = "total decode tokens/s, 95 % interval below; per step: tokens"
    to.print(f"\nbase: {base}; cand.: {candidate}; {means}", markup=False)
    to.print(finished(analysis), markup=False)
    for note in notes(analysis):
        to.print(f"  {note}", markup=False)
    to.print(f"\n{summary(analysis)}", markup=False)
    for setup in analysis.setups:
        for problem in setup.problems:
            to.print(f"  {setup.label}: {problem}", markup=False, style="red")


def _table(grid: Grid) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for number, name in enumerate(grid.head):
        right = number < _FIGURES
        table.add_column(escape(name), justify="right" if right else "left", no_wrap=name == "path")
    for row in grid.rows:
        table.add_row(*(f"{escape(text)}\n[dim]{escape(below)}[/]" if below else escape(text) for text, below in row))
    return table


_FIGURES = 4
"""Columns of figures: batch, both levels, their ratio."""
