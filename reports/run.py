"""A run directory, loaded for judging: small things whole, requests as polars frames, chunks as memory maps."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from replay.records import (
    CHUNK,
    SCHEMA_VERSION,
    Block,
    HealthSample,
    Manifest,
    MetricsSample,
    Plan,
    RequestRecord,
    RunFacts,
)
from workloads.errors import UserError

_BATCH = 10_000  # records decoded to Python objects at a time
_UNREAD = (
    "detail",
    "notes",
    "server_fingerprint",
    "http_status",
    "finish_reason",
    "first_byte_ns",
    "reasoning_tokens",
    "server_queue_s",
)
"""Fields of RequestRecord that nothing here reads: left out of the frames, for the sake of large runs."""
_BLOCK_NAME = re.compile(r"(\d+)-(.+)")

T = TypeVar("T", bound=msgspec.Struct)
M = TypeVar("M", bound=RunFacts)


class ChunkFile(msgspec.Struct, frozen=True):
    """A file of ``records`` whole CHUNK records. It stays on disk: mapping it whole would make it count as our
    memory."""

    path: Path
    records: int

    def map(self, first: int, end: int) -> npt.NDArray[Any]:
        """Records ``first`` to ``end`` (not included) as a memory map, which lasts as long as the result."""
        return np.memmap(self.path, dtype=CHUNK, mode="r", offset=first * CHUNK.itemsize, shape=(end - first,))


class Measurement(msgspec.Struct, frozen=True):
    """What one uninterrupted measurement left: a block, or a window of decode tables. ``requests`` has the fields of
    RequestRecord that judging reads as columns, and ``file``, an index into ``chunks``."""

    name: str
    path: Path
    server: str | None
    """As Block.server."""
    requests: pl.DataFrame
    chunks: list[ChunkFile]
    """Per worker."""
    health: list[pl.DataFrame]
    """Per worker, HealthSample fields as columns, in order of time; empty for one that left none."""
    metrics: list[MetricsSample]
    """Readings of the server's /metrics, in order of time; empty if it was not asked."""


class LoadedBlock(Measurement, frozen=True):
    """One finished block."""

    block: Block


class SetAside(msgspec.Struct, frozen=True):
    """An attempt at a block that is listed and not judged. ``cut_short``: why it ended early, as Block.cut_short."""

    name: str
    backend: str | None
    why: str
    cut_short: str | None = None


class Run(msgspec.Struct, frozen=True):
    """A run directory with at least one finished block."""

    path: Path
    manifest: Manifest
    plan: Plan
    blocks: list[LoadedBlock]
    """Finished blocks in measured order."""
    set_aside: list[SetAside]
    changed: list[str]
    """Files of the plan that are not those whose digests were recorded."""
    notes: list[str]
    """What was dropped while reading."""

    def cut_short(self, backend: str) -> dict[str, int]:
        """A backend's attempts at blocks that were not finished, by why they ended."""
        ends = [each.cut_short or "unfinished" for each in self.set_aside if each.backend == backend]
        return {why: ends.count(why) for why in sorted(set(ends))}


class _Version(msgspec.Struct):
    schema_version: int = 1


def load(path: Path) -> Run:
    """Load a run directory. Raises UserError if it is none, is of a newer schema, is damaged in the middle, has an
    impossible time scale, or holds no finished block."""
    notes: list[str] = []
    manifest = read_manifest(path, Manifest)
    plan = read(path / "plan.json", Plan)
    digests = {"plan.json": manifest.plan_digest, "sessions.jsonl": plan.sessions_digest}
    changed = [name for name, digest in digests.items() if _sha256(path / name) != digest]
    blocks: list[LoadedBlock] = []
    set_aside: list[SetAside] = []
    for folder in sorted((path / "blocks").glob("*"), key=measured_order):
        if not folder.is_dir():
            continue
        try:
            block = msgspec.json.decode((folder / "block.json").read_bytes(), type=Block)
        except (FileNotFoundError, msgspec.MsgspecError):
            set_aside.append(SetAside(folder.name, backend_of(folder), "never started: no readable block.json"))
            continue
        if ".interrupted-" in folder.name or not block.finished or block.ended_ns is None:
            why = block.cut_short or "not finished"
            set_aside.append(SetAside(folder.name, block.backend, why, block.cut_short))
            continue
        if block.backend not in [backend.name for backend in manifest.backends]:
            raise UserError(f"{folder}/block.json names backend {block.backend!r}, which manifest.json does not know")
        left = read_measurement(folder, block.server, notes)
        blocks.append(LoadedBlock(**msgspec.structs.asdict(left), block=block))
    if not blocks:
        what = f"{len(set_aside)} unfinished" if set_aside else "no"
        raise UserError(f"{path} holds {what} block(s) and nothing to judge: finish it with compare --resume")
    return Run(path, manifest, plan, blocks, set_aside, changed, notes)


def read_manifest(path: Path, schema: type[M]) -> M:
    """The manifest of a run directory of one kind. Raises UserError as ``load`` does."""
    manifest = read(path / "manifest.json", schema)
    if not (math.isfinite(manifest.time_scale) and manifest.time_scale > 0):
        raise UserError(
            f"{path}/manifest.json has time_scale {manifest.time_scale:g}, which no clock has: it must be above 0"
        )
    if len(manifest.backends) != 2:
        raise UserError(f"{path}/manifest.json names {len(manifest.backends)} backends, not the two that are compared")
    return manifest


