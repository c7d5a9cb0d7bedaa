"""How replies are put on the wire: four APIs, each as a stream of events or as one body.

A reply's chunks are pieced together from bytes made beforehand.
"""

from __future__ import annotations

import time
from codecs import getincrementaldecoder
from collections.abc import Sequence as Tokens
from itertools import accumulate
from typing import Any, Protocol

import msgspec

from replay.emulator import language
from replay.emulator.requests import Ask
from replay.emulator.scheduler import Sequence
from replay.emulator.speech import Score
from replay.emulator.tools import Call

PIECES = [
    *[b""] * language.FIRST_BYTE,
    *(bytes([byte]) for byte in range(256)),
    *(text.encode() for text in language.TOKENS[language.FIRST_CHARACTER :]),
]
"""What each token shows, as UTF-8: special tokens nothing."""

DONE = b"data: [DONE]\n\n"
LOWEST = -9999.0
"""What stands for a logprob that is not a number, as in vLLM."""

encode = msgspec.json.encode


class Reply(Protocol):
    """The reply to one request under way: to n choices, where it asks for n. ``usage`` False leaves all token counts
    out."""

    def chunk(self, tokens: Tokens[int], index: int = 0) -> bytes:
        """Events for the tokens that one step yields for a choice; the last one's also carry the finish reason."""

    def close(self) -> bytes:
        """Events that end a stream."""

    def fail(self, message: str) -> bytes:
        """Events of a stream that breaks off in an error."""

    def whole(self, outputs: Tokens[Tokens[int]]) -> bytes:
        """The body of a reply without streaming, of the tokens of each choice."""


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


def _usage(ask: Ask, sequences: Tokens[Sequence]) -> dict[str, Any]:
    output = sum(sequence.output for sequence in sequences)
    usage: dict[str, Any] = {
        "prompt_tokens": len(ask.prompt),
        "total_tokens": len(ask.prompt) + output,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": sequences[0].cached},
    }
    thought = sum(min(sequence.answer_from, sequence.output) for sequence in sequences)
    if thought:
        usage["completion_tokens_details"] = {"reasoning_tokens": thought}
    return usage


def _shown(token: int, as_id: bool) -> str:
    """A token by itself, in logprobs."""
    if as_id:
        return f"token_id:{token}"
    return language.TOKENS[token] if token < language.FIRST_BYTE else PIECES[token].decode("utf-8", "replace")


def _ranked(score: Score) -> list[tuple[int, float, int | None]]:
    """(token, logprob, rank) as vLLM orders them: the sampled one first, then the others but for that one."""
    found = {score.token: (score.logprob, score.rank or None)}
    others = zip(score.others.tolist(), score.other_logprobs.tolist(), strict=True)
    found |= {token: (logprob, rank) for rank, (token, logprob) in enumerate(others, 1)}
    return [
        (token, logprob if logprob == logprob else LOWEST, rank if logprob == logprob else None)
        for token, (logprob, rank) in found.items()
    ]


def completion_logprobs(scores: Tokens[Score], ask: Ask, offset: int) -> dict[str, Any]:
    """``logprobs`` of /v1/completions; ``offset``: characters of the choice before."""
    tokens = [_shown(score.token, ask.tokens_as_ids) for score in scores]
    ranked = [_ranked(score) for score in scores]
    count = None if ask.logprob_ids else (ask.logprobs or 0) + 1
    return {
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)),
        "token_logprobs": [each[0][1] for each in ranked],
        "tokens": tokens,
        "top_logprobs": [
            {_shown(token, ask.tokens_as_ids): logprob for token, logprob, _ in each[:count]} for each in ranked
        ],
    }


def chat_logprobs(scores: Tokens[Score], ask: Ask) -> dict[str, Any]:
    """``logprobs`` of a chat's choice."""
    count = None if ask.logprob_ids else ask.logprobs
    if ask.api == "generate":
        count = max(ask.logprobs or 0, 1)
    content = []
    for score in scores:
        each = [
            {"token": (shown := _shown(token, ask.tokens_as_ids)), "logprob": logprob, "bytes": list(shown.encode())}
            for token, logprob, _ in _ranked(score)
        ]
        content.append({**each[0], "bytes": list(_shown(score.token, False).encode()), "top_logprobs": each[:count]})
    return {"content": content}


