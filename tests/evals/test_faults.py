"""The fault-injecting proxy: what it leaves alone is the same to the byte, and each fault does what it says, as often
as it says, against a server whose every byte is known."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax
from yarl import URL

from evals.faults import FAULTS, Store, parse, positions, proxy
from evals.faults.tokens import FALL, NO_LOGPROB, shifted
from replay.emulator import process
from replay.emulator.settings import EmulatorSettings
from replay.emulator.truth import read_emissions
from tests import scripted_server
from tests.scripted_server import DONE, FIN, ROLE, C, Request, ScriptedServer, Step, chunk, event, stream, usage
from workloads.errors import UserError

Json = dict[str, Any]
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "generate": "/inference/v1/generate"}
BODY = b'{ "prompt":"x"}'
TIMEOUT = aiohttp.ClientTimeout(total=20)


# ---- a server that shows everything: token i of a reply is id 100 + i, text "wI ", with two other candidates


def candidates(index: int) -> list[tuple[int, str, float]]:
    rivals = [(100 + index, f"w{index} ", 0.9), (5000 + index, f"x{index} ", 0.06), (7000 + index, f"y{index} ", 0.01)]
    return [(token, text, math.log(share)) for token, text, share in rivals]


def shown(each: tuple[int, str, float], by_id: bool) -> str:
    return f"token_id:{each[0]}" if by_id else each[1]


def named(each: tuple[int, str, float], by_id: bool) -> Json:
    return {"token": shown(each, by_id), "logprob": each[2], "bytes": list(shown(each, by_id).encode())}


def ranked(row: list[tuple[int, str, float]]) -> list[Json]:
    return [{"token_id": token, "logprob": value, "rank": rank} for rank, (token, _, value) in enumerate(row, 1)]


def choice(api: str, ask: Json, indices: range, finish: str | None) -> Json:
    """Output tokens ``indices`` as a choice of the API, with all that is asked for."""
    found: Json = {"index": 0, "finish_reason": finish}
    rows = [candidates(index) for index in indices]
    text = "".join(row[0][1] for row in rows)
    by_id = ask.get("return_tokens_as_token_ids", False)
    if api == "generate" or ask.get("return_token_ids"):
        found["token_ids"] = [row[0][0] for row in rows]
    if api == "completions":
        found["text"] = text
        if ask.get("logprobs") is not None:
            found["logprobs"] = {
                "text_offset": [0] * len(rows),
                "tokens": [shown(row[0], by_id) for row in rows],
                "token_logprobs": [row[0][2] for row in rows],
                "top_logprobs": [{shown(each, by_id): each[2] for each in row} for row in rows],
            }
    elif api == "chat":
        found["delta" if ask.get("stream") else "message"] = {"content": text}
        if ask.get("logprobs"):
            content = [named(row[0], by_id) | {"top_logprobs": [named(each, by_id) for each in row]} for row in rows]
            found["logprobs"] = {"content": content}
    elif ask["sampling_params"].get("logprobs") is not None:
        found["logprobs"] = {"content": [ranked(row)[0] | {"top_logprobs": ranked(row)} for row in rows]}
    return found


def answer(request: Request) -> list[Step]:
    """One token each chunk and "stop" with the last, usage, [DONE]; or whole."""
    api = next((api for api, path in PATHS.items() if path == request.path), None)
    if api is None:
        return scripted_server.reply(404, {"path": request.path})
    ask = json.loads(request.body)
    sampling = ask.get("sampling_params", ask)
    asked = sampling.get("max_completion_tokens") or sampling.get("max_tokens") or 100
    count, finish = min(asked, 600), "length" if asked <= 600 else "stop"
    counts = {"usage": usage(40, count), "model": "m"}
    if not ask.get("stream"):
        return scripted_server.reply(200, {"id": "r", "choices": [choice(api, ask, range(count), finish)], **counts})
    events = [
        event(json.dumps({"choices": [choice(api, ask, range(at, at + 1), finish if at == count - 1 else None)]}))
        for at in range(count)
    ]
    return stream([(0, b"".join(events)), (0, event(json.dumps({"choices": [], **counts})) + DONE)])


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server.serve(answer) as running:
        yield running


def request(api: str, number: int = 0, tokens: int = 100, **more: Any) -> Json:
    """The sampling fields in ``more`` go where the API wants them."""
    if api == "generate":
        stream = {"stream": True} if more.pop("stream", False) else {}
        return {"token_ids": [number + 1] * 40, "sampling_params": {"max_tokens": tokens, **more}, **stream}
    prompt = {"messages": [{"role": "user", "content": f"q{number}"}]} if api == "chat" else {"prompt": f"q{number}"}
    return {**prompt, "max_tokens": tokens, **more}


async def post(url: str, api: str, body: Json) -> bytes:
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session, session.post(url + PATHS[api], json=body) as reply:
        return await reply.read()


def through(upstream: str, fault: str | None, work: Callable[[str], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with proxy(upstream, fault, **options) as url:
            return await work(url)

    return asyncio.run(main())


def replies(upstream: str, fault: str | None, api: str, bodies: list[Json], **options: Any) -> list[Json]:
    """The replies to requests that are sent one after the other: whole ones, or the last of a stream's events with
    all of its tokens, texts and logprobs together."""

    async def work(url: str) -> list[Json]:
        return [joined(await post(url, api, body)) for body in bodies]

    result: list[Json] = through(upstream, fault, work, **options)
    return result


def joined(raw: bytes) -> Json:
    if not raw.startswith(b"data: "):
        whole: Json = json.loads(raw)
        return whole
    datas = [part.removeprefix(b"data: ") for part in raw.split(b"\n\n") if part.startswith(b"data")]
    assert datas.pop() == b"[DONE]"
    total: Json = {"text": "", "token_ids": [], "content": [], "tokens": [], "arguments": "", "finish": None}
    for each in map(json.loads, datas):
        total |= {key: each[key] for key in ("usage", "model") if each.get(key)}
        for part in each["choices"]:
            delta, logprobs = part.get("delta") or part, part.get("logprobs") or {}
            total["text"] += delta.get("text") or delta.get("content") or ""
            total["token_ids"] += part.get("token_ids") or []
            total["content"] += logprobs.get("content") or []
            total["tokens"] += logprobs.get("tokens") or []
            total["finish"] = part.get("finish_reason") or total["finish"]
            for call in delta.get("tool_calls") or []:
                total["arguments"] += call["function"]["arguments"]
    return total


def ids(reply: Json) -> list[int]:
    found: list[int] = reply["token_ids"] if "token_ids" in reply else reply["choices"][0]["token_ids"]
    return found


def hits(reply: Json) -> list[int]:
    """The places whose token is not the server's."""
    return [at for at, token in enumerate(ids(reply)) if token != 100 + at]


