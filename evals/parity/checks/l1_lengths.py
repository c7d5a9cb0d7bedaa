"""L1: how long replies are that may end by themselves, and how many of them end at the limit.

Free runs with EOS honoured: answers to questions where there are chats, since models end what they were asked for in
their own format; else replies to ids. The same prompts and seeds in every arm make pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

from evals.parity.asking import answers, case, groups, lots, record, width
from evals.parity.check import Budget, Check, Given, Situation
from evals.records import Case

PROMPT = 64
WIDTH = 32
REPLIES: dict[Budget, int] = {"quick": 32, "standard": 128, "full": 512}
"""100 pairs show EOS with half or twice its probability."""
TOKENS: dict[Budget, int] = {"quick": 256, "standard": 4096, "full": 16_384}


def _cases(situation: Situation) -> list[Case]:
    replies, tokens = REPLIES[situation.budget], TOKENS[situation.budget]
    batches = [len(lot) for lot in lots(replies, width(situation, WIDTH)) for _ in lot]
    prompt, variant = (0, "chat") if "chat" in situation.has else (PROMPT, "ids")
    return [
        case(situation, "L1", number, number, (prompt, tokens), batch=batch, variant=variant)
        for number, batch in enumerate(batches)
    ]


async def _run(given: Given, cases: Sequence[Case]) -> None:
    for group in groups(cases):
        for each, generation in zip(group, await answers(given, group, logprobs=0, ignore_eos=False), strict=True):
            record(given, each, generation)


CHECK = Check(
    id="L1",
    title="Lengths",
    finds="replies that end early or late: EOS of another probability, limits, loops",
    statistic="Wilcoxon of paired lengths; McNemar of stops at the limit",
    needs=frozenset({"token ids", "seeds"}),
    cases=_cases,
    run=_run,
)
