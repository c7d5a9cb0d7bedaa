"""Reference traces (check T0) asked for again: forced through the decode path, or as part of a prompt.

What is forced is equal on all arms, so every position can be compared, also behind an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from msgspec.structs import replace

from evals.parity.asking import ask, groups, record
from evals.parity.check import Given
from evals.parity.endpoint import Ask
from evals.parity.http_replies import nothing
from evals.parity.prompts import cut
from evals.records import Case

STREAMED = 4096
"""Replies of more tokens come as streams, where a server has them: a whole one would pass through memory as text."""


def label(tokens: int) -> str:
    """A context for reading: 200, 8k, 128k-64."""
    if tokens < 1024:
        return str(tokens)
    thousands = round(tokens / 1024)
    rest = tokens - thousands * 1024
    return f"{thousands}k{rest:+}" if rest else f"{thousands}k"


def stratum(context: int, batch: int) -> dict[str, str]:
    """What judging tells cases apart by."""
    return {"context": label(context), "batch": str(batch)}


def forced(trace: Case, number: int, *, batch: int, tokens: int | None = None, variant: str = "") -> Case:
    """The case that forces the first ``tokens`` ids of a trace, by default all, ``batch`` cases at a time."""
    return replace(
        free(trace, number, batch=batch, tokens=tokens or trace.output_tokens, variant=variant), trace=trace.number
    )


def free(trace: Case, number: int, *, batch: int, tokens: int, variant: str = "") -> Case:
    """The case that replies greedily to a trace's prompt, no longer than the trace."""
    return replace(
        trace,
        number=number,
        output_tokens=min(tokens, trace.output_tokens),
        batch=batch,
        seed=None,
        temperature=0.0,
        top_p=1.0,
        stratum=stratum(trace.prompt_tokens, batch),
        variant=variant or trace.variant,
    )


def probe(trace: Case, number: int, at: int, *, batch: int, tokens: int, variant: str = "") -> Case:
    """The case that replies greedily, ``tokens`` long, to a trace's prompt and its first ``at`` ids."""
    plain = free(trace, number, batch=batch, tokens=tokens, variant=variant)
    return replace(plain, output_tokens=tokens, trace=trace.number, cut=at)


async def in_step(given: Given, cases: Sequence[Case], salt: str, **other: Any) -> None:
    """Ask and record cases, those of a batch at once. ``salt`` and ``other`` as in asking.ask."""
    for group in groups(cases):
        await _together(given, group, salt, other)


async def in_lanes(given: Given, cases: Sequence[Case], salt: str, **other: Any) -> None:
    """Likewise, but whenever a request ends the next one joins: runs of cases of one ``batch`` keep so many busy."""
    for batch, run in groupby(cases, key=lambda each: each.batch):
        waiting = iter(list(run))
        async with asyncio.TaskGroup() as lanes:
            for _ in range(batch):
                lanes.create_task(_lane(given, waiting, salt, other))


async def _lane(given: Given, waiting: Iterator[Case], salt: str, other: dict[str, Any]) -> None:
    for each in waiting:  # which all lanes take from
        await _together(given, [each], salt, other)


async def _together(given: Given, group: Sequence[Case], salt: str, other: dict[str, Any]) -> None:
    asks = {each.number: _ask(given, each, salt, other) for each in group}
    sent = [request for request in asks.values() if request is not None]
    came = iter(await given.endpoint.generate(sent))
    for each in group:
        found = nothing("no trace") if asks[each.number] is None else next(came)[0]
        record(given, each, found)


def _ask(given: Given, case: Case, salt: str, other: dict[str, Any]) -> Ask | None:
    """Null: its trace is missing, or not long enough."""
    stream = case.output_tokens > STREAMED and "streaming" in given.endpoint.has
    plain = ask(given, case, salt, **{"stream": stream, **other})
    if case.trace is None:
        return plain
    trace = given.traces.get(case.trace)
    if trace is None or trace.size < (case.output_tokens if case.cut is None else case.cut):
        return None
    if case.cut is None:
        return replace(plain, force=trace[: case.output_tokens])
    return replace(plain, prompt=cut(plain.prompt, trace.tolist(), case.cut))
