"""What a snapshot shows of a server and its GPUs, and that nothing it lacks is made up."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from replay import snapshot
from replay.emulator import process as emulator
from replay.emulator.settings import EmulatorSettings
from replay.records import Command, Snapshot
from replay.wire import Limits, Wire
from tests.replay.fake_nvml import gpu, install, process
from tests.scripted_server import Request, Step, reply, serve

INFO: dict[str, Any] = {
    "vllm_config": {
        "cache_config": {"cache_dtype": "auto", "num_gpu_blocks": 1000},
        "parallel_config": {"tensor_parallel_size": 2, "master_port": 29501, "_data_parallel_master_port_list": [1]},
        "additional_config": {"decode_backend": "latency_specialized"},
        "instance_id": "1796067211890797164",
    },
    "vllm_env": {"VLLM_PORT": 1, "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME": "vllm_mm_x"},
    "system_env": {"cuda_runtime_version": "13.0"},
}

PAGES: dict[str, Any] = {
    "/version": {"version": "0.33.0"},
    "/v1/models": {"data": [{"id": "other", "max_model_len": 1}, {"id": "m", "max_model_len": 4096}]},
    "/v1/completions": {"choices": [], "system_fingerprint": "vllm-0.33.0-8a99caa6"},
    "/server_info?config_format=json": INFO,
}


def take(
    url: str, edge: Literal["before", "after"] = "before", started: Command | None = None, model: str = "m"
) -> Snapshot:
    async def ask() -> Snapshot:
        async with Wire(url, Limits(), connections=1, headers={}) as wire:
            return await snapshot.take(wire, model, edge, started)

    return asyncio.run(ask())


def pages(found: dict[str, Any]) -> Any:
    def script(request: Request) -> Sequence[Step]:
        return reply(200, found[request.path]) if request.path in found else reply(404, {"detail": "Not Found"})

    return script


def command(**changes: Any) -> Command:
    usual: dict[str, Any] = {
        "words": ["vllm"], "environment": {}, "devices": None, "url": "", "pid": os.getpid(), "started_unix_s": 0.0
    }  # fmt: skip
    return Command(**usual | changes)


def test_all_that_a_server_tells() -> None:
    with serve(pages(PAGES)) as server:
        seen = take(server.url)
    assert (seen.version, seen.fingerprint, seen.max_model_len) == ("0.33.0", "vllm-0.33.0-8a99caa6", 4096)
    assert len(seen.config_digest or "") == 64
    asked = [json.loads(request.body) for request in server.requests if request.body]
    assert asked == [{"model": "m", "prompt": [1, 2, 3, 4], "max_tokens": 1}]


@pytest.mark.parametrize(
    "found",
    [
        {},
        dict.fromkeys(PAGES, b"<html>"),
        dict.fromkeys(PAGES, "[]"),
        {"/version": {"version": 3}, "/v1/models": {"data": [{"id": "m"}]}, "/v1/completions": {}},
        {"/v1/models": {"data": ["m"]}, "/server_info?config_format=json": "text"},
    ],
)
def test_what_a_server_does_not_tell_is_null(found: dict[str, Any]) -> None:
    with serve(pages(found)) as server:
        seen = take(server.url)
    assert (seen.version, seen.fingerprint, seen.max_model_len, seen.config_digest) == (None,) * 4


def test_an_emulator_answers_too(tmp_path: Path) -> None:
    running = emulator.start(EmulatorSettings(profile="toy"), tmp_path)
    try:
        seen = take(running.url, model=EmulatorSettings(profile="toy").model)
    finally:
        emulator.stop(running)
    assert seen.version
    assert seen.max_model_len


def changed(place: str, value: object) -> dict[str, Any]:
    info: dict[str, Any] = json.loads(json.dumps(INFO))
    *path, last = place.split("/")
    inner = info
    for key in path:
        inner = inner[key]
    inner[last] = value
    return info


@pytest.mark.parametrize(
    ("place", "value", "same"),
    [
        ("vllm_config/instance_id", "2", True),
        ("vllm_config/cache_config/num_gpu_blocks", 1001, True),
        ("vllm_config/parallel_config/master_port", 3, True),
        ("vllm_config/parallel_config/_data_parallel_master_port_list", [4], True),
        ("vllm_env/VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME", "vllm_mm_y", True),
        ("vllm_config/cache_config/cache_dtype", "fp8", False),
        ("vllm_config/parallel_config/tensor_parallel_size", 4, False),
        ("vllm_config/additional_config", {}, False),
        ("vllm_env/VLLM_NEW", True, False),
    ],
)
def test_the_digest_is_of_settings_not_of_starts(place: str, value: object, same: bool) -> None:
    digests = []
    for info in (INFO, changed(place, value)):
        with serve(pages({"/server_info?config_format=json": info})) as server:
            digests.append(take(server.url).config_digest)
    assert None not in digests
    assert (digests[0] == digests[1]) == same


# -- GPUs


@pytest.mark.parametrize("edge", ["before", "after"])
def test_gpus_of_a_server_that_we_started(monkeypatch: pytest.MonkeyPatch, edge: Literal["before", "after"]) -> None:
    """Of the visible ones those that it uses."""
    mine = gpu(1, ComputeRunningProcesses_v3=[process(os.getpid()), process(1)])
    install(monkeypatch, gpu(0), mine, gpu(2))
    with serve(pages(PAGES)) as server:
        seen = take(server.url, edge, command())
    assert seen.gpus is not None
    assert [reading.index for reading in seen.gpus] == [1]
    assert [process.ours for process in seen.gpus[0].processes or []] == [True, False]
    before_first_request = seen.t_ns <= min(request.came_ns for request in server.requests)
    assert before_first_request == (edge == "after")


def test_gpus_are_read_again_when_the_window_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, gpu(0))
    with serve(pages(PAGES)) as server:
        taken = take(server.url, "before", command())
    fake.rows[0]["TotalEnergyConsumption"] += 5
    again = snapshot.refreshed(taken, "http://127.0.0.1:1", command())
    assert taken.gpus is not None
    assert again.gpus is not None
    assert again.gpus[0].energy_mj == (taken.gpus[0].energy_mj or 0) + 5
    assert again.t_ns > taken.t_ns
    assert (again.version, again.config_digest) == (taken.version, taken.config_digest)


def test_gpus_are_those_that_the_server_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, gpu(0), gpu(1), gpu(2))
    with serve(pages({})) as server:
        by_index = take(server.url, started=command(devices=[2]))
        by_environment = take(server.url, started=command(environment={"CUDA_VISIBLE_DEVICES": "1"}))
        gone = take(server.url, started=command(devices=[7]))
    assert [reading.index for reading in by_index.gpus or []] == [2]
    assert [reading.index for reading in by_environment.gpus or []] == [1]
    assert (gone.gpus, gone.gpus_unseen) == (None, "there is no GPU 7: this host has 3")


def test_gpus_of_a_server_on_several_hosts_are_not_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, gpu(0), gpu(1))
    words = ["srun", "./rank.sh", "vllm", "serve", "m", "--nnodes"]
    with serve(pages(PAGES)) as server:
        over_hosts, alone = (take(server.url, started=command(words=[*words, hosts])) for hosts in ("4", "1"))
    assert over_hosts.gpus is None
    assert over_hosts.gpus_unseen == "its server runs on 4 hosts, and only this one's GPUs are seen"
    assert alone.gpus is not None


def test_a_server_that_someone_else_started_has_no_gpus_here(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, gpu(0))
    with serve(pages({})) as server:
        for url in (server.url, server.url.replace("127.0.0.1", "localhost")):
            seen = take(url)
            assert seen.gpus is None
            assert seen.gpus_unseen.startswith("we did not start its server")
    assert snapshot._gpus("http://10.0.0.1:8000", None, ())[1:] == (None, "another host")
