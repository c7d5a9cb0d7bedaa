"""The wire against a scripted server: times against the server's own, and honest ends.

Times are compared with what the server says it did; bounds are wide enough for a busy machine.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from email.utils import formatdate
from itertools import pairwise
from typing import Any, TypeVar

import pytest
import uvloop

from replay.outcomes import Outcome, outcome
from replay.wire import Exchange, Limits, Wire
from tests.scripted_server import DONE, FIN, ROLE, USE, C, Request, ScriptedServer, Step, reply, serve, stream
from workloads.errors import UserError

T = TypeVar("T")
MS = 1_000_000
LATE_MS = 500
"""What a busy machine may add between the server's write and our stamp."""
TOKEN = [(0.0, C("a")), (1.0, FIN("length") + USE(3, 1) + DONE)]
LOOPS: list[Callable[[Coroutine[Any, Any, Any]], Any]] = [uvloop.run, asyncio.run]


def use(
    server: ScriptedServer | str,
    work: Callable[[Wire], Awaitable[T]],
    limits: Limits | None = None,
    connections: int = 4,
    run: Callable[[Coroutine[Any, Any, T]], T] = uvloop.run,
) -> T:
    url = server if isinstance(server, str) else server.url

    async def main() -> T:
        async with Wire(url, limits or Limits(), connections=connections, headers={"X-Key": "k"}) as wire:
            return await asyncio.wait_for(work(wire), 30)

    return run(main())


def ask(wire: Wire, body: bytes | list[bytes] = b'{"model":"m"}') -> Coroutine[Any, Any, Exchange]:
    return wire.exchange("/v1/chat/completions", body, {"X-Session": "s"})


def one(server: ScriptedServer, limits: Limits | None = None, **more: Any) -> Exchange:
    exchange: Exchange = use(server, ask, limits, **more)
    return exchange


def judged(exchange: Exchange, asked: int = 1, limits: Limits | None = None) -> Outcome:
    return outcome(exchange, api="chat", asked_output=asked, exact_length=True, limits=limits or Limits())


# --- times


@pytest.mark.parametrize("run", LOOPS, ids=["uvloop", "asyncio"])
def test_every_write_is_stamped_at_its_own_arrival(run: Any) -> None:
    events = [(20.0 * number, C(f"w{number}")) for number in range(1, 9)]
    with serve(lambda _: stream([*events, (180, FIN("length") + USE(3, 8) + DONE)])) as server:
        exchange = one(server, run=run)
        sent = server.sent_ns(0)
    result = judged(exchange, 8)
    assert result.status == "ok"
    assert exchange.read_end[-1] == len(exchange.body)
    arrived = result.chunks["t_ns"].tolist()
    assert len(arrived) == 8
    for written, stamped in zip(sent, arrived, strict=False):
        assert -1 * MS < stamped - written < LATE_MS * MS
    assert exchange.first_byte_ns == arrived[0]
    assert exchange.sent_ns <= server.requests[0].came_ns
    assert exchange.end_ns >= arrived[-1]
    assert exchange.connect_ns is not None
    assert exchange.pool_wait_ns == 0


def test_br_01_five_writes_of_four_tokens_are_five_stamps_and_twenty_tokens() -> None:
    script: list[tuple[float, bytes]] = [(60, ROLE)]
    for number in range(1, 6):
        count = {"prompt_tokens": 50, "completion_tokens": 4 * number, "total_tokens": 50 + 4 * number}
        script.append((60 + 40 * number, C("abcd", usage=count)))
    with serve(lambda _: stream([*script, (261, FIN("stop") + USE(50, 20) + DONE)])) as server:
        result = judged(one(server), 20)
        sent = server.sent_ns(0)
    assert (result.status, result.output_tokens, result.token_source) == ("ok", 20, "usage")
    assert result.chunks["tokens"].tolist() == [4] * 5
    assert result.first_token_ns is not None
    assert -1 * MS < result.first_token_ns - sent[1] < LATE_MS * MS  # the role's write, 40 ms before, is no token


