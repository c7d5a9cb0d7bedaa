"""Named faults, off by default: the proof that gates and checks can fail.

``FAULTS`` says what each one does and takes. Which requests a rate picks depends on the request's id alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from replay.emulator.noise import text_number
from workloads.errors import UserError


class Fault(msgspec.Struct, frozen=True):
    """``argument`` names the number after the colon (empty: it takes none), which lies in ``low``..``high``."""

    summary: str
    argument: str = ""
    low: float = 0.0
    high: float = 1.0


FAULTS = {
    "error-in-stream": Fault("this share of streams ends half-way in an error object, under HTTP 200", "RATE"),
    "truncate": Fault("this share of streams ends half-way without finish reason and terminal event", "RATE"),
    "stall": Fault("this share of streams falls silent half-way and stays open", "RATE"),
    "refuse-long": Fault("503 for prompts of more than this many tokens", "TOKENS", 0, float("inf")),
    "ignore-ignore-eos": Fault("replies stop at half of the asked length although told not to"),
    "drift": Fault("steps get this many percent slower each (emulated) minute", "PERCENT_PER_MINUTE", -50, 1e6),
    "no-usage": Fault("no token counts in any reply"),
    "no-cache": Fault("the prefix cache is off"),
    "slow": Fault("every step takes this many times as long", "FACTOR", 1e-3, 1e6),
}

_SD = ("SD", 0.0, 10.0)
_TOKENS = ("TOKENS", 0.0, float("inf"))
DECODE_FAULTS = {
    "flip-token": Fault("one token in 1/RATE comes from another candidate's logit", "RATE"),
    "repeat-after": Fault("replies repeat their last three words after this many tokens", *_TOKENS),
    "kv-beyond": Fault("the prefix is read wrongly beyond this context", *_TOKENS),
    "prefix-off-by-one": Fault("the state is restored one token off after a hit in the prefix cache"),
    "ignore-temperature": Fault("temperature is taken as 0"),
    "ignore-top-p": Fault("top_p is taken as 1"),
    "batch-corrupts": Fault("one row of each step with more rows than this is corrupted", *_TOKENS),
    "race": Fault("one step in 1/RATE corrupts one row", "RATE"),
    "ignore-seed": Fault("each request draws from a seed of its own"),
    "shared-seed": Fault("all requests draw from one seed"),
    "neighbour-leak": Fault("one row reads another's state whenever requests join or leave"),
    "state-drift": Fault("logits get noise that grows by this standard deviation in 1,000 decode steps", *_SD),
    "eos-scaled": Fault("the odds of the end of a text are multiplied by this", "FACTOR", 1e-3, 1e3),
    "nan-zero": Fault("this share of requests computes what is not a number, and says !!!!", "RATE"),
    "padded-batch": Fault("logits are wrong in batches that are padded: of 3, 5, 6, 7, 9, ... rows"),
    "low-precision": Fault("logits get unbiased noise of this standard deviation", *_SD),
    "bf16-noise": Fault("harmless: logits get noise of this standard deviation (.01 to .03)", *_SD),
    "batch-noise": Fault("harmless: the same, another one at each batch size", *_SD),
}
"""Faults of the decode path, which act on the language model's numbers (replay/emulator/decoding.py)."""
FAULTS |= DECODE_FAULTS

Active = Mapping[str, float]
"""Name of each fault that is on -> its number (1 for one without)."""


def parse(texts: Iterable[str]) -> dict[str, float]:
    """Read ``NAME`` or ``NAME:NUMBER`` texts. Raises UserError for an unknown name or a number that does not fit."""
    active: dict[str, float] = {}
    for text in texts:
        name, colon, number = text.partition(":")
        fault = FAULTS.get(name)
        if fault is None:
            raise UserError(f"unknown fault {name!r}; known: {', '.join(FAULTS)}")
        if not fault.argument:
            if colon:
                raise UserError(f"fault {name} takes no number; write just {name}")
            active[name] = 1.0
            continue
        try:
            value = float(number)
        except ValueError:
            raise UserError(f"fault {name} needs a number: {name}:{fault.argument} ({fault.summary})") from None
        if not fault.low <= value <= fault.high:
            raise UserError(f"fault {name}: {fault.argument} is {number}; it must lie in {fault.low:g}..{fault.high:g}")
        active[name] = value
    return active


def picks(active: Active, name: str, request_id: str) -> bool:
    """Say whether a fault with a rate strikes this request."""
    rate = active.get(name, 0.0)
    return rate > 0 and text_number(f"{name}:{request_id}") < rate * 2**64
