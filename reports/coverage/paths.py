"""The path of a backend's decode steps, by the best source that tells of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec
import polars as pl

from replay.records import Backend, PathRule, StepLog
from reports.coverage import emulator, graph_table, prediction, step_log
from reports.coverage.classes import ADVICE, OPEN
from reports.coverage.strata import CONCURRENCY, CONTEXT, Stratum, ratio, strata, stratum
from reports.coverage.stretches import Stretch, stretch_of
from reports.run import Run

SPECIALISED = "latency_specialized"

Source = Literal["step log", "emulator", "graph table", "prediction", "none"]

_SEEN = 0.98
"""A log with this share of the clients' tokens counts as whole: tokens at the edges of the window are not the same."""
_WORTH_ADVICE = 0.1
_ELIGIBLE = "would have been eligible"


class PathCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the path that one backend's decode steps took, over the measured windows of its blocks."""

    backend: str
    source: Source
    means: str
    """Where the figures come from, in sentences."""
    counted: str
    """What the share is the share of."""
    total: Stratum | None
    """Null without a source."""
    at_least: float | None
    at_most: float | None
    """Bounds of the share of tokens (or steps) that is counted: steps that are not shown, or are missing in the log,
    may be of either kind."""
    full_graphs: float | None
    """Share of decode tokens of steps in FULL graphs without prompt rows, whatever their size; by the step log only."""
    by_concurrency: list[Stratum]
    """By decoding requests in the step."""
    by_context: list[Stratum]
    """By the request's tokens so far. Tokens as the client counted them; ``steps`` are null."""
    set_by_server: list[str]
    """decode_backend as the servers' own configurations have it, each once; "not set" where one has none."""
    advice: str
    notes: list[str]

    @property
    def measured(self) -> bool:
        """By the server's own log of steps."""
        return self.source in MEASURED


MEASURED: tuple[Source, ...] = ("step log", "emulator")
"""The sources that are a server's own log of its steps."""

_SOURCES: list[tuple[Source, Callable[[Stretch, PathRule | None], pl.DataFrame | None]]] = [
    ("step log", step_log.counts),
    ("emulator", emulator.counts),
    ("graph table", graph_table.counts),
    ("prediction", prediction.counts),
]
"""The best first."""


def coverage(run: Run, by_block: list[pl.DataFrame]) -> list[PathCoverage]:
    """The path coverage of both backends, baseline first. ``by_block``: measured turns of each finished block
    (reports.measures.measured). Raises UserError for a damaged log."""
    backends = run.manifest.backends
    stretches: dict[str, list[Stretch]] = {backend.name: [] for backend in backends}
    for loaded, turns in zip(run.blocks, by_block, strict=True):
        block = loaded.block
        assert block.ended_ns is not None  # reports.run judges finished blocks only
        stretches[block.backend].append(stretch_of(run.path, loaded, turns, block.started_ns, block.ended_ns))
    return [covered(backend, rule_for(backend, backends), stretches[backend.name]) for backend in backends]


def rule_for(backend: Backend, backends: list[Backend]) -> PathRule | None:
    """A backend's own rule; one that is not to run specialised is held against the other's, so that the same steps can
    be told on both sides."""
    if backend.path is not None or backend.decode_backend == SPECIALISED:
        return backend.path
    return next((other.path for other in backends if other.path is not None), None)


def covered(backend: Backend, rule: PathRule | None, stretches: list[Stretch]) -> PathCoverage:
    """The path coverage of one backend over stretches of time, by the best source that tells of all of them. Raises
    UserError for a damaged log."""
    return summed(backend, rule, stretches, *told(stretches, rule, all))


def told(
    stretches: list[Stretch], rule: PathRule | None, enough: Callable[[Iterable[bool]], bool]
) -> tuple[Source, list[pl.DataFrame | None]]:
    """The best source that tells of ``enough`` (all or any) of the stretches, and its strata.COUNTS of each; null where
    it has no decode steps. Raises UserError for a damaged log."""
    for source, read in _SOURCES:
        counts = [found if (found := read(stretch, rule)) is not None and len(found) else None for stretch in stretches]
        if counts and enough(found is not None for found in counts):
            return source, counts
    return "none", [None] * len(stretches)


