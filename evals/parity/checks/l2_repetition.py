"""L2: long replies do not run into loops.

Free runs beyond 8,192 tokens, EOS ignored, since few replies get there by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from evals.parity.asking import answers, case, groups, lots, record, width
from evals.parity.check import Budget, Check, Given, Situation
from evals.records import Case

PROMPT = 64
WIDTH = 8
REPLIES: dict[Budget, int] = {"quick": 4, "standard": 16, "full": 64}
"""Five show a loop that every reply runs into."""
TOKENS: dict[Budget, int] = {"quick": 512, "standard": 10_240, "full": 20_480}
"""Of which the last 2,048 are judged."""


def _cases(situation: Situation) -> list[Case]:
    tokens = PROMPT, TOKENS[situation.budget]
    batches = [len(lot) for lot in lots(REPLIES[situation.budget], width(situation, WIDTH)) for _ in lot]
    return [case(situation, "L2", number, number, tokens, batch=batch) for number, batch in enumerate(batches)]


async def _run(given: Given, cases: Sequence[Case]) -> None:
    for group in groups(cases):
        for each, generation in zip(group, await answers(given, group, logprobs=0), strict=True):
            record(given, each, generation)


CHECK = Check(
    id="L2",
    title="Repetition",
    finds="replies that loop after some thousands of tokens",
    statistic="share of repeated 32-grams in the last 2,048 tokens, longest loop, compression",
    needs=frozenset({"token ids", "seeds"}),
    cases=_cases,
    run=_run,
)
