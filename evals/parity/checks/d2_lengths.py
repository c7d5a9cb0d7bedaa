"""D2: replies end where they were asked to: at exactly max_tokens where EOS is to be ignored, or at a stop id.

The stop id is one that the arm itself sampled in the same place without it ("free"), and that the reply does not have
before: a server that heeds it says nothing beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evals.parity.asking import ask, case, groups, lots, miscounted, record, width
from evals.parity.check import Budget, Check, Given, Situation
from evals.parity.endpoint import Generation
from evals.records import Case

PROMPT = 32
LENGTHS: dict[Budget, tuple[int, ...]] = {
    "quick": (1, 2, 17, 4097),
    "standard": (1, 2, 17, 4096, 8193, 32_769),
    "full": (1, 2, 17, 4096, 8193, 32_769),
}
"""Those that max_context holds. A limit of 4,096 that somebody else set shows beyond it."""
REPLIES: dict[Budget, int] = {"quick": 1, "standard": 2, "full": 4}
"""Of each length."""

WIDTH = 8
STOPS: dict[Budget, int] = {"quick": 8, "standard": 64, "full": 256}
STOP_TOKENS = 64
STOP_AFTER = 8
"""The stop id is the first from here on that is new in its reply."""

LENGTH, FREE, STOP = "length", "free", "stop"


def _cases(situation: Situation) -> list[Case]:
    budget = situation.budget
    lengths = [length for length in LENGTHS[budget] if PROMPT + length <= situation.max_context]
    replies = [length for length in lengths for _ in range(REPLIES[budget])]
    asked: list[tuple[int, int, dict[str, Any]]] = [
        (number, replies[number], {"variant": LENGTH, "batch": len(lot)})
        for lot in lots(len(replies), width(situation, WIDTH))
        for number in lot
    ]
    asked += [
        (len(replies) + number, STOP_TOKENS, {"variant": variant, "batch": len(lot)})
        for lot in lots(STOPS[budget], width(situation, WIDTH))
        for variant in (FREE, STOP)
        for number in lot
    ]
    return [
        case(situation, "D2", number, prompt, (PROMPT, tokens), **how)
        for number, (prompt, tokens, how) in enumerate(asked)
    ]


async def _run(given: Given, cases: Sequence[Case]) -> None:
    stops: dict[int, list[int]] = {}
    for group in groups(cases):
        stop_ids = [stops.get(each.prompt_seed, []) if each.variant == STOP else [] for each in group]
        asks = [
            ask(given, each, each.variant, logprobs=0, stop_token_ids=stop)
            for each, stop in zip(group, stop_ids, strict=True)
        ]
        found = await given.endpoint.generate(asks)
        for each, stop, (generation,) in zip(group, stop_ids, found, strict=True):
            if each.variant == FREE:
                stops[each.prompt_seed] = _new_ids(generation.ids.tolist())[:1]
            record(given, each, generation, problem=miscounted(generation) or _wrong_end(each, generation, stop))


def _new_ids(ids: list[int]) -> list[int]:
    """The ids from STOP_AFTER on that a reply does not have before."""
    return [each for place, each in enumerate(ids) if place >= STOP_AFTER and each not in ids[:place]]


def _wrong_end(case: Case, generation: Generation, stop: Sequence[int]) -> str | None:
    ids = generation.ids.tolist()
    if generation.error:
        return None
    if not set(stop).isdisjoint(ids[:-1]):
        return "it went on after a stop id"
    if generation.finish_reason == "stop" and ids[-1:] == stop:
        return None
    if len(ids) != case.output_tokens:
        return f"{case.output_tokens} tokens asked for, {len(ids)} came"
    return None if generation.finish_reason == "length" else f"finish reason {generation.finish_reason} at the limit"


CHECK = Check(
    id="D2",
    title="Lengths and stops",
    finds="limits of length that are not the request's, stop ids that are not heeded",
    statistic="replies that end elsewhere than asked",
    needs=frozenset({"token ids"}),
    cases=_cases,
    run=_run,
)
