"""T0: the reference traces, which A1 decodes once and other checks force or cut on every arm.

Sampled as in production, so that they go where real replies go. A few are long (drift takes thousands of steps to
show), and a few follow long prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from evals.parity.asking import case, lots, width
from evals.parity.check import Budget, Check, Given, Situation
from evals.parity.traces import in_step, stratum
from evals.records import Case

BASE, LONG, CONTEXT = "base", "long", "context"

K = 1024
TRACES: dict[Budget, dict[str, tuple[int, int]]] = {
    "quick": {BASE: (16, 128), LONG: (0, 0), CONTEXT: (1, 64)},
    "standard": {BASE: (112, 2 * K), LONG: (24, 16 * K), CONTEXT: (5, 256)},
    "full": {BASE: (208, 2 * K), LONG: (56, 32 * K), CONTEXT: (10, 256)},
}
"""Traces and their tokens; CONTEXT: at each context."""
PROMPTS: dict[Budget, tuple[int, ...]] = {"quick": (64, 128), "standard": (64, 512, 2 * K), "full": (64, 512, 2 * K)}
"""Tokens of the base traces' prompts, in turn."""
LONG_PROMPT = 512
_CONTEXTS = (K, 8 * K, 32 * K, 128 * K - 64, 128 * K + 64, 256 * K, 512 * K, 1024 * K)
CONTEXTS: dict[Budget, tuple[int, ...]] = {"quick": (K, 2 * K), "standard": _CONTEXTS, "full": _CONTEXTS}
"""Tokens of prompts. Instead of those that max_context does not hold there is the longest that it holds."""
WIDTH = 8


def traces(situation: Situation) -> list[Case]:
    """The cases of T0: their variant is BASE, LONG or CONTEXT."""
    made = list(enumerate(_traces(situation)))
    return [
        case(
            situation,
            "T0",
            number,
            number,
            (prompt, tokens),
            variant=variant,
            batch=batch,
            stratum=stratum(prompt, batch),
        )
        for number, (variant, prompt, tokens, batch) in made
    ]


def of(situation: Situation, variant: str) -> list[Case]:
    """Those of one variant."""
    return [trace for trace in traces(situation) if trace.variant == variant]


def _traces(situation: Situation) -> Iterator[tuple[str, int, int, int]]:
    """Variant, tokens of prompt and of reply, batch."""
    numbers, most = TRACES[situation.budget], situation.max_context
    size, half = width(situation, WIDTH), most // 2
    count, tokens = numbers[BASE]
    prompts = PROMPTS[situation.budget]
    for lot in lots(count, size):
        for index in lot:
            yield BASE, min(prompts[index % len(prompts)], half), tokens, len(lot)
    if most - LONG_PROMPT > tokens:  # else they would be no longer than the base ones
        count, tokens = numbers[LONG]
        for lot in lots(count, size):
            for _ in lot:
                yield LONG, LONG_PROMPT, tokens, len(lot)
    count, tokens = numbers[CONTEXT]
    longest = max(most - tokens, half)
    for context in sorted({min(context, longest) for context in CONTEXTS[situation.budget]}):
        for _ in range(count):
            yield CONTEXT, context, tokens, 1


async def _run(given: Given, cases: Sequence[Case]) -> None:
    await in_step(given, cases, "T0", logprobs=0)


CHECK = Check(
    id="T0",
    title="Reference traces",
    finds="nothing: on A1 alone, it makes what other checks force",
    statistic="none",
    needs=frozenset({"token ids"}),
    cases=traces,
    run=_run,
)
