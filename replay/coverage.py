"""What servers wrote about the CUDA graphs of their steps: the tables in their logs, and the step logs of our plugin.

The tables are the fallback where the plugin cannot be loaded: with --cudagraph-metrics vLLM counts the sizes and modes
of all steps and prints the counts every VLLM_LOG_STATS_INTERVAL seconds (10 if unset) while it is not idle, then starts
anew (vllm/compilation/cuda_graph.py, CUDAGraphLogging). So the steps of a stretch of time are known with blurred edges:
what ran in the last interval before it is printed in it, what ran in its own last interval up to one interval after it.
Nothing is printed with several API servers. The tables do not tell decode steps from prefill.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from replay.records import STEP, GraphCount, StepLog

_ROW = re.compile(rb"\| (\d+) +\| (\d+) +\| \d+ +\| ([A-Z_]+) +\| (\d+) +\|\s*$", re.MULTILINE)
"""| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |, after whatever the logger puts first."""


def tables(log: Path, since_byte: int, until_byte: int) -> list[GraphCount]:
    """Sum of all tables in these bytes of a server's log, the most frequent first.

    A row that an edge cuts is left out. Empty if there is no table.
    """
    with log.open("rb") as file:
        file.seek(since_byte)
        text = file.read(until_byte - since_byte)
    counts: Counter[tuple[int, int, str]] = Counter()
    for unpadded, padded, mode, count in _ROW.findall(text):
        counts[int(unpadded), int(padded), mode.decode()] += int(count)
    return [
        GraphCount(unpadded=unpadded, padded=padded, mode=mode, count=count)
        for (unpadded, padded, mode), count in counts.most_common()
    ]


def copy_steps(folder: Path, into: Path, since_ns: int, until_ns: int) -> None:
    """Copy the step logs in ``folder``, which a running server goes on writing, as far as they fall into that time
    (CLOCK_MONOTONIC of this host), give or take a second. Those of another host get this host's clock, by way of both
    hosts' wall clocks. ``into`` is made if there is something to copy."""
    for head, steps in read_steps(folder):
        ahead_ns = (time.time_ns() - time.monotonic_ns()) - round(head.started_unix_s * 1e9 - head.started_ns)
        if abs(ahead_ns) > _SAME_CLOCK_NS:
            head = msgspec.structs.replace(head, started_ns=head.started_ns - ahead_ns)
            steps["t_ns"] -= ahead_ns
        kept = steps[(steps["t_ns"] >= since_ns - _SLACK_NS) & (steps["t_ns"] <= until_ns + _SLACK_NS)]
        if not len(kept):
            continue
        into.mkdir(exist_ok=True)
        name = f"{head.engine}-{head.pid}"
        (into / f"{name}.json").write_bytes(msgspec.json.encode(head))
        kept.tofile(into / f"{name}.bin")


_SLACK_NS = 1_000_000_000
_SAME_CLOCK_NS = 500_000_000
"""A host's wall clock is set by less than this while a server runs; monotonic clocks of two hosts differ by days."""


def read_steps(folder: Path) -> list[tuple[StepLog, npt.NDArray[np.void]]]:
    """All step logs in ``folder``, by file name: head, and STEP records so far (one under way is left out).

    Raises msgspec.MsgspecError if a head is none.
    """
    return [
        (
            msgspec.json.decode(head.read_bytes(), type=StepLog),
            np.fromfile(head.with_suffix(".bin"), STEP),
        )
        for head in sorted(folder.glob("*.json"))
    ]
