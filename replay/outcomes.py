"""What an exchange came to: from raw bytes and their arrival to tokens, times and an honest status.

Statuses are those of `replay.records.Status`. The classes of failure (``Outcome.error``), with their status:

    class                   status     meaning
    ----------------------  ---------  ---------------------------------------------------------------------------
    http NNN                failed     refused with this status code
    context overflow        failed     refused because prompt and answer do not fit the model's context
    no connection           failed     see replay.wire, as for the next four
    disconnected            failed
    connection lost         failed
    bad http                failed
    reply too large         failed
    event too large         failed     one event is above ``max_event_bytes``
    error in stream         failed     the server reported an error under status 200, in the stream or instead of it
    aborted by server       failed     finish reason "abort" or "error"
    unreadable reply        failed     status 200, but neither events nor JSON, or an event that cannot be understood
    empty reply             failed     complete, but without one token
    truncated               truncated  ended without its terminal event and without a finish reason
    closed early            truncated  the same, and without the end of the HTTP body
    no first byte           stalled    see replay.wire, as for the next two
    stalled                 stalled
    too slow                stalled
    short                   short      fewer tokens than asked, although the server was told not to stop
    cut                     cut        given up when the drain time ended
    cancelled               cancelled  given up by the user

A reply whose terminal event ([DONE], message_stop) came is complete whatever happened to the connection after it.
What came before a failure is kept: it counts where tokens are counted by arrival, never in statistics of speed.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate
from typing import Any, Literal
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import numpy.typing as npt

from replay import sse
from replay.records import CHUNK, Status, TokenSource
from replay.wire import Exchange, Limits

Api = Literal["completions", "chat", "anthropic"]
CountTokens = Callable[[str], int]
"""Tokens of a text, special tokens not added (tokenizers: ``len(t.encode(text, add_special_tokens=False))``)."""

_STATUS: dict[str, Status] = {
    "truncated": "truncated",
    "closed early": "truncated",
    "no first byte": "stalled",
    "stalled": "stalled",
    "too slow": "stalled",
    "short": "short",
    "cut": "cut",
    "cancelled": "cancelled",
}
"""Status of a class of failure; "failed" for all others."""

_SLICE_NS = 500_000
"""Longest piece of decoding in one turn of the event loop. Bytes that arrive meanwhile are stamped that much late."""


class Outcome(msgspec.Struct, kw_only=True):
    """The facts of one reply. Fields that `replay.records.RequestRecord` has too mean the same there."""

    status: Status
    error: str | None = None
    detail: str | None = None
    streamed: bool = True
    finish_reason: str | None = None
    first_token_ns: int | None = None
    first_answer_ns: int | None = None
    last_token_ns: int | None = None
    chunks: npt.NDArray[np.void]
    """Shape (chunks,), dtype CHUNK: the token-bearing events, in order of arrival."""
    first_chunk_tokens: int | None = None
    token_source: TokenSource | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    output_tokens_client: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    server_fingerprint: str | None = None
    notes: list[str] = []
    answer: str = ""
    """Visible text, tool calls not included."""
    reasoning: str = ""


# What is read of an event; everything else in it is skipped by the decoder. gc=False: these hold no cycles, and the
# collector would otherwise walk through thousands of them.


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _OutputDetails(msgspec.Struct, gc=False):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _OutputDetails | None = None


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct, gc=False):
    function: _Function | None = None


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None
    role: str | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    """In a reply that is not streamed."""
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    system_fingerprint: str | None = None
    error: Any = None


class _Piece(msgspec.Struct, gc=False):
    """Anthropic's content block, or delta of one or of the message."""

    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    name: str | None = None
    stop_reason: str | None = None


class _AnthropicUsage(msgspec.Struct, gc=False):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Message(msgspec.Struct, gc=False):
    usage: _AnthropicUsage | None = None


