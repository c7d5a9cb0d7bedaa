"""Everything that a run directory holds, as schemas. The only module that judging shares with measuring.

    RUN/
      experiment.yaml            the experiment file, resolved and frozen
      manifest.json              Manifest: versions, host, digests
      plan.json                  Plan: limits, who plays what
      sessions.jsonl             one Session a line, in the order of Plan.sessions
      rendering.json             how blocks become bytes (workloads.rendering.Rendering), for --resume
      check/                     what emulators wrote during preflight
      blocks/NN-BACKEND/         one block; NN counts from 01 in measured order
        block.json               Block, written when the block starts, rewritten (atomically) when it has ended
        wN.requests.jsonl        one RequestRecord a line, by worker N, appended as replies end
        wN.chunks.bin            CHUNK records; RequestRecord.chunk_start/chunk_count index into it
        wN.health.jsonl          one HealthSample a line, about one a second
        server/                  what a server that we started wrote about itself (emulator: see replay/emulator)
      blocks/NN-BACKEND.interrupted-K/   a block that was cut off; kept, never judged

All times called *_ns are CLOCK_MONOTONIC nanoseconds of the client host (time.monotonic_ns), comparable between
processes of that host. A field that is unknown is null, never 0 and never NaN.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

SCHEMA_VERSION = 1

CHUNK = np.dtype([("t_ns", "<i8"), ("tokens", "<i4")])
"""One token-bearing piece of a streamed reply: arrival of the last byte of its event, and the tokens it carried."""

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


class Backend(msgspec.Struct, kw_only=True):
    """One backend as declared and seen."""

    name: str
    decode_backend: str
    url: str | None
    gpus: Gpus | None
    emulated: bool
    settings: dict[str, str | int | float | bool | None] = {}
    """Declared: model, the emulator's own. Seen in preflight: version, fingerprint, max_model_len."""


class Manifest(msgspec.Struct, kw_only=True):
    """Written once, before the first request."""

    schema_version: int = SCHEMA_VERSION
    name: str
    created_utc: str
    decodegate_version: str
    versions: dict[str, str]
    host: dict[str, str]
    plan_digest: str
    """SHA-256 of plan.json: with the digests inside it, of everything that will be sent."""
    workload_digest: str
    workload_source: str
    backends: list[Backend]
    """baseline first, candidate second."""
    order: list[str]
    """Backend name of each block, in measured order."""
    matched_gpus: bool
    unmatched_reasons: list[str]
    emulated: bool
    workers: int
    salt: str = ""
    """With seed, block, session and play: what the salts in the prompts are derived from."""
    time_scale: float = 1.0
    """Emulator only: how many times faster than the emulated hardware time runs."""


class Block(msgspec.Struct, kw_only=True):
    """One uninterrupted measured run of the plan against one backend."""

    index: int
    backend: str
    salt: str
    """What this block's salts are derived from, besides seed, session and play."""
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
    cut_short: str | None = None
    """Why an attempt at this block ended early: "server gone", "interrupted", "client"; null if it did not, or if it
    was killed and could not say."""
