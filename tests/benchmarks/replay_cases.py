"""The replay as a whole: bodies, a corpus too big to hold, and real recorded sessions at full speed.

The last two start the command's own processes: parent, workers, run directory and all.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import statistics
import tarfile
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from replay.compare import run_blocks, start_run
from replay.emulator.truth import read_emissions
from replay.experiment import experiment_of
from replay.servers import Servers
from tests.benchmarks.wire_cases import CORES, Row, instant_server
from tests.integration.runs import silent
from tests.shared import TRACES
from workloads.content import vocabulary_of_range
from workloads.formats import weka
from workloads.generate import GeneratorSettings, generate
from workloads.rendering import Rendering, prompt_for, token_table

BLOCK = 64
GPUS = {"count": 1, "kind": "none"}


def bodies() -> list[Row]:
    """A prompt of 500,000 token ids: the first time, and at the next turn, when 1,264 tokens are new."""
    tokens, growth = 500_000, 1_264
    rendering = Rendering(api="completions", model="m", vocabulary=vocabulary_of_range(1000, 30000))
    prompt = prompt_for(
        rendering,
        token_table(rendering),
        content_key="k",
        block_size=BLOCK,
        seed=1,
        block_salt="1",
        session="s",
        play=0,
    )
    blocks = -(-tokens // BLOCK)
    prompt.advance(0, list(range(blocks)), tokens, 100)
    started = time.perf_counter()
    worst = 0.0
    step = time.perf_counter()
    for _ in prompt.render():
        worst = max(worst, time.perf_counter() - step)
        step = time.perf_counter()
    cold = time.perf_counter() - started
    prompt.body(100)
    more = -(-(tokens + growth) // BLOCK)
    prompt.advance(blocks, list(range(blocks, more)), tokens + growth, 100)
    started = time.perf_counter()
    for _ in prompt.render():
        pass
    body, _ = prompt.body(100)
    warm = time.perf_counter() - started
    assert len(json.loads(b"".join(body))["prompt"]) == tokens + growth
    return [
        Row("body of 500k tokens, next turn", warm * 1e3, "ms", 10.0, "less"),
        Row("body of 500k tokens, first turn, in slices", cold * 1e3, "ms", None, "less"),
        Row("longest slice of that", worst * 1e3, "ms", None, "less"),
    ]


def big_corpus() -> list[Row]:
    """1,800 sessions of up to 40 turns: from the command's start to its first request, and memory at its highest."""
    with tempfile.TemporaryDirectory() as folder, instant_server() as url:
        corpus = Path(folder) / "corpus.jsonl"
        turns = _write_corpus(corpus)
        megabytes = corpus.stat().st_size / 1e6
        described = {
            "model": "tiny",
            "token_ids": [1000, 30000],
            "workload": {"path": str(corpus)},
            "replay": {
                "lanes": 64,
                "end": "duration",
                "duration_s": 3,
                "drain_s": 1,
                "pause_cap_s": 1,
                "order": "AB",
                "warmup": {"requests": 0},
            },
            "backends": {name: {"url": url, "gpus": GPUS} for name in ("baseline", "candidate")},
        }
        seconds, peak = _watched(described, Path(folder) / "run", skip_lengths=True)
        return [
            Row(f"corpus: {turns:,} turns", megabytes, "MB"),
            Row("start to first request", seconds, "s", 30.0, "less"),
            Row("RSS, parent and worker together", peak / 1e6, "MB", 2000.0, "less"),
        ]


def _write_corpus(path: Path) -> int:
    """1,800 sessions of exactly 40 turns, in the Weka form; returns the number of turns."""
    turns = 0
    with path.open("w") as file:
        kept = 0
        for trace in generate(GeneratorSettings(sessions=20_000, seed=7, input_scale=2.8, subagent_share=0.0)):
            if len(trace.streams[0].turns) < 40:
                continue
            del trace.streams[0].turns[40:]
            file.write(json.dumps(weka.session(trace)) + "\n")
            turns += 40
            kept += 1
            if kept == 1_800:
                return turns
    raise AssertionError("the generator made too few long sessions")


