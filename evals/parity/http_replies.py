"""Replies as parity checks want them: from the JSON of vLLM's endpoints to token ids and logprobs in exact numbers.

vLLM lists the sampled token first and then the likeliest ones in order; here a position's top tokens are the likeliest
alone. Where trace replay forces a token from outside of them, it takes the place of the last: the list is one shorter.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Annotated, Any, TypeVar

import aiohttp
import msgspec
import numpy as np

from evals.parity.endpoint import TOP, ChatReply, Generation
from replay import sse

_SAID = 300
"""Characters kept of what a server said."""

_LARGEST_ID = 2**31 - 1
TokenId = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST_ID)]


class Failure(Exception):
    """No usable reply: its class, as in Generation.error, and what was seen."""

    def __init__(self, error: str, detail: str) -> None:
        super().__init__(f"{error}: {detail}" if detail else error)
        self.error = error


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Candidate(msgspec.Struct):
    token_id: TokenId
    logprob: float | None = None
    rank: int | None = None


class _Position(_Candidate):
    top_logprobs: list[_Candidate] = []


class _Logprobs(msgspec.Struct):
    """Of /v1/completions, or (``content``) of /inference/v1/generate."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float | None] | None] = []
    content: list[_Position] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    token_ids: list[TokenId] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Document(msgspec.Struct):
    """A whole reply, or an event of a stream."""

    usage: Usage | None = None
    system_fingerprint: str | None = None
    error: Any = None


class Reply(_Document):
    choices: list[_Choice] = []


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """Its name in other servers, and in vLLM of old."""
    tool_calls: list[_Call] | None = None


class _ChatChoice(msgspec.Struct):
    message: _Message | None = None
    delta: _Message | None = None
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None


class ChatDocument(_Document):
    choices: list[_ChatChoice] = []


_D = TypeVar("_D", bound=_Document)


def decoded(data: bytes, kind: type[_D]) -> _D:
    """Raises Failure for what is no such document, or says that it is an error."""
    try:
        document = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Failure("unreadable reply", str(error)) from None
    if document.error is not None:
        raise Failure("error in reply", words(data))
    return document


def words(data: bytes) -> str:
    """What an error reply says: its message, else its text."""
    said: Any = data.decode("utf-8", "replace")
    with suppress(msgspec.DecodeError):
        said = msgspec.json.decode(said)
    for key in ("error", "message"):
        said = said.get(key, said) if isinstance(said, dict) else said
    return " ".join(str(said).split())[:_SAID]


async def events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of events as they come. One that the end of the body cuts off before its blank line is given too."""
    kept = bytearray()
    async for piece in content.iter_any():
        kept += piece
        end = max(kept.rfind(b"\n\n") + 2, kept.rfind(b"\r\n\r\n") + 4)
        if end > 3:  # of an event; without a blank line it is at most 3
            for window in sse.windows(bytes(kept[:end])):
                for data in window.data:
                    yield data
            del kept[:end]
    for window in sse.windows(bytes(kept)):
        for data in window.data:
            yield data


def _check_end(came: bool, finish: str | None) -> None:
    if not came:
        raise Failure("unreadable reply", "it lacks a choice")
    if finish in ("abort", "error"):
        raise Failure("aborted", "the server gave the request up")


class GrowingChoice:
    """One choice as it comes, in arrays of its numbers. ``top``: logprobs asked for at each position."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._ids, self._named, self._top_ids = array("i"), array("i"), array("i")
        self._logprobs, self._top_logprobs = array("f"), array("f")
        self._text: list[str] = []
        self._came = False
        self._finish: str | None = None

    def add(self, piece: _Choice) -> None:
        """Raises Failure for logprobs without ids."""
        self._came = True
        self._ids.extend(piece.token_ids or ())
        self._finish = piece.finish_reason or self._finish
        if piece.text is not None:
            self._text.append(piece.text)
        if self._top and piece.logprobs is not None:
            for token, logprob, likeliest in _positions(piece.logprobs, self._top):
                missing = TOP - len(likeliest)
                self._named.append(token)
                self._logprobs.append(_number(logprob))
                self._top_ids.extend([*(each for each, _ in likeliest), *[-1] * missing])
                self._top_logprobs.extend([*(_number(each) for _, each in likeliest), *[-math.inf] * missing])

    def generation(self, usage: Usage, fingerprint: str | None, *, alone: bool) -> Generation:
        """``alone``: the usage is of this choice only. Raises Failure if its parts contradict each other."""
        _check_end(self._came, self._finish)
        if self._top and self._ids != self._named:
            said = f"{len(self._ids)} token ids, and logprobs of {len(self._named)} tokens that are not the same"
            raise Failure("unreadable reply", said)
        details = usage.prompt_tokens_details or _Details()
        return Generation(
            ids=np.array(self._ids, np.int32),
            logprobs=np.array(self._logprobs, np.float32),
            top_ids=np.array(self._top_ids, np.int32).reshape(-1, TOP),
            top_logprobs=np.array(self._top_logprobs, np.float32).reshape(-1, TOP),
            finish_reason=self._finish,
            completion_tokens=usage.completion_tokens if alone else None,
            cached_tokens=details.cached_tokens,
            text="".join(self._text) if self._text else None,
            fingerprint=fingerprint,
        )