def summed(
    backend: Backend,
    rule: PathRule | None,
    stretches: list[Stretch],
    source: Source,
    counts: list[pl.DataFrame | None],
    received: int | None = None,
) -> PathCoverage:
    """The path coverage that a source tells of, ``counts`` being those of ``told``. ``received``: decode tokens of the
    replies; null: as their streams have them."""
    heads = [head for folder in {stretch.steps for stretch in stretches} for head, _ in step_log.logs(folder)]
    set_by_server = sorted({head.decode_backend or "not set" for head in heads})
    if source == "none":
        return PathCoverage(
            backend=backend.name, source="none", means=_MEANS["none"], counted="", total=None, at_least=None,
            at_most=None, full_graphs=None, by_concurrency=[], by_context=[], set_by_server=set_by_server,
            advice="", notes=[],
        )  # fmt: skip
    found = pl.concat([each for each in counts if each is not None])
    steps = found.filter(pl.col("by") == "concurrency")
    total = stratum("all", steps)
    by_context = strata(found.filter(pl.col("by") == "context"), CONTEXT)
    seen, notes = 1.0, _notes(source, heads, by_context)
    if source in MEASURED and total.tokens:
        if received is None:
            received = sum(each.tokens or 0 for each in by_context)
        if received * _SEEN > total.tokens:
            seen = total.tokens / received
            notes.append(f"The log holds only {seen:.1%} of the decode tokens that clients received: steps are missing")
    share = total.share
    counted = _counted(source, backend, rule, set_by_server)
    leading = next(iter(total.reasons), "")
    advice = ADVICE.get(leading, "") if 1 - share >= _WORTH_ADVICE and counted != _ELIGIBLE else ""
    return PathCoverage(
        backend=backend.name,
        source=source,
        means=_MEANS[source].format(rule=f"{rule.model} ({rule.source})" if rule else "") + _by_rule(source, rule),
        counted=counted,
        total=total,
        at_least=share * seen,
        at_most=1 - (1 - share - sum(total.reasons.get(reason, 0.0) for reason in OPEN)) * seen,
        full_graphs=ratio(int(steps["full"].sum()), total.tokens) if source == "step log" else None,
        by_concurrency=strata(steps, CONCURRENCY),
        by_context=by_context,
        set_by_server=set_by_server,
        advice=advice,
        notes=notes,
    )


_MEANS: dict[Source, str] = {
    "step log": "Measured: every decode step of the measured windows, as the server's own counters describe it.",
    "emulator": "Measured: the emulator's own log of its steps.",
    "graph table": "Not measured over the window: the tables of --cudagraph-metrics in the server's log, which count "
    "steps by size and graph mode. Shares are of steps, those of prefill alone among them, and not of output tokens; "
    "whether a batch held prompt rows is unknown.",
    "prediction": "Predicted, not measured: from the client's own times, how many requests decoded as each chunk "
    "arrived, held against the rule of {rule}. A request in prefill keeps steps off the specialised path for part of "
    "its time only, so its share is an upper bound and the true share lies in between.",
    "none": "The server does not tell which path its decode steps took, and no rule is known to predict it from.",
}


def _by_rule(source: Source, rule: PathRule | None) -> str:
    if source not in ("step log", "graph table"):
        return ""
    if rule is None:
        return " No rule of a specialised path is known for this deployment, so no step can be called specialised."
    return f" Which steps the specialised path takes: the rule of {rule.model} ({rule.source})."


def _counted(source: Source, backend: Backend, rule: PathRule | None, set_by_server: list[str]) -> str:
    if source == "emulator":
        return "specialised"
    if source == "prediction":
        return "predicted to fit the specialised path"
    if rule is None:
        return "pure decode in FULL graphs" if source == "step log" else "in FULL graphs"
    if source == "graph table":
        return "in FULL graphs of the specialised path's sizes"
    runs = backend.decode_backend == SPECIALISED and not rule.problems and set_by_server == [SPECIALISED]
    return "specialised" if runs else _ELIGIBLE


def _notes(source: Source, heads: list[StepLog], by_context: list[Stratum]) -> list[str]:
    notes = []
    if source == "step log":
        if not all(head.cudagraph_metrics for head in heads):
            notes.append("Without --cudagraph-metrics the log shows no batch sizes and no graph modes")
        if by_context and len({head.engine for head in heads}) > 1:
            notes.append("Several engines: chunks are assigned to the nearest step of any of them")
    return notes
