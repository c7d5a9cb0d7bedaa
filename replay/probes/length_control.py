"""Does it stream, does it take the experiment's request fields, and does it keep the asked length, told how?"""

from __future__ import annotations

import msgspec

from replay.outcomes import Outcome
from replay.probes.asking import ask
from replay.progress import Finding
from replay.wire import Wire
from workloads.errors import UserError
from workloads.rendering import LengthControl, Rendering

_CONTROLS: list[tuple[LengthControl, bool]] = [
    ("ignore_eos", True),
    ("ignore_eos", False),
    ("min_tokens", True),
    ("min_tokens", False),
    ("none", True),
    ("none", False),
]
"""Ways to ask for a length, and whether to ask for continuous usage; from most to least exact."""

_REFUSED = ("http 400", "http 422")


def with_control(rendering: Rendering, control: int) -> Rendering:
    """The rendering that asks for a length in that way."""
    how, usage = _CONTROLS[control]
    return msgspec.structs.replace(rendering, length_control=how, server_usage=usage)


async def find_length_control(wire: Wire, rendering: Rendering, control: int) -> tuple[int, Outcome, list[Finding]]:
    """The most exact way to ask for a length that this server takes, from ``control`` on, and its reply to it.

    Raises UserError if it does not stream, or refuses every way.
    """
    last: Outcome | None = None
    for index in range(control, len(_CONTROLS)):
        trial = with_control(rendering, index)
        how = trial.length_control
        last = await ask(wire, trial, "shape", [64])
        if not last.streamed:
            raise UserError(
                f"{wire.url}: answers in one piece although streaming was asked for: a decode rate cannot "
                "be measured; check for a proxy that buffers, or another endpoint"
            )
        if last.status == "ok" and how == "none":
            return index, last, [
                Finding(
                    "warning",
                    f"{wire.url}: takes neither ignore_eos nor min_tokens: answers may be shorter than recorded",
                    "use a server that takes ignore_eos (vLLM does)",
                    why="what is decoded, and the context of later turns, would depend on the answers",
                )
            ]  # fmt: skip
        if last.status == "ok":
            return index, last, [Finding("ok", f"{wire.url}: keeps the asked length with {how}")]
        if last.status != "short" and last.error not in _REFUSED:
            break
    assert last is not None
    if last.error in _REFUSED and (fields := await _refused_fields(wire, rendering)):
        raise UserError(
            f"{wire.url}: refuses sampling.{', sampling.'.join(fields)} ({last.detail}): change or remove it; every "
            "turn would carry it"
        )
    hint = ": give tokenizer, or token_ids: [low, high] that this model has" if "vocab" in str(last.detail) else ""
    raise UserError(f"{wire.url}: a probe of 64 tokens failed: {last.error} ({last.detail}){hint}")


async def _refused_fields(wire: Wire, rendering: Rendering) -> list[str]:
    """The experiment's request fields that are refused even alone, where a request without any is taken."""
    plain = msgspec.structs.replace(with_control(rendering, len(_CONTROLS) - 1), sampling={})
    if (await ask(wire, plain, "no fields", [64])).error in _REFUSED:
        return []
    refused = []
    for name, value in rendering.sampling.items():
        alone = msgspec.structs.replace(plain, sampling={name: value})
        if (await ask(wire, alone, "one field", [64])).error in _REFUSED:
            refused.append(name)
    return refused


def check_usage(wire: Wire, rendering: Rendering, reply: Outcome) -> list[Finding]:
    """Which token counts the reply to a probe carries. Raises UserError where prompts cannot be checked without."""
    if reply.input_tokens is None and rendering.api != "completions":
        raise UserError(
            f"{wire.url}: replies carry no usage, so the length of a text prompt cannot be checked: use api: "
            "completions (token ids are exact), or a server that answers stream_options.include_usage"
        )
    if reply.input_tokens is None:
        return [
            Finding(
                "warning",
                f"{wire.url}: replies carry no usage",
                "use a server that answers stream_options.include_usage",
                why="token counts will be the client's estimate and prompt lengths cannot be checked",
            )
        ]
    if reply.token_source in ("usage", "ids"):
        return [Finding("ok", f"{wire.url}: says with every chunk how many tokens it carries")]
    return [
        Finding(
            "note",
            f"{wire.url}: does not say how many tokens a chunk carries",
            "use a server that answers stream_options.continuous_usage_stats (vLLM's completions and chat do)",
            why=f"it is {reply.token_source or 'not known'}, which is exact only where each chunk is one token",
        )
    ]