Likeliest = list[tuple[int, float | None]]


def _positions(told: _Logprobs, top: int) -> Iterator[tuple[int, float | None, Likeliest]]:
    """Of each position its token, that token's logprob, and the likeliest ``top`` in order; ties by id."""
    if told.content is not None:
        for at in told.content:
            candidates = [(each.token_id, each.logprob) for each in at.top_logprobs if (each.rank or 0) <= top]
            yield at.token_id, at.logprob, sorted(candidates, key=_place)
        return
    if not len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs):
        raise Failure("unreadable reply", "logprobs of unequal length")
    for token, logprob, given in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        candidates = [(_token_id(name), each) for name, each in (given or {}).items()]
        # a sampled one from outside of them comes as one more
        yield _token_id(token), logprob, sorted(candidates, key=_place)[:top]


def _place(candidate: tuple[int, float | None]) -> tuple[float, int]:
    token, logprob = candidate
    return (math.inf if logprob is None else -logprob), token


def _number(logprob: float | None) -> float:
    return math.nan if logprob is None else logprob  # JSON has no NaN


def _token_id(name: str) -> int:
    number = name.removeprefix("token_id:")
    if number == name or not number.isdecimal() or int(number) > _LARGEST_ID:
        raise Failure("unreadable reply", "its logprobs name tokens by text, not by id")
    return int(number)


def nothing(error: str) -> Generation:
    """A generation that failed."""
    return Generation(
        ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        top_ids=np.empty((0, TOP), np.int32),
        top_logprobs=np.empty((0, TOP), np.float32),
        error=error,
    )


class GrowingChat:
    """A chat completion as it comes, whole or in deltas. An empty text in a delta is none: the first has one."""

    def __init__(self) -> None:
        self._found = ChatReply()
        self._calls: dict[int, tuple[str, str]] = {}
        self._came = False

    def add(self, document: ChatDocument) -> None:
        """Take one document; of its choices the first."""
        found = self._found
        if document.usage is not None:
            found.completion_tokens = document.usage.completion_tokens
        found.fingerprint = document.system_fingerprint or found.fingerprint
        if not document.choices:
            return
        self._came, choice = True, document.choices[0]
        found.finish_reason = choice.finish_reason or found.finish_reason
        if choice.token_ids is not None:
            found.ids = [*(found.ids or ()), *choice.token_ids]
        said = choice.message or choice.delta or _Message()
        thought = said.reasoning if said.reasoning is not None else said.reasoning_content
        if choice.message is not None:
            found.text, found.reasoning = said.content, thought
        else:
            found.text = (found.text or "") + (said.content or "") or None
            found.reasoning = (found.reasoning or "") + (thought or "") or None
        for place, call in enumerate(said.tool_calls or ()):
            index = place if call.index is None else call.index
            name, arguments = self._calls.get(index, ("", ""))
            self._calls[index] = (name or call.function.name or "", arguments + (call.function.arguments or ""))

    def reply(self) -> ChatReply:
        """What came, once all has. Raises Failure if the server gave up."""
        _check_end(self._came, self._found.finish_reason)
        self._found.tool_calls = [self._calls[index] for index in sorted(self._calls)]
        return self._found
