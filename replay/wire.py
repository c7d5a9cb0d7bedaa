"""The wire: one HTTP exchange after another with one server, every read of the reply stamped as it arrives.

The bytes are stamped inside the protocol's ``data_received``, which is where the event loop hands them over, before
they pass any queue or wake any task. The task that waits for the reply is woken once, at its end; reading never
pauses; nothing is decoded here (see `replay.sse` and `replay.outcomes`).

aiohttp's client protocol and its C parser do the HTTP. Its session, its request and response objects and its
connection pool are not used: they cost more than the parsing, hide when a request really left, and open and retry
connections by rules of their own. The subclass leans on aiohttp's internals, so aiohttp's minor version is pinned.

What an exchange can end in, besides a reply (``Exchange.failure``):

    no connection      refused, unreachable, not within ``connect_s``, or no TLS
    client limit       no connection, because this host has no file or port left: not the server's doing
    disconnected       the connection ended before one byte of a reply
    connection lost    ... after the first byte, by a reset or another error of the system
    closed early       ... after the first byte, closed in order by the server, but before the end of the HTTP body
    bad http           the reply breaks the rules of HTTP
    reply too large    more than ``max_reply_bytes``
    no first byte      no byte of a body, or no more than a first event, within ``first_byte_s`` of sending
    stalled            no byte (and no event: comments and pings do not count) for ``idle_s`` in the middle of the body
    too slow           not ended within ``total_s`` of sending
    cut, cancelled     given up by `Wire.cut`, that is by us
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Literal
from urllib.parse import urlsplit

import msgspec
import numpy as np
from aiohttp.client_exceptions import ServerDisconnectedError
from aiohttp.client_proto import ResponseHandler
from aiohttp.helpers import _EXC_SENTINEL
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import RawResponseMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

from replay import sse
from workloads.errors import UserError

_NEVER_PAUSE = 2**30
"""Read buffer limit, bytes: above any ``max_reply_bytes``, so the parser never stops the transport."""

_OURS: dict[int | None, str] = dict.fromkeys((errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL), "client limit")
"""Failures to connect that are this host's own."""

_aiohttp_data_received = ResponseHandler.data_received


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When to give up. Seconds and bytes."""

    connect_s: float = 10.0
    first_byte_s: float = 600.0
    """From sending to the first output: a long prompt may be computed for minutes."""
    idle_s: float = 120.0
    """Silence in the middle of a reply."""
    total_s: float | None = None
    """From sending to the end of the reply; None: no limit, a long answer is not a fault."""
    max_reply_bytes: int = 256 * 2**20
    max_event_bytes: int = 16 * 2**20
    keep_alive_s: float = 4.0
    """Idle connections older than this are closed. Below vLLM's 5 s, so that the server is never first."""
    throttle_wait_s: float = 60.0
    """Longest wait before a retry, whatever Retry-After says."""
    throttle_retries: int = 5
    """Retries of one request after 429 or 503 with Retry-After; 0: fail at once."""


class Exchange(msgspec.Struct, kw_only=True):
    """One HTTP exchange, raw. Of a retried request this is the last attempt, apart from the three counts and the wait
    for the pool. Times are monotonic ns."""

    sent_ns: int
    """When the request was handed to the kernel (or, without a connection, when that was given up)."""
    end_ns: int
    """Arrival of the last byte of a whole reply, else the moment of the failure."""
    pool_wait_ns: int
    """Wait for one of the ``connections`` to be free; 0: there was one at once."""
    connect_ns: int | None
    """Time to open a new connection; None on one that was open."""
    reused: bool
    first_byte_ns: int | None
    """Arrival of the first byte of the reply, header included."""
    http_status: int | None
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes
    read_ns: array[int]
    """Moment of each read that brought bytes of the body."""
    read_end: array[int]
    """Length of the body after each of these reads; the last is ``len(body)``."""
    failure: str | None
    """None: a whole reply came (whatever it says). Else a class from this module's table."""
    detail: str | None
    attempts: int = 1
    reset_retries: int = 0
    throttle_retries: int = 0

    def reads(self) -> tuple[sse.Times, sse.Offsets]:
        """``read_ns`` and ``read_end`` as numpy arrays, without a copy."""
        return np.frombuffer(self.read_ns, np.int64), np.frombuffer(self.read_end, np.int64)


