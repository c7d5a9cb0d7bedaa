"""Starts and stops an emulator as a child process of its own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import msgspec

from replay.emulator.settings import EmulatorSettings, resolve
from workloads.errors import UserError

START_S = 30.0
STOP_S = 5.0
STDERR = "emulator.stderr"
ROOT = Path(__file__).parents[2]


class Emulator(msgspec.Struct, frozen=True):
    """A running emulator."""

    url: str
    """Like http://127.0.0.1:40123, without /v1."""
    pid: int
    settings: EmulatorSettings
    log_dir: Path
    """Holds emissions.jsonl, steps.jsonl (replay.emulator.truth) and emulator.stderr."""
    process: subprocess.Popen[bytes]


def start(settings: EmulatorSettings, log_dir: Path) -> Emulator:
    """Start an emulator on a free loopback port and wait until it answers /health.

    It runs in a process group of its own, so that Ctrl-C in a terminal reaches only us, and ends when we do. Raises
    UserError, with what the child wrote to stderr, if it ends or does not answer within ``START_S`` seconds.
    """
    resolve(settings)
    log_dir.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with (log_dir / STDERR).open("wb") as stderr:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "replay.emulator",
                msgspec.json.encode(settings).decode(),
                str(log_dir.absolute()),
                str(os.getpid()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
    try:
        url = _url(process, time.monotonic() + START_S)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/health", timeout=START_S):
            pass
    except BaseException as error:
        _end(process)
        if not isinstance(error, OSError):
            raise
        words = (log_dir / STDERR).read_text(errors="replace").strip()[-2000:]
        raise UserError(f"the emulator did not start: {words or error}") from None
    return Emulator(url, process.pid, settings, log_dir, process)


def stop(emulator: Emulator) -> None:
    """End an emulator: SIGTERM, and after ``STOP_S`` seconds SIGKILL. Nothing happens if it has ended already.

    Requests in flight are cut and stand in the log as aborted.
    """
    _end(emulator.process)


def _url(process: subprocess.Popen[bytes], deadline: float) -> str:
    """Return the URL from the child's first line. Raises OSError if there is none in time."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], max(0, deadline - time.monotonic()))
    line = process.stdout.readline() if ready else b""
    if not line:
        raise OSError(f"no word from it within {START_S:g} s" if not ready else "it ended at once")
    return str(msgspec.json.decode(line)["url"])


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()
