"""The guard alone: whatever happens to whom, no process of a server stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from replay import guard
from tests.replay.fake_vllm import STUBBORN

WORDS = [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(300)"]
STUBBORN_WORDS = [sys.executable, "-c", STUBBORN]


class Guarded:
    """A guard with its server, and what it said."""

    def __init__(self, log: Path, words: list[str], stop_s: float = 30) -> None:
        self.log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-E", "-P", guard.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        assert self.process.stdin is not None
        order = {"words": words, "environment": {**os.environ, "SHOWN": "yes"}, "stop_s": stop_s, "abandoned_s": 0.6}
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        self.started = self.line()

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {}

    def until_up(self, ups: int = 1) -> set[int]:
        """Wait until so many processes have said that they are up; returns all below the guard."""
        deadline = time.monotonic() + 30
        while self.log.read_text().count("up\n") < ups:
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        return {process.pid for process in psutil.Process(self.process.pid).children(recursive=True)}


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Any]:
    made: list[Guarded] = []

    def make(words: list[str], stop_s: float = 30) -> Guarded:
        made.append(Guarded(tmp_path / "log", words, stop_s))
        return made[-1]

    yield make
    for each in made:
        each.process.kill()
        with each.process:
            pass
        if "pid" in each.started and psutil.pid_exists(each.started["pid"]):
            os.kill(each.started["pid"], signal.SIGKILL)


def all_gone(pids: set[int], within_s: float = 20) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.05)
    return False


def with_grandchild(words: list[str]) -> list[str]:
    """A server whose grandchild leaves its process group and whose child ends, so that it is an orphan."""
    child = f"import subprocess; subprocess.Popen({STUBBORN_WORDS!r}, start_new_session=True)"
    return [
        sys.executable,
        "-c",
        f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {child!r}]); subprocess.run({words!r})",
    ]


def test_a_server_is_asked_to_end_and_its_status_told(guarded: Any) -> None:
    under = guarded(WORDS)
    pids = under.until_up()
    assert pids == {under.started["pid"]}
    assert os.getpgid(under.started["pid"]) == under.started["pid"]
    assert os.getsid(under.started["pid"]) == under.process.pid != os.getsid(0)
    under.process.terminate()
    assert under.line() == {"exit": -signal.SIGTERM, "left": []}
    assert under.process.wait(10) == 0
    assert all_gone(pids)


def test_a_server_that_ends_by_itself_takes_its_guard_along(guarded: Any) -> None:
    under = guarded([sys.executable, "-c", "import os; assert os.environ['SHOWN'] == 'yes'; raise SystemExit(7)"])
    assert under.line() == {"exit": 7, "left": []}
    assert under.process.wait(10) == 0


def test_one_that_ignores_the_request_is_killed_after_its_grace(guarded: Any) -> None:
    under = guarded(STUBBORN_WORDS, stop_s=0.3)
    pids = under.until_up()
    under.process.terminate()
    assert under.line() == {"exit": -signal.SIGKILL, "left": []}
    assert all_gone(pids)


def test_one_that_ends_in_time_is_not_killed(guarded: Any) -> None:
    words = [
        sys.executable,
        "-c",
        "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(0.5), sys.exit(3)));"
        "print('up', flush=True); time.sleep(300)",
    ]
    under = guarded(words)
    under.until_up()
    under.process.terminate()
    assert under.line() == {"exit": 3, "left": []}


@pytest.mark.parametrize("how", ["asked", "we died"])
def test_an_orphan_in_a_session_of_its_own_goes_too(guarded: Any, how: str) -> None:
    under = guarded(with_grandchild(WORDS), stop_s=0.5)
    pids = under.until_up(2)
    assert len(pids) == 3
    if how == "asked":
        under.process.terminate()
    else:
        under.process.stdin.close()
    assert under.line()["left"] == []
    assert all_gone(pids)


def test_our_death_shortens_a_long_grace(guarded: Any) -> None:
    under = guarded(STUBBORN_WORDS, stop_s=3600)
    pids = under.until_up()
    under.process.terminate()
    time.sleep(0.2)
    assert under.process.poll() is None
    under.process.stdin.close()
    assert all_gone(pids)


def test_a_killed_guard_leaves_no_server(guarded: Any) -> None:
    under = guarded(STUBBORN_WORDS)
    pids = under.until_up()
    under.process.kill()
    assert all_gone(pids)


def test_nothing_is_started_for_one_who_died_before_saying_what(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-E", "-P", guard.__file__], input=b'{"words": ["touch",', capture_output=True, timeout=30
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, b"", b"")


def test_a_command_that_cannot_run_is_told(guarded: Any, tmp_path: Path) -> None:
    (tmp_path / "not-a-program").write_text("\0")
    (tmp_path / "not-a-program").chmod(0o755)
    under = guarded([str(tmp_path / "not-a-program")])
    assert "Exec format error" in under.started["error"]
    assert under.process.wait(10) == 1