def id_logprobs(scores: Tokens[Score], ask: Ask) -> dict[str, Any]:
    """``logprobs`` of /inference/v1/generate."""
    content = []
    for score in scores:
        each = [{"token_id": token, "logprob": logprob, "rank": rank} for token, logprob, rank in _ranked(score)]
        content.append({**each[0], "top_logprobs": each[: max(ask.logprobs or 0, 1)]})
    return {"content": content}


class _Choice:
    """One of a request's replies."""

    __slots__ = ("call_begun", "first", "first_ns", "index", "offset", "part", "sequence", "start", "text")

    def __init__(self, sequence: Sequence, index: int, opening: bytes = b"") -> None:
        self.sequence = sequence
        self.index = index
        self.text = _Text(sequence)
        self.part = b',"choices":[{"index":%d,' % index
        self.start = opening + self.part  # of its events, whose beginning is ``opening``
        self.first = True
        self.first_ns = 0
        self.offset = 0  # characters of its tokens, where it has logprobs
        self.call_begun = False

    def take_scores(self) -> list[Score]:
        """Of its tokens since the last time; empty where none were asked for, or the reply is from a script."""
        voice = self.sequence.voice
        if voice is None:
            return []
        scores, voice.scores = voice.scores, []
        return scores


def _finish(choice: _Choice) -> tuple[str | None, str | None]:
    """finish_reason and stop_reason; a reply that a fault breaks off never gets to its reason."""
    finish = choice.sequence.finish
    return finish if finish in ("length", "stop") else None, choice.sequence.stop_reason


