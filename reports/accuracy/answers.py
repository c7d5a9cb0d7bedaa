"""The answers of RUN/evals: read, checked to be the same exam on both backends, and as arrays of items x repeats."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from evals.records import Answer, Repeat, TaskPlan
from reports.accuracy.drop import Floats
from reports.accuracy.tasks import KINDS
from reports.run import read
from workloads.errors import UserError

COLUMNS = {
    "item": pl.Int64,
    "item_hash": pl.String,
    "prompt_hash": pl.String,
    "repeat": pl.Int64,
    "seed": pl.Int64,
    "outcome": pl.String,
    "score": pl.Float64,
    "attempts": pl.Int64,
    "bin": pl.String,
    "cell": pl.String,
}
"""Of a frame of answers: fields of Answer, and of its stratum the ``bin`` and all of it as text (``cell``)."""

_SIZE = re.compile(r"(\d+)([kM]?)$")
_UNIT = {"": 1, "k": 2**10, "M": 2**20}


class Exam(msgspec.Struct, frozen=True):
    """One task as both backends sat it. Arrays of items x repeats, in the order of ``item`` and repeat."""

    baseline: Floats
    candidate: Floats
    """Scores."""
    baseline_outcome: npt.NDArray[np.object_]
    candidate_outcome: npt.NDArray[np.object_]
    bin: list[str]
    cell: list[str]
    """Per item; empty strings where a task has no strata."""


def frame(answers: Iterable[Answer]) -> pl.DataFrame:
    """Answers as a frame of COLUMNS."""
    rows = [
        (
            each.item,
            each.item_hash,
            each.prompt_hash,
            each.repeat,
            each.seed,
            each.outcome,
            each.score,
            each.attempts,
            each.stratum.get("bin"),
            ", ".join(f"{name} {value}" for name, value in sorted(each.stratum.items())) or None,
        )
        for each in answers
    ]
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


def read_answers(folder: Path, backend: str, task: str, notes: list[str]) -> list[Answer]:
    """One backend's answers to one task in RUN/evals, of repeats that have ended; the others are named in ``notes``,
    and their files, whose last line may be torn, are not read. Raises UserError for a damaged file."""
    found: list[Answer] = []
    for path in sorted((folder / backend / task).glob("r*.jsonl")):
        end = path.with_suffix(".json")
        if not end.exists():
            notes.append(f"{backend}/{task}/{path.name}: not counted, the repeat has not ended")
            continue
        repeat = read(end, Repeat)
        answers = list(_read(path))
        if len(answers) != repeat.answers:
            raise UserError(
                f"{path} holds {len(answers):,} answers, {end.name} says {repeat.answers:,}: it was changed since"
            )
        found += answers
    return found


def _read(path: Path) -> Iterator[Answer]:
    decode = msgspec.json.Decoder(Answer).decode
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield decode(line)
            except msgspec.MsgspecError as error:
                raise UserError(f"{path}:{number} is damaged: {error}. Run this repeat again") from None


def ended(answers: pl.DataFrame) -> int:
    """Repeats 0, 1, ... that are there, up to the first that is not."""
    there = set(answers["repeat"].unique().to_list())
    return next(count for count in range(len(there) + 1) if count not in there)


def pair(
    task: TaskPlan, items: int, repeats: int, answers: tuple[pl.DataFrame, pl.DataFrame], names: tuple[str, str]
) -> Exam | list[str]:
    """The first ``repeats`` of baseline and candidate as one exam of ``items`` items; or why they are none, in
    sentences."""
    sheets = [each.filter(pl.col("repeat") < repeats).sort("item", "repeat") for each in answers]
    strange = [
        f"{name} {what}" for name, sheet in zip(names, sheets, strict=True) for what in _strange(sheet, task, items)
    ]
    if problems := strange or list(_unlike(*sheets)):
        return problems
    first, second = sheets
    shape = (items, repeats)
    per_item = first.filter(pl.col("repeat") == 0)
    return Exam(
        first["score"].to_numpy().reshape(shape),
        second["score"].to_numpy().reshape(shape),
        first["outcome"].to_numpy().reshape(shape),
        second["outcome"].to_numpy().reshape(shape),
        per_item["bin"].fill_null("").to_list(),
        per_item["cell"].fill_null("").to_list(),
    )


def _strange(sheet: pl.DataFrame, task: TaskPlan, items: int) -> Iterator[str]:
    """What is wrong with one backend's answers by themselves."""
    sizes = sorted(sheet.group_by("repeat").len()["len"].to_list())
    if doubles := len(sheet) - sheet.select("item", "repeat").n_unique():
        yield f"has {doubles:,} answers to an item that it had answered in the same repeat."
    elif sheet["item"].n_unique() != items or sizes[0] != items or sizes[-1] != items:
        asked = f"{sizes[0]:,}" if sizes[0] == sizes[-1] else f"{sizes[0]:,} to {sizes[-1]:,}"
        yield f"answered {asked} items a repeat where {items:,} were planned."
    if other := len(sheet.filter(pl.col("seed") != task.seed + pl.col("repeat"))):
        yield f"was asked with other seeds than planned in {other:,} of {len(sheet):,} answers."
    right = pl.col("outcome") == "right"
    found = right | (pl.col("outcome") == "wrong")
    most = (right if KINDS[task.task].binary else found).cast(pl.Float64)
    least = right.cast(pl.Float64) if KINDS[task.task].binary else 0.0
    if beyond := len(sheet.filter(~pl.col("score").is_between(least, most))):
        yield f"has {beyond:,} scores that this task does not give."
    if not KINDS[task.task].binary and (unplaced := sheet["bin"].null_count()):
        yield f"has {unplaced:,} answers to items without a bin of context: give every item of the data its bin."


def _unlike(first: pl.DataFrame, second: pl.DataFrame) -> Iterator[str]:
    """How two whole sets of answers, sorted alike, differ in what was asked."""
    if not first["item"].equals(second["item"]):
        yield "The backends were asked different items."
        return
    for column, what in (
        ("item_hash", "Other content stood behind the same item"),
        ("prompt_hash", "Prompts differed between the backends"),
        ("cell", "The same item was counted to different strata"),
    ):
        if differ := int(first[column].ne_missing(second[column]).sum()):
            yield f"{what} in {differ:,} of {len(first):,} answers."


def context_tokens(name: str) -> int:
    """Upper edge of a bin by its name: 16,384 for "8k-16k". Raises UserError for other names."""
    match = _SIZE.search(name)
    if match is None:
        raise UserError(f"{name!r} is no bin of context: its name must end in its upper edge, as 8k-16k or 512k-1M do")
    return int(match[1]) * _UNIT[match[2]]


def log_context(bins: list[str]) -> Floats:
    """Binary logarithm of each bin's upper edge."""
    edges = {each: math.log2(context_tokens(each)) for each in set(bins)}
    return np.array([edges[each] for each in bins])
