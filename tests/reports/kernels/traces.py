"""Kernels of made-up models on made-up streams, with known layers, as traces and as what is read from them."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reports.kernels.kineto import Activity


class Run(NamedTuple):
    """One run of a kernel."""

    name: str
    start_us: float
    dur_us: float
    stream: int = 7
    category: str = "kernel"


class Kernel(NamedTuple):
    """A kernel of a layer: it starts ``after_us`` after the one before it in its layer."""

    name: str
    after_us: float
    dur_us: float
    stream: int = 7


def model(
    step_layers: list[list[Kernel]],
    *,
    steps: int,
    head: list[Kernel],
    tail: list[Kernel],
    layer_us: float,
    jitter: float = 0.0,
    odd: float = 0.0,
    beside: int = 0,
    seed: int = 0,
) -> list[Run]:
    """Kernels of decode steps: ``head``, the layers, each ``layer_us`` long whatever it holds, and ``tail``.

    ``jitter``: durations vary by up to this share. ``odd``: chance that a layer has a copy, behind its kernels, that
    does not belong to it; the time is there anyway. ``beside``: copies on another stream, somewhere in each step."""
    dice = random.Random(seed)
    runs: list[Run] = []
    now = 1000.0
    for _ in range(steps):
        begin = now
        for part in (head, *step_layers, tail):
            at = now
            for kernel in part:
                at += kernel.after_us
                runs.append(Run(kernel.name, at, kernel.dur_us * (1 + dice.uniform(-jitter, 0)), kernel.stream))
            if dice.random() < odd:
                runs.append(Run("Memcpy DtoD (Device -> Device)", now + layer_us - 0.2, 0.1, 9, "gpu_memcpy"))
            now += layer_us
        moments = [dice.uniform(begin, now) for _ in range(beside)]
        runs += [Run("Memcpy DtoH (Device -> Pageable)", moment, 0.1, 20, "gpu_memcpy") for moment in moments]
    return sorted(runs, key=lambda run: run.start_us)


def as_read(runs: list[Run], gpus: tuple[str, ...] = ("NVIDIA H200",)) -> Activity:
    """What reading a trace of these runs gives."""
    names = list(dict.fromkeys(run.name for run in runs))
    return Activity(
        path=Path("trace.json.gz"),
        gpus=list(gpus),
        names=names,
        name=np.array([names.index(run.name) for run in runs], dtype=np.int32),
        kernel=np.array([run.category == "kernel" for run in runs]),
        device=np.zeros(len(runs), dtype=np.int32),
        stream=np.array([run.stream for run in runs], dtype=np.int32),
        start_us=np.array([run.start_us - runs[0].start_us for run in runs]),
        dur_us=np.array([run.dur_us for run in runs]),
        other_events=0,
    )


def event(run: Run, device: int = 0) -> dict[str, Any]:
    """A Kineto event."""
    args = {"External id": 3, "device": device, "stream": run.stream, "correlation": 27, "grid": [1, 1, 1]}
    where = {"pid": device, "tid": run.stream, "ts": run.start_us, "dur": run.dur_us}
    return {"ph": "X", "cat": run.category, "name": run.name, **where, "args": args}


def write(
    path: Path,
    events: list[dict[str, Any]],
    *,
    indent: int | None = None,
    after: dict[str, Any] | None = None,
    zipped: bool = True,
) -> Path:
    """Write a trace; ``after``: what follows its events."""
    before = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}, {"id": 1, "name": "NVIDIA H200"}],
        "with_flops": 0,
    }
    separators = (",", ":") if indent is None else None
    text = json.dumps({**before, "traceEvents": events, **(after or {})}, indent=indent, separators=separators)
    path.write_bytes(gzip.compress(text.encode(), 1) if zipped else text.encode())
    return path
