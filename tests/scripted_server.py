"""A server that does exactly what a script says, byte by byte, and remembers when it did it.

A script is a function from a `Request` to the steps of its reply; times are milliseconds after the request had come
whole. The server runs in a thread with a loop of its own, on a port that the system chose:

    with serve(lambda request: stream([(150, ROLE), (200, C("a")), (201, DONE)])) as server:
        ... server.url, server.requests, server.sent_ns(0)

C, ROLE, FIN, USE and DONE are the events of shared/cases/bug-reports.md.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    """A chat chunk with any delta; ``more`` stands beside ``choices``."""
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
    return event(_dumps({"id": "c1", "object": "chat.completion.chunk", "choices": choices, **more}))


def C(text: str, **more: Any) -> bytes:
    return chunk({"content": text}, **more)


ROLE = chunk({"role": "assistant", "content": ""})


def FIN(reason: str, **more: Any) -> bytes:
    return chunk({}, reason, **more)


def usage(p: int, c: int, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": p, "completion_tokens": c, "total_tokens": p + c, **more}


def USE(p: int, c: int, **more: Any) -> bytes:
    return event(_dumps({"id": "c1", "choices": [], "usage": usage(p, c, **more)}))


DONE = b"data: [DONE]\n\n"


@dataclass
class Step:
    """At ``at_ms``: write ``data``, and then close or reset the connection, if so told."""

    at_ms: float
    data: bytes = b""
    end: Literal["", "close", "reset"] = ""


@dataclass
class Request:
    connection: int
    """Connections count from 0 in order of arrival, as do requests on a connection and requests in all."""
    on_connection: int
    number: int
    head: bytes
    body: bytes
    came_ns: int
    sent: list[tuple[int, bytes]] = field(default_factory=list)
    """Monotonic ns and bytes of every write of the reply."""

    @property
    def path(self) -> str:
        return self.head.split(b" ", 2)[1].decode()

    def header(self, name: str) -> str | None:
        found = re.search(rb"(?im)^" + re.escape(name.encode()) + rb":[ \t]*(.*?)\r?$", self.head)
        return found[1].decode() if found else None


Script = Callable[[Request], Sequence[Step]]
Framing = Literal["chunked", "close"]
STREAM_HEADER = "content-type: text/event-stream; charset=utf-8\r\n"


def stream(
    events: Sequence[tuple[float, bytes]],
    *,
    framing: Framing = "chunked",
    header_ms: float | None = None,
    end: Literal["end", "close", "reset", "hold"] = "end",
    end_ms: float | None = None,
    header: str = STREAM_HEADER,
) -> list[Step]:
    """A reply with status 200: each piece one write (and one HTTP chunk), the header with the first one unless it has a
    time of its own. ``end`` other than "end": no proper end of the body, but a close, a reset, or nothing more at all.
    ``framing`` close: no chunks, the body lasts until the connection is closed."""
    extra = "transfer-encoding: chunked\r\n" if framing == "chunked" else "connection: close\r\n"
    head = f"HTTP/1.1 200 OK\r\n{header}{extra}\r\n".encode()
    steps: list[Step] = []
    if header_ms is not None:
        steps.append(Step(header_ms, head))
        head = b""
    for at_ms, data in events:
        steps.append(Step(at_ms, head + (b"%x\r\n%s\r\n" % (len(data), data) if framing == "chunked" else data)))
        head = b""
    last = Step(end_ms if end_ms is not None else (steps[-1].at_ms if steps else 0.0), head)
    if end == "end" and framing == "chunked":
        last.data += b"0\r\n\r\n"
    elif end != "hold":
        last.end = "reset" if end == "reset" else "close"
    return [*steps, last]


def reply(status: int, body: bytes | object, *, at_ms: float = 0.0, headers: str = "") -> list[Step]:
    """A whole reply in one write; a body that is not bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else _dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{headers}content-length: {len(data)}\r\n\r\n"
    return [Step(at_ms, head.encode() + data)]


class ScriptedServer:
    """See the module. Facts may be read while it runs."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.connections = 0
        self.open_connections = 0
        self.in_flight = 0
        self.peak_in_flight = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def sent_ns(self, number: int) -> list[int]:
        """When each write of the reply to request ``number`` was made, monotonic ns."""
        return [at for at, _ in self.requests[number].sent]


class _Connection(asyncio.Protocol):
    def __init__(self, server: ScriptedServer) -> None:
        self.server = server
        self.number = server.connections
        server.connections += 1
        server.open_connections += 1
        self.received = bytearray()
        self.count = 0
        self.replies: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.open_connections -= 1
        for task in self.replies:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self.received += data
        while (end := self.received.find(b"\r\n\r\n")) >= 0:
            head = bytes(self.received[:end])
            length = re.search(rb"(?i)content-length:\s*(\d+)", head)
            whole = end + 4 + (int(length[1]) if length else 0)
            if len(self.received) < whole:
                return
            server = self.server
            request = Request(
                self.number,
                self.count,
                len(server.requests),
                head,
                bytes(self.received[end + 4 : whole]),
                time.monotonic_ns(),
            )
            del self.received[:whole]
            self.count += 1
            server.requests.append(request)
            task = asyncio.get_running_loop().create_task(self.play(request))
            self.replies.add(task)
            task.add_done_callback(self.replies.discard)

    async def play(self, request: Request) -> None:
        server = self.server
        server.in_flight += 1
        server.peak_in_flight = max(server.peak_in_flight, server.in_flight)
        try:
            for step in server.script(request):
                left_s = step.at_ms / 1e3 - (time.monotonic_ns() - request.came_ns) / 1e9
                if left_s > 0:
                    await asyncio.sleep(left_s)
                if step.data:
                    request.sent.append((time.monotonic_ns(), step.data))
                    self.transport.write(step.data)
                if step.end == "close":
                    self.transport.close()
                elif step.end == "reset":
                    sock = self.transport.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.transport.abort()
        finally:
            server.in_flight -= 1


@contextmanager
def serve(script: Script) -> Iterator[ScriptedServer]:
    """Run a server until the block ends."""
    server = ScriptedServer(script)
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        listening = await loop.create_server(lambda: _Connection(server), "127.0.0.1", 0, backlog=2048)
        server.port = listening.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        listening.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
