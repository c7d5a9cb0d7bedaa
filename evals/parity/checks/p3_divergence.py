"""P3: free replies, greedy and sampled with equal seeds, compared up to their first difference.

With a difference in 1,000 tokens as the floor, 24 prompts of 2,048 tokens see one in 500 more, 174 one in 2,000.
"""

from __future__ import annotations

from collections.abc import Sequence

from evals.parity.asking import case, lots, width
from evals.parity.check import Budget, Check, Given, Situation
from evals.parity.traces import in_step, stratum
from evals.records import Case

PROMPTS: dict[Budget, int] = {"quick": 8, "standard": 24, "full": 176}
"""Of each variant."""
TOKENS: dict[Budget, int] = {"quick": 256, "standard": 2048, "full": 2048}
PROMPT = 256
WIDTH = 8

GREEDY, SEEDED = "free greedy", "free T=1"


def _cases(situation: Situation) -> list[Case]:
    prompt = min(PROMPT, situation.max_context // 2)
    variants = (GREEDY, SEEDED) if "seeds" in situation.has else (GREEDY,)
    asked = [
        (variant, index, len(lot))
        for variant in variants
        for lot in lots(PROMPTS[situation.budget], width(situation, WIDTH))
        for index in lot
    ]
    greedy = {"temperature": 0.0, "top_p": 1.0, "seed": None}
    return [
        case(
            situation,
            "P3",
            number,
            index,
            (prompt, TOKENS[situation.budget]),
            variant=variant,
            batch=size,
            stratum=stratum(prompt, size),
            **(greedy if variant == GREEDY else {}),
        )
        for number, (variant, index, size) in enumerate(asked)
    ]


async def _run(given: Given, cases: Sequence[Case]) -> None:
    await in_step(given, cases, "P3")


CHECK = Check(
    id="P3",
    title="First divergence",
    finds="any difference that changes a token, and where",
    statistic="first difference: log-rank against A1-A2; the gap of A's two likeliest tokens there",
    needs=frozenset({"token ids"}),
    cases=_cases,
    run=_run,
)
