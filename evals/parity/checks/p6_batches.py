"""P6: batch sizes, and requests that join and leave.

The sizes are those at which kernels, padding or paths change; 65 is one more than any specialised path takes. At each
size that many identical requests decode in step. Then one long reply has neighbours of unlike length, the next one of
which joins when one has left; all are on record, since an error may strike any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from evals.parity.asking import width
from evals.parity.check import Budget, Check, Given, Situation
from evals.parity.checks.t0 import BASE, of
from evals.parity.traces import forced, free, in_lanes, in_step
from evals.records import Case

_LADDER = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 25, 32, 33, 40, 48, 63, 64, 65)
LADDER: dict[Budget, tuple[int, ...]] = {
    "quick": (1, 2, 3, 4, 8, 9, 16, 17, 32, 33, 64, 65),
    "standard": _LADDER,
    "full": _LADDER,
}
"""Those up to max_requests."""
TOKENS: dict[Budget, int] = {"quick": 64, "standard": 2048, "full": 8192}
"""At each size, of all rows together, or MIN_TOKENS of each row."""
VICTIMS: dict[Budget, int] = {"quick": 1, "standard": 2, "full": 4}
"""Prompts at each size, one after the other."""
MIN_TOKENS = 8

CHURN: dict[Budget, dict[int, int]] = {
    "quick": {8: 64},
    "standard": {8: 512, 32: 128},
    "full": {8: 2048, 32: 512, 64: 256},
}
"""Size of the batch -> tokens of the long reply in it."""
NEIGHBOURS = (3, 34, 8, 21, 5, 13)
"""Tokens of its neighbours, in turn."""

LADDER_VARIANT, VICTIM, NEIGHBOUR = "in step", "churn: victim", "churn: neighbour"


def _cases(situation: Situation) -> list[Case]:
    replay = {"trace replay", "logprobs"} <= situation.has
    again = forced if replay else free
    return [
        again(trace, number, batch=batch, tokens=tokens, variant=variant)
        for number, (trace, batch, tokens, variant) in enumerate(_asked(situation))
    ]


def _asked(situation: Situation) -> Iterator[tuple[Case, int, int, str]]:
    budget = situation.budget
    base = of(situation, BASE)
    shortest = min(trace.prompt_tokens for trace in base)  # so that one prefill step takes many of them
    victims = [trace for trace in base if trace.prompt_tokens == shortest]
    for size in LADDER[budget]:
        if size <= situation.max_requests:
            rounds = VICTIMS[budget]
            tokens = max(MIN_TOKENS, -(-TOKENS[budget] // (size * rounds)))
            for index in range(rounds):
                for _ in range(size):
                    yield victims[index], size, tokens, LADDER_VARIANT
    sizes: dict[int, int] = {}
    for batch, tokens in CHURN[budget].items():
        sizes.setdefault(width(situation, batch), tokens)
    for index, (size, tokens) in enumerate(sizes.items()):
        if size > 1:
            tokens = min(tokens, victims[index].output_tokens)
            yield victims[index], size, tokens, VICTIM
            # as many as fill the time of the long one
            for joining in range((size - 1) * tokens * len(NEIGHBOURS) // sum(NEIGHBOURS)):
                trace = base[joining % len(base)]
                yield trace, size, NEIGHBOURS[joining % len(NEIGHBOURS)], NEIGHBOUR


async def _run(given: Given, cases: Sequence[Case]) -> None:
    ladder = [each for each in cases if each.variant == LADDER_VARIANT]
    await in_step(given, ladder, "P6")
    await in_lanes(given, cases[len(ladder) :], "P6")


CHECK = Check(
    id="P6",
    title="Batches and churn",
    finds="errors at some batch sizes, and of neighbours on each other",
    statistic="as P1 at each size and under churn; without trace replay as P4",
    needs=frozenset({"token ids"}),
    cases=_cases,
    run=_run,
)
