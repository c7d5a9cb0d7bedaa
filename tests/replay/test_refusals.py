"""Causes out of logs that look like vLLM's; those of real servers: tests/integration/test_serving_vllm.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay.refusals import REFUSALS, cause, last_words, read_tail, refused_decode_backend

ENGINE = "(EngineCore pid=7186) ERROR 11-30 19:32:12 [core.py:1510] "
API = "(APIServer pid=7152) "

SYMPTOMS = f"""{API}Traceback (most recent call last):
{API}  File "/opt/vllm/v1/engine/utils.py", line 1431, in wait_for_engine_startup
{API}    raise RuntimeError(
{API}RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{'EngineCore': 1}}
/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: 1 leaked shared_memory
  warnings.warn('resource_tracker: There appear to be %d '
"""


def engine_died(error: str) -> str:
    """A log in which the engine says why, and the API server then only that it died."""
    frames = ["EngineCore failed to start.", "Traceback (most recent call last):", '  File "core.py", line 1, in run']
    told = "\n".join(ENGINE + line for line in [*frames, "    raise ValueError(", *error.splitlines()])
    return (
        f"{API}INFO 11-30 19:31:48 [api_utils.py:286] non-default args: {{'additional_config': "
        "{'decode_backend': 'latency_specialized'}, 'port': 8000}\n"
        f"{API}WARNING 11-30 19:31:48 [system_utils.py:255] Errors like `OSError: [Errno 24] Too many` follow.\n"
        f"{told}\n{SYMPTOMS}"
    )


CAUSES = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 139.80 GiB.": (
        "the GPU has too little memory"
    ),
    "ValueError: To serve at least one request with the model's max seq len (4096), (1.0 GiB KV cache is needed, which "
    "is larger than the available KV cache memory (0.5 GiB).": "the KV cache is too small",
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.": (
        "the KV cache is too small"
    ),
    "ValueError: Free memory on device cuda:0 (3.1/139.8 GiB) on startup is less than desired GPU memory utilization": (
        "the GPU's memory is in use by others"
    ),
    "OSError: [Errno 98] Address already in use": "the port is taken",
    "ValueError: Kimi K3 specialized decode does not support tensor parallel size 4": "the model refuses",
    "ValueError: decode_backend=latency_specialized needs a GB300 (SM103) GPU; FlashInfer 0.7; DSpark": (
        "the model refuses"
    ),
    "OSError: Org/modle is not a local folder and is not a valid model identifier listed on the hub": "no such model",
    "huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error. Repository Not Found for url": "no such model",
    "ValueError: Invalid repository ID or local directory specified: '/m'. no file named config.json": "no such model",
    "OSError: You are trying to access a gated repo. 401 Client Error: Unauthorized": "the model hub denies access",
    "OSError: [Errno 28] No space left on device: '/root/.cache'": "the disk is full",
    "RuntimeError: Found no NVIDIA driver on your system.": "no GPU can be used",
    "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory": "no GPU can be used",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error": (
        "the GPUs cannot talk"
    ),
    "ValueError: Model architectures ['KimiK9ForCausalLM'] are not supported for now.": "does not know the model",
    "ModuleNotFoundError: No module named 'flashinfer'": "Python environment lacks something",
    "NotImplementedError: FP8 KV cache is not supported with this attention backend": "refuses these settings together",
}


@pytest.mark.parametrize("error", CAUSES, ids=lambda error: error[:40])
def test_the_childs_error_is_named_and_quoted(error: str) -> None:
    told = cause(engine_died(error), 1)
    assert CAUSES[error] in told
    assert error in told
    assert any(told.endswith(f"({refusal.mend})") for refusal in REFUSALS)


def test_every_reason_of_a_refusal_is_quoted() -> None:
    error = "ValueError: Kimi K3 specialized decode does not support:\n  - TP 4 (8 or 16)\n  - sleep mode\n- LoRA"
    told = cause(engine_died(error), 1)
    assert all(reason in told for reason in ("TP 4 (8 or 16)", "sleep mode", "LoRA"))


def test_processes_that_write_into_one_another_are_told_apart() -> None:
    log = "\n".join(
        [
            "(Worker_TP0 pid=1) ERROR 11-30 12:00:00 [m.py:1] ValueError: this deployment does not support",
            "(Worker_TP1 pid=2) INFO 11-30 12:00:00 [m.py:1] Loading weights",
            "(Worker_TP0 pid=1) ERROR 11-30 12:00:00 [m.py:1]   - LoRA",
            "(Worker_TP1 pid=2) ERROR 11-30 12:00:00 [m.py:1] torch.distributed.DistBackendError: closed by peer",
        ]
    )
    assert "ValueError: this deployment does not support\n  - LoRA (" in cause(log, 1)


def test_an_argument_error_is_quoted() -> None:
    log = "usage: vllm [-h] [-v] {serve}\n            [--kda-decode-backend X]\n"
    log += "vllm: error: unrecognized arguments: --max-model-length 10"
    told = cause(log, 2)
    assert told.startswith(
        "the server does not know an option, or its value: vllm: error: unrecognized arguments: --max"
    )


def test_what_is_not_known_is_the_last_exception_that_is_not_a_symptom() -> None:
    log = engine_died("acme.errors.TeapotError: short and stout")
    assert cause(log, 1) == "acme.errors.TeapotError: short and stout"


@pytest.mark.parametrize(
    ("log", "code", "told"),
    [
        ("", None, "it said nothing"),
        (f"{API}INFO 11-30 12:00:00 [m.py:1] Loading weights\n", None, "its last words were: Loading weights"),
        (f"{API}INFO 11-30 12:00:00 [m.py:1] Loading weights\n", -9, "it was killed: the host may have had too little"),
        (ENGINE + "Worker proc VllmWorker-0 died unexpectedly (exit code: -9)\n", 1, "the host has too little memory"),
        (
            ENGINE
            + "Worker proc VllmWorker-0 died unexpectedly (exit code: -4)\n"
            + ENGINE
            + "RuntimeError: cancelled\n",
            0,
            "Worker proc VllmWorker-0 died unexpectedly",
        ),
        (f"{API}WARNING 11-30 12:00:00 [m.py:1] ValueError: caught\n", 1, "its last words were: ValueError: caught"),
    ],
)
def test_little_to_go_by(log: str, code: int | None, told: str) -> None:
    assert cause(log, code).startswith(told)


def test_a_refused_value_of_the_key_is_told_from_its_mention() -> None:
    value = "ValueError: Supported decode_backend values are auto/latency_specialized"
    assert refused_decode_backend(engine_died(value)) == value
    assert refused_decode_backend(engine_died("ValueError: something else is not supported")) is None


def test_last_words_are_without_prefix_colour_and_bars() -> None:
    bar = "Loading shards:   0% 0/9\rLoading shards:  50% 5/9\r\n"
    assert last_words(f"{API}INFO 11-30 12:00:00 [m.py:1] one\n{bar}") == "Loading shards:  50% 5/9"
    assert (
        last_words("(Worker pid=1) (TP1) \x1b[36mINFO\x1b[0m 11-30 12:00:00 [m.py:1] two words\n --- \n") == "two words"
    )
    assert last_words("INFO:     Application startup complete.\n") == "Application startup complete."


def test_a_long_log_is_read_from_its_end(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    assert read_tail(log) == ""
    log.write_bytes(b"\xff" * 2_000_000 + b"\nOSError: [Errno 98] here\n")
    assert cause(read_tail(log)).startswith("the port is taken")
