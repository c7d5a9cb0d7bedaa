"""Appending a worker's records: chunk times first, then the line that points at them, so that a line never lies."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np
import numpy.typing as npt

from replay.records import CHUNK, HealthSample, RequestRecord


class Recorder:
    """Writes wN.requests.jsonl, wN.chunks.bin and wN.health.jsonl, unbuffered: what was written survives a kill."""

    def __init__(self, folder: Path, worker: int) -> None:
        self._requests = (folder / f"w{worker}.requests.jsonl").open("ab", buffering=0)
        self._chunks = (folder / f"w{worker}.chunks.bin").open("ab", buffering=0)
        self._health = (folder / f"w{worker}.health.jsonl").open("ab", buffering=0)
        self._chunk_count = self._chunks.tell() // CHUNK.itemsize
        self._encoder = msgspec.json.Encoder()

    def request(self, record: RequestRecord, chunks: npt.NDArray[np.void]) -> None:
        """Append a record; ``chunks``: CHUNK array, shape (n,), in order of arrival."""
        record.chunk_start = self._chunk_count
        record.chunk_count = len(chunks)
        if len(chunks):
            _append(self._chunks, chunks.tobytes())
            self._chunk_count += len(chunks)
        _append(self._requests, self._encoder.encode(record) + b"\n")

    def health(self, sample: HealthSample) -> None:
        """Append one sample of the client's own state."""
        _append(self._health, self._encoder.encode(sample) + b"\n")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._requests, self._chunks, self._health):
            file.close()


def _append(file: io.FileIO, data: bytes) -> None:
    """Write all of it. A disk that is nearly full takes a part without a word: what follows would be misread."""
    if file.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
