"""Writes synthetic runs of decode tables through the schemas of replay/records.py, from known step times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from replay.records import (
    CHUNK,
    STEP,
    STEP_MODES,
    Backend,
    Cell,
    DecodeManifest,
    Gpus,
    HealthSample,
    MetricsSample,
    PathRule,
    RequestRecord,
    Setup,
    Speculation,
    StepLog,
    Window,
    WindowPlace,
)
from tests.reports.make_run import MS, START_NS, Chunks, request

BASELINE, CANDIDATE = "baseline", "candidate"
SPACE_NS = 600_000 * MS
"""Between the starts of windows."""

Streams = list[tuple[RequestRecord, Chunks]]
Change = Callable[[int, str, Cell, Streams], Streams]
"""(index of the window from 1, backend, cell, its streams) -> the streams to write instead."""


def streams(
    cell: Cell, started_ns: int, *, step_s: float, per_step: int = 1, per_chunk: int = 1, ttft_s: float = 0.1
) -> Streams:
    """What ``batch`` streams get whose decode steps take ``step_s`` and yield ``per_step`` tokens each; a chunk carries
    ``per_chunk`` steps. Streams arrive a microsecond apart."""
    return [
        request(
            at_ns=started_ns,
            ttft_s=ttft_s + number * 1e-6,
            seconds_per_token=step_s / per_step,
            output=cell.output_tokens,
            per_chunk=per_step * per_chunk,
            session=str(number),
            asked_input=cell.input_tokens,
        )
        for number in range(cell.batch)
    ]


def write_window(
    run: Path,
    index: int,
    backend: str,
    cell: int,
    rows: Streams,
    *,
    started_ns: int,
    drafts: int = 0,
    per_step: int = 1,
    counters: bool = True,
    loop_lag_ms: float = 0.1,
    **changes: Any,
) -> Path:
    """One window, with a warm-up request that must count for nothing. ``changes`` replace fields of Window."""
    folder = run / "windows" / f"{index:04d}-{backend}"
    folder.mkdir(parents=True)
    ended_ns = max(record.end_ns for record, _ in rows)
    warm, early = request(at_ns=started_ns - 5_000 * MS, session="0", phase="warmup")
    lines, pieces, start = [], [], 0
    for record, chunks in [(warm, early), *rows]:
        kept = chunks if record.first_token_ns is not None else []
        lines.append(msgspec.json.encode(msgspec.structs.replace(record, chunk_start=start, chunk_count=len(kept))))
        pieces.append(np.array(kept, CHUNK))
        start += len(kept)
    (folder / "w0.requests.jsonl").write_bytes(b"\n".join([*lines, b""]))
    (folder / "w0.chunks.bin").write_bytes(np.concatenate(pieces).tobytes())
    health = [
        HealthSample(
            t_ns=t, loop_lag_ms_max=loop_lag_ms * 2, loop_lag_ms_p99=loop_lag_ms, in_flight=1, lanes_in_session=1,
            cpu_share=0.2, rss_bytes=10**8,
        )
        for t in range(started_ns, ended_ns + 1000 * MS, 200 * MS)
    ]  # fmt: skip
    (folder / "w0.health.jsonl").write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in health))
    if counters:
        outputs = [record.output_tokens or 0 for record, _ in rows]
        steps = sum(-(-(output - 1) // per_step) for output in outputs)
        grown = {"generation_tokens_total": sum(outputs), "time_to_first_token_seconds_count": len(rows)}
        if drafts:
            # drafts are accepted beyond the last token of a reply, too
            grown |= {
                "spec_decode_num_drafts_total": steps,
                "spec_decode_num_accepted_tokens_total": steps * (per_step - 1),
            }
        readings = [
            MetricsSample(
                t_ns=at_ns, at=at,
                samples=[(f"vllm:{name}", {"engine": "0"}, base + value) for name, value in counts.items()],
            )
            for at, at_ns, base, counts in (
                ("start", started_ns - MS, 500.0, dict.fromkeys(grown, 0)), ("end", ended_ns + MS, 500.0, grown),
            )
        ]  # fmt: skip
        (folder / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in readings))
    window = Window(
        index=index, backend=backend, cell=cell, started_unix_s=1.7e9,
        started_ns=started_ns, ended_ns=ended_ns, finished=True,
    )  # fmt: skip
    (folder / "window.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(window, **changes)))
    return folder


def rule(draft_tokens: int = 0, **changes: Any) -> PathRule:
    """Like that of Kimi K3 on NVIDIA."""
    each = 1 + draft_tokens
    found = PathRule(
        model="Kimi K3 on NVIDIA", source="vLLM 0.33.0", sizes=[*range(1, 9), 16, 32, 64], tokens_per_request=each,
        max_requests=64 // each,
    )  # fmt: skip
    return msgspec.structs.replace(found, **changes)


def make_tables(
    run: Path,
    *,
    batches: tuple[int, ...] = (1, 4),
    output: int = 101,
    step_s: float = 0.010,
    ratio: float = 1.5,
    noise: float = 0.002,
    order: str = "ABBA",
    repeats: int = 3,
    speculation: Speculation | None = None,
    per_step: dict[str, int] | None = None,
    per_chunk: int = 1,
    counters: bool = True,
    path: PathRule | None = None,
    candidate: str = "latency_specialized",
    change: Change | None = None,
    loop_lag_ms: float = 0.1,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Passes of ``order`` over cells of these batches: the baseline takes ``step_s`` a step, times lognormal ``noise``
    a window, the candidate 1/``ratio`` of that. ``changes`` replace fields of the manifest."""
    rng = np.random.default_rng(seed)
    speculation = speculation or Speculation()
    gpus = Gpus(count=16, kind="GB300", layout={"TP": 16})
    backends = [
        Backend(
            name=name, decode_backend=decode, url=None, gpus=gpus, emulated=False, settings={"model": "kimi-k3"},
            served=True, command=["vllm", "serve", "kimi-k3"],
            path=path if decode == "latency_specialized" else None,
        )
        for name, decode in ((BASELINE, "auto"), (CANDIDATE, candidate))
    ]  # fmt: skip
    setup = Setup(speculation=speculation, backends=backends, matched_gpus=True, unmatched_reasons=[])
    cells = [Cell(batch=batch, input_tokens=1, output_tokens=output, setup=0) for batch in batches]
    places = [
        WindowPlace(backend=BASELINE if letter == "A" else CANDIDATE, cell=cell)
        for letter in order
        for cell in range(len(cells))
        for _ in range(repeats)
    ]
    manifest = DecodeManifest(
        name="tables", created_utc="2026-11-30T12:00:00+00:00", decodegate_version="0.1.0", versions={"python": "3.11"},
        host={"cpus": "2"}, backends=backends, matched_gpus=True, unmatched_reasons=[], emulated=False, setups=[setup],
        cells=cells, order=places, repeats=repeats, warmup_tokens=16,
    )  # fmt: skip
    run.mkdir(parents=True, exist_ok=True)
    (run / "manifest.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, **changes)))
    (run / "setups").mkdir()
    (run / "setups" / "01.json").write_bytes(msgspec.json.encode(setup))
    for index, place in enumerate(places, 1):
        started_ns = START_NS + index * SPACE_NS
        cell = cells[place.cell]
        faster = ratio if place.backend == CANDIDATE else 1.0
        yields = (per_step or {}).get(place.backend, 1)
        took = step_s / faster * float(np.exp(rng.normal(0, noise)))
        rows = streams(cell, started_ns, step_s=took, per_step=yields, per_chunk=per_chunk)
        if change is not None:
            rows = change(index, place.backend, cell, rows)
        write_window(
            run, index, place.backend, place.cell, rows, started_ns=started_ns, drafts=speculation.draft_tokens,
            per_step=yields, counters=counters, loop_lag_ms=loop_lag_ms,
            server=f"servers/{(index - 1) // (len(cells) * repeats) + 1:02d}-{place.backend}",
        )  # fmt: skip
    return run


def add_step_logs(run: Path, *, mode: str = "FULL", backend: str = CANDIDATE, padded: int | None = None) -> None:
    """Step logs of a backend's servers: a step at each distinct moment at which the first stream got a chunk,
    all requests in it."""
    for folder in sorted((run / "windows").glob(f"*-{backend}")):
        window = msgspec.json.decode((folder / "window.json").read_bytes(), type=Window)
        records = [
            msgspec.json.decode(line, type=RequestRecord)
            for line in (folder / "w0.requests.jsonl").read_bytes().splitlines()
        ]
        chunks = np.fromfile(folder / "w0.chunks.bin", CHUNK)
        mine = [record for record in records if record.phase == "measured"]
        first, batch = mine[0], len(mine)
        at = chunks[first.chunk_start : first.chunk_start + first.chunk_count]["t_ns"][1:]
        steps = np.full(len(at), -1, np.int64).astype(STEP)
        for name, value in {
            "running": batch, "prompt_tokens": 0, "first_tokens": 0, "decode_tokens": batch, "unpadded": batch,
            "padded": padded or batch, "draft_requests": 0, "draft_tokens": 0, "accepted_tokens": 0,
            "mode": STEP_MODES.index(mode),
        }.items():  # fmt: skip
            steps[name] = value
        steps["t_ns"] = at - 1000
        assert window.server is not None
        target = run / window.server / "steps"
        target.mkdir(parents=True, exist_ok=True)
        with (target / "0-77.bin").open("ab") as file:
            file.write(steps.tobytes())
        head = StepLog(
            engine=0, pid=77, started_ns=0, started_unix_s=0.0, vllm_version="0.33.0", cudagraph_mode="FULL",
            capture_sizes=[1, 2, 4, 8], cudagraph_metrics=True, draft_tokens=0,
            decode_backend="latency_specialized" if backend == CANDIDATE else None,
        )  # fmt: skip
        (target / "0-77.json").write_bytes(msgspec.json.encode(head))
