"""The verb `eval power`: how many repeats a margin needs, before anything is asked."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.table import Table

from reports.accuracy.tasks import KINDS
from workloads.errors import UserError

_DROPS = (0.01, 0.02, 0.03, 0.05)
_ALPHA_PASS, _ALPHA_FAIL = 0.05, 0.01
_WITHIN_MRCR = 0.06


def power(
    task: Literal["aime25", "gpqa_diamond", "mrcr"],
    /,
    *,
    mean: Annotated[float | None, Parameter()] = None,
    items: int | None = None,
    within: float | None = None,
) -> None:
    """Say how many repeats a benchmark needs: to pass equal backends, and to find a drop, nine times of ten.

    A rough figure (normal approximation) for planning: the bound that judges is wider where most items are at the
    ceiling. After a run the sign-off says it from the variance that was observed.

    Parameters
    ----------
    task
        The benchmark.
    mean
        The baseline's mean score, 0 to 1: a question's variance is taken as half of that of one toss.
    items
        Of fewer items than the whole benchmark has.
    within
        Variance of a score around its item's mean, where it is known, instead of mean. MRCR: 0.06 by default.
    """
    from reports.accuracy.power import repeats_needed  # scipy costs a moment that the command's other verbs do without

    kind = KINDS[task]
    if within is None and mean is None and kind.binary:
        raise UserError("give --mean, the baseline's mean score, or --within: without one of them nothing can be said")
    if mean is not None and not 0 < mean < 1:
        raise UserError(f"--mean is {mean:g}: a mean score lies between 0 and 1")
    varies = within if within is not None else mean * (1 - mean) / 2 if mean is not None else _WITHIN_MRCR
    count = items if items is not None else kind.items
    if varies <= 0 or count < 1:
        raise UserError("--within and --items must be above 0")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("margin, or true drop", "repeats to PASS if equal", "repeats to FAIL at that drop"):
        table.add_column(name, justify="right")
    for drop in _DROPS:
        needed = (repeats_needed(varies, count, drop, alpha) for alpha in (_ALPHA_PASS, _ALPHA_FAIL))
        table.add_row(f"{drop * 100:g} points", *(f"{each:,}" for each in needed))
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{kind.title}, {count:,} items, variance within an item {varies:.4g}; on each backend, power .9:")
    console.print(table)
