"""The client's worker processes of one block: started, kept in step, ended."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import cast

import msgspec

from replay import worker
from replay.lanes import Counts
from workloads.errors import UserError


class Ended(UserError):
    """A block could not go on. ``why``: see Block.cut_short."""

    def __init__(self, why: str, text: str) -> None:
        super().__init__(text)
        self.why = why


class Workers:
    """One process for each assignment, started on making, ended by :meth:`close`."""

    def __init__(self, assignments: list[worker.Assignment]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for assignment in assignments:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=worker.main, args=(assignment, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._talking = {pipe: number for number, pipe in enumerate(self._pipes)}
        """Pipes whose worker has more to say."""

    def wait_ready(self, limit_s: float) -> list[worker.Ready]:
        """Wait until every worker has warmed up and made its first prompts."""
        ready: dict[int, worker.Ready] = {}
        deadline = time.monotonic() + limit_s
        while len(ready) < len(self._pipes):
            left = deadline - time.monotonic()
            if left <= 0:
                text = f"workers not ready after {limit_s:.0f} s: does the server answer, is this host free?"
                raise Ended("client", text)
            messages = self._messages(left)
            ready |= {number: message for number, message in messages if isinstance(message, worker.Ready)}
        return [ready[number] for number in sorted(ready)]

    def go(self, start_ns: int) -> None:
        """Start all workers at one moment."""
        for pipe in self._pipes:
            worker.send_message(pipe, worker.Go(start_ns))

    def wait_done(self, progress: Callable[[Counts, int], None]) -> list[worker.Done]:
        """Wait for the end of the block, handing on progress. Ctrl-C: tell the workers, then raise."""
        done: dict[int, worker.Done] = {}
        latest: dict[int, worker.Progress] = {}
        try:
            while len(done) < len(self._pipes):
                for number, message in self._messages(1.0):
                    if isinstance(message, worker.Progress):
                        latest[number] = message
                    elif isinstance(message, worker.Done):
                        done[number] = message
                        latest[number] = worker.Progress(message.counts, 0)
                progress(_added(list(latest.values())), sum(message.in_flight for message in latest.values()))
        except KeyboardInterrupt:
            for pipe in self._pipes:
                worker.send_message(pipe, worker.Stop())
            for process in self._processes:
                process.join(5)
            raise
        return [done[number] for number in sorted(done)]

    def _messages(self, limit_s: float) -> Iterator[tuple[int, worker.Message]]:
        """Messages that are there, or come within ``limit_s`` (a second at most), with their worker's number."""
        for ready in multiprocessing.connection.wait(list(self._talking), min(limit_s, 1.0)):
            pipe = cast(Connection, ready)
            number = self._talking[pipe]
            try:
                message = worker.receive_message(pipe)
            except EOFError:
                self._processes[number].join(5)
                code = self._processes[number].exitcode
                text = f"client worker {number} died (exit {code}); what it recorded is kept: continue with --resume"
                raise Ended("client", text) from None
            if isinstance(message, worker.Failed):
                raise Ended(message.why, message.text)
            if isinstance(message, worker.Done):
                del self._talking[pipe]  # it closes its end, and a closed pipe is always ready
            yield number, message

    def close(self) -> None:
        """End every worker; one that does not go by itself is killed."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _added(messages: list[worker.Progress]) -> Counts:
    fields = [field.name for field in msgspec.structs.fields(Counts)]
    return Counts(**{name: sum(getattr(message.counts, name) for message in messages) for name in fields})
