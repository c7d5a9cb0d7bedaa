"""D5: a prompt whose beginning comes from the prefix cache is answered as a cold one is, at block edges and around.

Each prompt goes out twice under one salt, of its own: first cold, then warm. What the cache gives back ends at a
block's edge, so prompts are cut at edges, one token before and one after. Greedy, so that the positions of both
replies can be compared one by one as long as their ids agree. Whether the second was warm its cached tokens tell,
where the server counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from evals.parity.asking import ask, case, groups, lots, record, width
from evals.parity.check import Budget, Check, Given, Situation
from evals.records import Case

WIDTH = 8
EDGES: dict[Budget, int] = {"quick": 8, "standard": 48, "full": 256}
"""Block edges, each with its two neighbours; fewer where blocks are large."""
LONGEST: dict[Budget, int] = {"quick": 1024, "standard": 16_384, "full": 65_536}
"""Prompt tokens about, the edges lie evenly by their logarithm up to there."""
TOKENS = 16

COLD, WARM = "cold", "warm"


def _cases(situation: Situation) -> list[Case]:
    wide = width(situation, WIDTH)
    asked: list[tuple[int, dict[str, Any]]] = []  # tokens of the prompt, fields of the case
    for offset in (-1, 0, 1):
        cuts = [edge + offset for edge in _edges(situation)]
        for lot in lots(len(cuts), wide):
            for variant in (COLD, WARM):
                how = {"variant": variant, "batch": len(lot), "stratum": {"edge": f"{offset:+d}"}}
                asked += [(cuts[cut], how) for cut in lot]
    greedy = {"temperature": 0.0, "top_p": 1.0, "seed": None}
    return [
        case(situation, "D5", number, cut, (cut, TOKENS), **greedy, **how) for number, (cut, how) in enumerate(asked)
    ]


def _edges(situation: Situation) -> list[int]:
    """Where blocks end, from the second on: before it there is nothing to hit."""
    block, most = situation.block, situation.max_context - TOKENS - 1
    longest = min(max(LONGEST[situation.budget], 4 * block), most)
    edges = np.geomspace(2, max(2, longest // block), EDGES[situation.budget]).round().astype(int) * block
    return [edge for edge in np.unique(edges).tolist() if edge <= most]


async def _run(given: Given, cases: Sequence[Case]) -> None:
    for group in groups(cases):
        found = await given.endpoint.generate([ask(given, each, "twice") for each in group])
        for each, (generation,) in zip(group, found, strict=True):
            record(given, each, generation)


CHECK = Check(
    id="D5",
    title="Cold and warm prefix",
    finds="state that a prefix hit restores wrongly",
    statistic="outliers of the logprobs of warm replies against cold ones (as P2)",
    needs=frozenset({"token ids", "logprobs"}),
    cases=_cases,
    run=_run,
)