class OpenAIReply:
    """A reply of /v1/completions or /v1/chat/completions."""

    def __init__(
        self,
        ask: Ask,
        sequences: Tokens[Sequence],
        reply_id: str,
        created: int,
        fingerprint: str,
        usage: bool,
        call: Call | None,
    ) -> None:
        self._ask = ask
        self._sequences = sequences
        self._chat = ask.api == "chat"
        self._call = call
        self._fingerprint = fingerprint
        self._usage = usage
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{reply_id}",
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": created,
            "model": ask.model,
        }
        self._opening = b"data: " + encode(self._head)[:-1]
        self._choices = [_Choice(sequence, index, self._opening) for index, sequence in enumerate(sequences)]
        self._each_usage = (
            b'],"usage":{"prompt_tokens":%d,"total_tokens":' % len(ask.prompt)
            if usage and ask.continuous_usage
            else b""
        )

    def chunk(self, tokens: Tokens[int], index: int = 0) -> bytes:
        """See Reply. A chat stream opens with a chunk that has a role and no token."""
        choice, ask = self._choices[index], self._ask
        sequence = choice.sequence
        output = sequence.output
        thought, answer = choice.text.split(tokens, output - len(tokens))
        parts = []
        prompt_ids = b""
        if choice.first:
            choice.first = False
            choice.first_ns = time.monotonic_ns()
            if ask.return_token_ids:
                prompt_ids = b',"prompt_token_ids":' + encode(ask.prompt.tolist())
            if self._chat:
                parts += [  # as vLLM puts them: of a chat beside the choices, of a completion into its choice
                    self._opening,
                    prompt_ids,
                    choice.part,
                    b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}',
                    self._running_usage(0),
                ]
                prompt_ids = b""
        parts.append(choice.start)
        if not self._chat:
            parts.append(b'"text":%b' % encode(answer))
        elif self._call is not None:
            parts.append(b'"delta":%b' % encode({"tool_calls": [self._call_part(choice, answer)]}))
        elif not thought:
            parts.append(b'"delta":{"content":%b}' % encode(answer))
        elif not answer:
            parts.append(b'"delta":{"reasoning":%b}' % encode(thought))
        else:
            parts.append(b'"delta":{"reasoning":%b,"content":%b}' % (encode(thought), encode(answer)))
        if sequence.finish is None and ask.logprobs is None:
            parts.append(b',"logprobs":null,"finish_reason":null,"stop_reason":null')
        else:
            told = (self._logprobs(choice), *self._finish(choice))
            parts.append(b',"logprobs":%b,"finish_reason":%b,"stop_reason":%b' % tuple(map(encode, told)))
        parts.append(prompt_ids)
        if ask.return_token_ids:
            parts.append(b',"token_ids":' + encode(tokens))
        parts += [b"}", self._running_usage(output)]
        return b"".join(parts)

    def close(self) -> bytes:
        """See Reply."""
        if not (self._usage and self._ask.include_usage):
            return DONE
        usage = _usage(self._ask, self._sequences)
        last = self._head | {"choices": [], "usage": usage, "system_fingerprint": self._fingerprint}
        if len(self._choices) == 1:
            last["metrics"] = self._metrics(self._choices[0], time.monotonic_ns())
        return b"data: " + encode(last) + b"\n\n" + DONE

    def fail(self, message: str) -> bytes:
        """See Reply."""
        return b"data: " + error_body(500, message, "InternalServerError", None, False) + b"\n\n" + DONE

    def whole(self, outputs: Tokens[Tokens[int]]) -> bytes:
        """See Reply."""
        choices = [self._whole(choice, tokens) for choice, tokens in zip(self._choices, outputs, strict=True)]
        body = self._head | {"choices": choices, "system_fingerprint": self._fingerprint}
        if self._chat:
            body["object"] = "chat.completion"
            if self._ask.return_token_ids:
                body["prompt_token_ids"] = self._ask.prompt.tolist()
        if self._usage:
            body["usage"] = _usage(self._ask, self._sequences)
        return encode(body)

    def _whole(self, choice: _Choice, tokens: Tokens[int]) -> dict[str, Any]:
        thought, answer = choice.text.split(tokens, 0)
        finish, stop = self._finish(choice)
        told: dict[str, Any] = {
            "index": choice.index,
            "logprobs": self._logprobs(choice),
            "finish_reason": finish,
            "stop_reason": stop,
        }
        if not self._chat:
            told["text"] = answer
        elif self._call is not None:
            calls = [self._call_part(choice, answer)]
            told["message"] = {"role": "assistant", "reasoning": None, "content": None, "tool_calls": calls}
        else:
            content = answer or (None if choice.sequence.script else "")
            told["message"] = {"role": "assistant", "reasoning": thought or None, "content": content}
        if self._ask.return_token_ids:
            told["token_ids"] = tokens
            if not self._chat:
                told["prompt_token_ids"] = self._ask.prompt.tolist()
        return told

    def _logprobs(self, choice: _Choice) -> dict[str, Any] | None:
        scores = choice.take_scores()
        if not scores:
            return None
        if self._chat:
            return chat_logprobs(scores, self._ask)
        told = completion_logprobs(scores, self._ask, choice.offset)
        choice.offset = told["text_offset"][-1] + len(told["tokens"][-1])
        return told

    def _call_part(self, choice: _Choice, arguments: str) -> dict[str, Any]:
        """What a stream's chunk, or a whole reply, says of its tool call: the first time, also which one it is."""
        assert self._call is not None
        if self._ask.stream and choice.call_begun:
            return {"index": 0, "function": {"arguments": arguments}}
        choice.call_begun = True
        part = {"id": f"chatcmpl-tool-{self._head['id'].partition('-')[2]}-{choice.index}", "type": "function"}
        at = {"index": 0} if self._ask.stream else {}
        return part | at | {"function": {"name": self._call.name, "arguments": arguments}}

    def _finish(self, choice: _Choice) -> tuple[str | None, str | None]:
        """As ``_finish``; a tool call is a reason of its own, except where the request names the tool."""
        finish, stop = _finish(choice)
        called = self._call is not None and isinstance(self._ask.tool_choice, str)
        return "tool_calls" if called and finish == "stop" else finish, stop

    def _metrics(self, choice: _Choice, last_ns: int) -> dict[str, float]:
        """As vLLM with --enable-per-request-metrics, by the clock (not the emulated hardware's time)."""
        sequence, first_ns = choice.sequence, choice.first_ns
        metrics = {
            "time_to_first_token_ms": (first_ns - sequence.scheduled_ns) / 1e6,
            "generation_time_ms": (last_ns - first_ns) / 1e6,
            "queue_time_ms": (sequence.scheduled_ns - sequence.queued_ns) / 1e6,
        }
        if sequence.output > 1:
            metrics["mean_itl_ms"] = metrics["generation_time_ms"] / (sequence.output - 1)
        return metrics

    def _running_usage(self, output: int) -> bytes:
        if not self._each_usage:
            return b"]}\n\n"
        return b'%b%d,"completion_tokens":%d}}\n\n' % (self._each_usage, len(self._ask.prompt) + output, output)