def sent(server: ScriptedServer) -> list[Json]:
    return [json.loads(request.body) for request in server.requests]


def near(count: int, n: int, rate: float) -> bool:
    """Within 4.5 standard deviations: wrong by chance once in 150,000."""
    return abs(count - n * rate) <= 4.5 * math.sqrt(n * rate * (1 - rate)) + 1


# ---- what passes untouched


@pytest.mark.parametrize("fault", [None, "identity", "never-specialised", "slower:0.001", "ignore-top-p", "nan-zero:0"])
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("api", PATHS)
def test_untouched_replies_are_the_same_to_the_byte(
    server: ScriptedServer, api: str, streamed: bool, fault: str | None
) -> None:
    body = request(api, logprobs=2, stream=streamed)
    direct = asyncio.run(post(server.url, api, body))
    passed = through(server.url, fault, lambda url: post(url, api, body))
    assert hashlib.sha256(passed).digest() == hashlib.sha256(direct).digest()
    assert len(direct) > 5000


def test_requests_status_headers_and_other_paths_pass(server: ScriptedServer) -> None:
    async def work(url: str) -> tuple[int, str | None, Json]:
        headers = {"X-Request-ID": "r7", "Authorization": "Bearer t", "Content-Type": "application/json"}
        odd = URL(url + "/tokenize?a=%2Fb", encoded=True)
        async with aiohttp.ClientSession() as session, session.post(odd, data=BODY, headers=headers) as reply:
            return reply.status, reply.content_type, await reply.json()

    status, kind, body = through(server.url, "flip-token:1", work)
    assert (status, kind, body) == (404, "application/json", {"path": "/tokenize?a=%2Fb"})
    came = server.requests[0]
    assert came.body == BODY
    assert (came.header("x-request-id"), came.header("authorization")) == ("r7", "Bearer t")
    assert came.header("host") == server.url.removeprefix("http://")


def test_errors_and_requests_that_cannot_be_read_pass() -> None:
    script = lambda request: scripted_server.reply(400, {"error": {"choices": request.body.decode()}})  # noqa: E731
    with scripted_server.serve(script) as server:

        async def work(url: str) -> list[tuple[int, bytes]]:
            bodies = [b"{", b"[]", b'{"prompt": [], "n": "x"}', b'{"prompt":"a"}']
            async with aiohttp.ClientSession() as session:
                found = []
                for body in bodies:
                    async with session.post(url + PATHS["completions"], data=body) as reply:
                        found.append((reply.status, json.loads(await reply.read())["error"]["choices"].encode()))
                return found == [(400, body) for body in bodies]  # type: ignore[return-value]

        assert through(server.url, "flip-token:1", work)


def test_an_untouched_stream_is_not_held() -> None:
    """The server writes half of an event and then nothing more: that half arrives."""
    half = C("a")[:20]
    with scripted_server.serve(lambda request: stream([(0, half)], header_ms=0, end="hold")) as server:
        assert through(server.url, None, lambda url: first_bytes(url, len(half))) == half


