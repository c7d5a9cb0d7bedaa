"""A server over HTTP, as parity checks see it: token ids and logprobs in exact numbers, whoever decodes them.

Prompts go as ids to /v1/completions, forced ids to vLLM's /inference/v1/generate (trace replay). Every request has a
connection of its own: a pooled one may be closed under it, and a retry would be another batch. Nothing is retried.

Streams are read as they come, into arrays: 170 bytes a position. A whole reply passes through memory as text, about
1 kB a position with 20 logprobs, so long replies are better streamed.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, get_args

import aiohttp
import msgspec
import numpy as np

from evals.parity.endpoint import TOP, Ask, Chat, ChatReply, Generation, Need
from evals.parity.http_replies import (
    ChatDocument,
    Failure,
    GrowingChat,
    GrowingChoice,
    Reply,
    Usage,
    decoded,
    events,
    nothing,
    words,
)
from replay import settings
from replay.metrics import parse
from replay.pages import LIMIT_S
from replay.wire import Limits
from workloads.errors import UserError

_COMPLETIONS = "/v1/completions"
_GENERATE = "/inference/v1/generate"
_CHAT = "/v1/chat/completions"

_TOKEN_S = 1.0
"""Longest time that a token of a whole reply is waited for: nothing comes before its last one."""

_NEUTRAL = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Else the model's own generation config fills what a request leaves out."""


