"""What is seen of servers and their GPUs at the edges of blocks: how GPUs are told, and the energy that they took."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from replay.records import GPUS_ALIKE, Backend, GpuReading, Snapshot
from reports.blocks import BlockSummary
from reports.run import Measurement, Run
from workloads.errors import UserError


class Edges(msgspec.Struct, frozen=True):
    """Snapshots around a block (or window); null where none was taken."""

    block: Measurement
    before: Snapshot | None
    after: Snapshot | None

    def snapshots(self) -> Iterator[Snapshot]:
        """Those that there are, in order of time."""
        yield from (each for each in (self.before, self.after) if each is not None)


class Usage(msgspec.Struct, frozen=True):
    """What a backend's output tokens took, over all its blocks; null: unknown."""

    energy_per_output_token_j: float | None
    mean_power_w: float | None
    """Of all its GPUs together."""
    cost_per_million_output_tokens: float | None


FORMULAS = {
    "Energy per output token": "Σ (energy after − before) over GPUs and blocks, by NVML's counters, read right before "
    "the window and after its last reply, over the output tokens that arrived inside the measured windows. Power of "
    "hosts, network and cooling is not in it.",
    "Mean power": "The same energy, over the time between the readings: of all GPUs of the backend together.",
    "Cost per million output tokens": "Price per GPU-hour × GPUs × Σ hours of the measured windows / (output tokens "
    "that arrived in them / 10⁶).",
}


def edges(run: Run, backend: str) -> list[Edges]:
    """Snapshots of a backend's finished blocks, in measured order. Raises UserError for a damaged one."""
    return [edges_of(loaded) for loaded in run.blocks if loaded.block.backend == backend]


def edges_of(block: Measurement) -> Edges:
    """Snapshots around one block or window. Raises UserError for a damaged one."""
    return Edges(block, _read(block.path / "before.json"), _read(block.path / "after.json"))


def readings(blocks: list[Edges]) -> list[list[GpuReading]]:
    """The GPUs of every snapshot that shows some."""
    return [snapshot.gpus for edge in blocks for snapshot in edge.snapshots() if snapshot.gpus]


def in_common(blocks: list[Edges]) -> dict[str, list[str]]:
    """What GPUs of both backends must have in common, in words, by property; those that are unknown are left out."""
    found: dict[str, list[str]] = {}
    for what, describe in GPUS_ALIKE.items():
        words = {describe(gpu) for gpus in readings(blocks) for gpu in gpus} - {None}
        found[what] = sorted(word for word in words if word is not None)
    found["GPU count"] = sorted({str(len(gpus)) for gpus in readings(blocks)})
    return found


def declared(backend: Backend) -> str | None:
    """ "8 x GB300 (TP8)"; None if the experiment declares none."""
    if backend.gpus is None:
        return None
    layout = ", ".join(f"{key}{value}" for key, value in sorted(backend.gpus.layout.items()))
    return f"{backend.gpus.count} x {backend.gpus.kind}" + (f" ({layout})" if layout else "")


def told(blocks: list[Edges]) -> str | None:
    """ "8 x NVIDIA GB300"; None if no snapshot shows GPUs."""
    common = in_common(blocks)
    return f"{' or '.join(common['GPU count'])} x {' and '.join(common['GPU name'])}" if common["GPU count"] else None


def usage(backend: Backend, blocks: list[Edges], summaries: list[BlockSummary]) -> Usage:
    """Energy and cost of a backend; none of an emulator's. ``summaries``: of the same blocks."""
    tokens = _tokens(summaries)
    if backend.emulated or not tokens:
        return Usage(None, None, None)
    spent = [energy(edge) for edge in blocks]
    known = [each for each in spent if each is not None]
    joules = sum(joules for joules, _ in known) if len(known) == len(spent) else None
    seconds = sum(seconds for _, seconds in known)
    price = backend.price_per_gpu_hour
    hours = sum(summary.window_s for summary in summaries) / 3600
    return Usage(
        energy_per_output_token_j=joules / tokens if joules is not None else None,
        mean_power_w=joules / seconds if joules is not None and seconds > 0 else None,
        cost_per_million_output_tokens=price * backend.gpus.count * hours / (tokens / 1e6)
        if price and backend.gpus
        else None,
    )


def energy(edge: Edges) -> tuple[float, float] | None:
    """Joules of all GPUs over a block, and the seconds that they were spent in; None where a counter is missing or
    other GPUs are seen after than before, or one ran backwards."""
    if edge.before is None or edge.after is None:
        return None
    before, after = ({gpu.uuid: gpu.energy_mj for gpu in each.gpus or []} for each in (edge.before, edge.after))
    if not before or before.keys() != after.keys():
        return None
    spent = 0
    for uuid, start in before.items():
        end = after[uuid]
        if start is None or end is None or end < start:
            return None
        spent += end - start
    return spent / 1e3, (edge.after.t_ns - edge.before.t_ns) / 1e9


def _tokens(summaries: list[BlockSummary]) -> float | None:
    """Output tokens inside the measured windows; None if a block's are not counted."""
    counted = [
        summary.output_tokens_per_s * summary.window_s
        for summary in summaries
        if summary.output_tokens_per_s is not None
    ]
    return sum(counted) if len(counted) == len(summaries) else None


def _read(path: Path) -> Snapshot | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Snapshot)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise UserError(f"{path} is damaged: {error}. Move it away to judge the run without it") from None
