"""What a check records on an arm, on disk as it comes: replies by line, positions by row group.

Positions are written to tokens.parquet.part, which becomes tokens.parquet when the check has ended: a file that a kill
cuts short is never taken for one. At most a row group is in memory. A position with 20 logprobs takes about 130 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from evals.parity.endpoint import Floats, Generation, Ints
from evals.records import TOKENS, ParityReply

ROW_GROUP = 100_000
"""Positions."""

_TYPES = (
    *(pa.int32(), pa.int16(), pa.int32(), pa.int32(), pa.float32()),
    *(pa.list_(pa.int32()), pa.list_(pa.float32())),
)
SCHEMA = pa.schema(list(zip(TOKENS, _TYPES, strict=True)))

_REPEATED = ["case", "repeat"]
_FLOATS = ["logprob", "top_logprobs.list.element"]
"""They pack better with their bytes apart."""


class Recorder:
    """A Sink that writes into a folder. A context manager: tokens.parquet is there once it has ended well.

    ``heard`` is called after each reply. The logprob of a position is null where none was told, and not a number where
    the server told that it is none.
    """

    def __init__(self, folder: Path, heard: Callable[[ParityReply], None] = lambda reply: None) -> None:
        self.replies = 0
        self.positions = 0
        self._heard = heard
        self._path = folder / "tokens.parquet"
        self._part = folder / "tokens.parquet.part"
        self._lines = (folder / "replies.jsonl").open("wb")
        self._writer = pq.ParquetWriter(
            self._part,
            SCHEMA,
            compression="zstd",
            use_dictionary=_REPEATED,
            use_byte_stream_split=_FLOATS,
        )
        self._held: list[pa.RecordBatch] = []
        self._rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._lines.close()
        if kind is None:
            self._write()
        self._writer.close()
        if kind is None:
            self._part.replace(self._path)

    def reply(self, reply: ParityReply) -> None:
        """Append one reply."""
        self._lines.write(msgspec.json.encode(reply) + b"\n")
        self._lines.flush()
        self.replies += 1
        self._heard(reply)

    def tokens(self, case: int, generation: Generation, *, repeat: int = 0) -> None:
        """Append a generation's positions."""
        batch = _batch(case, repeat, generation)
        self._held.append(batch)
        self._rows += batch.num_rows
        self.positions += batch.num_rows
        if self._rows >= ROW_GROUP:
            self._write()

    def _write(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_batches(self._held), row_group_size=ROW_GROUP)
        self._held.clear()
        self._rows = 0


def _batch(case: int, repeat: int, generation: Generation) -> pa.RecordBatch:
    count = len(generation.ids)
    if len(generation.logprobs):
        logprobs, tops = pa.array(generation.logprobs, pa.float32()), _lists(generation)
    else:
        logprobs, tops = pa.nulls(count, pa.float32()), [pa.nulls(count, kind) for kind in _TYPES[-2:]]
    columns = [
        pa.array(np.full(count, case, np.int32)),
        pa.array(np.full(count, repeat, np.int16)),
        pa.array(np.arange(count, dtype=np.int32)),
        pa.array(generation.ids, pa.int32()),
        logprobs,
        *tops,
    ]
    return pa.record_batch(columns, schema=SCHEMA)


def _lists(generation: Generation) -> list[pa.ListArray]:
    """Top ids and top logprobs, without what fills short lists up."""
    told = generation.top_ids >= 0
    ends = pa.array(np.concatenate([[0], told.sum(axis=1).cumsum()]).astype(np.int32))
    return [
        pa.ListArray.from_arrays(ends, pa.array(values[told]))
        for values in (generation.top_ids, generation.top_logprobs)
    ]


def read_ids(path: Path) -> dict[int, Ints]:
    """The token ids of a tokens.parquet, by case, of its first repeat."""
    table = pq.read_table(path, columns=["case", "position", "token"], filters=[("repeat", "=", 0)])
    case, position, token = (table[name].to_numpy() for name in ("case", "position", "token"))
    order = np.lexsort((position, case))
    cases, starts = np.unique(case[order], return_index=True)
    parts = zip(cases, starts, [*starts[1:], order.size], strict=False)
    return {int(each): token[order[start:end]] for each, start, end in parts}


def read_case(path: Path, case: int) -> dict[int, tuple[Ints, Floats]]:
    """Token ids and logprobs (not a number where none was told) that a tokens.parquet has of a case, by repeat."""
    columns = ["repeat", "position", "token", "logprob"]
    table = pq.read_table(path, columns=columns, filters=[("case", "=", case)]).sort_by("position")
    repeat, token, logprob = (table[name].to_numpy() for name in ("repeat", "token", "logprob"))
    return {int(each): (token[repeat == each], logprob[repeat == each]) for each in np.unique(repeat)}
