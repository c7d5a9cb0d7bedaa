"""A server that costs next to nothing, for measuring the client: raw protocol, ready bytes, vLLM's shape of stream.

    python -m tests.benchmarks.instant_server [--first-ms 20 --gap-ms 10]

Without pacing a whole reply is one write. With it each event is a write of its own, due at fixed moments after the
request has come (first + i x gap), however late the one before was. The number of token events is the request's
max_tokens. Prints its port. Every answer has one token an event, ids, usage on every event when asked for
(continuous_usage_stats), a usage event and [DONE].
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import heapq
import json
import re
import time
from typing import cast

import uvloop

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"server: instant\r\ntransfer-encoding: chunked\r\n\r\n"
)
BASE: dict[str, object] = {"id": "cmpl-0123456789abcdef0123456789abcdef", "created": 1796042895, "model": "instant"}
OBJECTS = {False: "text_completion", True: "chat.completion.chunk"}
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens"\s*:\s*(\d+)')
_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)


def _line(event: dict[str, object]) -> bytes:
    line = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(line), line)


def _usage(count: int) -> dict[str, int]:
    return {"prompt_tokens": 10, "total_tokens": 10 + count, "completion_tokens": count}


@functools.cache
def _token(chat: bool, number: int, last: bool, ids: bool, continuous: bool) -> bytes:
    """The HTTP chunk of one token: made once, so that a reply of a new length costs nothing."""
    choice: dict[str, object] = {"index": 0}
    choice |= {"delta": {"content": " word"}} if chat else {"text": " word"}
    choice |= {"logprobs": None, "finish_reason": "length" if last else None, "stop_reason": None}
    if ids:
        choice["token_ids"] = [1000 + number]
    event: dict[str, object] = {**BASE, "object": OBJECTS[chat], "choices": [choice]}
    if continuous:
        event["usage"] = _usage(number)
    return _line(event)


@functools.cache
def events(chat: bool, tokens: int, ids: bool, continuous: bool) -> list[bytes]:
    """The reply as HTTP chunks, one for each event."""
    found = [_token(chat, number, number == tokens, ids, continuous) for number in range(1, tokens + 1)]
    found.append(_line({**BASE, "object": OBJECTS[chat], "choices": [], "usage": _usage(tokens)}))
    done = b"data: [DONE]\n\n"
    return [*found, b"%x\r\n%s\r\n" % (len(done), done)]


@functools.cache
def burst(chat: bool, tokens: int, ids: bool, continuous: bool) -> bytes:
    return HEAD + b"".join(events(chat, tokens, ids, continuous)) + b"0\r\n\r\n"


class Server(asyncio.Protocol):
    """One connection."""

    def __init__(self, pace: Pace | None, model: str) -> None:
        self.pace = pace
        self.model = model
        self.received = bytearray()
        self.whole = 0
        """Length of the request that is coming in, header included; 0 while its header is not there."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.received += data
        while True:
            if not self.whole:
                end = self.received.find(b"\r\n\r\n")
                if end < 0:
                    return
                length = _LENGTH.search(self.received, 0, end)
                self.whole = end + 4 + (int(length[1]) if length else 0)
            if len(self.received) < self.whole:
                return
            # of a long prompt only the fields before it are looked at, and they come first
            head, _, body = bytes(self.received[: min(self.whole, 4096)]).partition(b"\r\n\r\n")
            del self.received[: self.whole]
            self.whole = 0
            self.answer(head, body)

    def answer(self, head: bytes, body: bytes) -> None:
        path = head.split(b" ", 2)[1]
        if b"completions" not in path:
            reply = {"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": "instant"}]}
            text = json.dumps(reply).encode()
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text)
            )
            return
        tokens = _MAX_TOKENS.search(body)
        shape = (
            b"chat" in path,
            int(tokens[1]) if tokens else 16,
            b"return_token_ids" in body,
            b"continuous_usage_stats" in body,
        )
        if self.pace is None:
            self.transport.write(burst(*shape))
        else:
            self.pace.start(self.transport, events(*shape))


class Pace:
    """One task writes for all streams: what is due, in the order in which it is due."""

    def __init__(self, first_ms: float, gap_ms: float) -> None:
        self.first_s, self.gap_s = first_ms / 1e3, gap_ms / 1e3
        self.due: list[tuple[float, int, asyncio.Transport, list[bytes], int]] = []
        self.number = 0

    def start(self, transport: asyncio.Transport, chunks: list[bytes]) -> None:
        self.number += 1
        heapq.heappush(self.due, (time.monotonic() + self.first_s, self.number, transport, chunks, 0))

    async def run(self) -> None:
        while True:
            now = time.monotonic()
            while self.due and self.due[0][0] <= now:
                at, number, transport, chunks, index = self.due[0]
                if transport.is_closing():
                    heapq.heappop(self.due)
                elif index < len(chunks) - 2:
                    transport.write(chunks[index] if index else HEAD + chunks[0])
                    heapq.heapreplace(self.due, (at + self.gap_s, number, transport, chunks, index + 1))
                else:
                    transport.write(chunks[-2] + chunks[-1] + b"0\r\n\r\n")
                    heapq.heappop(self.due)
            await asyncio.sleep(0 if self.due and self.due[0][0] - now < 0.0015 else 0.001)


async def serve(port: int, first_ms: float | None, gap_ms: float, model: str) -> None:
    """Serve until killed. ``first_ms`` None: no pacing."""
    loop = asyncio.get_running_loop()
    pace = None if first_ms is None else Pace(first_ms, gap_ms)
    server = await loop.create_server(lambda: Server(pace, model), "127.0.0.1", port, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await (pace.run() if pace else server.serve_forever())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first-ms", type=float, default=None)
    parser.add_argument("--gap-ms", type=float, default=10.0)
    parser.add_argument("--model", default="tiny")
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.first_ms, options.gap_ms, options.model))


if __name__ == "__main__":
    main()
