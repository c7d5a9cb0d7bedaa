"""The servers of an experiment: which of them run now, where each start of one wrote what it did."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Self

import msgspec
import psutil
from msgspec.structs import replace

from replay import nvml, serve_command, serving
from replay.backends import NAMES, emulator_settings, model_name, request_headers
from replay.emulator import process
from replay.experiment import Backend, Experiment
from replay.progress import Event, Tell
from replay.records import Command
from workloads.errors import UserError

DYING_S = serving.ABANDONED_S + 5.0
"""A server whose port is closed may take so long to end: then its log is quoted."""

_LEFT_S = 15.0
"""Servers of a run that was killed are gone by then: their guards give them 5 s."""

_SAME_START_S = 60.0
"""A process that is so much younger than a server's start has got its process id later."""


class Running(msgspec.Struct, frozen=True):
    """Where a backend answers."""

    url: str
    server: serving.Server | None = None
    """None if we did not start it."""
    beside: tuple[Command, ...] = ()
    """Other servers of ours that run."""

    @property
    def command(self) -> Command | None:
        """What was started; None if we did not start it."""
        return None if self.server is None else self.server.command

    @property
    def folder(self) -> Path | None:
        """Of the server's start, RUN/servers/NN-NAME; None if we did not start it."""
        return None if self.server is None else self.server.folder

    @property
    def start(self) -> str | None:
        """The folder, relative to the run directory."""
        return None if self.server is None else _start_name(self.server)


class Servers:
    """Starts the experiment's servers when they are needed and stops them when another needs their place, or at the
    end. A context manager; made once for a run directory, new or resumed."""

    def __init__(self, experiment: Experiment, run: Path, tell: Tell) -> None:
        self._experiment = experiment
        self._folder = run / "servers"
        self._tell = tell
        self._up: dict[str, serving.Server] = {}

    def __enter__(self) -> Self:
        _await_left(self._folder, self._tell)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def answering(
        self, name: str, log_folder: Path, *, with_faults: bool = True, fresh: bool = False, noise: int = 0
    ) -> Iterator[Running]:
        """Yield where the backend answers. A server of ours stays up until another needs its place; an emulator is
        started before, with its truth written to ``log_folder``, and stopped after; a server at a URL is left alone.
        ``with_faults``: switch the emulator's named faults on. ``fresh``: see running. ``noise``: added to the
        emulator's noise_seed."""
        if self._experiment.backend(name).emulator is None:
            yield self.running(name, fresh=fresh)
            return
        log_folder.mkdir(parents=True, exist_ok=True)
        settings = emulator_settings(self._experiment, name)
        settings = replace(settings, noise_seed=settings.noise_seed + noise)
        emulator = process.start(settings if with_faults else replace(settings, faults=()), log_folder)
        try:
            yield Running(emulator.url)
        finally:
            process.stop(emulator)

    def running(self, name: str, *, fresh: bool = False) -> Running:
        """Where the backend called ``name`` answers, which has url or serve.

        A server of ours is started if it does not run, or again if ``fresh``; in turn, the other is stopped before;
        side by side, both are started together. Raises UserError if one does not start.
        """
        backend = self._experiment.backend(name)
        if backend.serve is None:
            assert backend.url is not None  # emulators: see answering
            return Running(backend.url.rstrip("/"))
        if fresh or self.died(name) is not None:
            self.stop(name)
        if name not in self._up:
            if not self._side_by_side:
                self.close()
            self._start([each for each in self._ours if each not in self._up] if self._side_by_side else [name])
        server = self._up[name]
        beside = tuple(other.command for each, other in self._up.items() if each != name)
        return Running(server.url, server, beside)

    def died(self, name: str, *, within_s: float = 0.0) -> str | None:
        """Why the backend's server, started by us, has ended, or ends ``within_s``; None if it runs or was not
        started."""
        deadline = time.monotonic() + within_s
        while name in self._up and (why := serving.died(self._up[name])) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return why if name in self._up else None

    def start_of(self, name: str) -> str | None:
        """The running start of the backend's server, as Running.start; None if none runs."""
        server = self._up.get(name)
        return None if server is None else _start_name(server)

    @property
    def in_turn(self) -> bool:
        """Whether servers of ours take turns."""
        return not self._side_by_side

    def control(self, name: str) -> serving.Control:
        """The start-up control of a backend that has serve (serving.control). Whatever else runs is stopped before: it
        may use the same GPUs."""
        self.close()
        backend = self._experiment.backend(name)
        return serving.control(
            backend,
            name=name,
            model=model_name(self._experiment, name),
            folder=self._next_folder(f"{name}-control"),
            headers=request_headers(self._experiment, name),
            tell=self._tell,
            freed=_freed(backend),
        )

    def stop(self, name: str) -> None:
        """Stop the backend's server if we have started it."""
        if name in self._up:
            serving.stop(self._up.pop(name), tell=self._tell)

    def close(self) -> None:
        """Stop all servers that we have started."""
        servers = list(self._up.values())
        self._up.clear()
        serving.stop(*servers, tell=self._tell)

    @property
    def _side_by_side(self) -> bool:
        return self._experiment.serving.arrangement == "side_by_side"

    @property
    def _ours(self) -> list[str]:
        return [name for name in NAMES if self._experiment.backend(name).serve is not None]

    def _start(self, names: list[str]) -> None:
        """Start these together, since it takes minutes, and wait for all."""
        words = {
            name: serve_command.completed(self._experiment.backend(name), model_name(self._experiment, name), name)
            for name in names
        }
        ports = [serve_command.address(each)[1] for each in words.values()]
        if len(set(ports)) < len(ports):  # vLLM's sockets would share it, and each take half of the other's requests
            raise UserError(
                f"side by side both servers would listen on port {ports[0]}: give each its own, or leave serve.port "
                "out for free ones"
            )
        try:
            for name in names:
                backend = self._experiment.backend(name)
                assert backend.serve is not None
                self._up[name] = serving.launch(
                    words[name],
                    backend.serve,
                    name=name,
                    model=model_name(self._experiment, name),
                    folder=self._next_folder(name),
                    headers=request_headers(self._experiment, name),
                    freed=_freed(backend),
                )
            serving.await_ready([self._up[name] for name in names], self._tell)
        except BaseException:
            self.close()
            raise

    def _next_folder(self, name: str) -> Path:
        numbers = [int(path.name.partition("-")[0]) for path in self._folder.glob("[0-9]*-*")]
        return self._folder / f"{max(numbers, default=0) + 1:02d}-{name}"


