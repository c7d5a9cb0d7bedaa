"""A reverse proxy that injects one fault into what passes, and passes on the rest byte for byte.

What a fault leaves alone is not parsed, nor held: each piece of a reply goes on as it comes. Of the streams that a
fault watches an event goes on when it is whole. A client that leaves takes its request to the server along, and a reply
that breaks off does so for the client too.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Set
from contextlib import asynccontextmanager, contextmanager
from hashlib import blake2b

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDictProxy
from yarl import URL

from evals.faults import requests
from evals.faults.events import Event, Moment, Rewrite
from evals.faults.registry import ProxyFault, parse
from evals.faults.requests import APIS, Asked
from replay.emulator.noise import mix

HOST = "127.0.0.1"
MAX_BODY_BYTES = 1 << 30

_OWN_HEADERS = {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
"""Of one connection only (RFC 9110, 7.6.1), or set anew for the other one."""
_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")


class Stored(msgspec.Struct, frozen=True):
    """A good reply, in full."""

    headers: list[tuple[str, str]]
    body: bytes


Store = dict[bytes, Stored]
"""Replies by a digest of what was asked. Unbounded: for batteries, not for production."""


@asynccontextmanager
async def proxy(
    upstream: str, fault: str | None = None, *, seed: int = 0, store: Store | None = None
) -> AsyncIterator[str]:
    """Run a proxy in front of the server at ``upstream`` until the block ends; yield its URL, on loopback.

    ``fault``: ``NAME`` or ``NAME:NUMBER`` of `registry.FAULTS`; None injects nothing. ``seed`` and what was asked (how
    often, too) decide what is hit, and nothing else does, but for faults that look at the batch. Two proxies with one
    ``store`` and the fault stale-replies serve each other's replies. Raises UserError for a fault that does not exist.
    """
    chosen, number = parse(fault or "identity")
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    # A connection for each request: one that was kept open could be closed by the server just as a request goes out.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    ) as session:
        front = _Front(upstream.rstrip("/"), chosen, number, seed, session, {} if store is None else store)
        app.router.add_route("*", "/{path:.*}", front.handle)
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, auto_decompress=False, shutdown_timeout=0.1
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, HOST, 0, backlog=4096)
            await site.start()
            yield f"http://{HOST}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


class _Flight(msgspec.Struct, eq=False):
    """A request under way."""

    asked: Asked
    peak: int = 0
    """Most replies in flight in its time."""
    seen: int = 0
    """Changes of the traffic up to its last event."""


class _Traffic:
    """What is in flight."""

    def __init__(self) -> None:
        self.flights: set[_Flight] = set()
        self.rows = 0
        self.changes = 0
        """Requests that came or left."""

    @contextmanager
    def joined(self, asked: Asked) -> Iterator[_Flight]:
        """A request, from its coming to its leaving."""
        flight = _Flight(asked)
        self.flights.add(flight)
        self._change(asked.rows)
        flight.seen = self.changes
        try:
            yield flight
        finally:
            self.flights.remove(flight)
            self._change(-asked.rows)

    def _change(self, rows: int) -> None:
        self.rows += rows
        self.changes += 1
        for flight in self.flights:
            flight.peak = max(flight.peak, self.rows)

    def moment(self, flight: _Flight, streamed: bool) -> Moment:
        """As of now, for the next event of a request; of a reply that comes whole, as of all of its time."""
        joins, flight.seen = self.changes - flight.seen, self.changes
        return Moment(self.rows if streamed else flight.peak, joins)


class _Front:
    """The proxy's handler and what requests share."""

    def __init__(
        self, upstream: str, fault: ProxyFault, number: float, seed: int, session: aiohttp.ClientSession, store: Store
    ) -> None:
        self._upstream, self._session, self._store = upstream, session, store
        self._fault, self._number, self._seed = fault, number, seed
        self._traffic = _Traffic()
        self._came: Counter[bytes] = Counter()
        self._blocks: set[bytes] = set()
        """First blocks of prompts: what the server's prefix cache may hold."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer any request."""
        body = await request.read()
        api = APIS.get(request.path) if request.method == "POST" else None
        if request.path == "/reset_prefix_cache":
            self._blocks.clear()
        if api is None:
            return await self._forward(request, body)
        digest = blake2b(request.path.encode() + body, digest_size=16).digest()
        key = mix(int.from_bytes(digest[:8], "little"), self._seed, self._came[digest])
        self._came[digest] += 1
        asked = requests.asked(api, body, key)
        if asked is None:
            return await self._forward(request, body)
        if self._fault.stores and digest in self._store:
            return _again(self._store[digest])
        block = asked.first_block
        if block is not None:
            asked.warm = block in self._blocks
            self._blocks.add(block)
        if self._fault.ask is not None:
            self._fault.ask(asked, self._number)
            body = msgspec.json.encode(asked.body)
        with self._traffic.joined(asked) as flight:
            return await self._forward(request, body, flight, digest if self._fault.stores else None)

    async def _forward(
        self, request: web.Request, body: bytes, flight: _Flight | None = None, keep_as: bytes | None = None
    ) -> web.StreamResponse:
        """Ask the server, and pass its reply on as it comes."""
        reply = self._fault.reply
        rewrite = None if flight is None or reply is None else reply(flight.asked, self._number)
        drop = _OWN_HEADERS | {"accept-encoding"} if rewrite else _OWN_HEADERS  # what is to be read must not be packed
        url = URL(self._upstream + request.raw_path, encoded=True)
        response = web.StreamResponse()
        try:
            async with self._session.request(
                request.method, url, data=body or None, headers=_kept(request.headers, drop), allow_redirects=False
            ) as answer:
                headers = _kept(answer.headers, _OWN_HEADERS)
                response.set_status(answer.status, answer.reason)
                response.headers.extend(headers)
                pieces: AsyncIterator[bytes] = answer.content.iter_any()
                if flight is not None and rewrite is not None and answer.status == 200:
                    pieces = self._rewritten(pieces, rewrite, flight, answer.content_type == "text/event-stream")
                else:
                    response.content_length = answer.content_length
                await response.prepare(request)
                sent = []
                async for piece in pieces:
                    if self._fault.delays and flight is not None:
                        await asyncio.sleep(self._number)
                    await response.write(piece)
                    if keep_as is not None:
                        sent.append(piece)
                await response.write_eof()
                if keep_as is not None and answer.status == 200:
                    self._store[keep_as] = Stored(headers, b"".join(sent))
        except (aiohttp.ClientError, OSError):  # the server, or the client, is gone in mid-reply
            if request.transport is not None:
                request.transport.close()  # after what was written, and without a proper end
        return response

    async def _rewritten(
        self, pieces: AsyncIterator[bytes], rewrite: Rewrite, flight: _Flight, streamed: bool
    ) -> AsyncIterator[bytes]:
        """The reply with the fault in it; of one that breaks off, what came after the last whole event as it was."""
        left = bytearray()
        try:
            async for piece in pieces:
                left += piece
                while streamed and (blank := _BLANK_LINE.search(left)):
                    raw = bytes(left[: blank.end()])
                    del left[: blank.end()]
                    for event in rewrite(Event(raw, _data(raw)), self._traffic.moment(flight, True)):
                        yield event.encoded(True)
        except (aiohttp.ClientError, OSError):
            yield bytes(left)
            raise
        if streamed:
            yield bytes(left)  # an event that its end cut off
        else:
            for event in rewrite(Event(bytes(left), _json(left)), self._traffic.moment(flight, False)):
                yield event.encoded(False)


def _again(stored: Stored) -> web.Response:
    response = web.Response(body=stored.body)
    response.headers.extend(stored.headers)
    return response


def _kept(headers: CIMultiDictProxy[str], drop: Set[str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.items() if name.lower() not in drop]


def _data(raw: bytes) -> dict[str, object] | None:
    """The JSON of an event; events of several lines of data are none of these APIs'."""
    lines = [line[5:] for line in raw.splitlines() if line.startswith(b"data:")]
    return _json(lines[0]) if len(lines) == 1 else None


def _json(text: bytes | bytearray) -> dict[str, object] | None:
    try:
        return msgspec.json.decode(text, type=dict)
    except msgspec.DecodeError:
        return None
