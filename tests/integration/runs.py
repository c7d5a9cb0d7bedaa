"""Small comparisons on two emulators, for tests: fast hardware, few lanes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from replay.compare import resume_run, run_blocks, start_run
from replay.experiment import Experiment, experiment_of
from replay.preflight import Prepared, prepare
from replay.progress import Event, Tell
from replay.records import Block, Manifest, RequestRecord
from replay.rundir import read_block
from replay.servers import Servers

GPUS = {"count": 1, "kind": "emulated", "layout": {"tp": 1}}


def silent(_: Event) -> None:
    """Tells nobody."""


def experiment(
    *,
    workload: dict[str, Any] | None = None,
    emulator: dict[str, Any] | None = None,
    candidate: dict[str, Any] | None = None,
    both: dict[str, Any] | None = None,
    **changes: Any,
) -> Experiment:
    """Both backends the toy emulator, 20 times faster than real; ``candidate`` overrides its backend's keys,
    ``both`` stands for both backends instead."""
    server = {"profile": "toy", "time_scale": 20, **(emulator or {})}
    replay = {
        "lanes": 4,
        "seed": 3,
        "pause_cap_s": 0.05,
        "ramp_s": 0.05,
        "order": "AB",
        "warmup": {"requests": 2, "seconds": 20},
        **changes.pop("replay", {}),
    }
    return experiment_of(
        {
            "name": "test",
            "model": "emulated",
            "workload": workload or {"demo": True},
            "replay": replay,
            "backends": {"both": both, "baseline": {}, "candidate": {}}
            if both
            else {
                "baseline": {"emulator": server, "decode_backend": "auto", "gpus": GPUS},
                "candidate": {
                    "emulator": server,
                    "decode_backend": "latency_specialized",
                    "gpus": GPUS,
                    **(candidate or {}),
                },
            },
            **changes,
        }
    )


def run(described: Experiment, folder: Path, *, allow_unmatched: bool = False) -> Path:
    """Measure all blocks; returns the run directory."""
    start(described, folder, allow_unmatched=allow_unmatched)
    resume(described, folder)
    return folder


def start(described: Experiment, folder: Path, *, allow_unmatched: bool = False) -> Manifest:
    """Make the run directory; nothing is measured yet."""
    with Servers(described, folder, silent) as servers:
        return start_run(described, servers, folder, allow_unmatched=allow_unmatched, tell=silent)


def resume(described: Experiment, folder: Path, tell: Tell = silent) -> None:
    """Measure the blocks that are not finished."""
    with Servers(described, folder, silent) as servers:
        run_blocks(described, servers, folder, resume_run(described, folder), tell)


def prepared(described: Experiment, folder: Path, tell: Tell = silent) -> Prepared:
    """The preflight of both backends."""
    with Servers(described, folder, silent) as servers:
        return prepare(described, servers, folder, tell)


def blocks(folder: Path) -> list[tuple[Path, Block]]:
    """Finished blocks in measured order."""
    found = []
    for path in sorted((folder / "blocks").iterdir()):
        block = read_block(path)
        if block is not None and block.finished and ".interrupted" not in path.name:
            found.append((path, block))
    return found


def records(block: Path, phase: str = "measured") -> list[RequestRecord]:
    """All whole records of a block."""
    decoder = msgspec.json.Decoder(RequestRecord)
    found = []
    for file in sorted(block.glob("w*.requests.jsonl")):
        found += [decoder.decode(line) for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [record for record in found if record.phase == phase]
