"""Everything that a run directory holds, as schemas. The only module that judging shares with measuring.

    RUN/
      experiment.yaml            the experiment file, resolved and frozen
      manifest.json              Manifest: versions, host, digests
      plan.json                  Plan: limits, who plays what
      sessions.jsonl             one Session a line, in the order of Plan.sessions
      rendering.json             how blocks become bytes (workloads.rendering.Rendering), for --resume
      check/                     what emulators wrote during preflight
      servers/NN-BACKEND/        one start of a server that we started ourselves; NN counts starts from 01
        command.json             Command: what was started
        server.log               its stdout and stderr
        steps/                   its step log: ENGINE-PID.json (StepLog) and ENGINE-PID.bin (STEP records)
      blocks/NN-BACKEND/         one block; NN counts from 01 in measured order
        block.json               Block, written when the block starts, rewritten (atomically) when it has ended
        wN.requests.jsonl        one RequestRecord a line, by worker N, appended as replies end
        wN.chunks.bin            CHUNK records; RequestRecord.chunk_start/chunk_count index into it
        wN.health.jsonl          one HealthSample a line, about one a second
        before.json, after.json  Snapshot: the server and its GPUs before the first request and after the last
        metrics.jsonl            one MetricsSample a line: /metrics at the edges of the window and now and then between
        graph_table.json         GraphTable: CUDA-graph tables that the server's log got while the block ran
        server/                  what an emulator wrote about itself (see replay/emulator)
        steps/                   of a server that we did not start: its step log, as far as it falls into the window
      blocks/NN-BACKEND.interrupted-K/   a block that was cut off; kept, never judged

A run of decode tables has experiment.yaml, servers/ and check/ alike, and

      manifest.json              DecodeManifest: setups, cells, order of windows
      setups/NN.json             Setup as seen when its servers first ran; NN counts from 01 (DecodeManifest.setups)
      windows/NNNN-BACKEND/      one window; NNNN counts from 0001 in measured order
        window.json              Window, written when it starts, rewritten (atomically) when it has ended
        w0.*, metrics.jsonl, before.json, after.json, graph_table.json, server/, steps/    as of a block; the streams
                                 are sessions "WINDOW.ATTEMPT.STREAM" of one turn, with the warm-up's as phase "warmup"
      windows/NNNN-BACKEND.interrupted-K/   a window that was cut off

A run of layer profiles has experiment.yaml, servers/ and check/ alike, and

      manifest.json              ProfileManifest
      profiles/BACKEND/          Profile in profile.json, and the server's traces *.json.gz as it wrote them

All times called *_ns are CLOCK_MONOTONIC nanoseconds of the client host (time.monotonic_ns), comparable between
processes of that host. A field that is unknown is null, never 0 and never NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np

SCHEMA_VERSION = 1

CHUNK = np.dtype([("t_ns", "<i8"), ("tokens", "<i4")])
"""One token-bearing piece of a streamed reply: arrival of the last byte of its event, and the tokens it carried."""

STEP = np.dtype(
    [
        ("t_ns", "<i8"),
        ("running", "<i4"),
        ("waiting", "<i4"),
        ("prompt_tokens", "<i4"),
        ("first_tokens", "<i4"),
        ("decode_tokens", "<i4"),
        ("unpadded", "<i4"),
        ("padded", "<i4"),
        ("draft_requests", "<i4"),
        ("draft_tokens", "<i4"),
        ("accepted_tokens", "<i4"),
        ("kv_use", "<f4"),
        ("mode", "<i4"),
    ]
)
"""One engine step, as vLLM's own counters describe it to replay/step_log.py. A count that is unknown is -1.

