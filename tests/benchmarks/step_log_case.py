"""What the step log costs its server: nanoseconds a record, and tokens/s of a real vLLM with it and without."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace as Stats

from replay.coverage import read_steps
from replay.step_log import Steps
from replay.step_plugin import environment, install
from tests.benchmarks.wire_cases import CORES, Row
from tests.integration.test_step_log_vllm import send
from tests.integration.vllm_cpu import BUILDER, VENV, served

RECORDS = 20_000
REQUESTS, PROMPT, OUTPUT = 8, 16, 400
ROUNDS = 12

SWITCHED = """
import os, time
from decodegate_step_log import StepLog as Base

class StepLog(Base):
    spent = 0

    def record(self, *statistics, **more):
        if not os.path.exists({off!r}):
            started = time.perf_counter_ns()
            super().record(*statistics, **more)
            self.spent += time.perf_counter_ns() - started
        elif self.spent:
            with open({off!r}, "w") as file:
                file.write(str(self.spent))
            self.spent = 0
"""
"""Looks for a file at every step, with the log and without, and writes into it what the log took while it was on."""


def record() -> list[Row]:
    """One record() of the step log: 1 % of the fastest steps, 2 ms, is 20,000 ns."""
    scheduler = Stats(
        num_running_reqs=64,
        num_waiting_reqs=0,
        num_skipped_waiting_reqs=0,
        kv_cache_usage=0.5,
        cudagraph_stats=Stats(num_unpadded_tokens=512, num_padded_tokens=512, runtime_mode="FULL"),
        spec_decoding_stats=Stats(num_drafts=64, num_draft_tokens=448, num_accepted_tokens=300),
    )
    iteration = Stats(
        num_generation_tokens=364,
        time_to_first_tokens_iter=[],
        inter_token_latencies_iter=[0.01] * 64,
        finished_requests=[],
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DECODEGATE_STEPS"] = folder
        log = Steps(Stats())
        del os.environ["DECODEGATE_STEPS"]
        started = time.perf_counter_ns()
        for _ in range(RECORDS):
            log.record(scheduler, iteration)
        taken = time.perf_counter_ns() - started
        assert log.file is not None
        os.close(log.file)
    return [Row("record() of a step", taken / RECORDS, "ns", target=20_000, better="less")]


def real_server() -> list[Row]:
    """A real vLLM on the CPU whose step log is switched off and on between rounds (needs DECODEGATE_VLLM_CPU)."""
    if not (VENV / "bin" / "vllm").exists() or not BUILDER.exists():
        return []
    os.sched_setaffinity(0, CORES)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plugin = install(folder)
        off = folder / "off"
        (plugin / "switched.py").write_text(SWITCHED.format(off=str(off)))
        [entry] = plugin.glob("*.dist-info/entry_points.txt")
        entry.write_text(entry.read_text().replace("decodegate_step_log:", "switched:"))
        model = folder / "model"
        words = [VENV / "bin" / "python", BUILDER, model, "--tokenizer", "byte"]
        subprocess.run(words, check=True, capture_output=True)
        ours = environment(plugin, folder / "steps", os.environ)
        with served(
            model, folder / "server", env=ours, instrument=False, max_model_len=2048, cudagraph_metrics=True
        ) as server:
            url = server.url
            _seconds(url)
            _switched_off(url, off)
            [(_, warm)] = read_steps(folder / "steps")
            seconds, ratios, without, spent_ns = 0.0, [], [], 0
            for _ in range(ROUNDS):  # on, off, off, on: what drifts cancels
                on = _seconds(url)
                apart, spent = _switched_off(url, off)
                on += _seconds(url)
                seconds += on
                without.append(apart)
                ratios.append(apart / on)
                spent_ns += spent
            spent_ns += _switched_off(url, off)[1]
            [(_, steps)] = read_steps(folder / "steps")
    logged = steps[len(warm) :]
    assert logged["decode_tokens"].sum() + logged["first_tokens"].sum() == 2 * ROUNDS * REQUESTS * OUTPUT
    lower, _, upper = statistics.quantiles(ratios, n=4)
    tokens = 2 * REQUESTS * OUTPUT
    return [
        Row("vLLM on the CPU, tiny model, 8 requests, no step log", tokens / statistics.median(without), "t/s"),
        Row("time in record() : time that its steps took", spent_ns / seconds / 1e7, "%", target=1, better="less"),
        Row("rate lost with the step log, median of rounds", 100 * (1 - statistics.median(ratios)), "%", better="less"),
        Row("  quartiles of the rounds apart", 100 * (upper - lower), "%", better="less"),
    ]


def _seconds(url: str) -> float:
    started = time.monotonic()
    asyncio.run(send(url, [(PROMPT, OUTPUT)] * REQUESTS))
    return time.monotonic() - started


def _switched_off(url: str, off: Path) -> tuple[float, int]:
    """Seconds of two runs without the step log, and the nanoseconds that it took while it was last on."""
    off.touch()
    seconds = _seconds(url) + _seconds(url)
    spent = int(off.read_text())
    off.unlink()
    return seconds, spent