def test_first_byte_is_not_first_token() -> None:
    with serve(lambda _: stream([(60, ROLE), (120, C("a")), (121, TOKEN[1][1])], header_ms=5)) as server:
        exchange = one(server)
        sent = server.sent_ns(0)
    result = judged(exchange)
    assert exchange.first_byte_ns is not None
    assert result.first_token_ns is not None
    assert exchange.first_byte_ns < sent[1]  # the header's write, not the first event's
    assert result.first_token_ns >= sent[2] - MS


def test_br_13_one_event_in_writes_of_one_byte() -> None:
    data = C("✅")
    writes = [(0.2 * number, data[number : number + 1]) for number in range(len(data))]
    with serve(lambda _: stream([*writes, (200, FIN("length") + USE(1, 1) + DONE)], framing="close")) as server:
        exchange = one(server)
        sent = server.sent_ns(0)
    result = judged(exchange)
    assert (result.status, result.answer) == ("ok", "✅")
    assert len(exchange.read_ns) > 5
    assert result.first_token_ns is not None
    last_byte = sent[len(data) - 1]
    assert -1 * MS < result.first_token_ns - last_byte < LATE_MS * MS


def test_br_13_one_event_of_700000_bytes_and_the_reading_never_pauses() -> None:
    big = C("x" * 700_000)
    with serve(lambda _: stream([(0, big), (1, FIN("length") + USE(1, 1) + DONE)])) as server:
        exchange = one(server)
    assert judged(exchange).answer == "x" * 700_000
    assert exchange.read_end[-1] == len(exchange.body) > 700_000


# --- requests


@pytest.mark.parametrize("pieces", [[b'{"a":1}'], [b'{"p":"', b"x" * 100_000, b'"}']])
def test_the_request_is_sent_as_given(pieces: list[bytes]) -> None:
    with serve(lambda _: stream(TOKEN)) as server:
        exchange = use(server, lambda wire: ask(wire, pieces))
        request = server.requests[0]
    assert exchange.failure is None
    assert request.body == b"".join(pieces)
    assert request.path == "/v1/chat/completions"
    assert request.header("accept-encoding") == "identity"
    assert request.header("x-key") == "k"
    assert request.header("x-session") == "s"
    assert request.header("host") == f"127.0.0.1:{server.port}"
    assert request.header("content-type") == "application/json"


def test_a_trailing_v1_in_the_url_is_not_doubled_and_a_prefix_is_kept() -> None:
    with serve(lambda _: stream(TOKEN)) as server:
        use(server.url + "/v1/", ask)
        use(server.url + "/proxy", ask)
        assert [request.path for request in server.requests] == ["/v1/chat/completions", "/proxy/v1/chat/completions"]


def test_line_breaks_cannot_be_smuggled_into_a_header() -> None:
    with serve(lambda _: stream(TOKEN)) as server, pytest.raises(ValueError, match="line break"):
        use(server, lambda wire: wire.exchange("/x", b"", {"X": "a\r\nY: b"}))


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:80", "ftp://x", "http://", "http://u:p@h", "http://h?q=1", "http://h:99999", "http://h#f"),
        "http://[::1",
    ],
)
def test_a_url_that_cannot_be_used_is_the_users_to_mend(url: str) -> None:
    with pytest.raises(UserError, match=r"http|port"):
        Wire(url, Limits(), connections=1, headers={})


# --- connections


def test_connections_are_reused_and_idle_ones_dropped_before_the_server_would() -> None:
    async def work(wire: Wire) -> list[Exchange]:
        first = await ask(wire)
        second = await ask(wire)
        await asyncio.sleep(0.5)
        return [first, second, await ask(wire)]

    with serve(lambda _: stream(TOKEN)) as server:
        exchanges = use(server, work, Limits(keep_alive_s=0.2))
        assert [request.connection for request in server.requests] == [0, 0, 1]
    assert [exchange.reused for exchange in exchanges] == [False, True, False]
    assert [exchange.connect_ns is None for exchange in exchanges] == [False, True, False]
    assert all(exchange.reset_retries == 0 for exchange in exchanges)


