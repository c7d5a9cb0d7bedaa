"""What clients may ask for: the three request bodies, and the one ``Ask`` that they all come down to."""

from __future__ import annotations

from array import array
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.emulator import language
from replay.emulator.noise import mix, text_number

Api = Literal["completions", "chat", "messages"]

DEFAULT_MAX_TOKENS = 16  # of /v1/completions; chat replies may fill the context


class Refused(Exception):
    """The request is answered with an error, worded as vLLM words it."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param


class Ask(msgspec.Struct, kw_only=True):
    """One understood request. ``max_tokens`` None: as many as the context holds."""

    api: Api
    model: str
    prompt: NDArray[np.int32]
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    temperature: float
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    thinking: bool
    question: str = ""
    """Of a chat: its last message of a user."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Sampling(msgspec.Struct, kw_only=True):
    """Fields that the OpenAI-style endpoints share. Unknown ones are ignored, as vLLM does."""

    model: str = ""
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None


class _CompletionBody(_Sampling, kw_only=True):
    prompt: str | list[int]


class _Part(msgspec.Struct):
    """A piece of a message's content; what is no text (a tool's use, its result) counts by its JSON."""

    type: str = "text"
    text: str | None = None
    input: msgspec.Raw = msgspec.Raw()
    content: msgspec.Raw = msgspec.Raw()


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class _TemplateArguments(msgspec.Struct):
    thinking: bool | None = None