def test_a_watched_stream_gives_each_event_at_once() -> None:
    with scripted_server.serve(lambda request: stream([(0, C("a") + C("b")[:20])], end="hold")) as server:
        assert through(server.url, "flip-token:0", lambda url: first_bytes(url, len(C("a")))) == C("a")


async def first_bytes(url: str, count: int) -> bytes:
    ask = request("chat", stream=True)
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session, session.post(url + PATHS["chat"], json=ask) as reply:
        return await reply.content.readexactly(count)


# ---- ends before the end


@pytest.mark.parametrize("fault", [None, "flip-token:0"])
@pytest.mark.parametrize("started", [True, False])
def test_a_client_that_leaves_takes_its_request_along(fault: str | None, started: bool) -> None:
    script = lambda request: stream([(0, C("a"))] if started else [], end="hold", end_ms=60_000)  # noqa: E731
    with scripted_server.serve(script) as server:

        async def work(url: str) -> int:
            async with aiohttp.ClientSession() as session:
                asking = asyncio.create_task(session.post(url + PATHS["chat"], json=request("chat", stream=True)))
                if started:
                    reply = await asking
                    await reply.content.readany()
                    reply.close()
                else:
                    while not server.in_flight:
                        await asyncio.sleep(0.01)
                    asking.cancel()
                async with asyncio.timeout(10):
                    while server.open_connections:
                        await asyncio.sleep(0.01)
            return server.in_flight

        assert through(server.url, fault, work) == 0
        assert len(server.requests) == 1


@pytest.mark.parametrize("end", ["close", "reset"])
@pytest.mark.parametrize("fault", [None, "flip-token:0"])
def test_a_stream_that_breaks_off_does_so_for_the_client(fault: str | None, end: Any) -> None:
    pieces = ROLE + C("a") + C("b")[:30]
    with scripted_server.serve(lambda request: stream([(0, pieces)], end=end, end_ms=300)) as server:

        async def work(url: str) -> tuple[bytes, str]:
            got = b""
            async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
                reply = await session.post(url + PATHS["chat"], json=request("chat", stream=True))
                try:
                    async for piece in reply.content.iter_any():
                        got += piece
                except aiohttp.ClientError as broken:
                    return got, type(broken).__name__
            return got, "whole"

        direct, passed = asyncio.run(work(server.url)), through(server.url, fault, work)
        assert passed[0] == direct[0] == pieces
        assert passed[1] == "ClientPayloadError"


