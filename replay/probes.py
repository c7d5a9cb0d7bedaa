"""Probes of one backend: a handful of requests that show whether it can be measured, and how.

Asked: is the model there; does it stream; does it keep the asked length, and told how; which token
counts does it give; what does its chat template add; are prompts as long as planned. replay/preflight.py makes both
backends' answers fit one rendering, since both get the same bytes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from replay.outcomes import Outcome, outcome
from replay.progress import Finding
from replay.wire import Wire
from workloads.content import stable_bytes
from workloads.errors import UserError
from workloads.rendering import PATHS, LengthControl, Prompt, Rendering, Template, token_table

_TOLERANCE = 0.005
"""Share by which the server's prompt_tokens may differ from the plan."""

_LENGTHS = (100, 1_000, 8_000)
_BLOCK = 64
_OUTPUT = 16

_CONTROLS: list[tuple[LengthControl, bool]] = [
    ("ignore_eos", True),
    ("ignore_eos", False),
    ("min_tokens", True),
    ("min_tokens", False),
    ("none", True),
    ("none", False),
]
"""Ways to ask for a length, and whether to ask for continuous usage; from most to least exact."""


class ServerFacts(msgspec.Struct, kw_only=True):
    """What one backend showed of itself."""

    control: int
    """Index into the ways to ask for a length."""
    template: Template
    max_model_len: int | None
    emulated: bool
    """It says itself that it is an emulator, also when it is named by a URL."""
    time_scale: float
    """Of an emulator; 1 for a real server."""
    server: dict[str, str | int | float | bool | None]
    """version, fingerprint, max_model_len: for the manifest."""
    findings: list[Finding]


def with_control(rendering: Rendering, control: int) -> Rendering:
    """The rendering that asks for a length in that way."""
    how, usage = _CONTROLS[control]
    return msgspec.structs.replace(rendering, length_control=how, server_usage=usage)


async def probe(wire: Wire, rendering: Rendering, *, control: int = 0) -> ServerFacts:
    """Ask one backend. ``control``: the first way to ask for a length that is still open.

    Raises UserError for what makes a measurement impossible, in words that say what to change.
    """
    findings: list[Finding] = []
    max_model_len = await _model(wire, rendering.model, findings)
    said = await version(wire)
    control, first = await _length_control(wire, rendering, control, findings)
    rendering = with_control(rendering, control)
    if first.input_tokens is None and rendering.api != "completions":
        raise UserError(
            f"{wire.url}: replies carry no usage, so the length of a text prompt cannot be checked: use api: "
            "completions (token ids are exact), or a server that answers stream_options.include_usage"
        )
    if first.input_tokens is None:
        findings.append(
            Finding(
                "warning",
                f"{wire.url}: replies carry no usage: token counts will be the client's estimate and prompt "
                "lengths cannot be checked",
                "use a server that answers stream_options.include_usage",
            )
        )
    if first.cached_tokens is None:
        findings.append(
            Finding(
                "note",
                f"{wire.url}: cached tokens are not reported",
                "start vLLM with --enable-prompt-tokens-details to compare achieved with ideal prefix reuse",
            )
        )
    template = Template()
    if rendering.api != "completions":
        template = await _template(wire, rendering)
        findings.append(
            Finding(
                "ok",
                f"{wire.url}: chat template adds {template.first} tokens to a first message ({template.with_system} "
                f"with a system message), {template.pair} to each further pair",
            )
        )
    rendering = msgspec.structs.replace(rendering, template=template)
    if first.input_tokens is not None:
        await _lengths(wire, rendering, max_model_len, findings)
    server: dict[str, str | int | float | bool | None] = {
        "version": said.version,
        "fingerprint": first.server_fingerprint,
        "max_model_len": max_model_len,
    }
    return ServerFacts(
        control=control,
        template=template,
        max_model_len=max_model_len,
        emulated=said.emulated,
        time_scale=said.time_scale,
        server=server,
        findings=findings,
    )


# -- single questions


async def _model(wire: Wire, model: str, findings: list[Finding]) -> int | None:
    """Check that the model is served; returns its max_model_len if the server tells."""
    reply = await wire.exchange("/v1/models", b"", {}, method="GET")
    if reply.failure is not None:
        raise UserError(f"{wire.url}: {reply.failure} ({reply.detail}); is the server up, and the URL right?")
    if reply.http_status != 200:
        findings.append(
            Finding(
                "note",
                f"{wire.url}: /v1/models answers HTTP {reply.http_status}; the model's name "
                "and context length are not checked",
            )
        )
        return None
    try:
        entries = msgspec.json.decode(reply.body, type=_Models).data
    except msgspec.MsgspecError as error:
        raise UserError(f"{wire.url}: /v1/models is not a list of models ({error}); is the URL right?") from None
    names = [str(entry.get("id")) for entry in entries]
    if model not in names:
        shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        raise UserError(f"{wire.url}: model {model!r} is not served; it serves {shown or 'nothing'}: change model")
    findings.append(Finding("ok", f"{wire.url}: serves {model}"))
    limit = entries[names.index(model)].get("max_model_len")
    if isinstance(limit, int) and limit > 0:
        return limit
    if limit is not None:
        findings.append(Finding("warning", f"{wire.url}: max_model_len {limit!r} makes no sense and is not used"))
    return None


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


