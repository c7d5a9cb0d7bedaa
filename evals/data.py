"""Benchmark data, as their users bring them: a file, or a pinned revision on the hub. Checked whole before anything is
asked.

Nothing said here quotes the data: records are named by line or row.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import polars as pl

from evals.records import DataFacts
from evals.tasks import TASKS, TEXTS, Task
from evals.tasks.items import Item
from evals.tasks.lengths import ENCODING, add_tokens
from workloads.errors import UserError
from workloads.formats.files import BYTE_ORDER_MARK, not_json

HUB = "hub:"
SUBSET = "not in the data (a subset)"
"""Reason of DataFacts.dropped for items that the whole benchmark has and the data lack."""

_SHOWN = 3
_Record = tuple[str, Mapping[str, object] | str]
"""Where a record stands, and the record, or why it cannot be read."""


class _Source(NamedTuple):
    name: str
    revision: str | None
    sha256: str
    table: Path
    """Where the lengths of its items are kept."""
    records: Iterable[_Record]


class Data(NamedTuple):
    """The items of one task, and all that is wrong with them."""

    facts: DataFacts
    items: list[Item]
    faults: list[str]
    """One a line, each with its place."""


def load(task: str, source: str, *, sha256: str | None = None, subset: bool = False) -> Data:
    """The items of a task, complete and without faults. Parameters and UserErrors: see ``inspect``."""
    data = inspect(task, source, sha256=sha256, subset=subset)
    if data.faults:
        first = "; ".join(data.faults[:_SHOWN])
        more = f"; and {len(data.faults) - _SHOWN} more" if len(data.faults) > _SHOWN else ""
        raise UserError(f"{first}{more}. See: decodegate eval data check {task} {source}")
    return data


def inspect(task: str, source: str, *, sha256: str | None = None, subset: bool = False) -> Data:
    """The items of a task and every fault of its data.

    ``source`` is a file (.jsonl, .json, .csv, .parquet), a folder of such files, or hub:OWNER/NAME@REVISION with the
    commit's 40 digits; data of the hub come through ``datasets``, and from its cache without a network. ``sha256`` is
    of the file's bytes; of a folder, of what sha256sum prints for its files (in it: sha256sum * | sha256sum); of the
    hub's data, of their rows as JSON lines with sorted keys. ``subset``: fewer items than the benchmark has are no
    fault. Items without faults get their lengths where the task's strata need them.

    Raises UserError for an unknown task, data that cannot be opened, another hash than ``sha256``, and lengths that
    cannot be found out.
    """
    if task not in TASKS:
        raise UserError(f"unknown task {task!r}: choose from {', '.join(TASKS)}")
    module = TASKS[task]
    place = _hub(module, source) if source.startswith(HUB) else _file(Path(source))
    if sha256 is not None and sha256.lower() != place.sha256:
        raise UserError(
            f"{source}: its SHA-256 is {place.sha256}, not {sha256}: these are other data than were agreed on"
        )
    items, faults = _items(module, place.records)
    if len(items) != module.COUNT and not faults and (len(items) > module.COUNT or not subset):
        faults.append(
            f"{source}: {len(items)} items; {task} has {module.COUNT}"
            + (" (--subset if fewer are meant)" if len(items) < module.COUNT else "")
        )
    if not items and not faults:
        faults.append(f"{source}: no items")
    if task in TEXTS and not faults:
        add_tokens(items, TEXTS[task], place.table, place.sha256)
    missing = module.COUNT - len(items)
    facts = DataFacts(
        name=place.name,
        revision=place.revision,
        sha256=place.sha256,
        items=len(items),
        dropped={SUBSET: missing} if subset and missing > 0 else {},
    )
    return Data(facts, items, faults)


def _items(task: Task, records: Iterable[_Record]) -> tuple[list[Item], list[str]]:
    items: list[Item] = []
    faults: list[str] = []
    first: dict[str, str] = {}
    for row, (where, record) in enumerate(records):
        if isinstance(record, str):
            faults.append(f"{where}: {record}")
            continue
        try:
            item = task.question(row, record)
        except ValueError as error:  # msgspec's too: they name types and columns, and quote nothing
            faults.append(f"{where}: {error}")
            continue
        if item.id in first:
            faults.append(f"{where}: the same item as {first[item.id]}")
        first.setdefault(item.id, where)
        items.append(item)
    return items, faults


def _file(path: Path) -> _Source:
    whole = path.resolve()
    table = whole.parent / f"{whole.name}.{ENCODING}.json"
    if not path.is_dir():
        return _Source(path.name, None, _sha256(path), table, _records(path))
    tables = f".{ENCODING}.json"
    files = sorted(file for file in path.iterdir() if file.suffix in _READERS and not file.name.endswith(tables))
    if not files:
        raise UserError(f"{path} holds no file of {', '.join(_READERS)}")
    lines = "".join(f"{_sha256(file)}  {file.name}\n" for file in files)
    records = (record for file in files for record in _records(file))
    return _Source(whole.name, None, hashlib.sha256(lines.encode()).hexdigest(), table, records)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give the file of the data") from None


def _records(path: Path) -> Iterator[_Record]:
    if path.suffix not in _READERS:
        raise UserError(f"{path}: give a file named for what it is: {', '.join(_READERS)}")
    return _READERS[path.suffix](path)


def _json_lines(path: Path) -> Iterator[_Record]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            if not line.isspace():
                yield f"{path}:{number}", _object(line)


def _object(data: bytes) -> dict[str, object] | str:
    fault = not_json(data)
    if fault is not None:
        return fault
    try:
        return msgspec.json.decode(data, type=dict[str, object])
    except msgspec.ValidationError:
        return "not a JSON object"


def _json(path: Path) -> Iterator[_Record]:
    data = path.read_bytes().removeprefix(BYTE_ORDER_MARK)
    fault = not_json(data)
    if fault is not None:
        raise UserError(f"{path}: {fault}")
    try:
        parts = msgspec.json.decode(data, type=list[msgspec.Raw])
    except msgspec.ValidationError:
        raise UserError(f"{path}: not a JSON list of objects; name it .jsonl if there is an object a line") from None
    for row, part in enumerate(parts):
        yield f"{path}: row {row}", _object(bytes(part))


def _csv(path: Path) -> Iterator[_Record]:
    csv.field_size_limit(sys.maxsize)  # a chat is megabytes
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        line = 2
        try:
            for record in reader:
                wide = None in record  # DictReader's key of what has no column
                yield f"{path}:{line}", "more cells than columns" if wide else record
                line = reader.line_num + 1
        except (csv.Error, UnicodeDecodeError) as error:
            what = "not UTF-8" if isinstance(error, UnicodeDecodeError) else f"not CSV: {error}"
            yield f"{path}:{line}", what


def _parquet(path: Path) -> Iterator[_Record]:
    try:
        frame = pl.read_parquet(path)
    except (pl.exceptions.PolarsError, OSError):
        raise UserError(f"{path} cannot be read as Parquet") from None
    for row, record in enumerate(frame.iter_rows(named=True)):
        yield f"{path}: row {row}", record


_READERS: dict[str, Callable[[Path], Iterator[_Record]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _hub(task: Task, source: str) -> _Source:
    named = re.fullmatch(r"([\w.-]+/[\w.-]+)@([0-9a-f]{40})", source.removeprefix(HUB))
    if named is None:
        raise UserError(f"{source}: write {HUB}OWNER/NAME@REVISION, the revision as the commit's 40 hex digits")
    try:
        import datasets  # an extra; slow to import
    except ImportError:
        raise UserError("data from the hub need the extra: pip install 'decodegate[evals]'") from None
    name, revision = named.groups()
    try:
        rows = list(datasets.load_dataset(name, task.HUB_CONFIG, split=task.HUB_SPLIT, revision=revision))
    except Exception as error:  # of the hub, the network, the cache: hardly two raise the same
        raise UserError(
            f"{source} cannot be had ({type(error).__name__}): log in if it is gated, fill the cache of datasets where "
            "there is a network, or give a file"
        ) from None
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode() + b"\n")
    table = Path(datasets.config.HF_DATASETS_CACHE) / f"decodegate.{task.NAME}.{ENCODING}.json"
    records = ((f"{name}: row {number}", row) for number, row in enumerate(rows))
    return _Source(name, revision, digest.hexdigest(), table, records)
