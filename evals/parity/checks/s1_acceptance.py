"""S1: the drafter's tokens are accepted as often, draft position by draft position.

Each batch is a window between two readings of the server's counters. Counters know no requests: what they grew by is
told with the batch's first reply, and nothing else may run on the server meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from evals.parity.asking import answers, case, groups, record, width
from evals.parity.check import Budget, Check, Given, Situation
from evals.parity.endpoint import Endpoint
from evals.records import Case
from replay.metrics import parse

PROMPT = 64
WIDTH = 8
WINDOWS: dict[Budget, int] = {"quick": 4, "standard": 20, "full": 60}
TOKENS: dict[Budget, int] = {"quick": 64, "standard": 512, "full": 1024}

_DRAFTS = "vllm:spec_decode_num_drafts_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


def _cases(situation: Situation) -> list[Case]:
    prompt, variant = (0, "chat") if "chat" in situation.has else (PROMPT, "ids")
    tokens, batch = (prompt, TOKENS[situation.budget]), width(situation, WIDTH)
    return [
        case(situation, "S1", number, number, tokens, batch=batch, variant=variant)
        for number in range(WINDOWS[situation.budget] * batch)
    ]


async def _run(given: Given, cases: Sequence[Case]) -> None:
    for group in groups(cases):
        before = await _counters(given.endpoint)
        found = await answers(given, group, logprobs=0)
        after = await _counters(given.endpoint)
        facts = _grown(before, after) if before and after else {}
        for each, generation in zip(group, found, strict=True):
            record(given, each, generation, **facts)
            facts = {}


async def _counters(endpoint: Endpoint) -> dict[str, int]:
    """Drafts, and accepted tokens by draft position, of all engines together; empty where they cannot be read."""
    status, page = await endpoint.page("/metrics")
    found = Counter[str]()
    with suppress(ValueError):
        for name, labels, value in parse(page.decode("utf-8", "replace")) if status == 200 else ():
            if name in (_DRAFTS, _ACCEPTED):
                found[labels.get("position", _DRAFTS)] += round(value)
    return found


def _grown(before: dict[str, int], after: dict[str, int]) -> dict[str, Any]:
    """Fields of ParityReply."""
    positions = sorted(after.keys() - {_DRAFTS}, key=int)
    return {
        "drafts": after[_DRAFTS] - before.get(_DRAFTS, 0),
        "accepted": [after[position] - before.get(position, 0) for position in positions],
    }


CHECK = Check(
    id="S1",
    title="Acceptance of drafts",
    finds="a changed distribution of the target or the drafter",
    statistic="difference of the share of drafts accepted up to each position",
    needs=frozenset({"metrics", "speculation"}),
    cases=_cases,
    run=_run,
)