def read(path: Path, schema: type[T]) -> T:
    """One of a run directory's JSON files. Raises UserError if it is missing, damaged, or of a newer schema."""
    try:
        data = path.read_bytes()
        version = msgspec.json.decode(data, type=_Version).schema_version
        if version > SCHEMA_VERSION:
            raise UserError(
                f"{path} has schema_version {version}, this decodegate reads up to {SCHEMA_VERSION}: upgrade decodegate"
            )
        return msgspec.json.decode(data, type=schema)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path.parent} is not a run directory: it has no {path.name}") from None
    except msgspec.MsgspecError as error:
        raise UserError(f"{path} is damaged: {error}") from None


def _sha256(path: Path) -> str:
    if not path.exists():
        return "missing"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def measured_order(folder: Path) -> tuple[int, str]:
    """Sorts folders of blocks or windows as they were measured."""
    match = _BLOCK_NAME.match(folder.name)
    return (int(match[1]) if match else 0, folder.name)


def backend_of(folder: Path) -> str | None:
    """Whose block or window it is, by the folder's name."""
    match = _BLOCK_NAME.match(folder.name.split(".interrupted-")[0])
    return match[2] if match else None


def read_measurement(folder: Path, server: str | None, notes: list[str]) -> Measurement:
    """What a finished block or window left in its folder; ``notes`` gets what was dropped. Raises UserError for
    damage in the middle of a file."""
    frames: list[pl.DataFrame] = []
    chunks: list[ChunkFile] = []
    health: list[pl.DataFrame] = []
    for file in sorted(folder.glob("w*.requests.jsonl")):
        worker = file.name.split(".")[0]
        file_of_chunks = _chunk_file(folder / f"{worker}.chunks.bin")
        frame = _read_frame(file, RequestRecord, notes)
        within = (pl.col("chunk_start") >= 0) & (
            pl.col("chunk_start") + pl.col("chunk_count") <= file_of_chunks.records
        )
        kept = frame.filter(within)
        if len(kept) < len(frame):
            notes.append(
                f"{folder.name}/{file.name}: {len(frame) - len(kept)} rows dropped, their chunks are not in the file"
            )
        frames.append(kept.with_columns(file=pl.lit(len(chunks), pl.Int64)))
        chunks.append(file_of_chunks)
        samples = folder / f"{worker}.health.jsonl"
        health.append(_read_frame(samples, HealthSample, notes) if samples.exists() else _frame([], HealthSample))
    requests = pl.concat(frames) if frames else _frame([], RequestRecord).with_columns(file=pl.lit(0, pl.Int64))
    requests = requests.sort("session", "play", "stream", "turn", "phase", "end_ns", "request_id")
    readings = folder / "metrics.jsonl"
    metrics = list(_records(readings, MetricsSample, notes)) if readings.exists() else []
    return Measurement(
        folder.name, folder, server, requests, chunks, [samples.sort("t_ns") for samples in health], metrics
    )


def _chunk_file(path: Path) -> ChunkFile:
    return ChunkFile(path, path.stat().st_size // CHUNK.itemsize if path.exists() else 0)


def _read_frame(path: Path, schema: type[msgspec.Struct], notes: list[str]) -> pl.DataFrame:
    """A JSONL file as a frame; see _records."""
    frames: list[pl.DataFrame] = []
    batch: list[msgspec.Struct] = []
    for record in _records(path, schema, notes):
        batch.append(record)
        if len(batch) == _BATCH:
            frames.append(_frame(batch, schema))
            batch = []
    return pl.concat([*frames, _frame(batch, schema)])


def _records(path: Path, schema: type[T], notes: list[str]) -> Iterator[T]:
    """The records of a JSONL file. A last line that was torn by a kill is dropped and noted; damage elsewhere is an
    error."""
    decode = msgspec.json.Decoder(schema).decode
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = decode(line)
            except msgspec.MsgspecError as error:
                if not line.endswith(b"\n") or not lines.readline():
                    notes.append(f"{path.parent.name}/{path.name}: torn last line ({number}) dropped")
                    break
                raise UserError(
                    f"{path}:{number} is damaged: {error}. Move its folder away to judge the rest"
                ) from None
            yield record


def _frame(records: list[msgspec.Struct], schema: type[msgspec.Struct]) -> pl.DataFrame:
    rows = [msgspec.structs.astuple(record) for record in records]
    return pl.DataFrame(rows, schema=_columns(schema), orient="row").drop(*_UNREAD, strict=False)


def _columns(schema: type[msgspec.Struct]) -> dict[str, pl.DataType]:
    """Column types of a flat record; an optional field has the type of its value."""
    info = msgspec.inspect.type_info(schema)
    assert isinstance(info, msgspec.inspect.StructType)
    return {field.name: _dtype(field.type) for field in info.fields}


def _dtype(kind: msgspec.inspect.Type) -> pl.DataType:
    match kind:
        case msgspec.inspect.UnionType(types=types):
            return _dtype(next(each for each in types if not isinstance(each, msgspec.inspect.NoneType)))
        case msgspec.inspect.ListType(item_type=item):
            return pl.List(_dtype(item))
        case msgspec.inspect.BoolType():
            return pl.Boolean()
        case msgspec.inspect.IntType():
            return pl.Int64()
        case msgspec.inspect.FloatType():
            return pl.Float64()
        case _:
            return pl.String()
