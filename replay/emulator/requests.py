"""What clients may ask for: the three request bodies, and the one ``Ask`` that they all come down to."""

from __future__ import annotations

from array import array
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.emulator import language
from replay.emulator.noise import MASK, mix, text_number

Api = Literal["completions", "chat", "messages", "generate"]

DEFAULT_MAX_TOKENS = 16  # of /v1/completions; other replies may fill the context
MAX_LOGPROBS = 20  # as vLLM's --max-logprobs
MAX_LOGPROB_IDS = 128
MAX_CHOICES = 128


class NamedTool(msgspec.Struct):
    name: str


class NamedChoice(msgspec.Struct):
    """The one tool that must be called."""

    function: NamedTool


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


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
    stop_ids: frozenset[int] = frozenset()
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    thinking: bool
    question: str = ""
    """Of a chat: its last message of a user."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    n: int = 1
    """Replies that are asked for."""
    logprobs: int | None = None
    """Most likely tokens whose logprobs are wanted at each position; None: no logprobs at all."""
    logprob_ids: tuple[int, ...] = ()
    """Tokens whose logprobs are wanted instead."""
    tokens_as_ids: bool = False
    """In logprobs tokens are written "token_id:7"."""
    trace: tuple[int, ...] = ()
    """The reply that is forced."""
    cache_salt: str = ""
    tools: bytes = b""
    """JSON, as it came."""
    tool_choice: ToolChoice = "none"
    as_text: bool = True
    """False: a reply of token ids alone."""


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
    stop_token_ids: list[int] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    top_p: float | None = None
    top_k: int | None = None
    logprob_token_ids: list[int] | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = None


class _CompletionBody(_Sampling, kw_only=True):
    prompt: str | list[int]
    logprobs: int | None = None


class _GenerateSampling(_Sampling, kw_only=True):
    logprobs: int | None = None
    trace_decode_token_ids: list[int] | None = None


class _GenerateBody(msgspec.Struct, kw_only=True):
    """Of /inference/v1/generate: how to sample is in a part of its own, how to answer is not."""

    token_ids: list[int]
    sampling_params: _GenerateSampling
    model: str = ""
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    output_mode: Literal["tokens", "text"] = "tokens"


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
    tool_choice: ToolChoice | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class _TokenizeBody(msgspec.Struct, kw_only=True):
    messages: list[_Message]
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
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    thinking: _Thinking | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    seed: int | None = None


_completion_decoder = msgspec.json.Decoder(_CompletionBody)
_chat_decoder = msgspec.json.Decoder(_ChatBody)
_generate_decoder = msgspec.json.Decoder(_GenerateBody)
_messages_decoder = msgspec.json.Decoder(_MessagesBody)
_tokenize_decoder = msgspec.json.Decoder(_TokenizeBody)


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


def _thinks(arguments: _TemplateArguments | None) -> bool:
    return bool(arguments and arguments.thinking)


def _sampled(body: _Sampling, api: Api, prompt: NDArray[np.int32], max_tokens: int | None, *, thinking: bool) -> Ask:
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
        stop_ids=frozenset(body.stop_token_ids or ()),
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        thinking=thinking,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),  # vLLM takes -1 for all, too
        n=1 if body.n is None else body.n,
        logprob_ids=tuple(body.logprob_token_ids or ()),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        cache_salt=body.cache_salt or "",
    )


def _ids(tokens: list[int], param: str) -> NDArray[np.int32]:
    try:
        return np.frombuffer(array("i", tokens), np.int32)
    except OverflowError:
        raise Refused(400, f"Token id {max(tokens, key=abs)} is out of vocabulary", param=param) from None


def completion(data: bytes) -> Ask:
    """Read a /v1/completions body: text, or token ids (100k of them in a few milliseconds)."""
    body: _CompletionBody = _decoded(_completion_decoder, data)
    ids = language.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    ask = _sampled(body, "completions", _ids(ids, "prompt"), limit, thinking=False)
    if ask.logprob_ids and body.logprobs is None:
        raise Refused(400, "when using `logprob_token_ids`, `logprobs` must be set.", param="logprob_token_ids")
    ask.logprobs = body.logprobs
    return ask


def generate(data: bytes) -> Ask:
    """Read an /inference/v1/generate body: token ids in, token ids out."""
    body: _GenerateBody = _decoded(_generate_decoder, data)
    asked = body.sampling_params
    asked.model, asked.stream, asked.stream_options = body.model, body.stream, body.stream_options
    asked.return_token_ids, asked.cache_salt = body.return_token_ids, body.cache_salt
    ask = _sampled(asked, "generate", _ids(body.token_ids, "token_ids"), asked.max_tokens, thinking=False)
    ask.as_text = body.output_mode == "text"
    ask.logprobs = asked.logprobs
    if asked.trace_decode_token_ids is not None:
        if not asked.trace_decode_token_ids:
            raise Refused(400, "trace_decode_token_ids must be a non-empty list.")
        if ask.n != 1:
            raise Refused(400, "trace_decode_token_ids requires n=1.")
        # As in vLLM a replay ends with its trace, whatever could end a reply before.
        ask.trace = tuple(asked.trace_decode_token_ids)
        ask.max_tokens = min(len(ask.trace), ask.max_tokens if ask.max_tokens is not None else len(ask.trace))
        ask.min_tokens, ask.ignore_eos, ask.stops, ask.stop_ids = 0, True, (), frozenset()
    return ask


def chat(data: bytes) -> Ask:
    """Read a /v1/chat/completions body. ``chat_template_kwargs: {"thinking": true}`` asks for reasoning."""
    body: _ChatBody = _decoded(_chat_decoder, data)
    thinking = _thinks(body.chat_template_kwargs)
    prompt = _chat_tokens(body.messages, "", body.tools, thinking)
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    ask = _sampled(body, "chat", prompt, limit, thinking=thinking)
    ask.tools = bytes(body.tools)
    ask.tool_choice = body.tool_choice or ("auto" if ask.tools else "none")
    if body.logprobs:
        ask.logprobs = body.top_logprobs or 0
    elif body.top_logprobs or ask.logprob_ids:
        field = "top_logprobs" if body.top_logprobs else "logprob_token_ids"
        raise Refused(400, f"when using `{field}`, `logprobs` must be set to true.", param=field)
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
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
    )


def tokenized(data: bytes) -> NDArray[np.int32]:
    """The prompt of a /tokenize body, which must be a chat."""
    body: _TokenizeBody = _decoded(_tokenize_decoder, data)
    return _chat_tokens(body.messages, "", body.tools, _thinks(body.chat_template_kwargs))


READERS = {"completions": completion, "chat": chat, "messages": messages, "generate": generate}


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
    if not 0 < ask.top_p <= 1:
        raise Refused(400, f"top_p must be in (0, 1], got {ask.top_p}.", param="top_p")
    if not 1 <= ask.n <= MAX_CHOICES:
        raise Refused(400, f"n must lie in 1..{MAX_CHOICES}, got {ask.n}.", param="n")
    _check_logprobs(ask)
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


def _check_logprobs(ask: Ask) -> None:
    wanted, ids = ask.logprobs, ask.logprob_ids
    if ask.api == "generate" and ids and wanted not in (None, len(ids)):
        raise Refused(
            400,
            "When both logprobs and logprob_token_ids are set, logprobs must equal len(logprob_token_ids). "
            f"Got logprobs={wanted}, len(logprob_token_ids)={len(ids)}.",
            param="logprob_token_ids",
        )
    if wanted is not None and not 0 <= wanted <= MAX_LOGPROBS and (not ids or ask.api == "generate"):
        raise Refused(
            400,
            f"Requested sample logprobs of {wanted}, which is greater than max allowed: {MAX_LOGPROBS}"
            if wanted > 0
            else f"logprobs must lie in 0..{MAX_LOGPROBS}; the emulator does not give the whole vocabulary",
            param="logprobs",
        )
    if len(ids) > MAX_LOGPROB_IDS:
        words = (
            f"Requested logprob_token_ids of length {len(ids)}, which is greater than max allowed: {MAX_LOGPROB_IDS}"
        )
        raise Refused(400, words, param="logprob_token_ids")
    for name, tokens in (("logprob_token_ids", ids), ("trace_decode_token_ids", ask.trace)):
        if any(not 0 <= token < language.VOCAB_SIZE for token in tokens):
            size = language.VOCAB_SIZE
            raise Refused(400, f"{name} contain out-of-vocab token ids. Vocabulary size: {size}", param=name)


def own_seed(ask: Ask, request_id: str, index: int) -> int:
    """The seed of one of a request's replies, 64 bits: its own (or its id, where it gives none) plus the index."""
    return ((ask.seed if ask.seed is not None else text_number(request_id)) + index) & MASK


def sampling_seed(ask: Ask, server_seed: int, request_id: str, index: int = 0) -> int:
    """Return what the reply's words depend on: the server's seed, and above temperature 0 the reply's own."""
    if ask.temperature == 0:
        return mix(server_seed, 0)
    return mix(server_seed, 1, own_seed(ask, request_id, index))
