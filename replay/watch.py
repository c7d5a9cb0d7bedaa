"""What is recorded of a server beside the replies of a block: itself and its GPUs before and after, its counters, and
the table of its CUDA graphs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self, TypeVar

from replay import coverage, rundir, serving, snapshot
from replay.backends import model_name, request_headers, wire_limits
from replay.experiment import Experiment
from replay.metrics import Scraper
from replay.pages import page
from replay.records import GraphTable, Snapshot
from replay.servers import Running
from replay.wire import Wire

T = TypeVar("T")


class Watch:
    """One block's, on one running backend. A context manager, which ends the reading of counters. An embedded emulator
    tells the truth by itself: of it only counters are taken."""

    def __init__(self, experiment: Experiment, name: str, folder: Path, running: Running) -> None:
        self._experiment, self._name, self._folder, self._running = experiment, name, folder, running
        self._emulated = experiment.backend(name).emulator is not None
        self._log = running.folder / serving.LOG if running.folder is not None else None
        self._log_start = 0
        self._opened_ns = 0
        self._before: Snapshot | None = None
        headers = request_headers(experiment, name)
        interval_s = experiment.serving.metrics_interval_s
        self._metrics = Scraper(running.url, headers, folder / "metrics.jsonl", interval_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()

    def before(self) -> bool | None:
        """Empty the prefix cache and look at the server, before its first request. Returns whether it emptied it; None
        if it does not offer that."""
        if self._emulated:
            return None
        reset = self._ask(_reset)
        self._before = self._look("before")
        return reset

    def opens(self) -> None:
        """Take counters and energy, right before the window opens."""
        if self._log is not None:
            self._log_start = self._log.stat().st_size
        if self._before is not None:
            running = self._running
            taken = snapshot.refreshed(self._before, running.url, running.command, running.beside)
            rundir.write_json(self._folder / "before.json", taken)
        self._metrics.start_edge()
        self._opened_ns = time.monotonic_ns()

    def closes(self) -> None:
        """Take them again after the last reply, and look at the server."""
        self._metrics.end_edge()
        if self._emulated:
            return
        closed_ns = time.monotonic_ns()
        self._look("after")
        steps = self._experiment.backend(self._name).steps
        if steps is not None:
            coverage.copy_steps(steps, self._folder / "steps", self._opened_ns, closed_ns)
        if self._log is not None:
            counts = coverage.tables(self._log, self._log_start, self._log.stat().st_size)
            if counts:
                rundir.write_json(self._folder / "graph_table.json", GraphTable(counts=counts))

    def _look(self, edge: snapshot.Edge) -> Snapshot:
        model = model_name(self._experiment, self._name)
        running = self._running
        taken = self._ask(lambda wire: snapshot.take(wire, model, edge, running.command, running.beside))
        rundir.write_json(self._folder / f"{edge}.json", taken)
        return taken

    def _ask(self, question: Callable[[Wire], Awaitable[T]]) -> T:
        async def ask() -> T:
            headers = request_headers(self._experiment, self._name)
            async with Wire(self._running.url, wire_limits(self._experiment), connections=1, headers=headers) as wire:
                return await question(wire)

        return asyncio.run(ask())


async def _reset(wire: Wire) -> bool | None:
    exchange = await page(wire, "/reset_prefix_cache", method="POST")
    if exchange.failure is not None or exchange.http_status in (404, 405):
        return None
    return exchange.http_status == 200