class _AnthropicEvent(msgspec.Struct, gc=False):
    type: str | None = None
    message: _Message | str | None = None
    content_block: _Piece | None = None
    delta: _Piece | None = None
    usage: _AnthropicUsage | None = None
    content: list[_Piece] | None = None
    """This and the next in a reply that is not streamed."""
    stop_reason: str | None = None
    error: Any = None


class _Facts:
    """What has been read so far. Lists called ``*_event`` count events from 0 at the start of the reply."""

    def __init__(self) -> None:
        self.times: list[int] = []
        """Arrival of each event."""
        self.output: list[int] = []
        """Events that carry output."""
        self.sizes: list[int] = []
        """Characters in each of those."""
        self.counts: list[int | None] = []
        """Completion tokens so far, by the usage in each of those."""
        self.ids: list[int | None] = []
        """Token ids in each of those."""
        self.silent: list[tuple[int, int | None, bool]] = []
        """Events with a choice but without output, their usage, and whether they announce a role: what an
        end-of-text token or an unfinished character looks like."""
        self.odd: list[int] = []
        """Events with nothing in them that we know; looked at again, as a whole."""
        self.first_answer: int | None = None
        self.answer: list[str] = []
        self.reasoning: list[str] = []
        self.finish_reason: str | None = None
        self.terminal = False
        self.error: str | None = None
        self.detail: str | None = None
        self.notes: list[str] = []
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.total_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.reasoning_tokens: int | None = None
        self.fingerprint: str | None = None

    def fail(self, error: str, detail: object) -> None:
        """Keep the first failure."""
        if self.error is None:
            self.error, self.detail = error, _words(detail)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def outcome(
    exchange: Exchange,
    *,
    api: Api,
    asked_output: int,
    exact_length: bool,
    limits: Limits,
    count_tokens: CountTokens | None = None,
) -> Outcome:
    """What ``exchange`` came to. Pure.

    ``exact_length``: the server was told not to stop before ``asked_output`` tokens (ignore_eos, min_tokens).
    ``count_tokens`` is used, on the joined text, only where the server counted nothing.
    """
    steps = outcome_steps(
        exchange,
        api=api,
        asked_output=asked_output,
        exact_length=exact_length,
        limits=limits,
        count_tokens=count_tokens,
    )
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Outcome = end.value
            return result


async def outcome_sliced(
    exchange: Exchange,
    *,
    api: Api,
    asked_output: int,
    exact_length: bool,
    limits: Limits,
    count_tokens: CountTokens | None = None,
) -> Outcome:
    """As `outcome`, giving way to the event loop after each half millisecond of work. However many callers wait, the
    loop does that much decoding in one turn and no more; they are served in the order in which they came."""
    loop = asyncio.get_running_loop()
    waiting = _waiting.setdefault(loop, deque())
    steps = outcome_steps(
        exchange,
        api=api,
        asked_output=asked_output,
        exact_length=exact_length,
        limits=limits,
        count_tokens=count_tokens,
    )
    done: asyncio.Future[Outcome] = loop.create_future()
    waiting.append((steps, done))
    if len(waiting) == 1:
        loop.call_soon(_decode_some, loop, waiting)
    return await done


_Waiting = deque[tuple[Generator[None, None, Outcome], "asyncio.Future[Outcome]"]]
_waiting: WeakKeyDictionary[asyncio.AbstractEventLoop, _Waiting] = WeakKeyDictionary()


def _decode_some(loop: asyncio.AbstractEventLoop, waiting: _Waiting) -> None:
    until = time.perf_counter_ns() + _SLICE_NS
    while waiting and time.perf_counter_ns() < until:
        steps, done = waiting[0]
        try:
            next(steps)
            continue
        except StopIteration as end:
            if not done.done():  # else the caller was cancelled
                done.set_result(end.value)
        except Exception as error:
            if not done.done():
                done.set_exception(error)
        waiting.popleft()
    if waiting:
        loop.call_soon(_decode_some, loop, waiting)