class GenerateReply:
    """A reply of /inference/v1/generate: token ids, and text only where it is asked for."""

    def __init__(self, ask: Ask, sequences: Tokens[Sequence], reply_id: str, created: int, usage: bool) -> None:
        self._ask = ask
        self._sequences = sequences
        self._choices = [_Choice(sequence, index) for index, sequence in enumerate(sequences)]
        self._id = f"generate-tokens-{reply_id}"
        self._created = created
        self._usage = usage
        self._prompt_ids = ask.prompt.tolist() if ask.return_token_ids else None

    def chunk(self, tokens: Tokens[int], index: int = 0) -> bytes:
        """See Reply."""
        choice = self._choices[index]
        text = choice.text.split(tokens, choice.sequence.output - len(tokens))[1]
        usage = None
        if self._usage and self._ask.continuous_usage:
            usage = _usage(self._ask, [choice.sequence])
            del usage["prompt_tokens_details"]
        event = self._head() | {"choices": [self._choice(choice, tokens, text)], "usage": usage}
        if self._prompt_ids is not None:
            event["prompt_token_ids"], self._prompt_ids = self._prompt_ids, None
        return b"data: " + encode(event) + b"\n\n"

    def close(self) -> bytes:
        """See Reply."""
        if not (self._usage and self._ask.include_usage):
            return DONE
        last = self._head() | {"choices": [], "usage": _usage(self._ask, self._sequences)}
        return b"data: " + encode(last) + b"\n\n" + DONE

    def fail(self, message: str) -> bytes:
        """See Reply."""
        return b"data: " + error_body(500, message, "InternalServerError", None, False) + b"\n\n" + DONE

    def whole(self, outputs: Tokens[Tokens[int]]) -> bytes:
        """See Reply."""
        choices = [
            self._choice(choice, tokens, choice.text.split(tokens, 0)[1])
            for choice, tokens in zip(self._choices, outputs, strict=True)
        ]
        about = {"created": self._created, "model": self._ask.model}
        usage = _usage(self._ask, self._sequences) if self._usage else None
        nothing = dict.fromkeys(("prompt_logprobs", "metrics", "kv_transfer_params", "ec_transfer_params"))
        told = {"choices": choices, "usage": usage, "prompt_token_ids": self._prompt_ids}
        return encode(self._head() | about | told | nothing)

    def _head(self) -> dict[str, Any]:
        return {"request_id": self._id, "output_mode": "text" if self._ask.as_text else "tokens"}

    def _choice(self, choice: _Choice, tokens: Tokens[int], text: str) -> dict[str, Any]:
        finish, stop = _finish(choice)
        logprobs = None
        if self._ask.logprobs is not None:
            scores = choice.take_scores()
            logprobs = chat_logprobs(scores, self._ask) if self._ask.as_text else id_logprobs(scores, self._ask)
        told = {
            "index": choice.index,
            "logprobs": logprobs,
            "finish_reason": finish,
            "stop_reason": stop,
            "token_ids": tokens,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": None,
        }
        return told | ({"text": text} if self._ask.as_text else {})


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

    def chunk(self, tokens: Tokens[int], index: int = 0) -> bytes:
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

    def whole(self, outputs: Tokens[Tokens[int]]) -> bytes:
        """See Reply."""
        thought, answer = self._text.split(outputs[0], 0)
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


def begin(
    ask: Ask,
    sequences: Tokens[Sequence],
    reply_id: str,
    created: int,
    fingerprint: str,
    usage: bool,
    call: Call | None,
) -> Reply:
    """Return the reply of the API that was asked. ``call``: the tool call that its tokens are the arguments of."""
    if ask.api == "messages":
        return AnthropicReply(ask, sequences[0], reply_id, usage)
    if ask.api == "generate":
        return GenerateReply(ask, sequences, reply_id, created, usage)
    return OpenAIReply(ask, sequences, reply_id, created, fingerprint, usage, call)