class Server:
    """A server, an Endpoint. ``connect`` finds out what it offers; made directly it is taken to offer everything.

    ``url``: with or without /v1. ``limits``: connect_s to connect, first_byte_s of silence, total_s.
    """

    def __init__(self, url: str, model: str, headers: Mapping[str, str], limits: Limits) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.has: frozenset[Need] = frozenset(get_args(Need))
        self.why_not: dict[Need, str] = {}
        """Of what it does not offer: what was seen, and which option of vLLM would give it."""
        self._headers = {"Accept-Encoding": "identity", **headers}
        self._limits = limits

    async def generate(self, group: Sequence[Ask]) -> list[list[Generation]]:
        """See Endpoint. Logprobs are left out where the server has none. Usage counts all choices of a reply together,
        so completion_tokens is null where ``n`` is above 1."""
        ready = [(ask, *self._request(ask)) for ask in group]  # encoded before the first is sent
        async with self._session() as session:
            return list(await asyncio.gather(*(self._generations(session, *each) for each in ready)))

    async def chat(self, group: Sequence[Chat]) -> list[ChatReply]:
        """See Endpoint. Bodies may ask for a stream."""
        ready = [self._chat_request(chat) for chat in group]
        async with self._session() as session:
            return list(await asyncio.gather(*(self._chat_reply(session, *each) for each in ready)))

    async def alive(self) -> bool:
        """Whether it says that it is well, or, where it has no such page, lists its models."""
        status, _ = await self.page("/health")
        if status == 404:
            status, _ = await self.page("/v1/models")
        return status == 200

    async def page(self, path: str) -> tuple[int | None, bytes]:
        """Status and body of a GET; no status: no whole reply."""
        limits = aiohttp.ClientTimeout(total=LIMIT_S, sock_connect=self._limits.connect_s)
        try:
            async with (
                self._session() as session,
                session.get(self.url + path, timeout=limits, allow_redirects=False) as response,
            ):
                return response.status, await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None, b""

    async def generate_one(self, ask: Ask) -> Generation:
        """One generation alone. Raises Failure, which says more than its class."""
        path, body = self._request(ask)
        async with self._session() as session:
            return (await self._choices(session, ask, path, body))[0]

    async def chat_one(self, chat: Chat) -> ChatReply:
        """One chat completion alone. Raises Failure."""
        async with self._session() as session:
            return await self._chatted(session, *self._chat_request(chat))

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
        )

    def _request(self, ask: Ask) -> tuple[str, bytes]:
        sampling: dict[str, Any] = {
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            **_NEUTRAL,
            "ignore_eos": ask.ignore_eos,
            "stop_token_ids": list(ask.stop_token_ids),
            "n": ask.n,
        }
        if ask.seed is not None:
            sampling["seed"] = ask.seed
        if ask.logprobs and "logprobs" in self.has:
            sampling["logprobs"] = min(ask.logprobs, TOP)
        body: dict[str, Any] = {"model": self.model, "stream": ask.stream}
        if ask.stream:
            body["stream_options"] = {"include_usage": True}
        if ask.salt:
            body["cache_salt"] = ask.salt
        prompt = np.asarray(ask.prompt).tolist()
        if ask.force is None:
            told = {"return_token_ids": True, "return_tokens_as_token_ids": True}
            return _COMPLETIONS, msgspec.json.encode(body | sampling | told | {"prompt": prompt})
        sampling["trace_decode_token_ids"] = np.asarray(ask.force).tolist()
        return _GENERATE, msgspec.json.encode(body | {"token_ids": prompt, "sampling_params": sampling})

    def _chat_request(self, chat: Chat) -> tuple[Chat, bytes]:
        body = {"model": self.model, "return_token_ids": True, **chat.body}
        if body.get("stream"):
            body.setdefault("stream_options", {"include_usage": True})
        return chat, msgspec.json.encode(body)

    async def _generations(self, session: aiohttp.ClientSession, ask: Ask, path: str, body: bytes) -> list[Generation]:
        sent = time.time()
        try:
            found = await self._choices(session, ask, path, body)
        except Failure as failure:
            found = [nothing(failure.error) for _ in range(ask.n)]
        ended = time.time()
        for each in found:
            each.sent_unix_s, each.ended_unix_s = sent, ended
        return found

    async def _choices(self, session: aiohttp.ClientSession, ask: Ask, path: str, body: bytes) -> list[Generation]:
        top = min(ask.logprobs, TOP) if "logprobs" in self.has else 0
        choices = [GrowingChoice(top) for _ in range(ask.n)]
        usage, fingerprint = Usage(), None
        async with aclosing(self._documents(session, path, body, ask.stream, ask.max_tokens)) as documents:
            async for data in documents:
                reply = decoded(data, Reply)
                for choice in reply.choices:
                    if not 0 <= choice.index < ask.n:
                        raise Failure("unreadable reply", f"choice {choice.index} of {ask.n}")
                    choices[choice.index].add(choice)
                usage = reply.usage or usage
                fingerprint = reply.system_fingerprint or fingerprint
        return [choice.generation(usage, fingerprint, alone=ask.n == 1) for choice in choices]

    async def _chat_reply(self, session: aiohttp.ClientSession, chat: Chat, body: bytes) -> ChatReply:
        try:
            return await self._chatted(session, chat, body)
        except Failure as failure:
            return ChatReply(error=failure.error)

    async def _chatted(self, session: aiohttp.ClientSession, chat: Chat, body: bytes) -> ChatReply:
        stream = bool(chat.body.get("stream"))
        most = chat.body.get("max_completion_tokens") or chat.body.get("max_tokens") or 0
        found = GrowingChat()
        async with aclosing(self._documents(session, _CHAT, body, stream, most)) as documents:
            async for data in documents:
                found.add(decoded(data, ChatDocument))
        return found.reply()

    async def _documents(
        self, session: aiohttp.ClientSession, path: str, body: bytes, stream: bool, tokens: int
    ) -> AsyncGenerator[bytes, None]:
        """The JSON texts of a reply: the data of its events as they come, or its body. Raises Failure."""
        silence_s = self._limits.first_byte_s + (0.0 if stream else tokens * _TOKEN_S)
        limits = aiohttp.ClientTimeout(
            total=self._limits.total_s, sock_connect=self._limits.connect_s, sock_read=silence_s
        )
        headers, begun = {"Content-Type": "application/json"}, False
        try:
            async with session.post(
                self.url + path, data=io.BytesIO(body), headers=headers, timeout=limits, allow_redirects=False
            ) as response:
                begun = True
                if response.status != 200:
                    raise Failure(f"HTTP {response.status}", words(await response.read()))
                if not stream:
                    yield await response.read()
                    return
                if response.content_type != "text/event-stream":
                    raise Failure("no stream", f"it came as {response.content_type}")
                async for data in events(response.content):
                    if data.strip() == b"[DONE]":
                        return
                    yield data
                raise Failure("broke off", "the stream ended without [DONE]")
        except TimeoutError as error:
            connecting = isinstance(error, aiohttp.ConnectionTimeoutError)
            raise Failure("connection" if connecting else "timeout", str(error)) from None
        except (aiohttp.ClientError, OSError) as error:
            raise Failure("broke off" if begun else "connection", f"{type(error).__name__}: {error}") from None


# -- what a server offers

_PROBE = Ask(prompt=range(16, 32), max_tokens=8, temperature=2.0, seed=1, logprobs=0, salt="parity probe")
"""At this temperature two seeds give two replies, also of a model that is nearly sure of each token."""

_FORCED = [20, 17, 24]

_PING: dict[str, Any] = {"messages": [{"role": "user", "content": "ping"}], "max_tokens": 1}
_TOOL = {"name": "ping", "description": "ping", "parameters": {"type": "object", "properties": {}}}

