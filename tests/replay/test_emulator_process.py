"""Starting and ending the emulator's process, and what is left of its log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from replay.emulator import process
from replay.emulator.settings import EmulatorSettings
from replay.emulator.truth import RequestTruth, StepRun, TruthLog, read_emissions, read_steps
from workloads.errors import UserError

ROOT = Path(__file__).parents[2]


def gone(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def answers(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
        return bool(response.status == 200)


def test_start_and_stop(tmp_path: Path) -> None:
    emulator = process.start(EmulatorSettings(), tmp_path / "log")
    assert answers(emulator.url)
    assert os.getpgid(emulator.pid) == emulator.pid != os.getpgid(0)
    process.stop(emulator)
    assert emulator.process.returncode == 0
    process.stop(emulator)
    assert read_emissions(tmp_path / "log") == []
    with pytest.raises(OSError, match=r"."):
        answers(emulator.url)


def test_a_child_that_cannot_start_is_reported_at_once_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "emissions.jsonl").write_text("")
    start = time.monotonic()
    with pytest.raises(UserError, match="already holds an emulator's log"):
        process.start(EmulatorSettings(), tmp_path)
    assert time.monotonic() - start < process.START_S / 2


def test_a_wedged_child_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = process.start(EmulatorSettings(), tmp_path)
    monkeypatch.setattr(process, "STOP_S", 0.3)
    emulator.process.send_signal(signal.SIGSTOP)
    process.stop(emulator)
    assert emulator.process.returncode == -signal.SIGKILL


def test_the_child_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    started: list[process.Emulator] = []
    thread = threading.Thread(target=lambda: started.append(process.start(EmulatorSettings(), tmp_path)))
    thread.start()
    thread.join()
    time.sleep(0.8)  # longer than the child's look at its parent
    try:
        assert answers(started[0].url)
    finally:
        process.stop(started[0])


def test_the_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import pathlib, sys, time
        from replay.emulator import process
        from replay.emulator.settings import EmulatorSettings
        print(process.start(EmulatorSettings(), pathlib.Path(sys.argv[1])).pid, flush=True)
        time.sleep(60)
        """
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ}
    )
    assert parent.stdout is not None
    try:
        child = int(parent.stdout.readline())
        assert psutil.pid_exists(child)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert gone(child, 5)


def a_truth(number: int) -> RequestTruth:
    return RequestTruth(
        request_id=f"r{number}",
        arrived_ns=1,
        ended_ns=9,
        prompt_tokens=3,
        cached_tokens=None,
        emissions=[(5, 1), (7, 2)],
        finish="length",
        specialised_tokens=2,
    )


def test_a_torn_last_line_is_left_out_and_a_bad_one_before_is_an_error(tmp_path: Path) -> None:
    log = TruthLog(tmp_path)
    run = StepRun(
        t_ns=1, end_ns=5, steps=2, rows=1, prompt_tokens=0, decode_tokens=2, specialised=True, reason="", late_ns=0
    )
    log.steps(run)
    for number in range(3):
        log.request(a_truth(number))
    log.close()
    assert read_steps(tmp_path) == [run]
    path = tmp_path / "emissions.jsonl"
    whole = path.read_bytes()
    for cut in range(whole.rindex(b'{"request_id"') + 1, len(whole)):
        path.write_bytes(whole[:cut])
        assert read_emissions(tmp_path) == [a_truth(0), a_truth(1)]
    path.write_bytes(b"{broken\n" + whole)
    with pytest.raises(UserError, match="line 1"):
        read_emissions(tmp_path)


def test_the_verb_says_where_it_serves_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    script = (
        "import cyclopts; from replay.emulator.cli import emulate; app = cyclopts.App(); app.command(emulate); app()"
    )
    words = [
        "emulate",
        "--draft-tokens",
        "7",
        "--acceptance-length",
        "6",
        "--fault",
        "slow:2",
        "--log-dir",
        str(tmp_path),
    ]
    child = subprocess.Popen([sys.executable, "-c", script, *words], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert child.stdout is not None
    try:
        line = child.stdout.readline()
        assert line.startswith("emulated toy, model 'emulated', at http://127.0.0.1:")
        assert answers(line.split(" at ")[1].strip())
        child.send_signal(signal.SIGINT)
        assert child.wait(10) == 0
    finally:
        child.kill()
        child.stdout.close()
    assert read_steps(tmp_path) == []
