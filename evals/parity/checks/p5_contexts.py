"""P5: decode at long contexts: traces of T0 forced behind long prompts, each alone.

Five traces of 256 tokens see a cache that is read wrongly beyond a context. Without trace replay the traces are cut
instead (see P4): first at the prompt's end, then further on.
"""

from __future__ import annotations

from collections.abc import Sequence

from evals.parity.check import Check, Given, Situation
from evals.parity.checks.t0 import CONTEXT, of
from evals.parity.traces import forced, in_step, probe
from evals.records import Case

CUTS = 2
"""Of each trace."""
PROBE = 64
"""Tokens of the reply from a cut."""


def _cases(situation: Situation) -> list[Case]:
    traces = of(situation, CONTEXT)
    if {"trace replay", "logprobs"} <= situation.has:
        return [forced(trace, number, batch=1, variant="replay") for number, trace in enumerate(traces)]
    cuts = [(trace, trace.output_tokens * part // CUTS) for trace in traces for part in range(CUTS)]
    return [
        probe(trace, number, at, batch=1, tokens=min(PROBE, trace.output_tokens // CUTS), variant="cut")
        for number, (trace, at) in enumerate(cuts)
    ]


async def _run(given: Given, cases: Sequence[Case]) -> None:
    await in_step(given, cases, "P5")


CHECK = Check(
    id="P5",
    title="Contexts",
    finds="wrong numbers beyond a context",
    statistic="as P1, by context, with a trend; without trace replay as P4",
    needs=frozenset({"token ids"}),
    cases=_cases,
    run=_run,
)
