"""The time whose decode steps are judged, and where the server's records of it lie."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from reports.chunks import Ints
from reports.run import Measurement


class Streams(msgspec.Struct, frozen=True):
    """What the client received meanwhile, chunk by chunk. ``turns``: the measured ones (reports.measures.measured)."""

    of: Measurement
    turns: pl.DataFrame


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """A measured stretch of time: the window of a block, or part of it, or the time of some answers."""

    path: Path
    """Folder of the block, window or repeat."""
    steps: Path
    """Folder of the step log."""
    spans: list[tuple[int, int]]
    """From when to when, CLOCK_MONOTONIC; at least one, in order, and none touches another.
    Both ends are in."""
    streams: Streams | None = None
    """Null: replies did not stream. Then nothing is known by context length, and nothing predicted."""


def stretch_of(run: Path, measured: Measurement, turns: pl.DataFrame, start_ns: int, end_ns: int) -> Stretch:
    """A stretch of a block or window. ``turns``: as Streams has them."""
    return Stretch(
        path=measured.path,
        steps=steps_folder(run, measured.server, measured.path),
        spans=[(start_ns, end_ns)],
        streams=Streams(measured, turns),
    )


def steps_folder(run: Path, server: str | None, path: Path) -> Path:
    """Of the server's start (``server``, relative to ``run``), or what was copied into ``path`` from a server that we
    did not start."""
    return (run / server if server is not None else path) / "steps"


def inside(spans: list[tuple[int, int]], t_ns: Ints) -> npt.NDArray[np.bool_]:
    """Which of these times fall into one of the spans."""
    starts, ends = np.array(spans, np.int64).T
    at = np.searchsorted(starts, t_ns, side="right") - 1
    found: npt.NDArray[np.bool_] = (at >= 0) & (t_ns <= ends[at])
    return found