class _ChatBody(_Sampling, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: int | None = None
    tools: msgspec.Raw = msgspec.Raw()
    chat_template_kwargs: _TemplateArguments | None = None


class _Thinking(msgspec.Struct):
    type: str = "disabled"


class _MessagesBody(msgspec.Struct, kw_only=True):
    max_tokens: int
    messages: list[_Message]
    model: str = ""
    system: str | list[_Part] | None = None
    tools: msgspec.Raw = msgspec.Raw()
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    stream: bool | None = None
    thinking: _Thinking | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    seed: int | None = None


_completion_decoder = msgspec.json.Decoder(_CompletionBody)
_chat_decoder = msgspec.json.Decoder(_ChatBody)
_messages_decoder = msgspec.json.Decoder(_MessagesBody)


def _decoded(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise Refused(400, str(error)) from None


def _content(content: str | list[_Part] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(
        part.text if part.text is not None else (bytes(part.input) + bytes(part.content)).decode() for part in content
    )


def _chat_tokens(messages: list[_Message], system: str, tools: msgspec.Raw, thinking: bool) -> NDArray[np.int32]:
    if not messages:
        raise Refused(400, "messages is empty; give at least one message", param="messages")
    turns = [(message.role, _content(message.content) + bytes(message.tool_calls).decode()) for message in messages]
    before = system + bytes(tools).decode()
    if before:
        turns.insert(0, ("system", before))
    try:
        return np.frombuffer(language.chat_prompt(turns, thinking=thinking), np.int32)
    except ValueError as error:
        raise Refused(400, str(error), param="messages") from None


def _sampled(body: _Sampling, api: Api, prompt: NDArray[np.int32], max_tokens: int | None, *, thinking: bool) -> Ask:
    if body.n not in (None, 1):
        raise Refused(400, f"n is {body.n}; the emulator gives one reply a request", param="n")
    options = body.stream_options or _StreamOptions()
    if body.stream_options is not None and not body.stream:
        raise Refused(400, "Stream options can only be defined when `stream=True`.", param="stream_options")
    return Ask(
        api=api,
        model=body.model,
        prompt=prompt,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        temperature=1.0 if body.temperature is None else body.temperature,
        seed=body.seed,
        stops=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        thinking=thinking,
    )


def completion(data: bytes) -> Ask:
    """Read a /v1/completions body: text, or token ids (100k of them in a few milliseconds)."""
    body: _CompletionBody = _decoded(_completion_decoder, data)
    ids = language.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
    try:
        prompt = np.frombuffer(array("i", ids), np.int32)
    except OverflowError:
        worst = max(ids, key=abs)
        raise Refused(400, f"Token id {worst} is out of vocabulary", param="prompt") from None
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return _sampled(body, "completions", prompt, limit, thinking=False)


def chat(data: bytes) -> Ask:
    """Read a /v1/chat/completions body. ``chat_template_kwargs: {"thinking": true}`` asks for reasoning."""
    body: _ChatBody = _decoded(_chat_decoder, data)
    thinking = bool(body.chat_template_kwargs and body.chat_template_kwargs.thinking)
    prompt = _chat_tokens(body.messages, "", body.tools, thinking)
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    ask = _sampled(body, "chat", prompt, limit, thinking=thinking)
    ask.question = next((_content(turn.content) for turn in reversed(body.messages) if turn.role == "user"), "")
    return ask


def messages(data: bytes) -> Ask:
    """Read a /v1/messages body (the Anthropic API's). min_tokens, ignore_eos and seed are taken as well."""
    body: _MessagesBody = _decoded(_messages_decoder, data)
    thinking = body.thinking is not None and body.thinking.type == "enabled"
    return Ask(
        api="messages",
        model=body.model,
        prompt=_chat_tokens(body.messages, _content(body.system), body.tools, thinking),
        max_tokens=body.max_tokens,
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        temperature=1.0 if body.temperature is None else body.temperature,
        seed=body.seed,
        stops=tuple(body.stop_sequences or ()),
        stream=bool(body.stream),
        include_usage=True,
        continuous_usage=False,
        return_token_ids=False,
        thinking=thinking,
    )


READERS = {"completions": completion, "chat": chat, "messages": messages}


def check(ask: Ask, model: str, max_model_len: int) -> int:
    """Return the output limit of an understood request. Raises Refused for what vLLM would not serve."""
    if ask.model not in ("", model):
        raise Refused(404, f"The model `{ask.model}` does not exist.", "NotFoundError", "model")
    length = len(ask.prompt)
    if not length:
        raise Refused(400, "The prompt is empty; give at least one token", param="prompt")
    lowest, highest = int(ask.prompt.min()), int(ask.prompt.max())
    if lowest < 0 or highest >= language.VOCAB_SIZE:
        raise Refused(400, f"Token id {lowest if lowest < 0 else highest} is out of vocabulary", param="prompt")
    limit = ask.max_tokens if ask.max_tokens is not None else max(1, max_model_len - length)
    if limit < 1:
        raise Refused(400, f"max_tokens must be at least 1, got {limit}.", param="max_tokens")
    if ask.min_tokens < 0 or ask.min_tokens > limit:
        raise Refused(400, f"min_tokens must lie in 0..{limit} (max_tokens), got {ask.min_tokens}.", param="min_tokens")
    if ask.temperature < 0:
        raise Refused(400, f"temperature must be non-negative, got {ask.temperature}.", param="temperature")
    if "" in ask.stops:
        raise Refused(400, "stop cannot contain an empty string.", param="stop")
    if length + limit > max_model_len:
        raise Refused(
            400,
            f"You passed {length} input tokens and requested {limit} output tokens. However, the model's context "
            f"length is only {max_model_len} tokens, resulting in a maximum input length of "
            f"{max(0, max_model_len - limit)} tokens. Please reduce the length of the input prompt. "
            f"(parameter=input_tokens, value={length})",
            param="input_tokens",
        )
    return limit


def sampling_seed(ask: Ask, server_seed: int, request_id: str) -> int:
    """Return what the reply's words depend on: the server's seed, and above temperature 0 the request's own (or its id,
    where it gives none)."""
    if ask.temperature == 0:
        return mix(server_seed, 0)
    return mix(server_seed, 1, ask.seed if ask.seed is not None else text_number(request_id))
