"""Speculative decoding with a given acceptance: how many tokens a step yields for one request."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import msgspec

from replay.emulator.noise import unit
from workloads.errors import UserError


class Speculation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Draft tokens per step, and how many hold: a mean length, or a rate for each draft position (one of the two)."""

    draft_tokens: int
    acceptance_length: float | None = None
    """Mean tokens a step yields per request, in [1, 1 + draft_tokens]; each step yields this, rounded down or up."""
    acceptance_rates: tuple[float, ...] = ()
    """Probability that the draft at each position is accepted (with all before it): not increasing."""


def check(speculation: Speculation) -> None:
    """Raise UserError unless the figures make sense together."""
    drafts, length, rates = speculation.draft_tokens, speculation.acceptance_length, speculation.acceptance_rates
    if drafts < 1:
        raise UserError(f"draft_tokens is {drafts}; give at least 1, or no speculation at all")
    if (length is None) == (not rates):
        raise UserError("speculation needs either acceptance_length or acceptance_rates, and not both")
    if length is not None and not 1 <= length <= drafts + 1:
        raise UserError(f"acceptance_length is {length}; with {drafts} draft tokens it must lie in [1, {drafts + 1}]")
    if rates:
        if len(rates) != drafts:
            raise UserError(f"acceptance_rates has {len(rates)} rates for {drafts} draft tokens; give one for each")
        if any(not 0 <= rate <= 1 for rate in rates) or any(a < b for a, b in pairwise(rates)):
            raise UserError("acceptance_rates must lie in [0, 1] and not increase from one position to the next")


def schedule(speculation: Speculation | None, seed: int) -> Callable[[int, int], int]:
    """Return ``accepted(step, position)``: tokens that a request's decode step yields.

    ``step`` counts the request's decode steps from 0, ``position`` is the place of the step's first token in the
    context. With a mean length the sum over n steps is ``floor(n * length)``: the spread is as small as whole tokens
    allow. With rates one number drawn from (seed, position) decides all positions of the step, so that the same turn
    meets the same luck on every backend and in every batch.
    """
    if speculation is None:
        return lambda step, position: 1
    rates = speculation.acceptance_rates
    if rates:

        def by_rates(step: int, position: int) -> int:
            luck = unit(seed, position, 0xACCE)
            return 1 + sum(luck < rate for rate in rates)

        return by_rates
    length = speculation.acceptance_length or 1.0
    return lambda step, position: int((step + 1) * length + 1e-9) - int(step * length + 1e-9)