class _Connection(ResponseHandler):
    """One connection. Holds the facts of the exchange that it carries, from `begin` on."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_reply_bytes: int) -> None:
        super().__init__(loop)
        self.max_reply_bytes = max_reply_bytes
        self.idle_since_ns = 0
        self.done: asyncio.Future[None] | None = None
        self.message: RawResponseMessage | None = None

    def begin(self) -> asyncio.Future[None]:
        """Get ready for the next reply. The future is set at its end, or when the exchange has failed."""
        self.message = None
        self.payload: StreamReader = EMPTY_PAYLOAD
        self.failure: str | None = None
        self.detail: str | None = None
        self.sent_ns = self.first_byte_ns = self.last_byte_ns = self.progress_ns = 0
        self.received = 0
        self.read_ns = array("q")
        self.read_end = array("q")
        self.done = self._loop.create_future()
        self.set_response_params(read_until_eof=True, auto_decompress=False, read_bufsize=_NEVER_PAUSE)
        return self.done

    def send(self, head: bytes, pieces: Sequence[bytes]) -> None:
        """Hand the request to the kernel, as far as it takes it at once."""
        self.sent_ns = self.progress_ns = time.monotonic_ns()
        if self.transport is None or self.transport.is_closing():
            self._failed("disconnected", "closed before sending")
        elif len(pieces) == 1 and len(pieces[0]) < 65536:
            self.transport.write(head + pieces[0])
        else:
            self.transport.writelines([head, *pieces])

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        _aiohttp_data_received(self, data)
        if self.done is None:  # nobody asked: what is left over makes should_close true
            return
        self.last_byte_ns = now
        if not self.first_byte_ns:
            self.first_byte_ns = now
        received = self.payload.total_bytes
        if received != self.received:
            self.received = received
            self.read_ns.append(now)
            self.read_end.append(received)
            if received > self.max_reply_bytes:
                self.give_up("reply too large", f"more than {self.max_reply_bytes} bytes (limit: max_reply_bytes)")

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """The parser has read a header. In place of aiohttp's queue of messages: there is at most one."""
        message, payload = data
        if 100 <= message.code < 200 and message.code != 101:  # "processing", "early hints": the reply follows
            return
        if self.message is not None:  # a second reply to one request
            self.force_close()
            return
        self.message = message
        self.payload = payload
        payload.on_eof(self._finished)

    def _finished(self) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_result(None)

    def _failed(self, failure: str, detail: str | None) -> None:
        if self.done is not None and not self.done.done():
            self.failure, self.detail = failure, detail
            self.done.set_result(None)

    def set_exception(self, exc: BaseException, exc_cause: BaseException = _EXC_SENTINEL) -> None:
        """aiohttp's notice that the parser has failed or that the connection is gone."""
        self.force_close()
        if self.done is None:
            return
        if isinstance(exc, HttpProcessingError):
            self._failed("bad http", " ".join((exc.message or str(exc_cause)).split()))
        elif not self.first_byte_ns:
            self._failed("disconnected", str(exc))
        elif isinstance(exc, ServerDisconnectedError):
            self._failed("closed early", "the server closed the connection before the end of the reply")
        else:
            self._failed("connection lost", str(exc))

    def connection_lost(self, exc: BaseException | None) -> None:
        # aiohttp takes any end of the connection for the end of a body that lasts until the connection closes. An
        # orderly close is one; a reset is not.
        if exc is not None:
            self.set_exception(exc)
        super().connection_lost(exc)

    def give_up(self, failure: str, detail: str | None = None) -> None:
        """End the exchange from our side and drop the connection."""
        self._failed(failure, detail)
        if self.transport is not None:
            self.transport.abort()