t_ns: CLOCK_MONOTONIC ns when the step's output had reached the API server. running, waiting: requests after the step.
prompt_tokens: prompt tokens computed in it (how it is known: replay/step_log.py). first_tokens: output tokens that
ended a prefill. decode_tokens: output tokens of requests that were decoding already. unpadded, padded: tokens
scheduled, and the size of the batch that ran (CUDA graphs pad). draft_requests: requests that verified drafts;
draft_tokens, accepted_tokens: over them. kv_use: share of the KV cache in use, NaN if unknown. mode: index into
STEP_MODES."""

STEP_MODES = ("unknown", "NONE", "PIECEWISE", "FULL")
"""CUDA-graph mode of a step; NONE is eager."""

Phase = Literal["warmup", "measured"]

Status = Literal["ok", "failed", "truncated", "stalled", "short", "cut", "cancelled"]
"""ok: complete, with the asked length. failed: refused, error in the stream, connection lost. truncated: ended without
its terminal event and finish reason. stalled: silence beyond the limit. short: ended before the asked length although
the server was told not to stop. cut: still running when the drain time ended. cancelled: by the user."""

TokenSource = Literal["usage", "ids", "inferred", "estimated"]
"""Where the tokens of each chunk come from. usage: continuous usage on every chunk. ids: token ids on every chunk.
inferred: as many chunks as output tokens, so one each. estimated: the server's total spread over the chunks by text
length."""


class RequestRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One turn as it was sent, or tried. Raw facts only; everything derived belongs to reports."""

    request_id: str
    session: str
    play: int
    stream: int
    turn: int
    lane: int
    phase: Phase
    # asked for
    prompt_digest: str
    """16 hex digits over the prompt's bytes without its salt: equal in every block for equal work."""
    asked_input: int
    asked_output: int
    ideal_cached: int
    """Prompt tokens that an unlimited prefix cache, isolated to this play of the session, would hold."""
    # when
    due_ns: int
    """When the plan said to send: end of what the turn waited for plus its pause, or the recorded schedule."""
    sent_ns: int
    """When the request was handed to the connection (of the last attempt, if it was retried)."""
    pool_wait_ns: int | None = None
    connect_ns: int | None = None
    """Time to open a new connection; null on a reused one."""
    first_byte_ns: int | None = None
    first_token_ns: int | None = None
    """Arrival of the first event that carries output: answer, reasoning or tool call."""
    first_answer_ns: int | None = None
    """Arrival of the first event that carries answer text or a tool call (not reasoning)."""
    last_token_ns: int | None = None
    end_ns: int
    """End of the HTTP exchange, or the moment it was given up."""
    # what came
    status: Status
    error: str | None = None
    """Short class of the failure, one of a fixed list in replay/outcomes: "http 503", "error in stream", ..."""
    detail: str | None = None
    """The server's or system's own words, cut to 300 characters."""
    http_status: int | None = None
    finish_reason: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    """Completion tokens, reasoning included, by the server's count; null if it gave none."""
    output_tokens_client: int | None = None
    """The client's own count where the server gave none (an estimate, never pooled with server counts)."""
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    first_chunk_tokens: int | None = None
    token_source: TokenSource | None = None
    chunk_start: int = 0
    chunk_count: int = 0
    attempts: int = 1
    reset_retries: int = 0
    """Retries because a reused connection ended before one response byte."""
    throttle_retries: int = 0
    """Retries after 429 or 503 with Retry-After; their wait is inside the latency from ``due_ns``."""
    streamed: bool = True
    zero_output: bool = False
    """The recording has no output here; one token was asked for, since none cannot be."""
    server_fingerprint: str | None = None
    server_first_token_s: float | None = None
    """The server's own TTFT, from its engine's receiving the request: waiting and prefill (vLLM: queue_time_ms and
    time_to_first_token_ms of --enable-per-request-metrics; the latter alone starts when the request is scheduled)."""
    server_queue_s: float | None = None
    """The part of it that the request waited to be scheduled."""
    server_itl_s: float | None = None
    """The server's own mean time per output token after the first (mean_itl_ms: divided by O - 1)."""
    notes: list[str] = []


class HealthSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The client's own state, one sample about each second and worker."""

    t_ns: int
    loop_lag_ms_max: float
    """Worst lateness of a 10 ms timer since the last sample."""
    loop_lag_ms_p99: float
    in_flight: int
    lanes_in_session: int
    """Lanes that hold a session, those in a pause too."""
    cpu_share: float
    """CPU seconds per second of this worker process."""
    rss_bytes: int


