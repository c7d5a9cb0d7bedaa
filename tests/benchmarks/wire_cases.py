"""How fast and how true the wire is: this process on one core, the server on another.

Each case does what a lane does (send, wait, decode in slices, send again) and returns rows of figures.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec
import uvloop

from replay.outcomes import Outcome, outcome_sliced
from replay.wire import Exchange, Limits, Wire

ROOT = Path(__file__).parents[2]
CORES = sorted(os.sched_getaffinity(0))
SERVER_CORE, CLIENT_CORE = CORES[0], CORES[-1]
FIRST_MS, GAP_MS = 20.0, 10.0


class Row(msgspec.Struct, frozen=True):
    """One figure. ``target``: "at least" or "at most" this, by ``better``; None: there is none."""

    name: str
    value: float
    unit: str
    target: float | None = None
    better: str = "more"


@contextmanager
def instant_server(*options: str) -> Iterator[str]:
    """Start the instant server on its core; its URL."""
    command = [sys.executable, "-m", "tests.benchmarks.instant_server", *options]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        os.sched_setaffinity(server.pid, {SERVER_CORE})
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.kill()
        server.wait()


def paced_server() -> AbstractContextManager[str]:
    return instant_server("--first-ms", str(FIRST_MS), "--gap-ms", str(GAP_MS))


async def drive(
    url: str, streams: int, requests: int, tokens: int
) -> tuple[float, float, list[tuple[Exchange, Outcome]]]:
    """``requests`` requests over ``streams`` closed lanes: wall seconds, CPU seconds, what came of each."""
    body = msgspec.json.encode(
        {
            "model": "tiny",
            "prompt": "x" * 128,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    limits = Limits()
    results: list[tuple[Exchange, Outcome]] = []
    left = requests
    async with Wire(url, limits, connections=streams, headers={"Authorization": "Bearer none"}) as wire:

        async def lane() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                exchange = await wire.exchange("/v1/completions", body, {"X-Session-Id": "0123456789abcdef"})
                result = await outcome_sliced(
                    exchange, api="completions", asked_output=tokens, exact_length=True, limits=limits
                )
                assert result.status == "ok", (result.error, result.detail)
                exchange.body = b""
                results.append((exchange, result))

        await wire.connect_ahead(streams)
        await asyncio.sleep(0.2)  # the kernel has accepted them; let the server do so too
        wall, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(lane() for _ in range(streams)))
        return time.perf_counter() - wall, time.process_time() - cpu, results


def requests_per_second() -> list[Row]:
    """Short replies, each in one read."""
    with instant_server() as url:
        wall, cpu, results = uvloop.run(drive(url, 64, 16_000, 8))
    return [
        Row("requests, 8 tokens, 64 lanes", len(results) / wall, "1/s", 8000),
        Row("CPU a request of 8 tokens", cpu / len(results) * 1e6, "µs", None, "less"),
    ]


def chunks_per_second() -> list[Row]:
    """Long replies as fast as they come, decoding included."""
    with instant_server() as url:
        wall, cpu, results = uvloop.run(drive(url, 64, 1_500, 512))
    chunks = sum(len(result.chunks) for _, result in results)
    return [
        Row("chunks, 512 tokens, 64 lanes", chunks / wall, "1/s", 340_000),
        Row("CPU a chunk, many in a read, all in", cpu / chunks * 1e6, "µs", None, "less"),
    ]


def truth_64() -> list[Row]:
    """Measured against true times, 64 paced streams."""
    return _truth(64, 320)


def truth_256() -> list[Row]:
    """Measured against true times, 256 paced streams."""
    return _truth(256, 1280)


def _truth(streams: int, requests: int) -> list[Row]:
    tokens = 128
    with paced_server() as url:
        wall, cpu, results = uvloop.run(drive(url, streams, requests, tokens))
    first_ms, gaps_ms, worst_ms = [], [], []
    for exchange, result in results:
        assert result.first_token_ns is not None
        assert result.last_token_ns is not None
        first_ms.append((result.first_token_ns - exchange.sent_ns) / 1e6)
        gaps_ms.append((result.last_token_ns - result.first_token_ns) / 1e6 / (tokens - 1))
        times = result.chunks["t_ns"]
        worst_ms.append(max(abs((times - times[0]) / 1e6 - GAP_MS * (times * 0 + range(tokens)))))
    chunks = tokens * len(results)
    where = f"{streams} paced streams"
    return [
        Row(f"TTFT error, mean, {where}", statistics.mean(abs(ms - FIRST_MS) for ms in first_ms), "ms", 5.0, "less"),
        Row(f"TTFT error, worst, {where}", max(abs(ms - FIRST_MS) for ms in first_ms), "ms", None, "less"),
        Row(
            f"ITL error, mean, {where}",
            statistics.mean(abs(ms - GAP_MS) for ms in gaps_ms) / GAP_MS * 100,
            "%",
            0.5,
            "less",
        ),
        Row(
            f"ITL error, worst request, {where}",
            max(abs(ms - GAP_MS) for ms in gaps_ms) / GAP_MS * 100,
            "%",
            None,
            "less",
        ),
        Row(f"chunk off its due time, mean of worst, {where}", statistics.mean(worst_ms), "ms", None, "less"),
        Row(f"chunks, {where}", chunks / wall, "1/s"),
        Row(f"CPU a chunk, one a read, all in, {where}", cpu / chunks * 1e6, "µs", None, "less"),
        Row(f"CPU share of the client, {where}", cpu / wall * 100, "%", None, "less"),
    ]