class Version(msgspec.Struct):
    """What /version says."""

    version: str | None = None
    emulated: bool = False
    time_scale: float = 1.0


async def version(wire: Wire) -> Version:
    """What /version says; nothing, if the server has no such page."""
    reply = await wire.exchange("/version", b"", {}, method="GET")
    if reply.failure is not None or reply.http_status != 200:
        return Version()
    try:
        said = msgspec.json.decode(reply.body, type=Version)
    except msgspec.MsgspecError:
        return Version()
    if not said.emulated:
        said.time_scale = 1.0
    if not 0 < said.time_scale <= 1000:
        raise UserError(f"{wire.url}: says that it emulates {said.time_scale} times as fast, which cannot be")
    return said


async def _length_control(
    wire: Wire, rendering: Rendering, control: int, findings: list[Finding]
) -> tuple[int, Outcome]:
    """The most exact way to ask for a length that this server takes, and its reply to it."""
    last: Outcome | None = None
    for index in range(control, len(_CONTROLS)):
        trial = with_control(rendering, index)
        how = trial.length_control
        last = await _ask(wire, trial, "shape", [64])
        if not last.streamed:
            raise UserError(
                f"{wire.url}: answers in one piece although streaming was asked for: a decode rate cannot "
                "be measured; check for a proxy that buffers, or another endpoint"
            )
        if last.status == "ok":
            if how == "none":
                findings.append(
                    Finding(
                        "warning",
                        f"{wire.url}: takes neither ignore_eos nor min_tokens: answers may be shorter than recorded",
                    )
                )
            else:
                findings.append(Finding("ok", f"{wire.url}: keeps the asked length with {how}"))
            if len(last.chunks) < 2:
                findings.append(
                    Finding(
                        "warning",
                        f"{wire.url}: {_OUTPUT} tokens came in {len(last.chunks)} chunk: decode rates of short "
                        "answers cannot be measured",
                        "lower the server's --stream-interval",
                    )
                )
            return index, last
        if last.status != "short" and last.error not in ("http 400", "http 422"):
            break
    assert last is not None
    hint = ": give tokenizer, or token_ids: [low, high] that this model has" if "vocab" in str(last.detail) else ""
    raise UserError(f"{wire.url}: a probe of 64 tokens failed: {last.error} ({last.detail}){hint}")


async def _template(wire: Wire, rendering: Rendering) -> Template:
    """Tokens that the chat template adds, from three probes of known content."""

    async def added(inputs: list[int], system: int = 0) -> int:
        reply = await _ask(wire, rendering, f"template {inputs} {system}", inputs, system)
        if reply.status != "ok" or reply.input_tokens is None:
            raise UserError(f"{wire.url}: a probe of {inputs[-1]} tokens failed: {reply.error} ({reply.detail})")
        return reply.input_tokens - inputs[-1]

    first = await added([64])
    with_system = await added([96], system=32)
    pair = await added([64, 128]) - first
    if min(first, with_system, pair) < 0 or max(first, with_system, pair) > 2_000:
        raise UserError(
            f"{wire.url}: the chat template seems to add {first}, {with_system} and {pair} tokens, which cannot be: "
            "does tokenizer belong to the served model?"
        )
    return Template(first=first, with_system=with_system, pair=pair)


async def _lengths(wire: Wire, rendering: Rendering, max_model_len: int | None, findings: list[Finding]) -> None:
    """Refuse to go on when prompts are not as long as planned."""
    found = []
    for length in _LENGTHS:
        if max_model_len is not None and length + _OUTPUT > max_model_len:
            continue
        reply = await _ask(wire, rendering, f"length {length}", [length])
        if reply.status != "ok" or reply.input_tokens is None:
            raise UserError(f"{wire.url}: a probe of {length} tokens failed: {reply.error} ({reply.detail})")
        if abs(reply.input_tokens - length) > _TOLERANCE * length:
            raise UserError(
                f"{wire.url}: a prompt planned as {length} tokens has {reply.input_tokens} by the server's count: "
                "give tokenizer of the served model, or use api: completions (token ids are exact)"
            )
        found.append(f"{length}: {reply.input_tokens}")
    findings.append(Finding("ok", f"{wire.url}: prompt lengths as planned ({', '.join(found)})"))


async def _ask(wire: Wire, rendering: Rendering, purpose: str, inputs: list[int], system: int = 0) -> Outcome:
    """Send the last prompt of a conversation that grows through ``inputs`` tokens, each reply 32 tokens long, after
    a system message of ``system`` tokens. Its content is its own."""
    table = token_table(rendering)
    salt = [byte % len(table) for byte in stable_bytes("check", purpose)[:8]]
    prompt = Prompt(rendering, table, f"check/{purpose}", _BLOCK, salt, system)
    blocks = 0
    for tokens in inputs:
        needed = -(-tokens // _BLOCK)
        prompt.advance(blocks, list(range(blocks, needed)), tokens, 32)
        blocks = needed
        for _ in prompt.render():
            pass
    body, _ = prompt.body(_OUTPUT)
    exchange = await wire.exchange(PATHS[rendering.api], body, {"X-Request-ID": f"check.{purpose}".replace(" ", "")})
    return outcome(
        exchange,
        api=rendering.api,
        asked_output=_OUTPUT,
        exact_length=rendering.length_control != "none",
        limits=wire.limits,
    )