def _start_name(server: serving.Server) -> str:
    return f"{server.folder.parent.name}/{server.folder.name}"


def _freed(backend: Backend) -> Callable[[], bool] | None:
    """Whether the memory of the backend's GPUs is what it is now; None where they cannot be seen."""
    assert backend.serve is not None
    try:
        before = nvml.readings(backend.serve.devices, set())
    except nvml.Unseen:
        return None
    return partial(nvml.memory_free_again, backend.serve.devices, before)


def _await_left(folder: Path, tell: Tell) -> None:
    """Wait until the servers of an earlier process on this run, which was killed, are gone: they end by themselves."""
    deadline = time.monotonic() + _LEFT_S
    left = [path for path in sorted(folder.glob("*/command.json")) if _runs(path)]
    if left:
        tell(Event(text=f"waiting for {', '.join(path.parent.name for path in left)}, left by a run that was killed"))
    while left := [path for path in left if _runs(path)]:
        if time.monotonic() > deadline:
            raise UserError(
                f"the server in {left[0].parent} still runs: does another decodegate measure into this run directory? "
                "End that, or kill the server"
            )
        time.sleep(0.1)


def _runs(path: Path) -> bool:
    """Whether a process of that start is still there: its process group has the number of its first process."""
    try:
        command = msgspec.json.decode(path.read_bytes(), type=Command)
        os.killpg(command.pid, 0)
        return abs(psutil.Process(command.pid).create_time() - command.started_unix_s) < _SAME_START_S
    except (msgspec.MsgspecError, ProcessLookupError, PermissionError):
        return False
    except psutil.NoSuchProcess:
        return command.started_unix_s > psutil.boot_time()  # the first one has ended, others have not
