"""The emulator's log of what it really did: the known truth that a client's measurements are held against.

    FOLDER/emissions.jsonl   one RequestTruth a line, written when a request ends, however it ends
    FOLDER/steps.jsonl       one StepRun a line

Times are CLOCK_MONOTONIC nanoseconds of the host (time.monotonic_ns), as in replay/records.py. Lines are buffered and
reach the file within about a second; after ``kill -9`` the last one may be torn, and readers leave it out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from workloads.errors import UserError

Finish = Literal["length", "stop", "abort", "error"]
"""abort: the client left, or the emulator was stopped. error: refused, or broken off by a fault."""


class RequestTruth(msgspec.Struct, kw_only=True):
    """One request."""

    request_id: str
    """The X-Request-ID header, or a made-up id without one."""
    arrived_ns: int
    """When its headers had been read (the body may still have been under way)."""
    ended_ns: int
    prompt_tokens: int | None
    """Null: refused before the prompt was understood."""
    cached_tokens: int | None
    """Prompt tokens found in the prefix cache; null: it never got to run."""
    emissions: list[tuple[int, int]]
    """(time, tokens) of each write that carried output, stamped just before the bytes went to the transport. A reply
    without streaming is one write."""
    finish: Finish
    specialised_tokens: int
    """Output tokens that came out of specialised steps."""


class StepRun(msgspec.Struct, kw_only=True):
    """One step that held prompt tokens, or a run of decode steps with the same rows, path and reason."""

    t_ns: int
    """Start of the first step."""
    end_ns: int
    """Due end of the last step: (end_ns - t_ns) / steps is the emulated step time, divided by the time scale."""
    steps: int
    rows: int
    """Requests in each step."""
    prompt_tokens: int
    """Prompt tokens computed, sum over the steps."""
    decode_tokens: int
    """Output tokens of decoding requests, sum over the steps (a prefill's first token is not among them)."""
    specialised: bool
    reason: str
    """Why the steps did not run specialised; empty if they did."""
    late_ns: int
    """The most by which a step's tokens came after they were due: the emulator's own slowness."""
    lost_ns: int = 0
    """Time by which the schedule was moved since the emulator was hopelessly late (see engine.py); 0 in a sound run."""


EMISSIONS = "emissions.jsonl"
STEPS = "steps.jsonl"


class TruthLog:
    """Appends to the two files of a new log. Raises UserError if the folder holds a log already."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._encode = msgspec.json.Encoder().encode
        try:
            self._emissions = (folder / EMISSIONS).open("xb")
            self._steps = (folder / STEPS).open("xb")
        except FileExistsError:
            raise UserError(f"{folder} already holds an emulator's log; give a folder of its own to each run") from None

    def request(self, truth: RequestTruth) -> None:
        """Append one ended request."""
        self._emissions.write(self._encode(truth) + b"\n")

    def steps(self, run: StepRun) -> None:
        """Append one run of steps."""
        self._steps.write(self._encode(run) + b"\n")

    def flush(self) -> None:
        """Hand buffered lines to the operating system."""
        self._emissions.flush()
        self._steps.flush()

    def close(self) -> None:
        """Flush and close both files."""
        self._emissions.close()
        self._steps.close()


T = TypeVar("T", RequestTruth, StepRun)


def _read(path: Path, kind: type[T]) -> list[T]:
    lines = path.read_bytes().split(b"\n")
    decode = msgspec.json.Decoder(kind).decode
    lines.pop()  # what a kill left of a line, or nothing
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(decode(line))
        except msgspec.DecodeError as error:
            raise UserError(f"{path}, line {number}: {error}; the file was changed after it was written") from None
    return entries


def read_emissions(folder: Path) -> list[RequestTruth]:
    """Read a log's requests, in the order in which they ended. A torn last line is left out."""
    return _read(folder / EMISSIONS, RequestTruth)


def read_steps(folder: Path) -> list[StepRun]:
    """Read a log's steps, in order. A torn last line is left out."""
    return _read(folder / STEPS, StepRun)
