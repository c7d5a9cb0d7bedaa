"""What a reply says, in each protocol: from the events of a stream, or one JSON object, to plain facts.

Chat and completions differ in one field and share a reader; the Anthropic messages protocol has its own. Only the
fields that are needed are decoded. What the facts amount to is judged in `replay.outcomes`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from typing import Any

import msgspec

from replay import sse
from replay.wire import Exchange, Limits
from workloads.rendering import Api

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
    metrics: Any = None
    """vLLM with --enable-per-request-metrics, on the last chunk: milliseconds by name. Others may mean other things."""
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


class Facts:
    """What has been read so far. Events are counted from 0 at the start of the reply."""

    def __init__(self) -> None:
        self.times: list[sse.Times] = []
        """Arrival of the events, some in each array."""
        self.output: list[int] = []
        """Events that carry output."""
        self.sizes: list[int] = []
        """Characters in each of those."""
        self.counts: list[int | None] = []
        """Completion tokens so far, by the usage in each of those."""
        self.ids: list[int | None] = []
        """Token ids in each of those."""
        self.counted = 0
        """The highest of all counts of completion tokens so far."""
        self.continuous = True
        """Every event with output so far had such a count."""
        self.silent: list[int] = []
        """Events with a choice but without output, other than the announcement of a role."""
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
        self.server_first_token_s: float | None = None
        self.server_queue_s: float | None = None
        self.server_itl_s: float | None = None

    def fail(self, error: str, detail: object) -> None:
        """Keep the first failure."""
        if self.error is None:
            self.error, self.detail = error, words(detail)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def refusal(facts: Facts, status: int, body: bytes) -> None:
    """A status code outside 200-299."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = body.decode("utf-8", "replace")
    detail = words(said)
    overflow = status in (400, 413, 422) and (_OVERFLOW_CODE.search(body) or _OVERFLOW_WORDS.search(detail or ""))
    facts.fail("context overflow" if overflow else f"http {status}", detail)


_OVERFLOW_CODE = re.compile(rb'"(?:context_length_exceeded|exceed_context_size_error)"|"param"\s*:\s*"input_tokens"')
_OVERFLOW_WORDS = re.compile(
    r"(?i)context (?:length|window|size)|maximum (?:model|sequence|input) length|max_model_len|prompt is too long"
    r"|too many (?:input )?tokens|input (?:is )?too long"
)


def stream(facts: Facts, exchange: Exchange, api: Api, limits: Limits) -> Generator[None, None, None]:
    """Read an event stream into ``facts``, one window at a time."""
    read_ns, read_end = exchange.reads()
    decoder, add = (_ANTHROPIC, _add_anthropic) if api == "anthropic" else (_OPENAI, _add_openai)
    events = 0
    for window in sse.windows(exchange.body):
        data = window.data
        if len(exchange.body) > limits.max_event_bytes and data and max(map(len, data)) > limits.max_event_bytes:
            facts.fail("event too large", f"{max(map(len, data))} bytes (limit: max_event_bytes)")
            return
        facts.times.append(sse.arrivals(window.ends, read_ns, read_end))
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


def _one_by_one(facts: Facts, window: sse.Window, first: int, api: Api) -> None:
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


def _add_openai(facts: Facts, number: int, chunks: Sequence[_Chunk]) -> None:
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
        if isinstance(chunk.metrics, dict):
            _take_metrics(facts, chunk.metrics)
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
        # A token without text: an end-of-text token, or a piece of a character. Only usage tells, if it is kept up.
        if not (size or found) and any(choice.delta is not None and choice.delta.role for choice in choices):
            pass
        elif size or found or (facts.continuous and count is not None and count > facts.counted):
            output.append(number)
            sizes.append(size)
            counts.append(count)
            ids.append(found)
            facts.continuous = facts.continuous and count is not None
        else:
            facts.silent.append(number)
        if count is not None and count > facts.counted:
            facts.counted = count


def _add_delta(facts: Facts, number: int, delta: _Delta) -> int:
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


def _look_again(facts: Facts, event: Any) -> None:
    """Judge an event without choices, usage or "error": an error may also look like this."""
    if isinstance(event, dict) and (
        event.get("object") == "error" or "detail" in event or event.get("type") == "error"
    ):
        facts.fail("error in stream", event)
    else:
        facts.note("events of unknown kind")


def _take_usage(facts: Facts, usage: _Usage) -> None:
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


def _take_metrics(facts: Facts, metrics: dict[str, Any]) -> None:
    """vLLM's time to first token starts when the request is scheduled, after its time in the queue."""
    queue, prefill = _of_ms(metrics.get("queue_time_ms")), _of_ms(metrics.get("time_to_first_token_ms"))
    facts.server_queue_s = queue
    facts.server_first_token_s = queue + prefill if queue is not None and prefill is not None else None
    facts.server_itl_s = _of_ms(metrics.get("mean_itl_ms"))


def _of_ms(value: object) -> float | None:
    """Seconds; None for what is no time."""
    return value * 1e-3 if isinstance(value, (int, float)) and 0 <= value < _LONGEST_MS else None


_LONGEST_MS = 1e9


def _add_anthropic(facts: Facts, number: int, events: Sequence[_AnthropicEvent]) -> None:
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


def _add_piece(facts: Facts, number: int, piece: _Piece) -> int:
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


def _take_anthropic_usage(facts: Facts, usage: _AnthropicUsage) -> None:
    """Here cached tokens stand beside the input tokens, not inside them; both are brought to "inside"."""
    if usage.output_tokens is not None:
        facts.output_tokens = usage.output_tokens
    if usage.cache_read_input_tokens is not None:
        facts.cached_tokens = usage.cache_read_input_tokens
    if usage.input_tokens is not None:
        facts.input_tokens = (
            usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        )


def whole(facts: Facts, body: bytes, api: Api) -> None:
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


def words(said: object) -> str | None:
    """The message in an error of any shape, cut to 300 characters."""
    while isinstance(said, dict):
        inner = next((said[key] for key in ("error", "message", "detail", "type") if said.get(key)), None)
        if inner is None:
            break
        said = inner
    if said is None or said == "":
        return None
    text = said if isinstance(said, str) else msgspec.json.encode(said).decode()
    return "".join(c if c.isprintable() else "·" for c in " ".join(text.split())[:300])