def outcome_steps(
    exchange: Exchange,
    *,
    api: Api,
    asked_output: int,
    exact_length: bool,
    limits: Limits,
    count_tokens: CountTokens | None = None,
) -> Generator[None, None, Outcome]:
    """`outcome` in steps of well below a millisecond (a single event of megabytes is one step)."""
    facts = _Facts()
    streamed = True
    status = exchange.http_status
    if status is not None and not 200 <= status < 300:
        _refused(facts, status, exchange.body)
    elif exchange.body:
        encoding = exchange.headers.get("content-encoding", "identity")
        if encoding != "identity":
            facts.fail("unreadable reply", f"compressed with {encoding!r}, although identity was asked for")
        elif exchange.body.lstrip()[:1] in (b"{", b"["):  # no line of an event stream that matters begins so
            streamed = False
            _unstreamed(facts, exchange.body, api)
        else:
            yield from _stream(facts, exchange, api, limits)
    if exchange.failure is not None:
        if facts.terminal:
            facts.note(f"{exchange.failure} after the terminal event")
        elif facts.error is None:
            facts.fail(exchange.failure, exchange.detail)
    return _conclude(facts, streamed, asked_output, exact_length, count_tokens)


def _refused(facts: _Facts, status: int, body: bytes) -> None:
    """A status code outside 200-299."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = body.decode("utf-8", "replace")
    detail = _words(said)
    overflow = status in (400, 413, 422) and (_OVERFLOW_CODE.search(body) or _OVERFLOW_WORDS.search(detail or ""))
    facts.fail("context overflow" if overflow else f"http {status}", detail)


_OVERFLOW_CODE = re.compile(rb'"(?:context_length_exceeded|exceed_context_size_error)"|"param"\s*:\s*"input_tokens"')
_OVERFLOW_WORDS = re.compile(
    r"(?i)context (?:length|window|size)|maximum (?:model|sequence|input) length|max_model_len|prompt is too long"
    r"|too many (?:input )?tokens|input (?:is )?too long"
)


def _stream(facts: _Facts, exchange: Exchange, api: Api, limits: Limits) -> Generator[None, None, None]:
    """Read an event stream into ``facts``, one window at a time."""
    read_ns, read_end = exchange.reads()
    decoder, add = (_ANTHROPIC, _add_anthropic) if api == "anthropic" else (_OPENAI, _add_openai)
    events = 0
    for window in sse.windows(exchange.body):
        data = window.data
        if len(exchange.body) > limits.max_event_bytes and data and max(map(len, data)) > limits.max_event_bytes:
            facts.fail("event too large", f"{max(map(len, data))} bytes (limit: max_event_bytes)")
            return
        facts.times += sse.arrivals(window.ends, read_ns, read_end).tolist()
        if window.unfinished:
            facts.note("last event without its blank line")
        done = bool(data) and data[-1].strip() == b"[DONE]"
        try:
            if window.kinds is not None and b"error" in window.kinds:
                raise msgspec.DecodeError
            add(facts, events, list(map(decoder.decode, data[:-1] if done else data)))  # type: ignore[arg-type]
            facts.terminal |= done
            for number in facts.odd:
                _look_again(facts, msgspec.json.decode(data[number - events]))
            facts.odd.clear()
        except (msgspec.DecodeError, UnicodeDecodeError):
            _one_by_one(facts, window, events, api)
        events += len(data)
        yield
    if not events:
        facts.fail("unreadable reply", f"no events in it: {exchange.body[:200].decode('utf-8', 'replace')}")


def _one_by_one(facts: _Facts, window: sse.Window, first: int, api: Api) -> None:
    """The careful way, for a window with something in it that is not an event of the usual kind."""
    for number, data in enumerate(window.data):
        kind = window.kinds[number] if window.kinds is not None else b""
        if data.strip() == b"[DONE]":
            facts.terminal = True
            continue
        if not data.strip():
            continue
        try:
            plain = _patient(data)
            if kind == b"error" and not (isinstance(plain, dict) and plain.get("error")):
                facts.fail("error in stream", plain)
            elif api == "anthropic":
                _add_anthropic(facts, first + number, [msgspec.convert(plain, _AnthropicEvent)])
            else:
                _add_openai(facts, first + number, [msgspec.convert(plain, _Chunk)])
                if facts.odd:
                    facts.odd.clear()
                    _look_again(facts, plain)
        except ValueError as error:  # msgspec's errors are ValueErrors too
            if kind == b"error":
                facts.fail("error in stream", data.decode("utf-8", "replace"))
            elif not (window.unfinished and number == len(window.data) - 1):
                facts.fail(
                    "unreadable reply", f"event {first + number}: {error}: {data[:100].decode('utf-8', 'replace')}"
                )


def _patient(data: bytes) -> Any:
    """JSON as it is met rather than as it should be: bytes that are not UTF-8 and lone surrogates become U+FFFD."""
    text = json.dumps(json.loads(data.decode("utf-8", "replace")), ensure_ascii=False)
    return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _add_openai(facts: _Facts, number: int, chunks: Sequence[_Chunk]) -> None:
    """Add events of a completions or chat stream; ``number``: of the first of them."""
    answer, output, sizes, counts, ids = facts.answer, facts.output, facts.sizes, facts.counts, facts.ids
    for number, chunk in enumerate(chunks, number):  # noqa: B020
        usage = chunk.usage
        count = None
        if usage is not None:
            count = usage.completion_tokens
            _take_usage(facts, usage)
        if chunk.error is not None:
            facts.fail("error in stream", chunk.error)
        choices = chunk.choices
        if not choices:
            if usage is None and choices is None and chunk.error is None:
                facts.odd.append(number)
            continue
        if chunk.system_fingerprint is not None:
            facts.fingerprint = chunk.system_fingerprint
        size = 0
        found: int | None = None
        for choice in choices:
            if choice.finish_reason is not None:
                facts.finish_reason = choice.finish_reason
            if choice.token_ids is not None:
                found = (found or 0) + len(choice.token_ids)
            if choice.text:
                size += len(choice.text)
                answer.append(choice.text)
                if facts.first_answer is None:
                    facts.first_answer = number
            elif choice.delta is not None:
                size += _add_delta(facts, number, choice.delta)
        if size or found:
            output.append(number)
            sizes.append(size)
            counts.append(count)
            ids.append(found)
        else:
            facts.silent.append((number, count, any(c.delta is not None and bool(c.delta.role) for c in choices)))


def _add_delta(facts: _Facts, number: int, delta: _Delta) -> int:
    """Add one chat delta (or whole message); characters of output in it."""
    size = 0
    thought = delta.reasoning or delta.reasoning_content  # some servers send the same text under both names
    if thought:
        facts.reasoning.append(thought)
        size = len(thought)
    visible = 0
    if delta.content:
        facts.answer.append(delta.content)
        visible = len(delta.content)
    if delta.refusal:
        facts.answer.append(delta.refusal)
        visible += len(delta.refusal)
    for call in delta.tool_calls or ():
        if call.function is not None:
            visible += len(call.function.name or "") + len(call.function.arguments or "")
    if visible and facts.first_answer is None:
        facts.first_answer = number
    return size + visible


def _look_again(facts: _Facts, event: Any) -> None:
    """Judge an event without choices, usage or "error": an error may also look like this."""
    if isinstance(event, dict) and (
        event.get("object") == "error" or "detail" in event or event.get("type") == "error"
    ):
        facts.fail("error in stream", event)
    else:
        facts.note("events of unknown kind")


def _take_usage(facts: _Facts, usage: _Usage) -> None:
    """Usage is cumulative wherever it stands: the last value that is not null wins."""
    if usage.prompt_tokens is not None:
        facts.input_tokens = usage.prompt_tokens
    if usage.completion_tokens is not None:
        facts.output_tokens = usage.completion_tokens
    if usage.total_tokens is not None:
        facts.total_tokens = usage.total_tokens
    if usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens is not None:
        facts.cached_tokens = usage.prompt_tokens_details.cached_tokens
    if usage.completion_tokens_details is not None and usage.completion_tokens_details.reasoning_tokens is not None:
        facts.reasoning_tokens = usage.completion_tokens_details.reasoning_tokens


def _add_anthropic(facts: _Facts, number: int, events: Sequence[_AnthropicEvent]) -> None:
    """Add events of a messages stream; ``number``: of the first of them."""
    for number, event in enumerate(events, number):  # noqa: B020
        if event.type == "error" or event.error is not None:
            facts.fail("error in stream", event.error)
        elif event.type == "message_stop":
            facts.terminal = True
        usage = event.message.usage if isinstance(event.message, _Message) else event.usage
        if usage is not None:
            _take_anthropic_usage(facts, usage)
        size = 0
        for piece in (event.content_block, event.delta):
            if piece is not None:
                size += _add_piece(facts, number, piece)
        if size:
            facts.output.append(number)
            facts.sizes.append(size)
            facts.counts.append(None)  # the counts of this protocol are not kept up from event to event
            facts.ids.append(None)


def _add_piece(facts: _Facts, number: int, piece: _Piece) -> int:
    """Add one content block or delta; characters of output in it."""
    if piece.stop_reason is not None:
        facts.finish_reason = piece.stop_reason
    thought, text = piece.thinking or "", piece.text or ""
    if thought:
        facts.reasoning.append(thought)
    if text:
        facts.answer.append(text)
    visible = len(text) + len(piece.partial_json or "") + len(piece.name or "")
    if visible and facts.first_answer is None:
        facts.first_answer = number
    return len(thought) + visible


def _take_anthropic_usage(facts: _Facts, usage: _AnthropicUsage) -> None:
    """Here cached tokens stand beside the input tokens, not inside them; both are brought to "inside"."""
    if usage.output_tokens is not None:
        facts.output_tokens = usage.output_tokens
    if usage.cache_read_input_tokens is not None:
        facts.cached_tokens = usage.cache_read_input_tokens
    if usage.input_tokens is not None:
        facts.input_tokens = (
            usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        )


def _unstreamed(facts: _Facts, body: bytes, api: Api) -> None:
    """One JSON object in place of a stream: a whole answer, or an error."""
    try:
        if api == "anthropic":
            answer = _ANTHROPIC.decode(body)
            if answer.type == "error" or answer.error is not None:
                facts.fail("error in stream", msgspec.json.decode(body))
                return
            if answer.usage is not None:
                _take_anthropic_usage(facts, answer.usage)
            for piece in answer.content or ():
                _add_piece(facts, 0, piece)
            facts.finish_reason = answer.stop_reason
            facts.terminal = answer.content is not None
        else:
            chunk = _OPENAI.decode(body)
            for choice in chunk.choices or ():
                choice.delta = choice.message
            _add_openai(facts, 0, [chunk])
            facts.terminal = bool(chunk.choices)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        facts.fail("unreadable reply", f"{error}: {body[:200].decode('utf-8', 'replace')}")
        return
    if not facts.terminal and facts.error is None:
        _look_again(facts, msgspec.json.decode(body))
        facts.fail("unreadable reply", body[:200].decode("utf-8", "replace"))
    facts.first_answer = None  # there was no moment at which a first token was seen
    for events in (facts.output, facts.sizes, facts.counts, facts.ids, facts.silent):
        events.clear()


_OPENAI = msgspec.json.Decoder(_Chunk)
_ANTHROPIC = msgspec.json.Decoder(_AnthropicEvent)


def _conclude(
    facts: _Facts, streamed: bool, asked_output: int, exact_length: bool, count_tokens: CountTokens | None
) -> Outcome:
    _correct_usage(facts)
    _add_silent(facts)
    answer, reasoning = "".join(facts.answer), "".join(facts.reasoning)
    tokens, source = _tokens_by_chunk(facts)
    total = facts.output_tokens
    if total is None and source == "ids":
        total = sum(tokens)
        facts.note("output tokens counted from the server's token ids")
    client: int | None = None
    if total is None and (facts.output or (answer + reasoning)):
        client = count_tokens(reasoning + answer) if count_tokens is not None else len(facts.output) or None
        facts.note(
            "output tokens are a client estimate: "
            + ("the text, tokenised" if count_tokens is not None else "one for each event")
        )
        if source is None and client is not None:
            tokens, source = _spread(facts.sizes, client), "estimated"
    chunks = np.empty(len(facts.output), dtype=CHUNK)
    chunks["t_ns"] = [facts.times[event] for event in facts.output]
    chunks["tokens"] = tokens
    if facts.error is None:
        _judge(facts, streamed, total, asked_output, exact_length)
    return Outcome(
        status=_STATUS.get(facts.error, "failed") if facts.error is not None else "ok",
        error=facts.error,
        detail=facts.detail,
        streamed=streamed,
        finish_reason=facts.finish_reason,
        first_token_ns=facts.times[facts.output[0]] if facts.output else None,
        first_answer_ns=facts.times[facts.first_answer] if facts.first_answer is not None else None,
        last_token_ns=facts.times[facts.output[-1]] if facts.output else None,
        chunks=chunks,
        first_chunk_tokens=int(tokens[0]) if facts.output and source is not None else None,
        token_source=source if facts.output else None,
        input_tokens=facts.input_tokens,
        output_tokens=total,
        output_tokens_client=client,
        cached_tokens=facts.cached_tokens,
        reasoning_tokens=facts.reasoning_tokens,
        server_fingerprint=facts.fingerprint,
        notes=facts.notes,
        answer=answer,
        reasoning=reasoning,
    )


def _judge(facts: _Facts, streamed: bool, total: int | None, asked_output: int, exact_length: bool) -> None:
    """Whether a reply that ended without an error is what was asked for."""
    if not facts.terminal and facts.finish_reason is None:
        facts.fail("truncated", "ended without a terminal event and without a finish reason")
    elif facts.finish_reason in ("abort", "error"):
        facts.fail("aborted by server", f"finish reason {facts.finish_reason!r}")
    elif not total and not facts.output and (streamed or not (facts.answer or facts.reasoning)):
        facts.fail("empty reply", f"finish reason {facts.finish_reason!r}")
    elif exact_length and total is not None and total < asked_output:
        facts.fail("short", f"{total} of {asked_output} tokens, finish reason {facts.finish_reason!r}")
    elif exact_length and total is None and facts.finish_reason in _NATURAL_ENDS:
        facts.fail("short", f"finish reason {facts.finish_reason!r}, tokens not counted by the server")
    else:
        if not facts.terminal:
            facts.note("no terminal event")
        if facts.finish_reason is None:
            facts.note("no finish reason")
        if total is not None and total > asked_output:
            facts.note("more tokens than asked")
        if facts.output and facts.first_answer is None:
            facts.note("no answer, only reasoning")


_NATURAL_ENDS = (
    "stop",
    "tool_calls",
    "function_call",
    "content_filter",
    "end_turn",
    "stop_sequence",
    "tool_use",
    "refusal",
)


def _correct_usage(facts: _Facts) -> None:
    """Bring the counts of servers that count in their own ways to one meaning."""
    output, thought = facts.output_tokens, facts.reasoning_tokens
    if output is not None and thought:
        both = output + thought
        outside = (
            thought > output
            or (facts.total_tokens is not None and facts.total_tokens - (facts.input_tokens or 0) == both)
            or (facts.reasoning and both in (len(facts.output), _sum(facts.ids)))
        )
        if outside:
            facts.output_tokens = both
            facts.note("reasoning tokens counted outside completion tokens; added")
    if facts.cached_tokens is not None and facts.input_tokens is not None and facts.cached_tokens > facts.input_tokens:
        facts.note(f"cached tokens ({facts.cached_tokens}) above input tokens; clamped")
        facts.cached_tokens = facts.input_tokens


def _sum(counts: Sequence[int | None]) -> int | None:
    """None if one is unknown, or if there are none."""
    return sum(count or 0 for count in counts) if counts and None not in counts else None


def _add_silent(facts: _Facts) -> None:
    """Count among the output what carries tokens without text: where usage stands on every event, those at which it
    rises; and if nothing at all has text (as from a model with random weights), all but the announcement of a role."""
    found: list[tuple[int, int | None]] = []
    if facts.output and None not in facts.counts:
        counted = [(event, count, True) for event, count in zip(facts.output, facts.counts, strict=True)]
        before = 0
        for event, count, has_text in sorted(counted + [(event, count, False) for event, count, _ in facts.silent]):
            if count is not None and count > before:
                before = count
                if not has_text:
                    found.append((event, count))
    elif not facts.output and facts.output_tokens:
        found = [(event, count) for event, count, role in facts.silent if not role]
        facts.note("output without text")
    if found:
        rows = [*zip(facts.output, facts.sizes, facts.counts, facts.ids, strict=True)]
        rows = sorted([*rows, *((event, 0, count, None) for event, count in found)], key=lambda row: row[0])
        facts.output, facts.sizes, facts.counts, facts.ids = (list(column) for column in zip(*rows, strict=True))


def _tokens_by_chunk(facts: _Facts) -> tuple[list[int], TokenSource | None]:
    """Tokens in each output event, and where that is known from. Without a source all are 0."""
    total, found = facts.output_tokens, len(facts.output)
    if not found:
        return [], None
    counts, ids = facts.counts, facts.ids
    # Usage on one event only, the last, is no continuous usage, unless there is only that event.
    if None not in counts and (found == 1 or counts[0] != counts[-1]):
        so_far = list(accumulate(counts, lambda before, count: max(before, count or 0)))
        return _settle(facts, [b - a for a, b in zip([0, *so_far], so_far, strict=False)], total), "usage"
    if None not in ids:
        return _settle(facts, [count or 0 for count in ids], total), "ids"
    if total is None:
        return [0] * found, None
    if total == found:
        return [1] * found, "inferred"
    if total == found + 1 and facts.finish_reason in ("stop", "end_turn"):  # the end-of-text token has no text
        return [1] * (found - 1) + [2], "inferred"
    return _spread(facts.sizes, total), "estimated"


def _settle(facts: _Facts, tokens: list[int], total: int | None) -> list[int]:
    """Make the tokens of the chunks sum to the server's total; a rest has come with the last one at the latest."""
    rest = total - sum(tokens) if total is not None else 0
    if rest:
        facts.note("tokens of the events do not sum to usage; the rest is put on the last")
        tokens[-1] = max(tokens[-1] + rest, 0)
    return tokens


def _spread(sizes: Sequence[int], total: int) -> list[int]:
    """Share ``total`` out in proportion to ``sizes``, the sum exact and no prefix off by more than half."""
    if not any(sizes):
        sizes = [1] * len(sizes)
    whole = sum(sizes)
    marks = [(2 * total * size + whole) // (2 * whole) for size in accumulate(sizes)]
    return [b - a for a, b in zip([0, *marks], marks, strict=False)]


def _words(said: object) -> str | None:
    """The message in an error of any shape, cut to 300 characters."""
    while isinstance(said, dict):
        inner = next((said[key] for key in ("error", "message", "detail", "type") if said.get(key)), None)
        if inner is None:
            break
        said = inner
    if said is None or said == "":
        return None
    text = said if isinstance(said, str) else msgspec.json.encode(said).decode()
    return " ".join(text.split())[:300]