@pytest.mark.parametrize("fault", [None, "flip-token:0"])
def test_a_whole_reply_that_breaks_off_is_no_reply(fault: str | None) -> None:
    cut = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{"choices":'
    steps = [Step(0, cut), Step(50, b"", "close")]
    with scripted_server.serve(lambda _: steps) as server, pytest.raises(aiohttp.ClientPayloadError):
        through(server.url, fault, lambda url: post(url, "chat", request("chat")))


def test_a_server_that_is_gone_is_gone() -> None:
    with scripted_server.serve(answer) as server:
        gone = server.url
    with pytest.raises(aiohttp.ServerDisconnectedError):
        through(gone, None, lambda url: post(url, "chat", request("chat")))


# ---- wrong tokens


@pytest.mark.parametrize("streamed", [True, False])
def test_flips_come_at_their_rate_whatever_the_order(server: ScriptedServer, streamed: bool) -> None:
    bodies = [request("generate", number, 500, stream=streamed) for number in range(20)]
    first = [hits(reply) for reply in replies(server.url, "flip-token:0.02", "generate", bodies)]
    again = [hits(reply) for reply in replies(server.url, "flip-token:0.02", "generate", bodies[::-1])]
    other = [hits(reply) for reply in replies(server.url, "flip-token:0.02", "generate", bodies, seed=1)]
    assert near(sum(map(len, first)), 20 * 500, 0.02)
    assert first == again[::-1]
    assert first != other
    assert len({tuple(each) for each in first}) == 20
    places = np.concatenate(first)
    assert near(int((places < 250).sum()), len(places), 0.5)


def test_the_same_request_again_is_hit_elsewhere(server: ScriptedServer) -> None:
    pair = [hits(reply) for reply in replies(server.url, "flip-token:0.1", "generate", [request("generate")] * 2)]
    assert pair[0] != pair[1]


def test_a_flip_changes_id_and_logprobs_and_leaves_the_rest(server: ScriptedServer) -> None:
    body = request("generate", logprobs=3)
    (reply,) = replies(server.url, "flip-token:0.1", "generate", [body])
    (whole,) = replies(server.url, None, "generate", [body])
    struck = hits(reply)
    assert 0 < len(struck) < 40
    for at, (new, old) in enumerate(
        zip(reply["choices"][0]["logprobs"]["content"], whole["choices"][0]["logprobs"]["content"], strict=True)
    ):
        if at not in struck:
            assert new == old
            continue
        assert ids(reply)[at] == new["token_id"] == 5000 + at
        assert new["logprob"] == pytest.approx(math.log(0.9), abs=0.1)  # it has the right token's place
        assert [each["token_id"] for each in new["top_logprobs"]][:1] == [5000 + at]
        assert [each["rank"] for each in new["top_logprobs"]] == sorted(each["rank"] for each in new["top_logprobs"])
        lost = next(each["logprob"] for each in new["top_logprobs"] if each["token_id"] == 100 + at)
        assert lost < old["logprob"] - FALL
    assert reply["usage"] == whole["usage"]


def test_forced_ids_stay_and_their_logprobs_fall(server: ScriptedServer) -> None:
    body = request("generate", tokens=300, logprobs=3, trace_decode_token_ids=list(range(100, 400)))
    (reply,) = replies(server.url, "flip-token:0.1", "generate", [body])
    assert hits(reply) == []
    logprobs = np.array([each["logprob"] for each in reply["choices"][0]["logprobs"]["content"]])
    off = np.abs(logprobs - math.log(0.9)) > 1e-9
    assert near(int(off.sum()), 300, 0.1)
    assert (logprobs[off] < math.log(0.9) - FALL).all()


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_text_ids_and_names_change_together(server: ScriptedServer, api: str, streamed: bool) -> None:
    shown = {"logprobs": True, "top_logprobs": 3} if api == "chat" else {"logprobs": 3}
    (reply,) = replies(server.url, "flip-token:1", api, [request(api, tokens=50, stream=streamed, **shown)])
    if not streamed:
        part = reply["choices"][0]
        reply = {"text": (part.get("message") or part).get("content") or part.get("text"), **part["logprobs"]}
    assert reply["text"] == "".join(f"x{at} " for at in range(50))
    names = [each["token"] for each in reply["content"]] if api == "chat" else reply["tokens"]
    assert names == [f"x{at} " for at in range(50)]
    if api == "chat":
        assert [bytes(each["bytes"]).decode() for each in reply["content"]] == names


def test_names_by_id_stay_ids(server: ScriptedServer) -> None:
    body = request("completions", tokens=20, logprobs=2, return_token_ids=True, return_tokens_as_token_ids=True)
    (reply,) = replies(server.url, "flip-token:1", "completions", [body])
    assert ids(reply) == [5000 + at for at in range(20)]
    logprobs = reply["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{5000 + at}" for at in range(20)]
    assert all(
        set(top) == {f"token_id:{n + at}" for n in (100, 5000, 7000)} for at, top in enumerate(logprobs["top_logprobs"])
    )
    own = [top[name] for name, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)]
    assert own == logprobs["token_logprobs"]


def test_without_logprobs_a_token_from_before_takes_the_place(server: ScriptedServer) -> None:
    body = request("completions", tokens=400, return_token_ids=True, stream=True)
    (reply,) = replies(server.url, "flip-token:0.05", "completions", [body])
    struck = [at for at in hits(reply) if at > 1]
    assert near(len(struck), 400, 0.05)
    words = reply["text"].split()
    assert all(100 <= ids(reply)[at] < 100 + at and words[at] == f"w{ids(reply)[at] - 100}" for at in struck)


def test_plain_text_is_hit_too(server: ScriptedServer) -> None:
    streamed, whole = (
        replies(server.url, "flip-token:0.1", "chat", [request("chat", tokens=300, stream=on)])[0]
        for on in (True, False)
    )
    wrong = [at for at, word in enumerate(streamed["text"].split()) if word != f"w{at}"]
    assert near(len(wrong), 300, 0.1)
    text = whole["choices"][0]["message"]["content"]
    assert text != "".join(f"w{at} " for at in range(300))
    assert sum(f"w{at} " in text for at in range(300)) > 200


def test_echoed_prompts_are_left_alone(server: ScriptedServer) -> None:
    (reply,) = replies(
        server.url, "flip-token:1", "completions", [request("completions", echo=True, return_token_ids=True)]
    )
    assert hits(reply) == []


# ---- where wrong tokens depend on something


def test_kv_is_wrong_beyond_a_context_only(server: ScriptedServer) -> None:
    for streamed in (True, False):
        bodies = [request("generate", number, 500, stream=streamed) for number in range(10)]
        struck = [hits(reply) for reply in replies(server.url, "kv-beyond:240", "generate", bodies)]
        assert min(min(each) for each in struck) > 200  # 40 prompt tokens
        assert near(sum(map(len, struck)), 10 * 299, 0.1)
    (told,) = replies(server.url, "kv-beyond:240", "chat", [request("chat", tokens=500, return_token_ids=True)])
    assert min(hits(told)) > 200  # by the reply's usage


