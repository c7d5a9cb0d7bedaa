"""Writes synthetic run directories through the schemas of replay/records.py, with known seconds per token."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from replay.records import (
    CHUNK,
    STEP,
    Backend,
    Block,
    Gpus,
    HealthSample,
    Manifest,
    MetricsSample,
    Plan,
    Play,
    RequestRecord,
    Session,
    Snapshot,
    StepLog,
    Stream,
    Turn,
)

MS = 1_000_000
BASELINE, CANDIDATE = "baseline", "candidate"
START_NS = 1_000_000_000_000

Chunks = list[tuple[int, int]]
"""(t_ns, tokens) of each chunk."""


def request(
    *,
    at_ns: int = START_NS,
    ttft_s: float = 0.2,
    seconds_per_token: float = 0.01,
    output: int = 21,
    first_chunk: int = 1,
    per_chunk: int = 1,
    session: str = "s0",
    turn: int = 0,
    asked_input: int = 1000,
    ideal_cached: int = 0,
    **changes: Any,
) -> tuple[RequestRecord, Chunks]:
    """An ok turn, due and sent at ``at_ns``, with exactly these times; ``changes`` replace fields of the record."""
    first = at_ns + round(ttft_s * 1e9)
    chunks: Chunks = [(first, first_chunk)]
    done = first_chunk
    while done < output:
        step = min(per_chunk, output - done)
        done += step
        chunks.append((first + round((done - first_chunk) * seconds_per_token * 1e9), step))
    last = chunks[-1][0]
    record = RequestRecord(
        request_id=f"{session}-{turn}-{at_ns}", session=session, play=0, stream=0, turn=turn, lane=0, phase="measured",
        prompt_digest=hashlib.sha256(f"{session} {turn}".encode()).hexdigest()[:16],
        asked_input=asked_input, asked_output=output, ideal_cached=ideal_cached,
        due_ns=at_ns, sent_ns=at_ns, pool_wait_ns=0, first_byte_ns=first, first_token_ns=first, first_answer_ns=first,
        last_token_ns=last, end_ns=last + MS, status="ok", http_status=200, finish_reason="length",
        input_tokens=asked_input, output_tokens=output, cached_tokens=ideal_cached, first_chunk_tokens=first_chunk,
        token_source="usage",
    )  # fmt: skip
    return msgspec.structs.replace(record, **changes), chunks


def agreeing(record: RequestRecord, chunks: Chunks) -> Chunks:
    """The chunks, changed to the record's first and last time and its count of tokens."""
    first, last, tokens = record.first_token_ns, record.last_token_ns, record.output_tokens
    if first is None or last is None:
        return chunks
    if tokens is not None:
        while len(chunks) > 1 and sum(count for _, count in chunks) > tokens:
            chunks = chunks[:-1]
        chunks = [*chunks[:-1], (last, tokens - sum(count for _, count in chunks[:-1]))]
    return [(first, chunks[0][1]), *chunks[1:-1], (last, chunks[-1][1])] if len(chunks) > 1 else chunks


def failed(record: RequestRecord, error: str = "http 503", **changes: Any) -> RequestRecord:
    """The same turn, refused."""
    empty = dict.fromkeys(
        ("first_byte_ns", "first_token_ns", "first_answer_ns", "last_token_ns", "finish_reason", "input_tokens",
         "output_tokens", "cached_tokens", "first_chunk_tokens", "token_source"),
    )  # fmt: skip
    return msgspec.structs.replace(record, status="failed", error=error, http_status=503, **empty, **changes)


def write_block(
    run: Path,
    index: int,
    backend: str,
    requests: Iterable[tuple[RequestRecord, Chunks]],
    *,
    started_ns: int = START_NS,
    ended_ns: int | None = None,
    workers: int = 1,
    loop_lag_ms: float = 0.2,
    steps: list[dict[str, Any]] | None = None,
    metrics: list[MetricsSample] | None = None,
    **changes: Any,
) -> Path:
    """Write one block; requests are dealt out to the workers in turn. ``changes`` replace fields of Block."""
    folder = run / "blocks" / f"{index:02d}-{backend}"
    folder.mkdir(parents=True)
    requests = list(requests)
    if ended_ns is None:
        ended_ns = max([record.end_ns for record, _ in requests], default=started_ns)
    for worker in range(workers):
        lines, pieces, start = [], [], 0
        for record, chunks in requests[worker::workers]:
            kept = chunks if record.first_token_ns is not None else []
            lines.append(msgspec.json.encode(msgspec.structs.replace(record, chunk_start=start, chunk_count=len(kept))))
            pieces.append(np.array(kept, CHUNK))
            start += len(kept)
        (folder / f"w{worker}.requests.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
        (folder / f"w{worker}.chunks.bin").write_bytes(np.concatenate(pieces).tobytes() if pieces else b"")
        samples = [
            HealthSample(
                t_ns=t, loop_lag_ms_max=loop_lag_ms * 2, loop_lag_ms_p99=loop_lag_ms, in_flight=2, lanes_in_session=1,
                cpu_share=0.2, rss_bytes=10**8,
            )
            for t in range(started_ns, ended_ns + 1, 1000 * MS)
        ]  # fmt: skip
        (folder / f"w{worker}.health.jsonl").write_bytes(b"".join(msgspec.json.encode(s) + b"\n" for s in samples))
    if steps is not None:
        (folder / "server").mkdir()
        (folder / "server" / "steps.jsonl").write_bytes(b"".join(msgspec.json.encode(s) + b"\n" for s in steps))
    if metrics is not None:
        (folder / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(s) + b"\n" for s in metrics))
    block = Block(
        index=index, backend=backend, salt=str(index), started_unix_s=1.7e9, started_ns=started_ns, ended_ns=ended_ns,
        drained_ns=ended_ns, warmup_s=1.0, warmup_requests=1, warmup_planned=2, sent=len(requests),
        plays_ended=len({(record.session, record.play) for record, _ in requests}), plays_cut=0, not_reached=0,
        finished=True,
    )  # fmt: skip
    block = msgspec.structs.replace(block, **changes)
    (folder / "block.json").write_bytes(msgspec.json.encode(block))
    return folder


