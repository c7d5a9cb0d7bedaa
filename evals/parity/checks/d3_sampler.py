"""D3: tokens are drawn as their own logprobs say, at T=1 and top_p, and at temperature 0 the likeliest is taken.

Free runs with logprobs, every reply with a seed of its own. Some are sent without a seed: seeds switch off vLLM's
fused sampler, which production uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evals.parity.asking import ask, case, groups, lots, record, width
from evals.parity.check import Budget, Check, Given, Situation
from evals.records import Case

PROMPT = 32
WIDTH = 32
REPLIES: dict[Budget, int] = {"quick": 16, "standard": 64, "full": 256}
"""Of each variant."""
TOKENS: dict[Budget, int] = {"quick": 48, "standard": 128, "full": 256}

VARIANTS: dict[str, dict[str, Any]] = {
    "sampled": {},
    "unseeded": {"seed": None},
    "greedy": {"temperature": 0.0, "top_p": 1.0, "seed": None},
}
"""What each changes of a case."""


def _cases(situation: Situation) -> list[Case]:
    tokens = PROMPT, TOKENS[situation.budget]
    asked = [
        (reply, {"variant": variant, "batch": len(lot), **changes})
        for variant, changes in VARIANTS.items()
        for lot in lots(REPLIES[situation.budget], width(situation, WIDTH))
        for reply in lot
    ]
    return [case(situation, "D3", number, reply, tokens, **how) for number, (reply, how) in enumerate(asked)]


async def _run(given: Given, cases: Sequence[Case]) -> None:
    for group in groups(cases):
        found = await given.endpoint.generate([ask(given, each, each.variant) for each in group])
        for each, (generation,) in zip(group, found, strict=True):
            record(given, each, generation)


CHECK = Check(
    id="D3",
    title="Sampler calibration",
    finds="temperature or top_p that is ignored, seeds that are shared",
    statistic="z of rank-1 share and surprisal against the returned logprobs; tokens outside the nucleus",
    needs=frozenset({"token ids", "logprobs"}),
    cases=_cases,
    run=_run,
)