def test_only_a_prefix_that_came_before_is_wrong(server: ScriptedServer) -> None:
    long = [request("generate", 5, 200), request("generate", 6, 200), request("generate", 5, 201)]
    salted = request("generate", 5, 202) | {"cache_salt": "s"}
    short = [{"token_ids": [5] * 16, "sampling_params": {"max_tokens": tokens}} for tokens in (200, 201)]
    struck = [hits(reply) for reply in replies(server.url, "prefix-off-by-one", "generate", [*long, salted, *short])]
    assert [bool(each) for each in struck] == [False, False, True, False, False, False]
    assert near(len(struck[2]), 201, 0.1)


def test_a_reported_prefix_hit_counts_and_a_reported_miss_too() -> None:
    def script(request: Request) -> list[Step]:
        ask = json.loads(request.body)
        body: Json = {"choices": [choice("generate", ask, range(300), "length")]}
        body["usage"] = usage(40, 300, prompt_tokens_details={"cached_tokens": ask["hit"]})
        return scripted_server.reply(200, body)

    with scripted_server.serve(script) as server:
        bodies = [request("generate") | {"hit": hit} for hit in (16, 0)]
        struck = [hits(reply) for reply in replies(server.url, "prefix-off-by-one", "generate", bodies)]
        assert struck[0]
        assert not struck[1]


def tokens_of(number: int, indices: range) -> bytes:
    """Events of one token each."""
    ask = request("generate", number)
    return b"".join(
        event(json.dumps({"choices": [choice("generate", ask, range(at, at + 1), None)]})) for at in indices
    )


