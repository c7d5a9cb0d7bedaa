"""Invented questions (evals/invented.py) as files of every format, and as items."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import polars as pl

from evals import invented
from evals.invented import Row
from evals.tasks import TASKS
from evals.tasks.items import Item


def items_of(task: str, rows: Iterable[Row]) -> list[Item]:
    """The items of rows, as evals.data.load makes them from a file (lengths aside)."""
    return [TASKS[task].question(number, row) for number, row in enumerate(rows)]


def write(rows: Sequence[Row], path: Path) -> Path:
    """The rows as a file, in the format that its suffix names."""
    match path.suffix:
        case ".jsonl":
            invented.write(rows, path)
        case ".json":
            path.write_text(json.dumps(rows, indent=1))
        case ".csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        case ".parquet":
            pl.DataFrame(rows).write_parquet(path)
    return path


def write_lengths(path: Path, sha256: str, tokens: Sequence[int]) -> None:
    """The table of lengths beside an MRCR file, as if they had been counted."""
    table = {"encoding": "o200k_base", "data_sha256": sha256, "tokens": dict(enumerate(tokens))}
    path.with_name(f"{path.name}.o200k_base.json").write_text(json.dumps(table))
