"""P4: short replies from many points of the traces, with what comes before the point in the prompt.

The first token comes from the prefill, the others from decode. Half of the points lie next to edges of cache blocks,
where a prefix that was restored wrongly shows. Each batch has one point of several traces, and a trace's points come in
order, so that later ones find the earlier ones' prefix where a server caches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from evals.parity.asking import width
from evals.parity.check import Budget, Check, Given, Situation
from evals.parity.checks.t0 import BASE, of
from evals.parity.traces import in_step, probe
from evals.records import Case

TRACES: dict[Budget, int] = {"quick": 16, "standard": 40, "full": 208}
POINTS: dict[Budget, int] = {"quick": 10, "standard": 16, "full": 16}
"""Of each trace."""
TOKENS = 16
WIDTH = 8

EDGE, BETWEEN = "block edge", "between"


def points(prompt: int, trace: int, block: int, count: int) -> list[tuple[int, str]]:
    """Where to cut: ``count`` numbers of trace tokens, spread, half of them a token before, at and after the ends of
    blocks (counted from the start of the prompt). Fewer where the trace is short, or has no block's end in it."""
    half = count // 2
    parts = [(2 * index + 1, 2 * half) for index in range(half)]
    found = {1 + trace * part // whole: BETWEEN for part, whole in parts}
    edges = range(block - prompt % block, trace, block)
    if edges:
        found |= {edges[len(edges) * part // whole] + index % 3 - 1: EDGE for index, (part, whole) in enumerate(parts)}
    return sorted((at, kind) for at, kind in found.items() if 0 < at <= trace)


def _cases(situation: Situation) -> list[Case]:
    base = of(situation, BASE)[: TRACES[situation.budget]]
    by_trace = []
    for trace in base:
        room = min(trace.output_tokens, situation.max_context - trace.prompt_tokens - TOKENS)
        cuts = points(trace.prompt_tokens, room, situation.block, POINTS[situation.budget])
        by_trace.append([(trace, at, kind) for at, kind in cuts])
    asked = []
    for first in range(0, len(base), size := width(situation, WIDTH)):
        for row in zip_longest(*by_trace[first : first + size]):
            lot = [each for each in row if each is not None]
            asked += [(trace, at, kind, len(lot)) for trace, at, kind in lot]
    return [
        probe(trace, number, at, batch=batch, tokens=TOKENS, variant=kind)
        for number, (trace, at, kind, batch) in enumerate(asked)
    ]


async def _run(given: Given, cases: Sequence[Case]) -> None:
    await in_step(given, cases, "P4")


CHECK = Check(
    id="P4",
    title="Cut points",
    finds="wrong numbers in decode on any server; a prefix that was restored wrongly",
    statistic="outliers of the logprob while the replies agree, and first differences",
    needs=frozenset({"token ids"}),
    cases=_cases,
    run=_run,
)
