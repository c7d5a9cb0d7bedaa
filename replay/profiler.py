"""A server's own torch profiler around decode steps of one batch, over HTTP.

    all streams sent -> each has its first token -> a few steps -> /start_profile -> the steps -> /stop_profile

Between the two calls no prompt is computed and no stream ends, so what the profiler records is decode steps of one
batch. A profiler slows the server between its kernels, so what the client times are the few steps before.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from replay.wire import Limits
from workloads.errors import UserError
from workloads.rendering import PATHS

_TIMED_STEPS = 20
"""Between the last first token and the profile: so many that a look's length hardly matters."""

_BETWEEN_STEPS = 20
"""Allowed for between those and the profile, while the profiler starts."""

_LOOK_S = 0.001
"""Between two looks at how far the streams are: less than a step."""

_STOP_S = 1800.0
"""Longest time to stop a profiler: all ranks write their traces then."""


class Batch(msgspec.Struct, kw_only=True, frozen=True):
    """What is decoded, and how much of it is profiled."""

    warmup: list[bytes]
    """Bodies of the requests that come before, to their end."""
    measured: list[bytes]
    """Bodies of the streams that decode together."""
    tokens_per_step: int
    """Most tokens that a stream gets in a step: 1 + draft tokens."""
    steps: int


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Event(msgspec.Struct):
    """What matters of an event of a stream."""

    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: Any = None


_event = msgspec.json.Decoder(_Event)


class _Stream(msgspec.Struct):
    """How far one stream is."""

    steps: int = 0
    tokens: int = 0


def fewest_tokens(steps: int, tokens_per_step: int) -> int:
    """Output tokens that a stream needs so as not to end before ``steps`` steps are profiled."""
    return 1 + (_TIMED_STEPS + _BETWEEN_STEPS + steps) * tokens_per_step


def config(folder: str) -> dict[str, str | bool]:
    """vLLM's --profiler-config with which a server can be profiled here: without Python stacks and the API server's own
    trace, which slow it and tell nothing of kernels."""
    return {
        "profiler": "torch",
        "torch_profiler_dir": folder,
        "torch_profiler_with_stack": False,
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,
    }


class Profiled(msgspec.Struct, kw_only=True, frozen=True):
    """What the client saw of a profile: as in replay.records.Profile."""

    opened_ns: int
    closed_ns: int
    step_s: float


async def profile(url: str, headers: Mapping[str, str], limits: Limits, batch: Batch) -> Profiled:
    """Decode the batch, time a few steps and profile ``batch.steps`` more, or a little beyond; returns when the server
    has written its traces. Streams that still run are then cut.

    Raises UserError if the server has no profiler, a request fails, or a stream ends before the profile does.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_s, sock_read=limits.first_byte_s)
    async with aiohttp.ClientSession(
        url.rstrip("/").removesuffix("/v1") + "/",
        headers={"Content-Type": "application/json", **headers},
        timeout=timeout,
        connector=aiohttp.TCPConnector(limit=0, force_close=True),  # none is reused as the server drops it
    ) as http:
        await asyncio.gather(*[_decode(http, body, batch.tokens_per_step, _Stream()) for body in batch.warmup])
        streams = [_Stream() for _ in batch.measured]
        decoding = [
            asyncio.create_task(_decode(http, body, batch.tokens_per_step, stream))
            for body, stream in zip(batch.measured, streams, strict=True)
        ]
        try:
            await _advance(decoding, streams, 1)
            begun_ns, before = time.monotonic_ns(), sum(stream.steps for stream in streams)
            await _advance(decoding, streams, _TIMED_STEPS)
            taken = (sum(stream.steps for stream in streams) - before) / len(streams)
            step_s = (time.monotonic_ns() - begun_ns) * 1e-9 / taken
            async with _profiler(http):
                opened_ns = time.monotonic_ns()
                await _advance(decoding, streams, batch.steps)
                closed_ns = time.monotonic_ns()
        finally:
            for task in decoding:
                task.cancel()
            await asyncio.gather(*decoding, return_exceptions=True)
    return Profiled(opened_ns=opened_ns, closed_ns=closed_ns, step_s=step_s)


@asynccontextmanager
async def _profiler(http: aiohttp.ClientSession) -> AsyncIterator[None]:
    """The profiler runs inside; it is stopped whatever happens, since a server at a url lives on."""
    await _post(http, "start_profile")
    try:
        yield
    finally:
        await _post(http, "stop_profile")


async def _post(http: aiohttp.ClientSession, page: str) -> None:
    try:
        async with http.post(page, timeout=aiohttp.ClientTimeout(total=_STOP_S)) as reply:
            status, said = reply.status, await reply.text(errors="replace")
    except TimeoutError:
        raise UserError(f"POST /{page} was not answered in {_STOP_S / 60:.0f} minutes: profile fewer --steps") from None
    except aiohttp.ClientError as error:
        raise UserError(f"POST /{page} failed: {error}") from None
    if status == 404:
        option = json.dumps(config("/FOLDER"))
        raise UserError(f"it has no profiler (POST /{page} answers 404): start vLLM with --profiler-config '{option}'")
    if status != 200:
        raise UserError(f"POST /{page} answers http {status}: {said[:300]}")


async def _decode(http: aiohttp.ClientSession, body: bytes, tokens_per_step: int, stream: _Stream) -> None:
    """Send one request and follow its stream to the end."""
    try:
        async with http.post(PATHS["completions"].lstrip("/"), data=body) as reply:
            if reply.status != 200:
                raise UserError(f"a request is answered http {reply.status}: {(await reply.text())[:300]}")
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    _take(stream, _event.decode(line[6:]), tokens_per_step)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:  # ValueError: an event that is none
        raise UserError(f"a stream broke off: {type(error).__name__} {error}".rstrip()) from None


def _take(stream: _Stream, event: _Event, tokens_per_step: int) -> None:
    """Steps are counted from tokens: an event may hold several steps (--stream-interval), a step several tokens."""
    if event.error is not None:
        raise UserError(f"a stream broke off: the server says {str(event.error)[:300]}")
    if event.choices:
        tokens = event.usage.completion_tokens if event.usage is not None else stream.tokens + 1
        stream.steps += -(-(tokens - stream.tokens) // tokens_per_step)
        stream.tokens = tokens


async def _advance(decoding: Sequence[asyncio.Task[None]], streams: Sequence[_Stream], steps: int) -> None:
    """Wait until each stream is so many steps further. Raises UserError if one fails, or ends, meanwhile."""
    goals = [stream.steps + steps for stream in streams]
    while any(stream.steps < goal for stream, goal in zip(streams, goals, strict=True)):
        if ended := [task for task in decoding if task.done()]:
            await asyncio.gather(*ended)
            raise UserError("a stream ended before the profile did: raise decode.output_tokens, or give fewer --steps")
        await asyncio.sleep(_LOOK_S)
