"""From a path to raw JSON records with their positions, one record in memory at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from workloads.errors import UserError
from workloads.trace import Notes

WHOLE = (".json",)
LINES = (".jsonl", ".ndjson")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")

ESCAPE = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
CONSTANT = re.compile(rb"-?(?:NaN|Infinity)")


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
        if not path.is_file():  # opening a FIFO waits for a writer, and a device may never end
            raise UserError(f"{path} is a FIFO, socket or device: only regular files and folders are read")
        return [path]
    try:
        found = sorted(child for child in path.iterdir() if child.suffix in WHOLE + LINES)
    except OSError as error:
        raise UserError(f"{path} cannot be listed: {error.strerror}") from None
    for child in found:
        if child.exists() and not child.is_file() and not child.is_dir():
            raise UserError(f"{child} is a FIFO, socket or device: only regular files and folders are read")
    found = [child for child in found if child.is_file()]
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


def not_json(data: bytes) -> str | None:
    """Why the bytes cannot be read as a JSON value, with the byte at fault (from 0); None if they can."""
    if not data.strip():
        return "empty file"
    if data.startswith(UTF_16_MARKS) or (data[:1] == b"\0") != (data[1:2] == b"\0"):  # every second byte is 0
        return "looks like UTF-16: convert it to UTF-8"
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        surrogate = data[error.start] == 0xED and data[error.start + 1 : error.start + 2] >= b"\xa0"
        return f"not JSON: {'a lone surrogate' if surrogate else 'not UTF-8'} at byte {error.start}"
    try:
        msgspec.json.decode(data)
    except RecursionError:
        return "nested too deeply to be read"
    except msgspec.ValidationError:
        return None  # JSON, of numbers that are too large for us
    except msgspec.DecodeError as error:
        fault = str(error)
    else:
        return None
    place = re.search(r"(.*) \(byte (\d+)\)$", fault.removeprefix("JSON is malformed: "))
    what, at = (place[1], int(place[2])) if place else ("it ends too early", len(data))
    lone = _lone_surrogate(data)
    if lone is not None and (place is None or lone <= at):  # the decoder takes some of these for an early end
        return f"not JSON: the lone surrogate {data[lone : lone + 6].decode()} at byte {lone}"
    for start in (at - 1, at):
        constant = CONSTANT.match(data, max(start, 0))
        if constant:
            return f"not JSON: {constant[0].decode()} (write null, or leave the field out) at byte {constant.start()}"
    if place:  # worded, and placed, as readers of Python know it
        with suppress(RecursionError, ValueError):
            try:
                json.loads(text)
            except json.JSONDecodeError as error:
                what, at = error.msg[0].lower() + error.msg[1:], len(text[: error.pos].encode())
    return f"not JSON: {what} at byte {at}"


def _lone_surrogate(data: bytes) -> int | None:
    """Where the first escape stands that is half of a UTF-16 pair without the other half."""
    high: int | None = None
    end = 0
    for escape in ESCAPE.finditer(data):
        code = int(escape[1], 16) if escape[1] else 0
        paired = high is not None and escape.start() == end and 0xDC00 <= code < 0xE000
        if high is not None and not paired:
            return high
        if 0xDC00 <= code < 0xE000 and not paired:
            return escape.start()
        high = escape.start() if 0xD800 <= code < 0xDC00 else None
        end = escape.end()
    return high