def real_sessions() -> list[Row]:
    """40 recorded sessions, pauses taken out, both cores, 2 workers against the instant server."""
    if not TRACES.exists():
        print(f"  left out: no {TRACES}")
        return []
    os.sched_setaffinity(0, CORES)
    with tempfile.TemporaryDirectory() as folder, instant_server() as url:
        with tarfile.open(TRACES) as archive:
            archive.extractall(folder, filter="data")
        described = {
            "model": "tiny",
            "token_ids": [1000, 30000],
            "workload": {"path": str(Path(folder) / "kv-cache-tester"), "sessions": 40, "max_turns": 13},
            "replay": {
                "lanes": 16,
                "pause_cap_s": 0,
                "ramp_s": 0.05,
                "order": "AB",
                "workers": 2,
                "warmup": {"requests": 0},
            },
            "backends": {name: {"url": url, "gpus": GPUS} for name in ("baseline", "candidate")},
        }
        run = Path(folder) / "run"
        _watched(described, run, skip_lengths=True)
        rows = []
        for path in sorted((run / "blocks").iterdir()):
            block = json.loads((path / "block.json").read_text())
            records = [
                json.loads(line) for file in path.glob("w*.requests.jsonl") for line in file.read_text().splitlines()
            ]
            assert all(record["status"] == "ok" for record in records)
            seconds = (block["ended_ns"] - block["started_ns"]) / 1e9
            chunks = sum(record["chunk_count"] for record in records)
            prompt = statistics.median(record["asked_input"] for record in records)
            rows += [
                Row(f"median prompt of {len(records)} requests", prompt, "tok"),
                Row(f"requests, real sessions, block {path.name}", len(records) / seconds, "1/s", 500.0),
                Row(f"chunks, real sessions, block {path.name}", chunks / seconds, "1/s"),
            ]
        return rows


def emulator_truth() -> list[Row]:
    """64 streams at the published Kimi K3 rates, against the emulator's emission log, on all cores."""
    os.sched_setaffinity(0, CORES)
    emulator = {"profile": "kimi-k3-tp16"}
    described = {
        "model": "emulated",
        "workload": {
            "synthetic": {"sessions": 64, "seed": 5, "input_scale": 0.02, "max_turns": 4, "subagent_share": 0.0},
            "max_output": 300,
        },
        "replay": {"lanes": 64, "pause_cap_s": 0.2, "order": "AB", "warmup": {"requests": 4}},
        "backends": {
            name: {"emulator": emulator, "decode_backend": backend, "gpus": GPUS}
            for name, backend in (("baseline", "auto"), ("candidate", "latency_specialized"))
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        _watched(described, run, skip_lengths=False)
        rows: list[Row] = []
        for block in sorted((run / "blocks").iterdir()):
            truth = {emission.request_id: emission.emissions for emission in read_emissions(block / "server")}
            rates, firsts, lags = [], [], []
            for line in (block / "w0.requests.jsonl").read_text().splitlines():
                record = json.loads(line)
                emitted = truth[record["request_id"]]
                if record["phase"] != "measured" or len(emitted) < 2:
                    continue
                seen = record["last_token_ns"] - record["first_token_ns"]
                rates.append(abs(seen / (emitted[-1][0] - emitted[0][0]) - 1) * 100)
                firsts.append((record["first_token_ns"] - emitted[0][0]) / 1e6)
                lags.append((record["sent_ns"] - record["due_ns"]) / 1e6)
            name = f"{len(rates)} requests, {block.name}"
            rows += [
                Row(f"decode rate error, median, {name}", statistics.median(rates), "%", 0.5, "less"),
                Row(f"decode rate error, worst, {name}", max(rates), "%", 2.0, "less"),
                Row(f"first token late, P99, {name}", statistics.quantiles(firsts, n=100)[98], "ms", 2.0, "less"),
                Row(f"send lag, P99, {name}", statistics.quantiles(lags, n=100)[98], "ms", None, "less"),
            ]
        return rows


def _watched(described: dict[str, Any], run: Path, *, skip_lengths: bool) -> tuple[float, float]:
    """Run a comparison in a child process; seconds until its first record, and the highest RSS of its tree, bytes."""
    spawn = multiprocessing.get_context("spawn")
    started = time.monotonic_ns()
    process = spawn.Process(target=_compare, args=(described, str(run), skip_lengths))
    process.start()
    peak = [0.0]

    def watch() -> None:
        root = psutil.Process(process.pid)
        while process.is_alive():
            with contextlib.suppress(psutil.Error):
                peak[0] = max(peak[0], sum(p.memory_info().rss for p in [root, *root.children(recursive=True)]))
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    process.join()
    watcher.join()
    assert process.exitcode == 0
    files = (run / "blocks").glob("01-*/w*.requests.jsonl")
    firsts = [json.loads(line)["sent_ns"] for file in files for line in file.read_text().splitlines()]
    return (min(firsts) - started) / 1e9, peak[0]


def _compare(described: dict[str, Any], run: str, skip_lengths: bool) -> None:
    if skip_lengths:
        from replay.probes import lengths  # the instant server says 10 prompt tokens whatever it gets

        lengths.LENGTHS = lengths.CONVERSATION = []
    experiment = experiment_of(described)
    with Servers(experiment, Path(run), silent) as servers:
        manifest = start_run(experiment, servers, Path(run), allow_unmatched=False, tell=silent)
        run_blocks(experiment, servers, Path(run), manifest, silent)