class Turn(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One planned turn: what is sent, after what, and what was changed against the recording."""

    input_tokens: int
    output_tokens: int
    keep: int
    new_blocks: list[int]
    joins: list[int] = []
    pause_s: float = 0.0
    """Pause that will be kept, after the cap."""
    recorded_pause_s: float = 0.0
    recorded_service_s: float = 0.0
    """From start to end of the recorded reply; only for saying beforehand how many requests will be in flight."""
    offset_s: float = 0.0
    """Closed loop: recorded start, seconds from the start of the session. Open loop: planned send time, seconds from
    the start of the block."""
    ideal_cached: int = 0
    fate: Literal["send", "cut"] = "send"
    """cut: over a limit of the plan, never sent (see also Play.start_turn for turns that are history)."""
    cut_reason: str = ""
    zero_output: bool = False


class Stream(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One planned stream; indices as in workloads.trace.Stream."""

    agent: str
    turns: list[Turn]
    parent: int | None = None
    spawn_turn: int | None = None
    join_turn: int | None = None
    background: bool = False


class Session(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One planned session tree."""

    id: str
    content_key: str
    """Namespace of the block ids: equal (content_key, block id) is equal content."""
    block_size: int
    streams: list[Stream]
    system_tokens: int = 0


class Play(msgspec.Struct, frozen=True):
    """One playing of a session by a lane. ``number`` tells plays of the same session apart (and salts them apart).

    ``start_turn``: the main agent's turn at which the play starts; turns recorded before it are history: part of
    later prompts, put into the server's cache during warm-up, never sent in the measured window."""

    session: int
    number: int
    start_turn: int = 0


class Plan(msgspec.Struct, kw_only=True):
    """Who sends what after what: deterministic from workload, seed, lanes and limits; the same for both backends."""

    schema_version: int = SCHEMA_VERSION
    seed: int
    mode: Literal["closed", "open"]
    end: Literal["work", "duration"]
    duration_s: float | None
    drain_s: float
    lanes: list[list[Play]]
    """For each lane the sessions that it plays, in order. With end "duration" a lane starts over at its end,
    with new play numbers."""
    lane_start_s: list[float]
    """When each lane starts, seconds from the start of the block: not all at once."""
    sessions: int
    sessions_digest: str
    """SHA-256 of sessions.jsonl."""
    api: str
    rendering_digest: str
    """SHA-256 over what turns blocks into bytes: content version, vocabulary, salt length, request fields."""
    pause_cap_s: float | None
    pause_removed_share: float
    """Share of the recorded pause time of sent turns that the cap removed."""
    estimated_s: float = 0.0
    """Longest lane at the recorded service times and the planned pauses, seconds: a rough length of one block."""
    turns: dict[str, int]
    """Turns by fate over all plays in ``lanes``: "send", "history", "cut: <reason>"."""
    lost: dict[str, int] = {}
    """What reading the workload dropped or changed, by reason."""


class Gpus(msgspec.Struct, kw_only=True, frozen=True):
    """GPUs of one backend as declared."""

    count: int
    kind: str
    layout: dict[str, int] = {}


class PathRule(msgspec.Struct, kw_only=True, frozen=True):
    """Which decode steps the specialised path can take in one deployment, as known before the start
    (replay/eligibility.py)."""

    model: str
    """For instance "Kimi K3 on NVIDIA"."""
    source: str
    """Whose code says so, with its version."""
    sizes: list[int]
    """Batch sizes, in tokens after padding, that it can run."""
    tokens_per_request: int
    """Tokens that a decoding request takes in a step: 1 + draft tokens. Unequal ones are not specialised."""
    max_requests: int
    """Most decoding requests in a step that it can run."""
    graphs_only: bool = True
    """Only steps in FULL CUDA graphs; otherwise eager ones too."""
    problems: list[str] = []
    """Why this deployment is refused, or never runs specialised; empty if it can."""


class Difference(msgspec.Struct, kw_only=True, frozen=True):
    """A setting that differs between the backends. Values as text; null where a side does not set it."""

    key: str
    baseline: str | None
    candidate: str | None
    under_test: bool
    """Meant to differ."""

    @property
    def values(self) -> str:
        """Both values in words, the baseline's first."""
        return " against ".join("not set" if v is None else v or "(empty)" for v in (self.baseline, self.candidate))


class Backend(msgspec.Struct, kw_only=True):
    """One backend as declared and seen."""

    name: str
    decode_backend: str
    url: str | None
    gpus: Gpus | None
    emulated: bool
    settings: dict[str, str | int | float | bool | None] = {}
    """Declared: model, the emulator's own. Seen in preflight: version, fingerprint, max_model_len."""
    served: bool = False
    """Started by us."""
    command: list[str] = []
    """Its words, if so, without secrets; the port may be another at each start."""
    price_per_gpu_hour: float | None = None
    path: PathRule | None = None
    """Null: no rule is known for this deployment."""
    files: dict[str, str] = {}
    """SHA-256 by name of the small files that say which model it is (config.json, ...; those of the draft model as
    draft/config.json, ...), where we start the server and the model is a folder of this host."""


class RunFacts(msgspec.Struct, kw_only=True):
    """What the manifest of every kind of run says: who was compared, with what, where."""

    schema_version: int = SCHEMA_VERSION
    name: str
    created_utc: str
    decodegate_version: str
    versions: dict[str, str]
    host: dict[str, str]
    measured_by: str = ""
    """USER@HOST."""
    backends: list[Backend]
    """baseline first, candidate second."""
    matched_gpus: bool
    unmatched_reasons: list[str]
    under_test: list[str] = []
    """Settings that are meant to differ."""
    differences: list[Difference] = []
    """Settings that do differ, where both sides' settings are known."""
    unverified: list[str] = []
    """What could not be checked of GPUs and settings, in sentences."""
    emulated: bool
    start_up_control: str = ""
    """What the candidate's server said to a decode_backend that does not exist, which it refused; empty if it was not
    asked."""
    salt: str = ""
    """With seed, block, session and play (or window and stream): what salts or prompts are derived from."""
    time_scale: float = 1.0
    """Emulator only: how many times faster than the emulated hardware time runs."""


class Manifest(RunFacts, kw_only=True):
    """Of an A/B replay. Written once, before the first request."""

    kind: Literal["compare"] = "compare"
    plan_digest: str
    """SHA-256 of plan.json: with the digests inside it, of everything that will be sent."""
    workload_digest: str
    workload_source: str
    order: list[str]
    """Backend name of each block, in measured order."""
    workers: int


class Speculation(msgspec.Struct, kw_only=True, frozen=True):
    """One speculative setting of both backends."""

    draft_tokens: int = 0
    """0: no speculation."""
    method: str | None = None
    acceptance_length: float | None = None
    """Synthetic acceptance: tokens that a step commits on average; null with real verification."""
    acceptance_rates: list[float] | None = None
    """Synthetic acceptance by position of the draft."""


class Setup(msgspec.Struct, kw_only=True):
    """Both backends with one speculative setting."""

    speculation: Speculation
    backends: list[Backend]
    """baseline first; ``path`` is the rule with these draft tokens."""
    matched_gpus: bool
    unmatched_reasons: list[str]
    differences: list[Difference] = []
    unverified: list[str] = []


class Cell(msgspec.Struct, kw_only=True, frozen=True):
    """One cell of a decode table: the work of one window."""

    batch: int
    """Streams that decode together."""
    input_tokens: int
    """Of each stream."""
    output_tokens: int
    setup: int
    """Index into DecodeManifest.setups."""


class WindowPlace(msgspec.Struct, kw_only=True, frozen=True):
    """Which backend decodes which cell."""

    backend: str
    cell: int
    """Index into DecodeManifest.cells."""


class DecodeManifest(RunFacts, kw_only=True):
    """Of decode tables. Written once, before the first request; backends and what is known of them together are those
    of the first setup, as seen."""

    kind: Literal["decode"] = "decode"
    setups: list[Setup]
    """As declared; setups/NN.json has each as it was seen."""
    cells: list[Cell]
    order: list[WindowPlace]
    """Of each window, in measured order."""
    repeats: int
    """Windows of a cell that follow each other in one pass."""
    warmup_tokens: int


class Window(msgspec.Struct, kw_only=True):
    """One measurement of one cell: so many streams sent at once, until all have ended. Which part of it counts is a
    matter of judging."""

    index: int
    """From 1, in measured order."""
    backend: str
    cell: int
    server: str | None = None
    """Folder of the server's start, relative to the run directory; null if we did not start one."""
    started_unix_s: float
    started_ns: int
    """Before the first request that is measured."""
    ended_ns: int | None = None
    """After the last reply."""
    finished: bool = False
    cut_short: str | None = None
    """As Block.cut_short."""


class ProfileManifest(RunFacts, kw_only=True):
    """Of layer profiles. Written once, before the first request."""

    kind: Literal["profile"] = "profile"
    setup: Setup
    cell: Cell
    """What is decoded while the profilers run; its ``setup`` is 0."""
    layers: int | None
    """Of the model, where its folder says so."""


class Profile(msgspec.Struct, kw_only=True):
    """One backend's profile."""

    backend: str
    server: str | None = None
    """As Window.server."""
    opened_ns: int
    """Moments after the server had started its profiler and before it was told to stop it, while all streams
    decoded."""
    closed_ns: int
    step_s: float | None = None
    """Seconds of a decode step just before, without the profiler: mean over some steps, by the client, good to a few
    percent; null if it was not measured."""
    traces: list[str]
    """Files, relative to the profile's folder."""


class Command(msgspec.Struct, kw_only=True):
    """A server that we started."""

    words: list[str]
    environment: dict[str, str]
    """What was added to our own; values that look like secrets are left out."""
    devices: list[int] | None
    """GPUs by index; null: as the environment says."""
    url: str
    pid: int
    started_unix_s: float
    ready_s: float | None = None
    """From start to the first real token."""


class StepLog(msgspec.Struct, kw_only=True):
    """Head of a step log, written when the engine has started."""

    schema_version: int = SCHEMA_VERSION
    engine: int
    pid: int
    started_ns: int
    """CLOCK_MONOTONIC and, at the same moment, ..."""
    started_unix_s: float
    vllm_version: str
    cudagraph_mode: str | None
    capture_sizes: list[int]
    cudagraph_metrics: bool
    """Without it (--cudagraph-metrics) batch sizes and modes of steps are unknown."""
    draft_tokens: int
    decode_backend: str | None
    """additional_config.decode_backend as the server was given it."""


class GraphCount(msgspec.Struct, kw_only=True, frozen=True):
    """Steps of one size and mode. ``unpadded``, ``padded`` as in STEP."""

    unpadded: int
    padded: int
    mode: str
    """As vLLM names it: one of STEP_MODES."""
    count: int


class GraphTable(msgspec.Struct, kw_only=True):
    """Steps by size and CUDA-graph mode, as vLLM printed them while a block ran (see replay/coverage.py)."""

    counts: list[GraphCount]


class GpuProcess(msgspec.Struct, kw_only=True, frozen=True):
    """A process that uses a GPU."""

    pid: int
    memory_bytes: int | None
    ours: bool
    """It belongs to the server that we started."""


THROTTLING_FAULTS = frozenset({"hardware slowdown", "thermal (software)", "thermal (hardware)", "power brake"})
"""Reasons of throttling that are the host's fault. The others come with load (power cap) or are someone's wish."""


class GpuReading(msgspec.Struct, kw_only=True, frozen=True):
    """One GPU as NVML shows it. Null: NVML does not say."""

    index: int
    uuid: str
    name: str
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    energy_mj: int | None = None
    """Millijoules since the driver was loaded."""
    throttling: list[str] = []
    """Reasons for which clocks are held down now (replay/nvml.py), idle left out."""
    mig: bool | None = None
    processes: list[GpuProcess] | None = None


GPUS_ALIKE: dict[str, Callable[[GpuReading], str | None]] = {
    "GPU name": lambda gpu: gpu.name,
    "GPU memory": lambda gpu: f"{gpu.memory_bytes / 2**30:.1f} GiB" if gpu.memory_bytes else None,
    "GPU power limit": lambda gpu: f"{gpu.power_limit_w:g} W" if gpu.power_limit_w else None,
    "MIG": lambda gpu: None if gpu.mig is None else "on" if gpu.mig else "off",
}
"""What GPUs of both backends must have in common, in words; None where it is not known."""


class Snapshot(msgspec.Struct, kw_only=True):
    """A server and its GPUs at one moment."""

    t_ns: int
    version: str | None = None
    fingerprint: str | None = None
    max_model_len: int | None = None
    config_digest: str | None = None
    """SHA-256 over the settings that /server_info shows; null if it shows none."""
    gpus: list[GpuReading] | None = None
    gpus_unseen: str = ""
    """Why there are none: no NVML, another host, ..."""


class MetricsSample(msgspec.Struct, kw_only=True):
    """One reading of a server's /metrics, raw: counters are totals since the server's start."""

    t_ns: int
    at: Literal["start", "between", "end"]
    """Edge of the measured window, or in it."""
    error: str | None = None
    """Why there are no samples."""
    samples: list[tuple[str, dict[str, str], float]] = []
    """(name, labels, value) of every sample whose name starts with "vllm:"; _created gauges and buckets of histograms
    left out, and between the edges only gauges."""


class Block(msgspec.Struct, kw_only=True):
    """One uninterrupted measured run of the plan against one backend."""

    index: int
    backend: str
    salt: str
    """What this block's salts are derived from, besides seed, session and play."""
    server: str | None = None
    """Folder of the server's start, relative to the run directory; null if we did not start one."""
    started_unix_s: float
    started_ns: int
    """Start of the measured window (all lanes leave the barrier)."""
    ended_ns: int | None = None
    """End of the measured window: the last planned reply (fixed work) or the end of the duration."""
    drained_ns: int | None = None
    warmup_s: float | None = None
    warmup_requests: int | None = None
    """Warm-up requests that succeeded, of ``warmup_planned``."""
    warmup_planned: int | None = None
    sent: int | None = None
    """Turns sent in the measured window, by the workers' own count."""
    plays_ended: int | None = None
    plays_cut: int | None = None
    """Plays under way when the window closed, or given up after a failure."""
    not_reached: int | None = None
    """Planned turns that were never sent, because the block ended first or their session was given up."""
    finished: bool = False
    prefix_cache_reset: bool | None = None
    """Whether the server emptied its prefix cache before the block; null if it does not offer that."""
    cut_short: str | None = None
    """Why an attempt at this block ended early: "server gone", "interrupted", "client"; null if it did not, or if it
    was killed and could not say."""