class Wire:
    """Exchanges with one server. ``async with Wire(...)`` inside a running loop; one loop, no threads.

    ``url``: where the server is, with any prefix of its paths; a trailing ``/v1`` is taken as part of the paths asked
    for. ``connections``: at most so many exchanges at once; more wait, which each of them reports. Nothing of the
    environment (proxies, netrc) and no cookies are used, and redirects are not followed.

    Raises UserError for a URL that cannot be used and, on entering, for a host that has no address.
    """

    def __init__(self, url: str, limits: Limits, *, connections: int, headers: Mapping[str, str]) -> None:
        try:
            parts = urlsplit(url)
        except ValueError as error:  # a bracket of an IPv6 address is missing
            raise UserError(f"{url!r} is not the address of a server: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{url!r} is not the address of a server: write it as http://HOST:PORT or https://HOST")
        if parts.username or parts.query or parts.fragment:
            raise UserError(f"{url!r}: give only scheme, host, port and path; credentials belong in the headers")
        if connections < 1:
            raise UserError(f"connections is {connections}: at least 1 is needed")
        try:
            self._port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise UserError(f"{url!r}: the port must be a number below 65536") from None
        if limits.max_reply_bytes >= _NEVER_PAUSE:
            raise UserError(f"max_reply_bytes is {limits.max_reply_bytes}: it must be below {_NEVER_PAUSE}")
        self.url = url
        self.limits = limits
        self._host = parts.hostname
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = _header_lines(
            {
                "Host": parts.netloc,
                "User-Agent": "decodegate",
                "Accept": "text/event-stream, application/json",
                "Accept-Encoding": "identity",
                **headers,
            }
        )
        self._free = connections
        self._queue: deque[asyncio.Future[None]] = deque()
        self._idle: deque[_Connection] = deque()
        self._busy: set[_Connection] = set()
        self._scopes: set[asyncio.Timeout] = set()
        self._cuts = 0
        self._cut_as = "cut"
        self._addresses: list[tuple[int, str]] = []

    @property
    def in_flight(self) -> int:
        """Requests that have been sent and whose exchange has not ended."""
        return len(self._busy)

    async def __aenter__(self) -> Wire:
        self._loop = asyncio.get_running_loop()
        try:
            found = await self._loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: an empty or very long part of a name
            raise UserError(f"{self.url}: no address for host {self._host!r} ({error}); check the URL") from None
        # Once, so that no name server is in the way later.
        self._addresses = [(family, str(address[0])) for family, _, _, _, address in found]
        self._watcher = self._loop.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        self.cut("cancelled")
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # the loop closes the sockets in its next turn

    async def exchange(
        self,
        path: str,
        body: bytes | Sequence[bytes],
        headers: Mapping[str, str],
        *,
        method: Literal["POST", "GET"] = "POST",
    ) -> Exchange:
        """Send one request and wait for the end of its reply. ``body``: ready bytes, or pieces of them in order.

        Never raises for what the server or the network does: see ``Exchange.failure``. Two things are retried, and
        counted. A connection from the pool that ends before one byte of the reply was being closed by the server
        when the request left: once, on a new connection. A 429 or 503 with Retry-After: after the stated wait. There
        is never a retry after the first byte of a reply that is not of these.

        When the waiting task is cancelled, the connection is dropped and CancelledError raised: the facts are lost.
        Use `cut` to end exchanges and keep them.
        """
        pieces = [body] if isinstance(body, bytes) else body
        head = b"".join(
            (
                f"{method} {self._path(path)} HTTP/1.1\r\n".encode("ascii"),
                self._headers,
                _header_lines(headers),
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % sum(map(len, pieces))
                if method == "POST"
                else b"\r\n",
            )
        )
        cuts = self._cuts
        attempts = reset_retries = throttle_retries = pool_wait_ns = 0
        while True:
            attempts += 1
            last = await self._attempt(head, pieces, cuts, new=reset_retries > 0)
            pool_wait_ns += last.pool_wait_ns
            # Nothing is sent after a cut, so both ways back look whether there was one.
            if last.failure == "disconnected" and last.reused and not reset_retries:
                if cuts == self._cuts:
                    reset_retries += 1
                    continue
            elif (
                last.http_status in (429, 503)
                and throttle_retries < self.limits.throttle_retries
                and (wait_s := _retry_after_s(last.headers)) is not None
            ):
                with suppress(TimeoutError):
                    async with self._until_cut():
                        await asyncio.sleep(min(wait_s, self.limits.throttle_wait_s) if cuts == self._cuts else 0)
                if cuts == self._cuts:
                    throttle_retries += 1
                    continue
                last.failure, last.end_ns = self._cut_as, time.monotonic_ns()
            last.pool_wait_ns = pool_wait_ns
            last.attempts, last.reset_retries, last.throttle_retries = attempts, reset_retries, throttle_retries
            return last

    async def connect_ahead(self, n: int) -> int:
        """Open idle connections until there are ``n``, in small groups so that no moment has to bear them all, and
        return how many there are: fewer if the server refuses more or ``connections`` allows no more. They last for
        ``keep_alive_s``."""
        cuts = self._cuts
        missing = min(n, self._free) - len(self._idle)
        for start in range(0, missing, 8):
            opened = await asyncio.gather(*(self._open(cuts) for _ in range(start, min(start + 8, missing))))
            for connection, *_ in opened:
                if connection is not None:
                    connection.idle_since_ns = time.monotonic_ns()
                    self._idle.append(connection)
            if any(connection is None for connection, *_ in opened):
                break
        return len(self._idle)

    def cut(self, failure: Literal["cut", "cancelled"] = "cut") -> None:
        """End every exchange that runs now, also those that wait for a connection or before a retry: each returns at
        once, with this failure and with what had come by then. Later exchanges are not affected."""
        self._cuts += 1
        self._cut_as = failure
        for scope in self._scopes:
            if not scope.expired():
                scope.reschedule(self._loop.time())
        for connection in list(self._busy):
            connection.give_up(failure)

    def _path(self, path: str) -> str:
        if not path.startswith("/") or any(character <= " " for character in path):
            raise ValueError(f"not a path: {path!r}")
        return self._prefix + path

    async def _attempt(self, head: bytes, pieces: Sequence[bytes], cuts: int, *, new: bool) -> Exchange:
        pool_wait_ns = await self._slot(cuts)
        if pool_wait_ns is None:
            return _unsent(self._cut_as, None, 0, None)
        try:
            connection = None if new else self._idle_connection()
            reused = connection is not None
            connect_ns = None
            if connection is None:
                connection, connect_ns, trouble, number = await self._open(cuts)
                if connection is None:
                    failure = self._cut_as if cuts != self._cuts else _OURS.get(number, "no connection")
                    return _unsent(failure, trouble, pool_wait_ns, connect_ns)
            done = connection.begin()
            self._busy.add(connection)
            try:
                connection.send(head, pieces)
                await done
            except BaseException:
                connection.abort()
                raise
            finally:
                self._busy.discard(connection)
            return self._result(connection, pool_wait_ns, connect_ns, reused)
        finally:
            self._release_slot()

    def _result(self, connection: _Connection, pool_wait_ns: int, connect_ns: int | None, reused: bool) -> Exchange:
        message, failure, payload = connection.message, connection.failure, connection.payload
        result = Exchange(
            sent_ns=connection.sent_ns,
            end_ns=connection.last_byte_ns if failure is None else time.monotonic_ns(),
            pool_wait_ns=pool_wait_ns,
            connect_ns=connect_ns,
            reused=reused,
            first_byte_ns=connection.first_byte_ns or None,
            http_status=message.code if message else None,
            headers={name.lower(): value for name, value in message.headers.items()} if message else {},
            body=b"" if payload is EMPTY_PAYLOAD else b"".join(payload._buffer),
            read_ns=connection.read_ns,
            read_end=connection.read_end,
            failure=failure,
            detail=connection.detail,
        )
        connection.done = None
        if failure is not None or connection.should_close:
            connection.close()
        else:
            connection.payload = EMPTY_PAYLOAD
            connection.idle_since_ns = result.end_ns
            self._idle.append(connection)
        return result

    async def _slot(self, cuts: int) -> int | None:
        """Take one of the ``connections``; ns waited, or None if cut meanwhile."""
        if self._free:
            self._free -= 1
            return 0
        started = time.monotonic_ns()
        turn = self._loop.create_future()
        self._queue.append(turn)
        try:
            async with self._until_cut():
                await turn
        except BaseException as error:
            if not turn.cancelled():  # given the slot in the same moment
                self._release_slot()
            if isinstance(error, TimeoutError):
                return None
            raise
        return time.monotonic_ns() - started

    def _release_slot(self) -> None:
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)  # the slot passes on
                return
        self._free += 1

    def _idle_connection(self) -> _Connection | None:
        """The connection used last, so that the others can grow old and be closed."""
        now = time.monotonic_ns()
        while self._idle:
            connection = self._idle.pop()
            if self._usable(connection, now):
                return connection
            connection.close()
        return None

    def _usable(self, connection: _Connection, now: int) -> bool:
        return (
            now - connection.idle_since_ns < self.limits.keep_alive_s * 1e9
            and connection.is_connected()
            and not connection.should_close
        )

    async def _open(self, cuts: int) -> tuple[_Connection | None, int, str | None, int | None]:
        """A new connection or None, ns that it took, and what was wrong: words, and the system's number for it."""
        started = time.monotonic_ns()
        trouble = "cut"
        number: int | None = None
        connection: _Connection | None = None
        try:
            async with self._until_cut(self.limits.connect_s):
                for address in list(self._addresses):
                    try:
                        _, connection = await self._loop.create_connection(
                            lambda: _Connection(self._loop, self.limits.max_reply_bytes),
                            address[1],
                            self._port,
                            family=address[0],
                            ssl=self._ssl,
                            server_hostname=self._host if self._ssl else None,
                        )
                    except OSError as error:
                        trouble, number = str(error), error.errno
                        continue
                    if address is not self._addresses[0]:  # of "localhost", say, often only one address is served
                        self._addresses.remove(address)
                        self._addresses.insert(0, address)
                    break
        except TimeoutError:
            trouble = f"not within {self.limits.connect_s:g} s (limit: connect_s)"
        if connection is not None and cuts != self._cuts:
            connection.abort()
            connection = None
        return connection, time.monotonic_ns() - started, trouble, number

    @asynccontextmanager
    async def _until_cut(self, seconds: float | None = None) -> AsyncIterator[None]:
        """A wait inside it ends with TimeoutError after ``seconds``, or at the next `cut`."""
        async with asyncio.timeout(seconds) as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)

    async def _watch(self) -> None:
        """Give up what is overdue and close what has been idle too long: one task for all exchanges."""
        limits = self.limits
        shortest = min(limits.first_byte_s, limits.idle_s, limits.total_s or limits.idle_s, limits.keep_alive_s)
        while True:
            await asyncio.sleep(min(max(shortest / 10, 0.01), 1.0))
            now = time.monotonic_ns()
            for connection in list(self._busy):
                if overdue := _overdue(connection, now, limits):
                    connection.give_up(*overdue)
            for _ in range(len(self._idle)):
                connection = self._idle.popleft()
                if self._usable(connection, now):
                    self._idle.append(connection)
                else:
                    connection.close()