def test_idle_connections_are_closed_even_if_nothing_is_sent() -> None:
    async def work(wire: Wire) -> list[int]:
        opened = await wire.connect_ahead(3)
        await asyncio.sleep(0.1)
        before = server.open_connections
        until = time.monotonic() + 10
        while server.open_connections and time.monotonic() < until:
            await asyncio.sleep(0.02)
        return [opened, before, server.open_connections]

    with serve(lambda _: stream(TOKEN)) as server:
        assert use(server, work, Limits(keep_alive_s=1.0)) == [3, 3, 0]


@pytest.mark.parametrize("run", LOOPS, ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("end", ["close", "reset"])
def test_br_19_a_reused_connection_that_ends_unanswered_is_retried_once_on_a_new_one(end: Any, run: Any) -> None:
    def script(request: Request) -> list[Step]:
        return [Step(30, end=end)] if request.on_connection == 1 else stream(TOKEN)

    async def work(wire: Wire) -> list[Exchange]:
        return [await ask(wire), await ask(wire)]

    with serve(script) as server:
        first, second = use(server, work, run=run)
        assert [(r.connection, r.on_connection) for r in server.requests] == [(0, 0), (0, 1), (1, 0)]
        assert server.requests[1].body == server.requests[2].body
        unanswered = server.requests[1].came_ns
    assert (first.reset_retries, first.attempts) == (0, 1)
    assert judged(second).status == "ok"
    assert (second.reset_retries, second.attempts, second.reused) == (1, 2, False)
    assert second.connect_ns is not None  # apart from the rest
    assert second.sent_ns > unanswered  # of the attempt that was answered: latency is due_ns's business


def test_br_19_never_a_second_retry_nor_one_on_a_new_connection() -> None:
    def script(request: Request) -> list[Step]:
        return stream(TOKEN) if request.number == 0 else [Step(0, end="close")]

    async def work(wire: Wire) -> list[Exchange]:
        return [await ask(wire), await ask(wire), await ask(wire)]

    with serve(script) as server:
        _, second, third = use(server, work)
        assert len(server.requests) == 4
    assert (second.failure, second.attempts, second.reset_retries) == ("disconnected", 2, 1)
    assert (third.failure, third.attempts, third.reset_retries) == ("disconnected", 1, 0)
    assert judged(third).status == "failed"


@pytest.mark.parametrize("first_byte", [b"HTTP/1.1 200 OK\r\n", b"H"])
def test_br_19_never_a_retry_after_the_first_byte(first_byte: bytes) -> None:
    def script(request: Request) -> list[Step]:
        return stream(TOKEN) if request.number == 0 else [Step(0, first_byte), Step(40, end="reset")]

    async def work(wire: Wire) -> Exchange:
        await ask(wire)
        return await ask(wire)

    with serve(script) as server:
        second = use(server, work)
        assert len(server.requests) == 2
    assert (second.failure, second.attempts, second.reused) == ("connection lost", 1, True)


def test_br_19_a_server_that_closes_idle_connections_first_costs_nothing() -> None:
    """The server closes 60 ms after its answer; the next turn comes later than that."""

    def script(_: Request) -> list[Step]:
        return [*stream(TOKEN), Step(60, end="close")]

    async def work(wire: Wire) -> list[Exchange]:
        first = await ask(wire)
        await asyncio.sleep(0.4)
        return [first, await ask(wire)]

    with serve(script) as server:
        first, second = use(server, work)
    assert judged(first).status == judged(second).status == "ok"
    assert (second.reused, second.attempts) == (False, 1)


def test_br_21_the_pool_hides_no_load() -> None:
    asked, rounds = 300, 3
    prompt = b'{"prompt":"' + b"x" * 200_000 + b'"}'

    async def work(wire: Wire) -> tuple[list[Exchange], int]:
        peak = 0
        exchanges: list[Exchange] = []

        async def lane() -> None:
            nonlocal peak
            for number in range(rounds):
                task = asyncio.ensure_future(ask(wire, prompt if number == 1 else b"{}"))
                await asyncio.sleep(0)
                peak = max(peak, wire.in_flight)
                exchanges.append(await task)

        await wire.connect_ahead(asked)
        await asyncio.gather(*(lane() for _ in range(asked)))
        assert wire.in_flight == 0
        return exchanges, peak

    with serve(lambda _: stream([(700, C("a")), (700, TOKEN[1][1])])) as server:
        exchanges, peak = use(server, work, connections=asked)
        assert server.peak_in_flight == peak == asked
        assert len(server.requests) == asked * rounds
        assert server.connections <= asked
    assert all(exchange.failure is None and exchange.pool_wait_ns == 0 for exchange in exchanges)


def test_br_21_waiting_for_a_connection_is_measured_and_apart() -> None:
    async def work(wire: Wire) -> list[Exchange]:
        return await asyncio.gather(*(ask(wire) for _ in range(4)))

    with serve(lambda _: stream([(150, C("a")), (150, TOKEN[1][1])])) as server:
        exchanges = use(server, work, connections=1)
        assert server.peak_in_flight == 1
    waits = [exchange.pool_wait_ns / MS for exchange in exchanges]
    assert waits[0] == 0
    for number, wait in enumerate(waits):
        assert wait >= 140 * number
    for exchange in exchanges:  # sent when handed to the connection, so the wait is not the server's TTFT
        assert exchange.first_byte_ns is not None
        assert exchange.first_byte_ns - exchange.sent_ns < (150 + LATE_MS) * MS


def test_no_connection_is_a_failure_with_its_reason() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    exchange = use(f"http://127.0.0.1:{port}", ask)
    assert (exchange.failure, exchange.http_status) == ("no connection", None)
    assert "refused" in (exchange.detail or "").lower()
    assert judged(exchange).status == "failed"


def test_a_server_that_does_not_accept_is_no_connection_within_the_limit() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        others = [socket.socket() for _ in range(3)]
        for other in others:  # fill the queue of connections
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        time.sleep(0.05)
        exchange = use(f"http://127.0.0.1:{full.getsockname()[1]}", ask, Limits(connect_s=0.3))
        for other in others:
            other.close()
    assert exchange.failure == "no connection"
    assert "connect_s" in (exchange.detail or "")


def test_localhost_is_reached_whichever_address_serves() -> None:
    with serve(lambda _: stream(TOKEN)) as server:
        assert use(f"http://localhost:{server.port}", ask).failure is None


def test_connect_ahead_opens_connections_that_are_then_used() -> None:
    async def work(wire: Wire) -> tuple[int, int, list[Exchange]]:
        opened = await wire.connect_ahead(10)
        again = await wire.connect_ahead(10)
        return opened, again, await asyncio.gather(*(ask(wire) for _ in range(10)))

    with serve(lambda _: stream(TOKEN)) as server:
        opened, again, exchanges = use(server, work, connections=10)
        assert server.connections == 10
    assert (opened, again) == (10, 10)
    assert all(exchange.reused and exchange.connect_ns is None for exchange in exchanges)


# --- ends


@pytest.mark.parametrize("run", LOOPS, ids=["uvloop", "asyncio"])
@pytest.mark.parametrize(
    ("end", "framing", "failure", "status"),
    [
        ("reset", "chunked", "connection lost", "failed"),
        ("close", "chunked", "closed early", "truncated"),
        ("close", "close", None, "truncated"),
        ("reset", "close", "connection lost", "failed"),
    ],
)
def test_a_reply_that_breaks_off_is_never_a_success(
    end: Any, framing: Any, failure: Any, status: str, run: Any
) -> None:
    with serve(lambda _: stream([(0, ROLE), (10, C("a"))], end=end, framing=framing, end_ms=60)) as server:
        exchange = one(server, run=run)
    assert exchange.failure == failure
    result = judged(exchange)
    assert (result.status, result.answer, len(result.chunks)) == (status, "a", 1)


@pytest.mark.parametrize("end", ["close", "reset"])
def test_a_reply_whose_terminal_event_came_is_complete_however_the_connection_ended(end: Any) -> None:
    with serve(lambda _: stream(TOKEN, end=end, end_ms=60)) as server:
        result = judged(one(server))
    assert result.status == "ok"
    assert len(result.notes) == 1


def test_br_15_error_objects_through_the_wire() -> None:
    error = {"error": {"message": "EngineCore died", "code": 500}}
    data = b'data: {"error":{"message":"EngineCore died","code":500}}\n\n'
    for steps in (
        stream([(0, ROLE), (5, C("a")), (10, data), (10, DONE)]),
        stream([(0, data), (0, DONE)]),
        stream([(0, C("a")), (1, b"event: error\n" + data)]),
        reply(200, error),
    ):
        with serve(lambda _, steps=steps: steps) as server:  # type: ignore[misc]
            result = judged(one(server))
        assert (result.status, result.error, result.detail) == ("failed", "error in stream", "EngineCore died")


@pytest.mark.parametrize(
    ("raw", "failure"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "bad http"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "bad http"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", "bad http"),
    ],
)
def test_broken_http_is_named(raw: bytes, failure: str) -> None:
    with serve(lambda _: [Step(0, raw), Step(300, end="close")]) as server:
        exchange = one(server)
    assert exchange.failure == failure
    assert exchange.detail


def test_interim_replies_are_passed_over_and_second_replies_not_believed() -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"

    def script(request: Request) -> list[Step]:
        if request.number == 0:
            return [Step(0, b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"), Step(20, whole + whole)]
        return [Step(0, whole)]

    async def work(wire: Wire) -> list[Exchange]:
        return [await ask(wire), await ask(wire)]

    with serve(script) as server:
        first, second = use(server, work)
        assert [request.connection for request in server.requests] == [0, 1]
    assert [exchange.http_status for exchange in (first, second)] == [200, 200]
    assert [exchange.body for exchange in (first, second)] == [b"{}", b"{}"]


def test_empty_replies_and_http_1_0() -> None:
    def script(request: Request) -> list[Step]:
        if request.number == 0:
            return [Step(0, b"HTTP/1.1 204 No Content\r\n\r\n")]
        return [Step(0, b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + C("a") + DONE, end="close")]

    async def work(wire: Wire) -> list[Exchange]:
        return [await ask(wire), await ask(wire), await ask(wire)]

    with serve(script) as server:
        first, second, third = use(server, work)
        assert [request.connection for request in server.requests] == [0, 0, 1]
    assert (first.http_status, first.failure, first.body) == (204, None, b"")
    assert (second.failure, third.failure) == (None, None)
    assert judged(second).answer == "a"


def test_a_reply_above_the_limit_fails_alone() -> None:
    def script(request: Request) -> list[Step]:
        return stream([(0, C("x" * 50_000)) for _ in range(40)]) if request.number == 0 else stream(TOKEN)

    async def work(wire: Wire) -> list[Exchange]:
        return [await ask(wire), await ask(wire)]

    with serve(script) as server:
        first, second = use(server, work, Limits(max_reply_bytes=300_000))
    assert (first.failure, second.failure) == ("reply too large", None)
    assert "max_reply_bytes" in (first.detail or "")


# --- stalls


def test_nothing_at_all_is_no_first_byte() -> None:
    with serve(lambda _: [Step(20_000)]) as server:
        exchange = one(server, Limits(first_byte_s=0.2, idle_s=0.05))
        assert (exchange.end_ns - exchange.sent_ns) / 1e9 >= 0.2
    assert (exchange.failure, exchange.first_byte_ns, exchange.attempts) == ("no first byte", None, 1)
    assert judged(exchange).status == "stalled"


@pytest.mark.parametrize("noise", [b"", b": keep-alive\n\n", b'event: ping\ndata: {"type":"ping"}\n\n'])
def test_silence_in_the_middle_is_stalled_and_noise_is_silence(noise: bytes) -> None:
    events = [(0.0, ROLE), (10.0, C("a"))] + [(10.0 + 40 * number, noise) for number in range(1, 500) if noise]
    with serve(lambda _: stream(events, end="hold", end_ms=20_000)) as server:
        exchange = one(server, Limits(idle_s=0.3, first_byte_s=20))
    assert exchange.failure == "stalled"
    assert 0.3 <= (exchange.end_ns - exchange.sent_ns) / 1e9 < 10  # the noise would have gone on for 20 s
    result = judged(exchange)
    assert (result.status, result.answer) == ("stalled", "a")
    assert server.open_connections == 0  # dropped, so that the server can stop computing


def test_a_role_sent_early_does_not_start_the_clock_of_silence() -> None:
    with serve(lambda _: stream([(0, ROLE), (600, C("a")), (601, TOKEN[1][1])])) as server:
        assert judged(one(server, Limits(idle_s=0.1, first_byte_s=20))).status == "ok"
        assert one(server, Limits(idle_s=0.1, first_byte_s=0.3)).failure == "no first byte"


def test_a_slow_but_steady_reply_is_no_stall_unless_a_total_is_set() -> None:
    events = [(60.0 * number, C("a")) for number in range(12)]
    with serve(lambda _: stream([*events, (720, FIN("length") + USE(1, 12) + DONE)])) as server:
        assert judged(one(server, Limits(idle_s=0.5)), 12).status == "ok"
        exchange = one(server, Limits(idle_s=0.5, total_s=0.3))
    assert (exchange.failure, judged(exchange).status) == ("too slow", "stalled")


# --- throttling


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_honoured_and_counted(status: int) -> None:
    def script(request: Request) -> list[Step]:
        return reply(status, {}, headers="retry-after: 0.2\r\n") if request.number < 2 else stream(TOKEN)

    with serve(script) as server:
        exchange = one(server)
        came = [request.came_ns for request in server.requests]
    assert judged(exchange).status == "ok"
    assert (exchange.throttle_retries, exchange.attempts, exchange.reset_retries) == (2, 3, 0)
    assert min(later - earlier for earlier, later in pairwise(came)) >= 190 * MS
    assert exchange.sent_ns > came[1]


def test_retry_after_as_a_date_counts_from_the_servers_own_clock() -> None:
    now = 1_000_000_000.0  # the server's clock is decades off
    dates = f"date: {formatdate(now, usegmt=True)}\r\nretry-after: {formatdate(now + 1, usegmt=True)}\r\n"
    with serve(lambda r: reply(503, {}, headers=dates) if r.number == 0 else stream(TOKEN)) as server:
        exchange = one(server)
        waited = server.requests[1].came_ns - server.requests[0].came_ns
    assert (exchange.failure, exchange.throttle_retries) == (None, 1)
    assert 1000 * MS <= waited < 3000 * MS


def test_the_wait_is_capped_and_the_retries_end() -> None:
    limits = Limits(throttle_wait_s=0.02, throttle_retries=3)
    with serve(lambda _: reply(429, {"error": {"message": "slow down"}}, headers="retry-after: 3600\r\n")) as server:
        exchange = one(server, limits)
        assert len(server.requests) == 4
    result = judged(exchange)
    assert (result.status, result.error, result.detail) == ("failed", "http 429", "slow down")
    assert exchange.throttle_retries == 3


@pytest.mark.parametrize(("headers", "retries"), [("", 5), ("retry-after: soon\r\n", 5), ("retry-after: 0\r\n", 0)])
def test_without_a_usable_header_or_without_retries_it_fails_at_once(headers: str, retries: int) -> None:
    with serve(lambda _: reply(429, {}, headers=headers)) as server:
        exchange = one(server, Limits(throttle_retries=retries))
        assert len(server.requests) == 1
    assert (exchange.http_status, exchange.attempts, judged(exchange).error) == (429, 1, "http 429")


# --- cut


@pytest.mark.parametrize("run", LOOPS, ids=["uvloop", "asyncio"])
def test_cut_returns_what_had_come_at_once_wherever_it_waits(run: Any) -> None:
    def script(request: Request) -> list[Step]:
        if b"throttled" in request.body:
            return reply(429, {}, headers="retry-after: 50\r\n")
        return stream([(0, ROLE), (5, C("a"))], end="hold", end_ms=20_000)

    async def work(wire: Wire) -> tuple[list[Exchange], float, Exchange]:
        throttled = asyncio.ensure_future(ask(wire, b"throttled"))
        await asyncio.sleep(0.2)
        tasks = [asyncio.ensure_future(ask(wire)) for _ in range(3)]  # the third waits for a connection
        await asyncio.sleep(0.3)
        assert wire.in_flight == 2
        started = time.monotonic()
        wire.cut()
        await asyncio.sleep(0)
        wire.cut()  # while the waits are ending: twice is once
        exchanges = await asyncio.gather(*tasks, throttled)
        after = asyncio.ensure_future(ask(wire))  # later exchanges are not affected
        await asyncio.sleep(0.3)
        wire.cut("cancelled")
        return exchanges, time.monotonic() - started, await after

    with serve(script) as server:
        exchanges, seconds, after = use(server, work, connections=2, run=run)
    assert seconds < 5
    assert [exchange.failure for exchange in exchanges] == ["cut"] * 4
    assert [judged(exchange).answer for exchange in exchanges] == ["a", "a", "", ""]
    assert [judged(exchange).status for exchange in exchanges] == ["cut"] * 4
    assert exchanges[2].first_byte_ns is None
    assert (after.failure, judged(after).answer, judged(after).status) == ("cancelled", "a", "cancelled")


def test_cut_ends_a_connection_attempt_and_nothing_is_sent_after_it() -> None:
    """Cut in the very moments in which a connection is being opened, has ended unanswered, or was throttled."""

    def script(request: Request) -> list[Step]:
        if request.on_connection == 0:
            return stream(TOKEN)
        return [Step(0, end="close")] if b"close" in request.body else reply(429, {}, headers="retry-after: 0\r\n")

    async def work(wire: Wire) -> list[Exchange]:
        opening = asyncio.ensure_future(ask(wire))
        await asyncio.sleep(0)
        wire.cut()
        wire.cut()
        exchanges = [await opening]
        for body in (b"close", b"throttle"):
            await ask(wire)
            task = asyncio.ensure_future(ask(wire, body))
            await asyncio.sleep(0)
            (connection,) = wire._busy
            assert connection.done is not None
            connection.done.add_done_callback(lambda _: wire.cut())  # before the waiting task runs on
            exchanges.append(await task)
        return exchanges

    with serve(script) as server:
        opening, closed, throttled = use(server, work, connections=1)
        assert len([request for request in server.requests if b"close" in request.body]) == 1
        assert len([request for request in server.requests if b"throttle" in request.body]) == 1
    assert opening.failure == "cut"
    assert closed.failure in ("cut", "disconnected")
    assert (throttled.failure, throttled.http_status, throttled.attempts) == ("cut", 429, 1)


def test_https_to_a_plain_server_is_no_connection() -> None:
    with serve(lambda _: stream(TOKEN)) as server:
        exchange = use(server.url.replace("http:", "https:"), ask, Limits(connect_s=2))
    assert exchange.failure == "no connection"
    assert exchange.detail


def test_a_cancelled_task_drops_its_connection_and_frees_its_place() -> None:
    async def work(wire: Wire) -> Exchange:
        task = asyncio.ensure_future(ask(wire))
        queued = asyncio.ensure_future(ask(wire))
        await asyncio.sleep(0.1)
        queued.cancel()
        task.cancel()
        await asyncio.gather(task, queued, return_exceptions=True)
        assert task.cancelled()
        assert wire.in_flight == 0
        return await ask(wire)

    def script(request: Request) -> list[Step]:
        return [Step(20_000)] if request.number == 0 else stream(TOKEN)

    with serve(script) as server:
        exchange = use(server, work, connections=1)
    assert (exchange.failure, exchange.reused, exchange.pool_wait_ns) == (None, False, 0)


def test_leaving_the_wire_leaves_no_connection() -> None:
    with serve(lambda _: stream(TOKEN)) as server:

        async def work(wire: Wire) -> None:
            await wire.connect_ahead(3)
            await asyncio.gather(*(ask(wire) for _ in range(4)))

        use(server, work)
        until = time.monotonic() + 5
        while server.open_connections and time.monotonic() < until:
            threading.Event().wait(0.01)
        assert server.open_connections == 0
