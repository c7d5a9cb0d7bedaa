"""The model of lm-eval that asks a backend: it keeps what lm-eval's own throws away, and loses no run to one request.

lm-eval's chat model gives a session one time limit, sends a request again that the server still works on, gives up all
answers when one fails, takes null for an empty answer, keeps neither finish reason nor usage nor thoughts, and prints
what it could not parse. Of it this one takes the payload alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
from lm_eval.api.registry import register_model
from lm_eval.models.openai_completions import LocalChatCompletion

from evals.tasks.replies import Reply

NAME = "decodegate"
"""Of the model, in lm-eval's registry."""

FIRST_WAIT_S = 1.0
"""Before a request is sent again; doubled each time."""

_CONNECT_S = 60.0
_NAME = re.compile(r"[!-~]{1,100}")
_PRIVATE = 10_000
"""Characters kept of a reply that is none."""


class Received(msgspec.Struct, kw_only=True):
    """What came back for one attempt."""

    reply: Reply
    turned_away: bool = False
    """No connection, or an HTTP status of 400 to 499: the server did not take it up."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    stop_reason: int | str | None = None
    body: str | None = None
    """What came instead of a reply. It may quote the prompt."""


class Asked(msgspec.Struct, kw_only=True):
    """One request, to its end."""

    doc: dict[str, int]
    """lm-eval's: the item's row and place."""
    payload: dict[str, Any]
    received: Received
    attempts: int
    sent_unix_s: float
    """Of the last attempt, as are the others."""
    sent_ns: int
    """CLOCK_MONOTONIC."""
    ended_ns: int
    """When its reply was whole, or was given up."""


class _Details(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    completion_tokens_details: _Details | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """Its name in other servers, and in vLLM of old."""


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None
    usage: _Usage | None = None
    system_fingerprint: str | None = None


Keep = Callable[[Asked], None]
"""Takes each request as it ends, in a thread of its own, one at a time."""


@register_model(NAME)
class Examinee(LocalChatCompletion):  # type: ignore[misc]  # lm-eval has no types
    """A chat backend. Its replies go to ``keep``; lm-eval itself gets empty ones, as it would judge them without their
    finish reasons, and keep their texts.

    ``timeout``: seconds for one attempt; one that takes longer is not repeated. ``retries``: how often a request
    without connection, or with HTTP status 429 or 5xx, is sent again.
    """

    def __init__(self, *, keep: Keep, retries: int, timeout: float, **given: Any) -> None:
        super().__init__(timeout=timeout, **given)
        self._keep, self._retries, self._timeout_s = keep, retries, timeout

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Ask all, so many at once."""
        asyncio.run(self._ask_all(requests))
        return [""] * len(requests)

    async def _ask_all(self, requests: list[Any]) -> None:
        room, keeping = asyncio.Semaphore(self._concurrent), asyncio.Lock()
        limits = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=min(_CONNECT_S, self._timeout_s))
        # a connection that the server is about to close would cost a retry, and retries are findings
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=limits, headers=self._header) as session:

            async def ask(request: Any) -> None:
                async with room:
                    asked = await self._ask(session, request)
                async with keeping:
                    await asyncio.to_thread(self._keep, asked)

            tasks = [asyncio.create_task(ask(request)) for request in requests]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    async def _ask(self, session: aiohttp.ClientSession, request: Any) -> Asked:
        chat, sampling = request.args
        payload = self._create_payload(
            self.create_message([chat]), generate=True, gen_kwargs=dict(sampling), seed=self._seed
        ) | {"return_token_ids": True}
        body = json.dumps(payload, ensure_ascii=False).encode()
        attempts = 0
        while True:
            attempts += 1
            sent_unix_s, sent_ns = time.time(), time.monotonic_ns()
            received, again = await _post(session, self.base_url, body)
            ended_ns = time.monotonic_ns()
            if not again or attempts > self._retries:
                break
            await asyncio.sleep(FIRST_WAIT_S * 2 ** (attempts - 1))
        return Asked(
            doc=request.doc,
            payload=payload,
            received=received,
            attempts=attempts,
            sent_unix_s=sent_unix_s,
            sent_ns=sent_ns,
            ended_ns=ended_ns,
        )


async def _post(session: aiohttp.ClientSession, url: str, body: bytes) -> tuple[Received, bool]:
    """What came back for one attempt, and whether another may help."""
    try:
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
            data, status = await response.read(), response.status
    except TimeoutError as error:
        connecting = isinstance(error, aiohttp.ConnectionTimeoutError)
        return _nothing("connection: timeout" if connecting else "timeout", turned_away=connecting), connecting
    except aiohttp.ClientError as error:
        never_taken_up = isinstance(error, aiohttp.ClientConnectorError)
        return _nothing(f"connection: {type(error).__name__}", turned_away=never_taken_up), True
    if status != 200:
        return _nothing(f"HTTP {status}", data, turned_away=400 <= status < 500), status == 429 or status >= 500
    try:
        return _received(msgspec.json.decode(data, type=_Completion)), False
    except (msgspec.DecodeError, IndexError):
        return _nothing("no chat completion", data), False


def _nothing(error: str, data: bytes = b"", *, turned_away: bool = False) -> Received:
    shown = data.decode(errors="replace")[:_PRIVATE] or None
    return Received(reply=Reply(error=error), turned_away=turned_away, body=shown)


def _name(told: str | None) -> str | None:
    """What a server calls something, as records may hold it: in place of text, which may be the prompt's, a digest."""
    if told is None or _NAME.fullmatch(told):
        return told
    return f"digest-{hashlib.sha256(told.encode(errors='replace')).hexdigest()[:16]}"


def _received(completion: _Completion) -> Received:
    choice, usage = completion.choices[0], completion.usage or _Usage()
    message, details = choice.message, usage.completion_tokens_details or _Details()
    return Received(
        reply=Reply(
            text=message.content,
            reasoning=message.reasoning if message.reasoning is not None else message.reasoning_content,
            finish_reason=_name(choice.finish_reason),
        ),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=details.reasoning_tokens,
        fingerprint=_name(completion.system_fingerprint),
        prompt_token_ids=completion.prompt_token_ids,
        token_ids=choice.token_ids,
        stop_reason=choice.stop_reason,
    )
