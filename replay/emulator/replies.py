"""How replies are put on the wire: three APIs, each as a stream of events or as one body.

A reply's chunks are pieced together from bytes made beforehand.
"""

from __future__ import annotations

import time
from codecs import getincrementaldecoder
from collections.abc import Sequence as Tokens
from typing import Any, Protocol

import msgspec

from replay.emulator import language
from replay.emulator.requests import Ask
from replay.emulator.scheduler import Sequence

PIECES = [
    *[b""] * language.FIRST_BYTE,
    *(bytes([byte]) for byte in range(256)),
    *(text.encode() for text in language.TOKENS[language.FIRST_BYTE + 256 :]),
]
"""What each token shows, as UTF-8: special tokens nothing."""

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.encode


class Reply(Protocol):
    """One reply under way. ``usage`` False leaves all token counts out."""

    def chunk(self, tokens: Tokens[int]) -> bytes:
        """Events for the tokens of one step; the last one's also carry the finish reason."""

    def close(self) -> bytes:
        """Events that end a stream."""

    def fail(self, message: str) -> bytes:
        """Events of a stream that breaks off in an error."""

    def whole(self, tokens: Tokens[int]) -> bytes:
        """The body of a reply without streaming."""


class _Text:
    """The text of a reply as it may be shown: thought and answer apart, and nothing of a stop string."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._hold = max(map(len, sequence.stops), default=1) - 1  # characters that may begin a stop string
        self._kept = ""
        self._decoder = getincrementaldecoder("utf-8")("replace")  # a character's bytes may come in several chunks

    def split(self, tokens: Tokens[int], first: int) -> tuple[str, str]:
        """Return (thought, answer) of tokens of which the first is output token number ``first``."""
        border = max(0, self._sequence.answer_from - first)
        thought = b"".join([PIECES[token] for token in tokens[:border]]).decode()
        ended = self._sequence.finish is not None
        answer = self._decoder.decode(b"".join([PIECES[token] for token in tokens[border:]]), ended)
        return thought, self._released(answer) if self._sequence.stops else answer

    def _released(self, text: str) -> str:
        text = self._kept + text
        sequence = self._sequence
        if sequence.stop_reason is not None:
            return text[: text.index(sequence.stop_reason)]
        keep = min(self._hold, len(text)) if sequence.finish is None else 0
        self._kept = text[len(text) - keep :]
        return text[: len(text) - keep]


def error_body(status: int, message: str, kind: str, param: str | None, anthropic: bool) -> bytes:
    """Return an error as JSON, in the manner of either API."""
    if anthropic:
        kinds = {400: "invalid_request_error", 404: "not_found_error", 503: "overloaded_error"}
        return encode({"type": "error", "error": {"type": kinds.get(status, "api_error"), "message": message}})
    return encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


def _usage(ask: Ask, sequence: Sequence, *, details: bool) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "prompt_tokens": len(ask.prompt),
        "total_tokens": len(ask.prompt) + sequence.output,
        "completion_tokens": sequence.output,
    }
    if details:
        usage["prompt_tokens_details"] = {"cached_tokens": sequence.cached}
        if sequence.answer_from:
            usage["completion_tokens_details"] = {"reasoning_tokens": min(sequence.answer_from, sequence.output)}
    return usage


class OpenAIReply:
    """A reply of /v1/completions or /v1/chat/completions."""

    def __init__(
        self, ask: Ask, sequence: Sequence, reply_id: str, created: int, fingerprint: str, usage: bool
    ) -> None:
        self._ask = ask
        self._sequence = sequence
        self._chat = ask.api == "chat"
        self._text = _Text(sequence)
        self._fingerprint = fingerprint
        self._usage = usage
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{reply_id}",
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": created,
            "model": ask.model,
        }
        self._start = b"data: " + encode(self._head)[:-1] + b',"choices":[{"index":0,'
        self._first = True
        self._first_ns = 0
        self._each_usage = (
            b'],"usage":{"prompt_tokens":%d,"total_tokens":' % len(ask.prompt)
            if usage and ask.continuous_usage
            else b""
        )

    def chunk(self, tokens: Tokens[int]) -> bytes:
        """See Reply. A chat stream opens with a chunk that has a role and no token."""
        sequence, ask = self._sequence, self._ask
        output = sequence.output
        thought, answer = self._text.split(tokens, output - len(tokens))
        parts = []
        prompt_ids = b""
        if self._first:
            self._first = False
            self._first_ns = time.monotonic_ns()
            if ask.return_token_ids:
                prompt_ids = b',"prompt_token_ids":' + encode(ask.prompt.tolist())
            if self._chat:
                parts += [
                    self._start,
                    b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null',
                    prompt_ids,
                    b"}",
                    self._running_usage(0),
                ]
                prompt_ids = b""
        parts.append(self._start)
        if not self._chat:
            parts.append(b'"text":%b' % encode(answer))
        elif not thought:
            parts.append(b'"delta":{"content":%b}' % encode(answer))
        elif not answer:
            parts.append(b'"delta":{"reasoning":%b}' % encode(thought))
        else:
            parts.append(b'"delta":{"reasoning":%b,"content":%b}' % (encode(thought), encode(answer)))
        if sequence.finish is None:
            parts.append(b',"logprobs":null,"finish_reason":null,"stop_reason":null')
        else:
            parts.append(b',"logprobs":null,"finish_reason":%b,"stop_reason":%b' % self._finish())
        parts.append(prompt_ids)
        if ask.return_token_ids:
            parts.append(b',"token_ids":' + encode(tokens))
        parts += [b"}", self._running_usage(output)]
        return b"".join(parts)

    def close(self) -> bytes:
        """See Reply."""
        if not (self._usage and self._ask.include_usage):
            return DONE
        usage = _usage(self._ask, self._sequence, details=True)
        last = self._head | {"choices": [], "usage": usage, "system_fingerprint": self._fingerprint}
        last["metrics"] = self._metrics(time.monotonic_ns())
        return b"data: " + encode(last) + b"\n\n" + DONE

    def fail(self, message: str) -> bytes:
        """See Reply."""
        return b"data: " + error_body(500, message, "InternalServerError", None, False) + b"\n\n" + DONE

    def whole(self, tokens: Tokens[int]) -> bytes:
        """See Reply."""
        thought, answer = self._text.split(tokens, 0)
        finish, stop = map(msgspec.Raw, self._finish())
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish, "stop_reason": stop}
        if self._chat:
            content = answer or (None if self._sequence.script else "")
            choice["message"] = {"role": "assistant", "reasoning": thought or None, "content": content}
        else:
            choice["text"] = answer
        if self._ask.return_token_ids:
            choice |= {"prompt_token_ids": self._ask.prompt.tolist(), "token_ids": tokens}
        body = self._head | {"choices": [choice], "system_fingerprint": self._fingerprint}
        if self._chat:
            body["object"] = "chat.completion"
        if self._usage:
            body["usage"] = _usage(self._ask, self._sequence, details=True)
        return encode(body)

    def _metrics(self, last_ns: int) -> dict[str, float]:
        """As vLLM with --enable-per-request-metrics, by the clock (not the emulated hardware's time)."""
        sequence, first_ns = self._sequence, self._first_ns
        metrics = {
            "time_to_first_token_ms": (first_ns - sequence.scheduled_ns) / 1e6,
            "generation_time_ms": (last_ns - first_ns) / 1e6,
            "queue_time_ms": (sequence.scheduled_ns - sequence.queued_ns) / 1e6,
        }
        if sequence.output > 1:
            metrics["mean_itl_ms"] = metrics["generation_time_ms"] / (sequence.output - 1)
        return metrics

    def _finish(self) -> tuple[bytes, bytes]:
        """finish_reason and stop_reason as JSON; a reply that a fault breaks off never gets to its reason."""
        finish = self._sequence.finish
        return encode(finish if finish in ("length", "stop") else None), encode(self._sequence.stop_reason)

    def _running_usage(self, output: int) -> bytes:
        if not self._each_usage:
            return b"]}\n\n"
        return b'%b%d,"completion_tokens":%d}}\n\n' % (self._each_usage, len(self._ask.prompt) + output, output)


class AnthropicReply:
    """A reply of /v1/messages. As in the Anthropic API ``input_tokens`` leaves out what came from the cache, which
    ``cache_read_input_tokens`` counts."""

    def __init__(self, ask: Ask, sequence: Sequence, reply_id: str, usage: bool) -> None:
        self._ask = ask
        self._sequence = sequence
        self._text = _Text(sequence)
        self._usage = usage
        self._head = {"id": f"msg_{reply_id}", "type": "message", "role": "assistant", "model": ask.model}
        self._block = -1
        self._kind = ""

    def chunk(self, tokens: Tokens[int]) -> bytes:
        """See Reply. The first one opens the message."""
        thought, answer = self._text.split(tokens, self._sequence.output - len(tokens))
        parts = []
        if self._block < 0:
            start = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None} | self._counts(0)
            parts.append(_event({"type": "message_start", "message": start}))
            parts.append(self._open("thinking" if self._ask.thinking else "text"))
            parts.append(_event({"type": "ping"}))
        if thought:
            parts.append(self._delta({"type": "thinking_delta", "thinking": thought}))
        if self._kind == "thinking" and self._sequence.output > self._sequence.answer_from:
            parts.append(_event({"type": "content_block_stop", "index": self._block}))
            parts.append(self._open("text"))
        if answer:
            parts.append(self._delta({"type": "text_delta", "text": answer}))
        return b"".join(parts)

    def close(self) -> bytes:
        """See Reply."""
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._sequence.stop_reason}
        return b"".join(
            [
                _event({"type": "content_block_stop", "index": self._block}),
                _event({"type": "message_delta", "delta": delta} | self._counts(self._sequence.output)),
                _event({"type": "message_stop"}),
            ]
        )

    def fail(self, message: str) -> bytes:
        """See Reply."""
        return b"event: error\ndata: " + error_body(500, message, "", None, True) + b"\n\n"

    def whole(self, tokens: Tokens[int]) -> bytes:
        """See Reply."""
        thought, answer = self._text.split(tokens, 0)
        content = [{"type": "thinking", "thinking": thought}] if thought else []
        content.append({"type": "text", "text": answer})
        end = {"stop_reason": self._stop_reason(), "stop_sequence": self._sequence.stop_reason}
        return encode({**self._head, "content": content, **end} | self._counts(self._sequence.output))

    def _open(self, kind: str) -> bytes:
        self._block += 1
        self._kind = kind
        return _event({"type": "content_block_start", "index": self._block, "content_block": {"type": kind, kind: ""}})

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._block, "delta": delta})

    def _counts(self, output: int) -> dict[str, Any]:
        if not self._usage:
            return {}
        cached = self._sequence.cached or 0
        return {
            "usage": {
                "input_tokens": len(self._ask.prompt) - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": output,
            }
        }

    def _stop_reason(self) -> str | None:
        sequence = self._sequence
        if sequence.finish == "stop":
            return "stop_sequence" if sequence.stop_reason is not None else "end_turn"
        return "max_tokens" if sequence.finish == "length" else None


def _event(event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))


def begin(ask: Ask, sequence: Sequence, reply_id: str, created: int, fingerprint: str, usage: bool) -> Reply:
    """Return the reply of the API that was asked."""
    if ask.api == "messages":
        return AnthropicReply(ask, sequence, reply_id, usage)
    return OpenAIReply(ask, sequence, reply_id, created, fingerprint, usage)