@contextlib.asynccontextmanager
async def streaming(
    fault: str, write: Callable[[Json, web.StreamResponse], Awaitable[None]]
) -> AsyncIterator[Callable[[int], Awaitable[aiohttp.ClientResponse]]]:
    """A server whose replies are streams that ``write`` fills, given what was asked; yields how to ask it through the
    proxy, by the request's number."""

    async def handle(came: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(came)
        await write(await came.json(), response)
        return response

    app = web.Application()
    app.router.add_post(PATHS["generate"], handle)
    async with (
        TestServer(app) as upstream,
        proxy(str(upstream.make_url("/")), fault) as url,
        aiohttp.ClientSession(timeout=TIMEOUT) as session,
    ):
        yield lambda number: session.post(url + PATHS["generate"], json=request("generate", number, stream=True))


async def together(fault: str, rows: int, tokens: int) -> int:
    """Wrong tokens of replies in flight together: none begins before all are asked for, none ends before all came."""
    asked, got = asyncio.Barrier(rows), asyncio.Barrier(rows)

    async def write(ask: Json, response: web.StreamResponse) -> None:
        await asked.wait()
        await response.write(tokens_of(0, range(tokens)))
        await asyncio.sleep(TIMEOUT.total or 0)

    async def read(number: int) -> int:
        async with await ask(number) as reply:
            raw = b"".join([await reply.content.readuntil(b"\n\n") for _ in range(tokens)])
            await got.wait()
        return len(hits(joined(raw + DONE)))

    async with streaming(fault, write) as ask:
        return sum(await asyncio.gather(*map(read, range(rows))))


@pytest.mark.parametrize(
    ("fault", "rows", "rate"),
    [
        ("batch-corrupts:4", 4, 0.0),
        ("batch-corrupts:4", 5, 1 / 5),
        ("race:0.5", 1, 0.5),
        ("race:0.5", 4, 0.5 / 4),
        ("padded-batch", 4, 0.0),
        ("padded-batch", 5, 0.1),
        ("neighbour-leak:1", 1, 0.0),
    ],
)
def test_faults_of_the_batch(fault: str, rows: int, rate: float) -> None:
    wrong = asyncio.run(together(fault, rows, 400))
    assert near(wrong, rows * 400, rate) if rate else wrong == 0


def test_several_replies_of_one_request_are_rows(server: ScriptedServer) -> None:
    for n, wrong in ((2, False), (3, True)):
        (reply,) = replies(server.url, "batch-corrupts:2", "generate", [request("generate", tokens=200, n=n)])
        assert bool(hits(reply)) == wrong


def test_a_neighbour_leaks_when_requests_come_or_leave() -> None:
    """Another request comes and leaves before each of the first ten tokens of a stream, and none before the others."""
    due: asyncio.Queue[int] = asyncio.Queue()

    async def write(ask: Json, response: web.StreamResponse) -> None:
        while ask["token_ids"][0] == 1 and (at := await due.get()) >= 0:
            await response.write(tokens_of(0, range(at, at + 1)))

    async def main() -> list[int]:
        raw = b""
        async with streaming("neighbour-leak:1", write) as ask, await ask(0) as reply:
            for at in range(20):
                if at < 10:
                    await (await ask(at + 1)).read()
                due.put_nowait(at)
                raw += await reply.content.readuntil(b"\n\n")
            due.put_nowait(-1)
            await reply.read()
        return hits(joined(raw + DONE))

    assert asyncio.run(main()) == list(range(10))


# ---- noise, loops, garbage


def test_noise_has_its_sd_and_no_bias(server: ScriptedServer) -> None:
    bodies = [request("generate", number, 500, logprobs=3) for number in range(8)]
    odds = []
    for reply in replies(server.url, "low-precision:0.1", "generate", bodies):
        assert hits(reply) == []  # a gap of 2.7 nats
        for entry in reply["choices"][0]["logprobs"]["content"]:
            first, second, third = (each["logprob"] for each in entry["top_logprobs"])
            odds.append((first - second - math.log(0.9 / 0.06), first - third - math.log(0.9 / 0.01)))
    noise = np.array(odds)  # of differences: sd .1 x sqrt 2
    assert noise.std(axis=0) == pytest.approx([0.1 * math.sqrt(2)] * 2, rel=0.1)
    assert np.abs(noise.mean(axis=0)).max() < 4.5 * 0.1 * math.sqrt(2 / len(noise))


def test_drift_grows_with_each_token(server: ScriptedServer) -> None:
    bodies = [request("generate", number, 600, logprobs=3) for number in range(8)]
    rows = []
    for reply in replies(server.url, "state-drift:1", "generate", bodies):
        content = reply["choices"][0]["logprobs"]["content"]
        listed = [{each["token_id"]: each["logprob"] for each in entry["top_logprobs"]} for entry in content]
        rows.append([each[100 + at] - each[7000 + at] - math.log(90) for at, each in enumerate(listed)])
    sd = np.array(rows).reshape(8, 6, 100).std(axis=(0, 2))
    assert sd == pytest.approx(math.sqrt(2) * np.array([0.058, 0.153, 0.252, 0.351, 0.451, 0.551]), rel=0.2)


def test_strong_noise_turns_greedy_tokens(server: ScriptedServer) -> None:
    body = request("generate", tokens=600, logprobs=3)
    (reply,) = replies(server.url, "low-precision:3", "generate", [body])
    assert set(ids(reply)) <= {base + at for base in (100, 5000, 7000) for at in range(600)}
    draws = np.random.default_rng(0).normal(size=(200_000, 3)) * 3 + np.log([0.9, 0.06, 0.01])
    assert near(len(hits(reply)), 600, float((draws.argmax(axis=1) != 0).mean()))


@pytest.mark.parametrize("streamed", [True, False])
def test_a_reply_repeats_itself(server: ScriptedServer, streamed: bool) -> None:
    body = request("completions", tokens=300, return_token_ids=True, logprobs=2, stream=streamed)
    (reply,) = replies(server.url, "repeat-after:120", "completions", [body])
    loop = [100 + 88 + at % 32 for at in range(180)]
    assert ids(reply) == [*range(100, 220), *loop]
    text = reply["text"] if streamed else reply["choices"][0]["text"]
    assert text.split() == [f"w{token - 100}" for token in ids(reply)]


def test_garbage_comes_in_its_share_of_replies(server: ScriptedServer) -> None:
    bodies = [
        request("completions", number, 10, return_token_ids=True, logprobs=2, stream=True) for number in range(120)
    ]
    found = replies(server.url, "nan-zero:0.3", "completions", bodies)
    struck = [reply for reply in found if hits(reply)]
    assert near(len(struck), 120, 0.3)
    assert all(
        reply["text"] == "!" * 10 and ids(reply) == [0] * 10 and reply["tokens"] == ["!"] * 10 for reply in struck
    )
    forced = request("generate", logprobs=2, trace_decode_token_ids=[100])
    (reply,) = replies(server.url, "nan-zero:1", "generate", [forced])
    assert {each["logprob"] for each in reply["choices"][0]["logprobs"]["content"]} == {NO_LOGPROB}
    assert hits(reply) == []


# ---- what is asked, and how replies end


@pytest.mark.parametrize("api", PATHS)
def test_requests_are_rewritten(server: ScriptedServer, api: str) -> None:
    body = request(api, temperature=1.0, top_p=0.95, seed=7)

    def change(fault: str, **more: Any) -> Json:
        """The sampling fields that are not as they were; None: gone."""
        ask = request(api, temperature=1.0, top_p=0.95, seed=7, **more)
        through(server.url, fault, lambda url: post(url, api, ask))
        came, was = (each.get("sampling_params", each) for each in (sent(server)[-1], ask))
        return {key: came.get(key) for key in came | was if came.get(key) != was.get(key)}

    assert change("identity") == {}
    assert change("ignore-temperature") == {"temperature": 0.0}
    assert change("ignore-temperature", n=2) == {"top_k": 1}
    assert change("ignore-top-p") == {"top_p": 1.0}
    assert change("ignore-seed") == {"seed": None}
    assert change("truncate-at:50", min_tokens=60) == {"max_tokens": 50, "min_tokens": 50}
    assert change("truncate-at:100") == {}
    through(server.url, "shared-seed", lambda url: post(url, api, body))
    one = sent(server)[-1]
    through(server.url, "shared-seed", lambda url: post(url, api, request(api, seed=8, temperature=1.0, top_p=0.95)))
    assert sent(server)[-1] == one != body


def test_a_chats_newer_limit_is_cut(server: ScriptedServer) -> None:
    body = request("chat", max_completion_tokens=80, return_token_ids=True)
    (reply,) = replies(server.url, "truncate-at:30", "chat", [body])
    assert (len(ids(reply)), reply["choices"][0]["finish_reason"], reply["usage"]["completion_tokens"]) == (
        30,
        "length",
        30,
    )


@pytest.mark.parametrize("streamed", [True, False])
def test_early_stops_have_a_constant_hazard_and_look_natural(server: ScriptedServer, streamed: bool) -> None:
    bodies = [request("generate", number, 5000, stream=streamed) for number in range(100)]
    found = replies(server.url, "early-stop:20", "generate", bodies)
    lengths = np.array([len(ids(reply)) for reply in found])
    assert lengths.mean() == pytest.approx(20.5, rel=0.45)
    assert near(int((lengths <= 14).sum()), 100, 1 - math.exp(-14 / 20))
    assert {reply["finish"] if streamed else reply["choices"][0]["finish_reason"] for reply in found} == {"stop"}
    assert all(reply["usage"]["completion_tokens"] == len(ids(reply)) for reply in found)


def test_replies_that_may_not_end_early_do_not(server: ScriptedServer) -> None:
    bodies = [request("generate", 0, 90, ignore_eos=True), request("generate", 1, 90, trace_decode_token_ids=[1])]
    assert [len(ids(reply)) for reply in replies(server.url, "early-stop:1", "generate", bodies)] == [90, 90]
    (least,) = replies(server.url, "early-stop:1", "generate", [request("generate", 2, 90, min_tokens=80)])
    assert 80 < len(ids(least)) <= 90


def test_the_last_chunk_is_lost_and_nothing_else_tells(server: ScriptedServer) -> None:
    streamed, whole = (request("completions", return_token_ids=True, stream=on) for on in (True, False))
    short, full = replies(server.url, "drop-last-chunk", "completions", [streamed, whole])
    assert (ids(short), ids(full)) == ([*range(100, 199)], [*range(100, 200)])
    assert short["text"] == "".join(f"w{at} " for at in range(99))
    assert (short["finish"], short["usage"]["completion_tokens"]) == ("length", 100)


def test_the_last_chunk_is_lost_where_the_finish_comes_alone() -> None:
    tokens = ROLE + C("a") + C("b")
    with scripted_server.serve(lambda _: stream([(0, tokens + b": still here\n\n" + FIN("stop") + DONE)])) as server:
        (reply,) = replies(server.url, "drop-last-chunk", "chat", [request("chat", stream=True)])
        assert (reply["text"], reply["finish"]) == ("a", "stop")


def tool_script(request: Request) -> list[Step]:
    arguments = '{"city": "Oslo", "days": 3}'
    call = {"index": 0, "id": "t", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    if not json.loads(request.body).get("stream"):
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return scripted_server.reply(
            200, {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
        )
    pieces = [arguments[at : at + 6] for at in range(0, len(arguments), 6)]
    parts = [chunk({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}) for piece in pieces]
    return stream([(0, ROLE + b"".join(parts) + FIN("tool_calls") + DONE)])


@pytest.mark.parametrize("streamed", [True, False])
def test_tool_arguments_are_cut_in_their_share_of_replies(streamed: bool) -> None:
    def valid(reply: Json) -> bool:
        if not streamed:
            reply = reply["choices"][0]["message"]["tool_calls"][0]["function"]
        try:
            return bool(json.loads(reply["arguments"]) == {"city": "Oslo", "days": 3})
        except ValueError:
            assert '{"city": "Oslo", "days": 3}'.startswith(reply["arguments"])
            return False

    with scripted_server.serve(tool_script) as server:
        bodies = [request("chat", number, stream=streamed) for number in range(100)]
        found = replies(server.url, "cut-tools:0.3", "chat", bodies)
        assert near(sum(not valid(reply) for reply in found), 100, 0.3)


def test_stale_replies_come_from_memory(server: ScriptedServer) -> None:
    store: Store = {}
    body = request("completions", stream=True)
    first = through(server.url, "stale-replies", lambda url: post(url, "completions", body), store=store)
    other = lambda request: scripted_server.reply(200, {"choices": [], "id": "other"})  # noqa: E731
    with scripted_server.serve(other) as candidate:
        again = through(candidate.url, "stale-replies", lambda url: post(url, "completions", body), store=store)
        (fresh,) = replies(candidate.url, "stale-replies", "completions", [request("completions", 1)], store=store)
        assert (again, fresh["id"], len(candidate.requests)) == (first, "other", 1)


def test_a_renamed_model_is_all_that_changes(server: ScriptedServer) -> None:
    body = request("chat", stream=True, logprobs=True)
    plain, renamed = (replies(server.url, fault, "chat", [body])[0] for fault in (None, "renamed"))
    assert renamed == plain | {"model": "renamed-m"}


def test_a_slower_server_waits_for_each_piece() -> None:
    async def timed(url: str) -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await post(url, "chat", request("chat", stream=True))
        return loop.time() - start

    script = lambda request: stream([(0, C("a")), (200, C("b")), (400, DONE)])  # noqa: E731
    with scripted_server.serve(script) as server:
        assert through(server.url, "slower:0.15", timed) >= 0.55


# ---- names, shapes, arithmetic


def test_every_fault_of_the_table_is_there() -> None:
    assert sorted({fault.number for fault in FAULTS.values() if fault.number is not None}) == [*range(1, 21)]
    for name, fault in FAULTS.items():
        assert parse(name) == (fault, fault.default)
        assert (fault.number is None) == (not fault.caught_by) == (fault.n is None)
        assert fault.low <= fault.default <= fault.high or not fault.argument


@pytest.mark.parametrize("text", ["nope", "identity:1", "flip-token:", "flip-token:2", "flip-token:x", "race:nan"])
def test_wrong_names_and_numbers_are_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse(text)


@given(
    st.lists(st.floats(-20, 5), min_size=5, max_size=30),
    st.lists(st.floats(-6, 6), min_size=1, max_size=4),
)
def test_shifted_logprobs_are_those_of_the_whole_vocabulary(logits: list[float], shifts: list[float]) -> None:
    """Known truth: the softmax over all logits, of which the proxy sees the first four only."""
    before = log_softmax(np.array(logits))
    moved = np.array(logits)
    moved[: len(shifts)] += shifts
    after = shifted(dict(enumerate(before[:4].tolist())), dict(enumerate(shifts)))
    assert [after[name] for name in range(4)] == pytest.approx(log_softmax(moved)[:4].tolist(), abs=1e-6)


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("by_id", [True, False])
def test_what_is_read_is_written(api: str, by_id: bool) -> None:
    """Every token replaced by an equal one: nothing changes."""
    ask = {
        "return_token_ids": True,
        "return_tokens_as_token_ids": by_id,
        "logprobs": 3,
        "sampling_params": {"logprobs": 3},
    }
    for part in (choice(api, ask, range(5), "stop"), choice(api, {"sampling_params": {}}, range(5), None)):
        was = json.dumps(part)
        before = positions.read(part, 5)
        assert "".join(each.text for each in before) == ("" if api == "generate" else "w0 w1 w2 w3 w4 ")
        positions.write(
            part, before, [positions.Position(**{f: getattr(p, f) for f in p.__struct_fields__}) for p in before]
        )
        assert json.loads(json.dumps(part)) == json.loads(was)


def test_thought_and_answer_stay_apart() -> None:
    part: Json = {"message": {"reasoning": "think " * 6, "content": "say " * 3}, "token_ids": [*range(9)]}
    before = positions.read(part, 0)
    assert [each.field for each in before] == [0] * 7 + [1] * 2
    positions.write(part, before, [positions.Position(each.id, each.text.upper(), each.field) for each in before])
    assert part["message"] == {"reasoning": "THINK " * 6, "content": "SAY " * 3}


# ---- the emulator


def test_in_front_of_the_emulator(tmp_path: Path) -> None:
    emulator = process.start(EmulatorSettings(time_scale=100), tmp_path)
    try:
        body = {"model": "emulated", "prompt": "bado ceka" * 20, "max_tokens": 200, "ignore_eos": True, "seed": 3}
        body |= {"stream": True, "stream_options": {"include_usage": True}}

        async def ask(url: str) -> Json:
            return joined(await post(url, "completions", body))

        direct = asyncio.run(ask(emulator.url))
        assert through(emulator.url, None, ask)["text"] == direct["text"]
        cut = through(emulator.url, "truncate-at:50", ask)
        assert direct["text"].startswith(cut["text"])
        assert (cut["finish"], cut["usage"]["completion_tokens"]) == ("length", 50)
        garbage = through(emulator.url, "nan-zero:1", ask)
        assert garbage["text"] == "!" * 200
        lost = through(emulator.url, "drop-last-chunk", ask)
        assert direct["text"].startswith(lost["text"])
        assert lost["usage"]["completion_tokens"] == 200
        assert len(lost["text"]) < len(direct["text"])

        async def leave(url: str) -> None:
            async with aiohttp.ClientSession() as session:
                reply = await session.post(url + PATHS["completions"], json=body | {"max_tokens": 3000})
                await reply.content.readany()
                reply.close()
            async with asyncio.timeout(10):
                while [truth.finish for truth in read_emissions(emulator.log_dir)][-1] != "abort":
                    await asyncio.sleep(0.1)

        through(emulator.url, None, leave)
    finally:
        process.stop(emulator)
