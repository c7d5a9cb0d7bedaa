"""Shows how far a run of evals has come: bars on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_PLAIN_EVERY_S = 10.0


class Standing(msgspec.Struct, frozen=True):
    """Where the part of a run stands that is under way."""

    number: int
    """Of the part, from 1."""
    words: str
    done: int
    total: int
    unit: str
    """Of ``done``: answered, say."""
    errors: int
    """Without reply."""


@contextmanager
def showing(console: Console) -> Iterator[Callable[[Standing], None]]:
    """Yield a function that shows where a run stands."""
    if not console.is_terminal:
        yield _plain(console)
        return
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        shown: dict[int, TaskID] = {}

        def show(at: Standing) -> None:
            if at.number not in shown:
                for bar in shown.values():
                    bars.remove_task(bar)
                shown.clear()
                shown[at.number] = bars.add_task(at.words, total=at.total, state="")
            bars.update(shown[at.number], completed=at.done, state=f"{at.errors} without reply")

        yield show


def _plain(console: Console) -> Callable[[Standing], None]:
    last = 0.0

    def show(at: Standing) -> None:
        nonlocal last
        if at.done < at.total and time.monotonic() - last < _PLAIN_EVERY_S:
            return
        last = time.monotonic()
        console.print(f"{at.words}: {at.done}/{at.total} {at.unit}, {at.errors} without reply", markup=False)

    return show