def readings(records: list[RequestRecord], started_ns: int) -> list[MetricsSample]:
    """What the /metrics of a server that served just these say, on top of earlier totals, with one reading between."""
    tokens = sum(record.output_tokens or 0 for record in records)
    prompts = sum(record.input_tokens or 0 for record in records)
    engine = {"engine": "0", "model_name": "m"}

    def page(generated: int, prompt: int) -> list[tuple[str, dict[str, str], float]]:
        return [
            ("vllm:generation_tokens_total", engine, float(generated)),
            ("vllm:prompt_tokens_total", engine, float(prompt)),
        ]

    gauges = [("vllm:num_requests_running", engine, 2.0), ("vllm:num_requests_waiting", engine, 0.0)]
    return [
        MetricsSample(t_ns=started_ns - MS, at="start", samples=page(5_000, 70_000)),
        MetricsSample(t_ns=started_ns + MS, at="between", samples=gauges),
        MetricsSample(t_ns=started_ns + 2 * MS, at="end", samples=page(5_000 + tokens, 70_000 + prompts)),
    ]


def write_frame(run: Path, *, send: int, order: list[str], lanes: int = 2, **changes: Any) -> None:
    """Write manifest, plan and sessions. ``changes`` replace fields of the manifest, or of the plan if it has them."""
    run.mkdir(parents=True, exist_ok=True)
    turn = Turn(input_tokens=1000, output_tokens=21, keep=0, new_blocks=[1])
    session = Session(id="s0", content_key="s0", block_size=64, streams=[Stream(agent="main", turns=[turn])])
    sessions = msgspec.json.encode(session) + b"\n"
    (run / "sessions.jsonl").write_bytes(sessions)
    plan = Plan(
        seed=1, mode="closed", end="work", duration_s=None, drain_s=30.0,
        lanes=[[Play(0, 0)] for _ in range(lanes)], lane_start_s=[0.0] * lanes, sessions=1,
        sessions_digest=hashlib.sha256(sessions).hexdigest(), api="completions", rendering_digest="r" * 64,
        pause_cap_s=2.0, pause_removed_share=0.25, turns={"send": send},
    )  # fmt: skip
    plan_fields = {key: changes.pop(key) for key in list(changes) if key in Plan.__struct_fields__}
    plan_bytes = msgspec.json.encode(msgspec.structs.replace(plan, **plan_fields))
    (run / "plan.json").write_bytes(plan_bytes)
    gpus = Gpus(count=8, kind="GB300", layout={"TP": 8})
    backends = [
        Backend(name=name, decode_backend=decode, url=None, gpus=gpus, emulated=False)
        for name, decode in ((BASELINE, "auto"), (CANDIDATE, "latency_specialized"))
    ]
    manifest = Manifest(
        name="synthetic", created_utc="2026-11-30T12:00:00+00:00", decodegate_version="0.1.0",
        versions={"python": "3.11"},
        host={"cpus": "2"}, plan_digest=hashlib.sha256(plan_bytes).hexdigest(), workload_digest="w" * 64,
        workload_source="synthetic", backends=backends, order=order, matched_gpus=True, unmatched_reasons=[],
        emulated=False, workers=1,
    )  # fmt: skip
    (run / "manifest.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, **changes)))


Change = Callable[[int, str, RequestRecord], RequestRecord | None]
"""(block number from 1, backend, record) -> the record to write instead; None: the turn was never sent."""


def make_run(
    run: Path,
    *,
    baseline_s: float = 0.010,
    ratio: float = 1.3,
    sessions: int = 12,
    turns: int = 12,
    order: str = "ABBA",
    noise: float = 0.02,
    seed: int = 0,
    workers: int = 1,
    change: Change | None = None,
    per_chunk: dict[str, int] | None = None,
    block: dict[str, Any] | None = None,
    specialised_share: float | None = None,
    server_tells: bool = False,
    **changes: Any,
) -> Path:
    """An experiment of ``sessions`` x ``turns`` turns a block: all ok, all gates pass, but for what ``change`` spoils.

    The baseline takes ``baseline_s`` a token, times a lognormal turn effect that is the same in every block and
    lognormal ``noise`` that is not; the candidate takes 1/``ratio`` of that. ``specialised_share`` writes an emulator's
    log of steps in which the candidate ran that share of its decode tokens specialised. ``server_tells``: replies hold
    the server's own times (2 ms before the client's TTFT, and its ITL), its /metrics were read, and
    snapshots of it were taken.
    """
    rng = np.random.default_rng(seed)
    names = [BASELINE if letter == "A" else CANDIDATE for letter in order]
    write_frame(run, send=sessions * turns, order=names, **changes)
    effect = np.exp(rng.normal(0, 0.2, (sessions, turns)))
    for index, name in enumerate(names, 1):
        started = START_NS + index * 600_000 * MS
        faster = ratio if name == CANDIDATE else 1.0
        rows = []
        for s in range(sessions):
            at = started + s * MS
            for t in range(turns):
                per_token = float(baseline_s / faster * effect[s, t] * np.exp(rng.normal(0, noise)))
                asked = 1000 + 500 * t
                record, chunks = request(
                    at_ns=at, ttft_s=0.05 + 0.01 * t, seconds_per_token=per_token, output=40 + t, session=f"s{s:02d}",
                    turn=t,
                    asked_input=asked, ideal_cached=asked - 500 if t else 0,
                    per_chunk=(per_chunk or {}).get(name, 1),
                )  # fmt: skip
                if server_tells:
                    own = {"server_first_token_s": 0.048 + 0.01 * t, "server_queue_s": 0.001}
                    record = msgspec.structs.replace(record, server_itl_s=per_token, **own)
                at = record.end_ns + 100 * MS
                written = change(index, name, record) if change else record
                if written is not None:
                    rows.append((written, agreeing(written, chunks) if change else chunks))
        steps = None
        if specialised_share is not None:
            mine = specialised_share if name == CANDIDATE else 0.0
            decoded = sum(tokens for _, pieces in rows for _, tokens in pieces[1:])
            steps = [
                {"t_ns": started + MS * i, "end_ns": started + MS * (i + 1), "steps": 1, "rows": 2,
                 "prompt_tokens": 0, "decode_tokens": -(-decoded // 100),
                 "specialised": i < mine * 100, "reason": "" if i < mine * 100 else "prompt rows"}
                for i in range(100)
            ]  # fmt: skip
        own_count = readings([record for record, _ in rows], started) if server_tells else None
        folder = write_block(
            run, index, name, rows, started_ns=started, workers=workers, steps=steps, metrics=own_count, **(block or {})
        )
        if server_tells:
            write_snapshots(folder, *(Snapshot(t_ns=started, version="0.33.0", fingerprint=name) for _ in range(2)))
    return run


def add_step_log(
    run: Path, index: int, backend: str, steps: list[dict[str, Any]], engine: int = 0, **head: Any
) -> None:
    """Give a block a server with a step log; the rest as write_step_log takes it."""
    server = f"servers/{index:02d}-{backend}"
    decode_backend = "latency_specialized" if backend == CANDIDATE else None
    write_step_log(run / server / "steps", steps, engine, **{"decode_backend": decode_backend, **head})
    rewrite_block(run / "blocks" / f"{index:02d}-{backend}", server=server)


def write_step_log(folder: Path, steps: list[dict[str, Any]], engine: int = 0, **head: Any) -> None:
    """One engine's log. ``steps`` are fields of STEP records; those left out are -1. ``head`` replaces fields of
    StepLog."""
    folder.mkdir(parents=True, exist_ok=True)
    names = STEP.names or ()
    records = np.array([tuple(step.get(name, -1) for name in names) for step in steps], STEP)
    (folder / f"{engine}-77.bin").write_bytes(records.tobytes())
    log = StepLog(
        engine=engine, pid=77, started_ns=0, started_unix_s=0.0, vllm_version="0.33.0",
        cudagraph_mode="FULL_AND_PIECEWISE", capture_sizes=[1, 2, 4, 8], cudagraph_metrics=True, draft_tokens=0,
        decode_backend=None,
    )  # fmt: skip
    (folder / f"{engine}-77.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(log, **head)))


def rewrite_block(folder: Path, **changes: Any) -> None:
    """Replace fields of a written block."""
    block = msgspec.json.decode((folder / "block.json").read_bytes(), type=Block)
    (folder / "block.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(block, **changes)))


def write_snapshots(folder: Path, before: Snapshot, after: Snapshot) -> None:
    """What was seen of the server and its GPUs at the edges of a block."""
    (folder / "before.json").write_bytes(msgspec.json.encode(before))
    (folder / "after.json").write_bytes(msgspec.json.encode(after))
