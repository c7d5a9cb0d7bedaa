"""A small process between decodegate and a server that it starts, so that no process of the server outlives us.

    python -E -P replay/guard.py

Its standard input holds one line, ``{"words": [...], "environment": {...}, "stop_s": 60, "abandoned_s": 5}``, and stays
open for as long as the server is wanted. The graces are for a server that is asked to end, and for one that nobody
waits for any more, because we or its first process have died. Its standard output gets one line when the server has
started, ``{"pid": 123}`` or ``{"error": "..."}``, and one when all is over, ``{"exit": 0, "left": []}``: the server's
exit status (negative: killed by that signal) and the processes that not even SIGKILL ended. The server writes to the
guard's standard error.

The server ends by itself, or is asked to (SIGTERM to its process group) because the guard got SIGTERM, or because its
standard input ended: we are dead, by kill -9 perhaps. What is left after the grace is killed, whatever sessions of
their own the processes made: the guard is their subreaper, so that all stay below it. When the guard itself is killed,
the kernel kills the server's first process. Keep this file light: it imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

_KILLING_S = 10.0
"""How long SIGKILL gets: a process that hangs in a driver cannot be ended."""

_LOOK_S = 0.05
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """Start what standard input says, wait for its end or bring it about. Returns the guard's own exit status."""
    signal.signal(signal.SIGCHLD, lambda *_: None)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    wakeup, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return 1  # we died before it was said what to start
    order = json.loads(line)
    try:
        server = _start(order, prctl)
    except (OSError, ValueError) as error:
        _say({"error": str(error)})
        return 1
    _say({"pid": server})

    exit_code = None
    try:
        exit_code = _watch(server, order["stop_s"], order["abandoned_s"], asked, wakeup)
    finally:
        left = [process.pid for process in _below()]
        _signal(_below(), signal.SIGKILL)
    _say({"exit": exit_code, "left": left})
    return 0


def _watch(server: int, stop_s: float, abandoned_s: float, asked: list[int], wakeup: int) -> int | None:
    """Return the server's exit status when nothing of it is left, or None if that cannot be had. ``asked`` is not empty
    once it shall end; ``wakeup`` can be read after each signal."""
    exit_code: int | None = None
    deadline = math.inf
    abandoned = False
    with selectors.DefaultSelector() as watched:
        watched.register(sys.stdin.buffer, selectors.EVENT_READ)
        watched.register(wakeup, selectors.EVENT_READ)
        while True:
            ended = _reap()
            exit_code = ended.get(server, exit_code)
            below = _below()
            now = time.monotonic()
            if (exit_code is not None and not below) or now > deadline + _KILLING_S:
                return exit_code
            if asked and deadline == math.inf:
                _signal_group(server, signal.SIGTERM)
                deadline = now + stop_s
            if (server in ended or abandoned) and now + abandoned_s < deadline:
                _signal_group(server, signal.SIGTERM)
                deadline = now + abandoned_s
            if server in ended:
                _signal(below, signal.SIGTERM)  # some may have left its process group
            if now > deadline:
                _signal(below, signal.SIGKILL)
            for key, _ in watched.select(None if deadline == math.inf else _LOOK_S):
                if key.fd == wakeup:
                    os.read(wakeup, 4096)
                else:  # nothing is ever written to standard input: it has ended
                    watched.unregister(sys.stdin.buffer)
                    abandoned = True


def _start(order: dict[str, Any], prctl: Callable[..., int]) -> int:
    """Start the server in a process group of its own. Returns its process id."""
    server = subprocess.Popen(
        order["words"],
        env=order["environment"],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        stderr=sys.stderr.fileno(),
        process_group=0,
        preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
    )
    server.returncode = 0  # it is waited for in _reap, with all others
    return server.pid


def _reap() -> dict[int, int]:
    """Exit statuses of the children that have ended since the last look, orphans that became ours among them."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def _below() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def _say(message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main())
