"""From a path to raw JSON records with their positions, one record in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from workloads.errors import UserError
from workloads.trace import Notes

WHOLE = (".json",)
LINES = (".jsonl", ".ndjson")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Record(NamedTuple):
    """The bytes of one JSON value and where they stand: "file" or "file:line"."""

    where: str
    data: bytes


def files(path: Path) -> list[Path]:
    """The JSON files of a folder (not of its subfolders) in name order, or ``path`` itself if it is a file.

    Raises UserError if there is nothing to read.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist: give a .json or .jsonl file, or a folder of them")
    if not path.is_dir():
        if any(suffix in (".gz", ".xz", ".zip", ".tar", ".zst", ".bz2") for suffix in path.suffixes):
            raise UserError(f"{path} is packed: unpack it first, and give the folder or file inside")
        return [path]
    found = sorted(child for child in path.iterdir() if child.suffix in WHOLE + LINES and child.is_file())
    if not found:
        raise UserError(f"{path} holds no *.json or *.jsonl file: give the folder that holds the recorded sessions")
    return found


def records(path: Path, notes: Notes) -> Iterator[Record]:
    """Every JSON record below ``path``: a .json file is one record, any other file one record a line.

    A file that cannot be read is counted in ``notes`` and passed over.
    """
    for file in files(path):
        try:
            if file.suffix in WHOLE:
                yield Record(str(file), file.read_bytes().removeprefix(BYTE_ORDER_MARK))
                continue
            with file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if number == 1:
                        line = line.removeprefix(BYTE_ORDER_MARK)
                    if not line.isspace():
                        yield Record(f"{file}:{number}", line)
        except OSError as error:
            notes.add("unreadable file skipped", f"{file}: {error.strerror}")


def sample(path: Path, count: int = 8) -> Iterator[Record]:
    """The first few records, for finding out what format they have."""
    return islice(records(path, Notes()), count)
