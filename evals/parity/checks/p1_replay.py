"""P1: the reference traces forced through the decode path, at several batch sizes. P2 (outliers) is judged on what P1
and P7 record: it asks nothing of its own.

105 prompts see a mean KL that is up by half; 2,000 positions a token in 500; 20 traces of 16k a drift.
"""

from __future__ import annotations

from collections.abc import Sequence

from evals.parity.asking import lots, width
from evals.parity.check import Budget, Check, Given, Situation
from evals.parity.checks.t0 import BASE, LONG, of
from evals.parity.traces import forced, in_step
from evals.records import Case

REPLAYED: dict[Budget, dict[int, int]] = {
    "quick": {1: 2, 8: 16},
    "standard": {1: 16, 8: 112, 32: 96},
    "full": {1: 48, 8: 208, 32: 192},
}
"""Base traces replayed at each batch size, in full batches."""
LONG_BATCH = 8
"""Long traces are replayed at this size, all of them."""


def _cases(situation: Situation) -> list[Case]:
    base, long = of(situation, BASE), of(situation, LONG)
    counts: dict[int, int] = {}
    for batch, count in REPLAYED[situation.budget].items():
        counts.setdefault(width(situation, batch), count)
    replays = [(trace, size) for size, count in counts.items() for trace in _whole(base[:count], size)]
    size = width(situation, LONG_BATCH)
    replays += [(trace, size) for trace in _whole(long, size)]
    return [forced(trace, number, batch=size) for number, (trace, size) in enumerate(replays)]


def _whole(traces: list[Case], size: int) -> list[Case]:
    """As many as fill batches."""
    return [traces[index] for lot in lots(len(traces), size) if len(lot) == size for index in lot]


async def _run(given: Given, cases: Sequence[Case]) -> None:
    await in_step(given, cases, "P1")


CHECK = Check(
    id="P1",
    title="Trace replay",
    finds="wrong or less exact numbers in decode: corrupt tokens, drift, lower precision",
    statistic="mean top-20 KL against the floor, by prompt; outliers of the forced token's logprob (P2)",
    needs=frozenset({"token ids", "logprobs", "trace replay"}),
    cases=_cases,
    run=_run,
    instead="P3 and P4: replies are compared up to their first difference alone, so that rare errors take many times "
    "the tokens, and drift and lower precision may not be seen",
)