_MEND: dict[Need, str] = {
    "token ids": "vLLM gives them if asked (return_token_ids): is there a proxy that leaves them out?",
    "logprobs": f"vLLM needs --max-logprobs {TOP} or more; it names tokens by id (return_tokens_as_token_ids)",
    "seeds": "vLLM heeds the seed of a request: is there a proxy or a cache before it?",
    "streaming": "vLLM streams completions: is there a proxy before it that does not?",
    "trace replay": "vLLM needs --enable-scale-out --enable-trace-replay, its V2 model runner, and no speculation",
    "chat": "vLLM needs a chat template: --chat-template FILE, where the model has none",
    "tools": "vLLM needs --enable-auto-tool-choice --tool-call-parser NAME",
    "cached tokens": "vLLM needs --enable-prompt-tokens-details",
    "metrics": "let its /metrics through, and leave out vLLM's --disable-log-stats",
    "speculation": "vLLM speculates with --speculative-config",
}

Look = Callable[[Server, Generation], Awaitable[str]]
"""What speaks against a server's having something; empty: it has it. Takes the reply to _PROBE too. May raise
Failure."""


async def connect(url: str, model: str, headers: Mapping[str, str], limits: Limits) -> Server:
    """Find out what a server offers, with about ten tiny requests, one after the other. Two starts are nothing that one
    server shows.

    Raises UserError if it does not complete a prompt of token ids: nothing could be checked.
    """
    server = Server(url, model, headers, limits)
    try:
        first = await server.generate_one(_PROBE)
    except Failure as failure:
        raise UserError(
            f"{url}: a completion of 8 tokens for a prompt of token ids failed ({failure}): check url, model and "
            "headers; parity checks need an OpenAI-compatible server that takes token ids as prompts"
        ) from None
    for need, look in _LOOKS.items():
        try:
            seen = await look(server, first)
        except Failure as failure:
            seen = str(failure)
        if seen:
            server.why_not[need] = f"{seen}; {_MEND[need]}"
    server.has = frozenset(_LOOKS) - server.why_not.keys()
    return server


async def _token_ids(_: Server, first: Generation) -> str:
    return "" if first.ids.size else "replies have no token_ids"


async def _logprobs(server: Server, _: Generation) -> str:
    found = await server.generate_one(msgspec.structs.replace(_PROBE, logprobs=TOP))
    return "" if found.top_ids.size else "replies have no logprobs"


async def _seeds(server: Server, first: Generation) -> str:
    again = await server.generate_one(msgspec.structs.replace(_PROBE, salt="parity probe, again"))
    other = await server.generate_one(msgspec.structs.replace(_PROBE, salt="parity probe, again", seed=2))
    if (again.ids.tolist(), again.text) != (first.ids.tolist(), first.text):
        return "the same seed gave two replies"
    return "" if (other.ids.tolist(), other.text) != (first.ids.tolist(), first.text) else "two seeds gave one reply"


async def _streaming(server: Server, _: Generation) -> str:
    await server.generate_one(msgspec.structs.replace(_PROBE, stream=True))  # whether it is all there is D1's question
    return ""


async def _trace_replay(server: Server, _: Generation) -> str:
    found = await server.generate_one(Ask(prompt=_PROBE.prompt, max_tokens=len(_FORCED), force=_FORCED, logprobs=0))
    return "" if found.ids.tolist() == _FORCED else "forced tokens were not decoded"


async def _chat(server: Server, _: Generation) -> str:
    await server.chat_one(Chat(body=_PING))
    return ""


async def _tools(server: Server, _: Generation) -> str:
    tools = [{"type": "function", "function": _TOOL}]
    await server.chat_one(Chat(body=_PING | {"tools": tools, "tool_choice": "auto"}))
    return ""


async def _cached_tokens(_: Server, first: Generation) -> str:
    return "usage has no cached_tokens" if first.cached_tokens is None else ""


async def _metrics(server: Server, _: Generation) -> str:
    return "" if await _samples(server) else "it has no metrics of vLLM's"


async def _speculation(server: Server, _: Generation) -> str:
    if any(name.startswith("vllm:spec_decode") for name in await _samples(server)):
        return ""
    status, info = await server.page("/server_info?config_format=json")
    try:
        shown = settings.from_server_info(msgspec.json.decode(info, type=dict)) if status == 200 else {}
    except (msgspec.DecodeError, UserError):  # it is something else
        shown = {}
    return "" if any(settings.covers("speculative-config", name) for name in shown) else "nothing shows that it does"


async def _samples(server: Server) -> list[str]:
    status, page = await server.page("/metrics")
    try:
        return [name for name, _, _ in parse(page.decode("utf-8", "replace"))] if status == 200 else []
    except ValueError:
        return []


_LOOKS: dict[Need, Look] = {
    "token ids": _token_ids,
    "logprobs": _logprobs,
    "seeds": _seeds,
    "streaming": _streaming,
    "trace replay": _trace_replay,
    "chat": _chat,
    "tools": _tools,
    "cached tokens": _cached_tokens,
    "metrics": _metrics,
    "speculation": _speculation,
}
