"""D4: what a reply says depends on its prompt and seed alone: not on logprobs, neighbours, or the way of asking.

Variants of the same prompts, in lots that decode together:

    first, again     the same twice, in one batch size: how often ids repeat at all
    no logprobs      likewise, without asking for logprobs
    other seed       likewise, with another seed: other ids
    n                a quarter of the prompts as one request each with n=4, in a batch of about the same size
    calls            as four requests each, with the seeds that n gives its replies: seed + index
    alone            a few prompts, one by one: another batch size than first
"""

from __future__ import annotations

from collections.abc import Sequence

from evals.parity.asking import ask, case, drawn, groups, lots, record, width
from evals.parity.check import Budget, Check, Given, Situation
from evals.parity.endpoint import TOP
from evals.records import Case

PROMPT = 48
WIDTH = 20
PROMPTS: dict[Budget, int] = {"quick": 20, "standard": 80, "full": 320}
ALONE: dict[Budget, int] = {"quick": 4, "standard": 20, "full": 80}
TOKENS: dict[Budget, int] = {"quick": 32, "standard": 64, "full": 128}
N = 4


def _cases(situation: Situation) -> list[Case]:
    budget, wide = situation.budget, width(situation, WIDTH)
    asked: list[tuple[str, int, int, int]] = []  # variant, prompt, index of the reply, batch
    for lot in lots(PROMPTS[budget], wide):
        for variant in ("first", "again", "no logprobs", "other seed"):
            asked += [(variant, prompt, 0, len(lot)) for prompt in lot]
    for lot in lots(PROMPTS[budget] // N, wide // N) if wide >= N else ():
        for variant in ("n", "calls"):
            asked += [(variant, prompt, index, N * len(lot)) for prompt in lot for index in range(N)]
    asked += [("alone", prompt, 0, 1) for prompt in range(ALONE[budget])]
    return [_case(situation, number, *each) for number, each in enumerate(asked)]


def _case(situation: Situation, number: int, variant: str, prompt: int, index: int, batch: int) -> Case:
    seed = drawn(situation, "D4", prompt, "other seed" if variant == "other seed" else "seed") + index
    tokens = PROMPT, TOKENS[situation.budget]
    return case(situation, "D4", number, prompt, tokens, variant=variant, batch=batch, seed=seed)


async def _run(given: Given, cases: Sequence[Case]) -> None:
    for group in groups(cases):
        replies = N if group[0].variant == "n" else 1
        logprobs = 0 if group[0].variant == "no logprobs" else TOP
        asks = [ask(given, each, each.variant, n=replies, logprobs=logprobs) for each in group[::replies]]
        found = [generation for choices in await given.endpoint.generate(asks) for generation in choices]
        for each, generation in zip(group, found, strict=True):
            record(given, each, generation)


CHECK = Check(
    id="D4",
    title="Seeds and neighbours",
    finds="seeds that are ignored or shared, replies that depend on logprobs, neighbours or n",
    statistic="pairs with the same ids that should differ, and with other ids that should not",
    needs=frozenset({"token ids", "seeds"}),
    cases=_cases,
    run=_run,
)
