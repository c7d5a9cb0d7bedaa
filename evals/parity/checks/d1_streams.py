"""D1: a reply is the same as a stream and as a whole, and its usage counts the ids that came.

The same requests go out twice: a lot of them as whole replies, then the same lot as streams, so that both decode in
batches of one size. Texts are compared where the ids agree: text is a function of ids, and a tokenizer of our own
would differ from the server's in special tokens and unfinished characters.
"""

from __future__ import annotations

from collections.abc import Sequence

from evals.parity.asking import ask, case, groups, lots, miscounted, record, width
from evals.parity.check import Budget, Check, Given, Situation
from evals.parity.endpoint import Generation
from evals.records import Case

PROMPT = 48
WIDTH = 8
PAIRS: dict[Budget, int] = {"quick": 16, "standard": 64, "full": 256}
TOKENS: dict[Budget, int] = {"quick": 32, "standard": 256, "full": 512}

WHOLE, STREAM = "whole", "stream"


def _cases(situation: Situation) -> list[Case]:
    tokens = PROMPT, TOKENS[situation.budget]
    asked = [
        (pair, {"variant": variant, "batch": len(lot)})
        for lot in lots(PAIRS[situation.budget], width(situation, WIDTH))
        for variant in (WHOLE, STREAM)
        for pair in lot
    ]
    return [case(situation, "D1", number, pair, tokens, **how) for number, (pair, how) in enumerate(asked)]


async def _run(given: Given, cases: Sequence[Case]) -> None:
    whole: dict[int, Generation] = {}
    for group in groups(cases):
        asks = [ask(given, each, each.variant, stream=each.variant == STREAM) for each in group]
        for each, (generation,) in zip(group, await given.endpoint.generate(asks), strict=True):
            agrees = None
            if each.variant == WHOLE:
                whole[each.prompt_seed] = generation
            else:
                agrees = _text_agrees(generation, whole.pop(each.prompt_seed))
            record(given, each, generation, text_agrees=agrees, problem=miscounted(generation))


def _text_agrees(one: Generation, other: Generation) -> bool | None:
    """Whether the same ids gave the same text; null where the ids differ, or no text is told."""
    if one.error or other.error or one.ids.tolist() != other.ids.tolist() or None in (one.text, other.text):
        return None
    return one.text == other.text


CHECK = Check(
    id="D1",
    title="Streams",
    finds="tokens or text lost on the way: a last chunk, a wrong count",
    statistic="replies whose stream, whole, usage and text disagree",
    needs=frozenset({"token ids", "seeds", "streaming"}),
    cases=_cases,
    run=_run,
)
