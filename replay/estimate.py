"""What a comparison will take, from its plan: time, tokens, disk, GPU hours. Nothing is sent for it.

Times assume that these servers take as long as the recorded ones did, and that the longest lane decides.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np

from replay.experiment import Backend, Experiment
from replay.plan import SessionFile, first_turns
from replay.progress import Finding
from replay.records import CHUNK, STEP, Plan
from workloads.errors import UserError

_RECORD_BYTES = 1_000
"""A RequestRecord as JSON: 620 in the demo; the times a real server tells, or words of a failure, come on top."""

_HEALTH_BYTES_S = 160
"""A HealthSample as JSON, one a second and worker: 145 in the demo."""

_EMULATOR_BYTES = 25
"""What an emulator writes about each token: 23 in the demo."""

_SERVER_BYTES_S = 2_000
"""A server's log and the readings of its /metrics, a second."""

_REST_BYTES = 16 * 2**20
"""Manifest, rendering, snapshots, start-up logs, and the report's files."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What one block sends, and asks for. With a fixed duration: if the lanes keep the recorded pace."""

    requests: int
    input_tokens: int
    cached_tokens: int
    """Of ``input_tokens``, what an ideal prefix cache holds."""
    output_tokens: int
    rated: int
    """Requests that ask for several tokens, which alone have a decode rate."""
    longest: int
    """Prompt + output of one turn, tokens."""
    median: int


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a comparison will take. Warm-up and the starts of servers are not in it."""

    block_s: float
    blocks: int
    work: Work
    disk_bytes: int
    gpu_hours: dict[str, float]
    """By backend, where its GPUs are declared."""
    cost: dict[str, float]
    """By backend, where its price is declared too; in the price's currency."""


def planned_work(plan: Plan, folder: Path) -> Work:
    """Sum up the turns that one block of the plan in ``folder`` sends."""
    sessions = SessionFile(folder / "sessions.jsonl")
    sent = []
    for play in (play for entries in plan.lanes for play in entries):
        session = sessions[play.session]
        for stream, first in zip(session.streams, first_turns(session, play.start_turn), strict=True):
            sent += [
                (turn.input_tokens, turn.ideal_cached, turn.output_tokens)
                for turn in stream.turns[first:]
                if turn.fate == "send"
            ]
    sessions.close()
    turns = np.array(sent, dtype=np.int64).reshape(-1, 3)
    times = plan.duration_s / plan.estimated_s if plan.end == "duration" and plan.duration_s and plan.estimated_s else 1
    inputs, cached, outputs = (int(total) for total in turns.sum(axis=0) * times)
    contexts = turns[:, 0] + turns[:, 2]
    return Work(
        requests=int(len(turns) * times),
        input_tokens=inputs,
        cached_tokens=cached,
        output_tokens=outputs,
        rated=int((turns[:, 2] > 1).sum() * times),
        longest=int(contexts.max(initial=0)),
        median=int(np.median(contexts)) if len(turns) else 0,
    )


def estimate(
    experiment: Experiment, plan: Plan, folder: Path, order: list[str], *, time_scale: float = 1.0
) -> Estimate:
    """Estimate the comparison whose plan is in ``folder``. ``order``: the backend of each block; ``time_scale``: how
    many times faster than the hardware an emulator runs."""
    work = planned_work(plan, folder)
    block_s = (plan.duration_s if plan.duration_s is not None else plan.estimated_s) / time_scale
    backends = {name: experiment.backend(name) for name in dict.fromkeys(order)}
    hours = {
        name: backend.gpus.count * order.count(name) * block_s / 3600
        for name, backend in backends.items()
        if backend.gpus is not None
    }
    prices = {name: backend.price_per_gpu_hour for name, backend in backends.items()}
    return Estimate(
        block_s=block_s,
        blocks=len(order),
        work=work,
        disk_bytes=_REST_BYTES
        + (folder / "sessions.jsonl").stat().st_size
        + sum(_block_bytes(backends[name], work, block_s, experiment.replay.workers) for name in order),
        gpu_hours=hours,
        cost={name: hours[name] * price for name, price in prices.items() if price is not None and name in hours},
    )


def _block_bytes(backend: Backend, work: Work, block_s: float, workers: int) -> int:
    """Disk that one block takes, at most: a chunk, and a step, for every token."""
    token = CHUNK.itemsize
    if backend.emulator is not None:
        token += _EMULATOR_BYTES
    elif backend.serve is not None and backend.serve.instrument:
        token += STEP.itemsize
    second = _HEALTH_BYTES_S * workers + (_SERVER_BYTES_S if backend.emulator is None else 0)
    return int(work.requests * _RECORD_BYTES + work.output_tokens * token + block_s * second)


def check_disk(estimated: Estimate, run: Path) -> Finding:
    """Room for the run directory ``run``, which need not exist yet. Raises UserError if it will not fit."""
    there = next(folder for folder in (run.absolute(), *run.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    need = estimated.disk_bytes
    words = f"the run directory takes up to {_size(need)}, {there} has {_size(free)} free"
    if free < need:
        raise UserError(f"{words}: name a folder on another disk with --run, or make room")
    if free < 2 * need:
        why = "a full disk ends a block, and what else is written there comes on top"
        return Finding("warning", words, "name a folder on another disk with --run, or make room", why=why)
    return Finding("ok", words)


def lines(estimated: Estimate) -> dict[str, str]:
    """The estimate in words, by heading."""
    work = estimated.work
    shown = {
        "how long": f"{span(estimated.block_s)} a block, {span(estimated.blocks * estimated.block_s)} in all, if these "
        "servers were as slow as the recorded ones and the longest lane decides; warm-up comes on top",
        "a block": f"{work.requests:,} requests: {work.input_tokens:,} prompt tokens "
        f"({_share(work.cached_tokens, work.input_tokens)} cached, ideally), {work.output_tokens:,} to be generated",
        "contexts": f"longest {work.longest:,} tokens, median {work.median:,}",
        "disk": f"up to {_size(estimated.disk_bytes)}",
    }
    if estimated.gpu_hours:
        shown["GPU hours"] = (
            ", ".join(
                f"{name} {hours:,.2f}" + (f" (costs {estimated.cost[name]:,.2f})" if name in estimated.cost else "")
                for name, hours in estimated.gpu_hours.items()
            )
            + "; starts of servers, warm-up and GPUs that wait for the other backend are not counted"
        )
    return shown


def span(seconds: float) -> str:
    """A length of time in words."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "none"


def _size(count: float) -> str:
    """Bytes in words."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"