def _overdue(connection: _Connection, now: int, limits: Limits) -> tuple[str, str] | None:
    """Failure class and words for an exchange that has run into a limit."""
    since_sent_s = (now - connection.sent_ns) / 1e9
    if limits.total_s is not None and since_sent_s > limits.total_s:
        return "too slow", f"not ended {limits.total_s:g} s after sending (limit: total_s)"
    if connection.read_ns:
        if now - connection.progress_ns <= limits.idle_s * 1e9:
            return None
        # Quiet, or only noise (comments, pings) since we last looked: look again, at most once in idle_s while all
        # is well. A first event alone may be no output but the announcement of a role, sent before the prompt is read.
        outputs, connection.progress_ns = _progress(connection)
        if outputs > 1:
            if now - connection.progress_ns <= limits.idle_s * 1e9:
                return None
            return "stalled", f"silent for {limits.idle_s:g} s in the middle of the reply (limit: idle_s)"
    if since_sent_s > limits.first_byte_s:
        return "no first byte", f"no output {limits.first_byte_s:g} s after sending (limit: first_byte_s)"
    return None


def _progress(connection: _Connection) -> tuple[int, int]:
    """How many events that may be output have come, and when the last one did (monotonic ns)."""
    assert connection.message is not None
    if "event-stream" not in connection.message.headers.get("Content-Type", ""):
        return 2, connection.last_byte_ns
    body = b"".join(connection.payload._buffer)
    read_ns = np.array(connection.read_ns, dtype=np.int64)
    read_end = np.array(connection.read_end, dtype=np.int64)
    found = sse.events(body, read_ns, read_end)
    real = [index for index, kind in enumerate(found.kinds) if kind != b"ping"]
    return len(real), int(found.last_ns[real[-1]]) if real else connection.sent_ns


