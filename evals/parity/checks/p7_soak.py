"""P7: many replayed steps, with requests that join and leave, for what happens once in thousands of them.

Steps count, not tokens: a race strikes one row of one step. 73,000 steps see one in 10,000; no event in 300,000 bounds
the rate at one in 100,000. Base traces are replayed again and again, with the forced token's logprob alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count

from evals.parity.asking import width
from evals.parity.check import Budget, Check, Given, Situation
from evals.parity.checks.t0 import BASE, of
from evals.parity.traces import forced, in_lanes
from evals.records import Case

STEPS: dict[Budget, dict[int, int]] = {
    "quick": {8: 128},
    "standard": {1: 24_000, 8: 40_000, 32: 11_000},
    "full": {1: 500_000, 8: 400_000, 32: 100_000},
}
"""Decode steps at each batch size."""
TOKENS = (512, 64, 1024, 128, 256)
"""Of replays, in turn, as far as the traces go."""


def _cases(situation: Situation) -> list[Case]:
    steps: Counter[int] = Counter()
    for batch, wanted in STEPS[situation.budget].items():
        steps[width(situation, batch)] += wanted
    base = of(situation, BASE)
    asked = [(trace, batch, tokens) for batch in steps for trace, tokens in _filling(base, batch * steps[batch])]
    return [forced(trace, number, batch=batch, tokens=tokens) for number, (trace, batch, tokens) in enumerate(asked)]


def _filling(base: list[Case], positions: int) -> Iterator[tuple[Case, int]]:
    """Traces and their tokens that together take so many positions. The first of each comes from the prefill."""
    for index in count():
        if positions <= 0:
            return
        trace = base[index % len(base)]
        tokens = min(TOKENS[index % len(TOKENS)], trace.output_tokens)
        positions -= tokens - 1
        yield trace, tokens


async def _run(given: Given, cases: Sequence[Case]) -> None:
    await in_lanes(given, cases, "P7", logprobs=1)


CHECK = Check(
    id="P7",
    title="Soak",
    finds="rare errors: races, leaks between requests",
    statistic="outliers of the forced token's logprob (P2), by step; rule of three",
    needs=frozenset({"token ids", "logprobs", "trace replay"}),
    cases=_cases,
    run=_run,
    instead="P3 and P4, which see no more than a few thousand steps: an error in fewer than one step in 1,000 is not "
    "bounded",
)
