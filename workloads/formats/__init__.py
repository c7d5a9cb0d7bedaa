"""The formats of recorded sessions: one module each, listed in FORMATS, read through ``read``.

A format module offers ``NAME``, ``detect(path) -> bool`` and ``read(path, notes) -> Iterator[Trace]``. It skips
what it cannot read, saying so in the notes; this module decides when that is too much.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from workloads.errors import UserError
from workloads.formats import weka
from workloads.formats.files import not_json, records
from workloads.trace import Notes, Trace


class Format(Protocol):
    """What a format module offers."""

    NAME: str

    def detect(self, path: Path, /) -> bool:
        """Whether the path's first records look like this format; reads no more than a few of them."""

    def read(self, path: Path, notes: Notes, /) -> Iterator[Trace]:
        """The path's sessions, one at a time, in file order."""


class Hash(Protocol):
    """What hashlib's objects offer."""

    def update(self, data: bytes, /) -> None:
        """Add bytes."""


FORMATS: dict[str, Format] = {weka.NAME: weka}


def detect(path: Path) -> str:
    """Name of the format of the file or folder. Raises UserError if no format knows it."""
    for name, module in FORMATS.items():
        if module.detect(path):
            return name
    notes = Notes()
    record = next(records(path, notes), None)
    if record is None:
        lost = [f"{kind}: {first}" for kind, first in notes.first.items()]
        raise UserError(lost[0] if lost else f"{path}: empty file")
    fault = not_json(record.data)
    if fault is not None:
        raise UserError(f"{record.where}: {fault}")
    raise UserError(
        f"{path}: not a format that decodegate reads ({', '.join(FORMATS)}); "
        "if it is one of these, name it (--format NAME, or workload.format) to see its first error"
    )


def read(path: Path, notes: Notes, *, format: str | None = None) -> Iterator[Trace]:
    """Yield the recorded sessions of a file or folder, holding one at a time.

    Ids are unique in what is yielded: a session whose id came before gets "#2", "#3", ... added, so that two sessions
    never share content by accident. What was dropped, changed or guessed is counted in ``notes``.

    Raises UserError if the path or format is unknown, or if not a single session could be read.
    """
    name = format or detect(path)
    if name not in FORMATS:
        raise UserError(f"unknown workload format {name!r}: choose from {', '.join(FORMATS)}")
    times: dict[str, int] = {}
    given: set[str] = set()
    for trace in FORMATS[name].read(path, notes):
        recorded = trace.id
        while trace.id in given:
            times[recorded] = times.get(recorded, 1) + 1
            trace.id = f"{recorded}#{times[recorded]}"
        if trace.id != recorded:
            notes.add("repeated session id qualified", f"{recorded} is now {trace.id}")
        given.add(trace.id)
        yield trace
    if not given:
        lost = [f"{kind}: {first}" for kind, first in notes.first.items() if "skipped" in kind]
        lost.sort(key=lambda text: "request" in text.partition(":")[0])  # what cost a whole session first
        raise UserError(f"{path}: no session could be read ({lost[0] if lost else 'it is empty'})")


def digesting(traces: Iterable[Trace], digest: Hash) -> Iterator[Trace]:
    """Pass traces through while adding each to ``digest`` (such as hashlib.sha256()).

    The digest is over what was read, not over files: the same sessions in other files, or with other white space,
    have the same digest. After the last trace its ``hexdigest()`` is the workload's.
    """
    encoder = msgspec.msgpack.Encoder()
    for trace in traces:
        digest.update(encoder.encode(trace))
        yield trace
