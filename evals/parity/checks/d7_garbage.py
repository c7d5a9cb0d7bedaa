"""D7: short replies to many prompts: none may be one token over and over, broken characters, or markers as text.

Most prompts are ids, since garbage shows in the ids first; some go through a chat where there is one, since markers
leak there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from evals.parity.asking import answers, case, groups, lots, record, width
from evals.parity.check import Budget, Check, Given, Situation
from evals.parity.endpoint import Generation
from evals.records import Case

PROMPT = 24
WIDTH = 32
IDS: dict[Budget, int] = {"quick": 460, "standard": 920, "full": 3680}
"""Replies to prompts of ids. At least one of 460 is hit by a fault in 1 of 200 with power .9, of 919 with .99."""
CHATS: dict[Budget, int] = {"quick": 16, "standard": 160, "full": 640}
TOKENS = 12
CHAT_TOKENS = 48
RUN = 8
"""So often in a row is too often for one token."""

_MARKER = re.compile(r"<\|[^<>|\s]{1,40}\|>|</?(think|tool_call|tool_response|s)>|\[/?(INST|TOOL_CALLS)\]")
_BROKEN = "\N{REPLACEMENT CHARACTER}"


def _cases(situation: Situation) -> list[Case]:
    budget, wide = situation.budget, width(situation, WIDTH)
    chats = CHATS[budget] if "chat" in situation.has else 0
    asked = [
        (variant, tokens, len(lot))
        for variant, count, tokens in (("ids", IDS[budget], (PROMPT, TOKENS)), ("chat", chats, (0, CHAT_TOKENS)))
        for lot in lots(count, wide)
        for _ in lot
    ]
    return [
        case(situation, "D7", number, number, tokens, variant=variant, batch=batch)
        for number, (variant, tokens, batch) in enumerate(asked)
    ]


async def _run(given: Given, cases: Sequence[Case]) -> None:
    for group in groups(cases):
        for each, generation in zip(group, await answers(given, group, logprobs=0), strict=True):
            record(given, each, generation, problem=_garbage(generation))


def _garbage(generation: Generation) -> str | None:
    run = max((len(list(same)) for _, same in groupby(generation.ids.tolist())), default=0)
    text = generation.text or ""
    if run >= RUN:
        return f"one token {run} times in a row"
    if _BROKEN in text.rstrip(_BROKEN):  # at its end a character may be unfinished
        return "invalid UTF-8"
    return "a marker in the text" if _MARKER.search(text) else None


CHECK = Check(
    id="D7",
    title="Garbage",
    finds="NaN logits (one token over and over), broken characters, markers that leak",
    statistic="replies with garbage, of which the baseline has none",
    needs=frozenset({"token ids"}),
    cases=_cases,
    run=_run,
)
