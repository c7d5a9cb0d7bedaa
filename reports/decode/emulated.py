"""Whether the embedded emulator kept to its own step times while it was measured: a clock that is too fast for its host
makes it late, and the rates too low, whatever the client does."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from workloads.errors import UserError

FORMULAS = {
    "Emulator's delay": "Of the embedded emulator, by its own log: the time between a stream's last writes before "
    "either edge of the common decode window − steps between them × their emulated time, in the client's own time. "
    "Limit: as for the client's lag.",
}


class _Steps(msgspec.Struct):
    t_ns: int
    end_ns: int
    steps: int
    prompt_tokens: int


class _Request(msgspec.Struct):
    emissions: list[tuple[int, int]]


T = TypeVar("T", _Steps, _Request)


def delay_ms(server: Path, opens_ns: int, closes_ns: int) -> float | None:
    """Milliseconds by which the steps between two moments took longer than they were to (negative: shorter, while it
    caught up). None without the log of an emulator. Raises UserError for a damaged one."""
    runs = [run for run in _read(server / "steps.jsonl", _Steps) if not run.prompt_tokens and run.end_ns > run.t_ns]
    inside = np.array([max(0, min(run.end_ns, closes_ns) - max(run.t_ns, opens_ns)) for run in runs])
    each_ns = np.array([(run.end_ns - run.t_ns) / run.steps for run in runs])
    spans = (
        _between(request.emissions, opens_ns, closes_ns) for request in _read(server / "emissions.jsonl", _Request)
    )
    steps, took_ns = max(spans, default=(0, 0))
    if not steps or not inside.any():
        return None
    step_ns = float(inside.sum() / (inside / each_ns).sum())
    return (took_ns - steps * step_ns) * 1e-6


def _between(emissions: list[tuple[int, int]], opens_ns: int, closes_ns: int) -> tuple[int, int]:
    """Steps of one stream, and their time, from its last write before one moment to that before another."""
    t_ns = np.array([t for t, _ in emissions], np.int64)
    first, last = np.searchsorted(t_ns, [opens_ns, closes_ns], side="right") - 1
    return (int(last - first), int(t_ns[last] - t_ns[first])) if 0 <= first < last else (0, 0)


def _read(file: Path, kind: type[T]) -> list[T]:
    """Without what a kill left of the last line; nothing if there is no file."""
    if not file.exists():
        return []
    lines = file.read_bytes().split(b"\n")[:-1]
    try:
        return [msgspec.json.decode(line, type=kind) for line in lines]
    except msgspec.MsgspecError as error:
        raise UserError(f"{file} is damaged: {error}. Move it away to judge the run without it") from None