def _unsent(failure: str, detail: str | None, pool_wait_ns: int, connect_ns: int | None) -> Exchange:
    now = time.monotonic_ns()
    return Exchange(
        sent_ns=now,
        end_ns=now,
        pool_wait_ns=pool_wait_ns,
        connect_ns=connect_ns,
        reused=False,
        first_byte_ns=None,
        http_status=None,
        headers={},
        body=b"",
        read_ns=array("q"),
        read_end=array("q"),
        failure=failure,
        detail=detail,
    )


def _header_lines(headers: Mapping[str, str]) -> bytes:
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if text.count("\r") != len(headers) or text.count("\n") != len(headers):
        raise ValueError(f"line break in a header: {dict(headers)}")
    return text.encode()


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait by the header Retry-After: a number of seconds or a date (RFC 9110, 10.2.3). A date is compared
    with the reply's own Date, so that a wrong clock here does not matter. None: no usable header."""
    value = headers.get("retry-after", "").strip()
    if not value:
        return None
    try:
        if value.replace(".", "", 1).isdigit():
            return float(value)
        until = parsedate_to_datetime(value).timestamp()
        now = parsedate_to_datetime(headers["date"]).timestamp() if "date" in headers else time.time()
    except ValueError:
        return None
    return max(until - now, 0.0)
