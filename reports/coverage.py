"""Which path decode steps took: how many ran specialised, or could have, by concurrency and context, and why the rest
did not.

A backend is judged by the best source that all of its finished blocks have: the step log of a server that we started,
the emulator's own log, the tables of --cudagraph-metrics, or, where the server tells nothing, a prediction from the
client's times. Only steps that gave decode tokens count, and only those of the measured windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from replay.records import SCHEMA_VERSION, STEP, STEP_MODES, Backend, GraphTable, PathRule, StepLog
from reports.chunks import Ints, slabs
from reports.run import Measurement, Run
from workloads.errors import UserError

SPECIALISED = "latency_specialized"

Source = Literal["step log", "emulator", "graph table", "prediction", "none"]

COVERED = ""
"""The class of steps that are counted; every other class is a reason."""
PROMPT = "prompt rows in the batch"
EAGER = "eager or PIECEWISE"
TOO_MANY = "too many rows"
RAGGED = "ragged drafts"
UNPREPARED = "size not prepared"
NOT_SHOWN = "batch not shown"
PREFILLING = "a request in prefill"
OPEN = (NOT_SHOWN, PREFILLING)
"""Reasons for which a step may be one of the counted ones all the same."""

ADVICE = {
    PROMPT: "Prompts share steps with decoding: raise the prefix-cache hit rate, give prefill fewer and larger chunks "
    "(a higher --max-num-batched-tokens), or move it to servers of its own.",
    PREFILLING: "Whether prompts really share steps with decoding cannot be seen from here: use the step log "
    "(serve.instrument), then raise the prefix-cache hit rate or give prefill servers of its own.",
    EAGER: "Decode steps run outside FULL CUDA graphs: set the cudagraph_mode to FULL_AND_PIECEWISE or "
    "FULL_DECODE_ONLY, leave out --enforce-eager, and have the sizes captured that occur.",
    TOO_MANY: "More requests decode at once than the specialised path takes: use fewer lanes per server or fewer draft "
    "tokens, or spread the load over more servers.",
    RAGGED: "Requests of one step verify different numbers of tokens: use a drafter that always proposes all of its "
    "draft tokens, without adaptive verification.",
    UNPREPARED: "Batches are padded to sizes that the specialised path does not run: have the sizes captured that it "
    "does (cudagraph_capture_sizes).",
    NOT_SHOWN: "The server does not show its batches: start it with --cudagraph-metrics, with one API server, and in "
    "older vLLM with VLLM_USE_V2_MODEL_RUNNER=0 (the V2 model runner of 0.26 counts no graphs, that of 0.32 does).",
}
"""What to do about each reason, when it is the most frequent."""

CONCURRENCY = ("1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "65+")
_CONCURRENCY_FROM = (2, 3, 5, 9, 17, 33, 65)
CONTEXT = ("0-2k", "2k-8k", "8k-32k", "32k-128k", "128k+")
_CONTEXT_FROM = (2 << 10, 8 << 10, 32 << 10, 128 << 10)

_SEEN = 0.98
"""A log with this share of the clients' tokens counts as whole: tokens at the edges of the window are not the same."""
_WORTH_ADVICE = 0.1
_ELIGIBLE = "would have been eligible"


class Stratum(msgspec.Struct, frozen=True, kw_only=True):
    """Decode steps of one concurrency, or decode tokens at one context length, or all of a backend's. ``shares`` are of
    its output tokens (of its steps where tokens are unknown), counted ones left out, by reason, the most frequent
    first: with the share that is counted they add up to 1. Null is unknown."""

    label: str
    steps: int | None
    tokens: int | None
    share_of_steps: float | None
    share_of_tokens: float | None
    reasons: dict[str, float]

    @property
    def share(self) -> float:
        """The share that is counted: of tokens, or of steps where tokens are unknown."""
        known = self.share_of_tokens if self.share_of_tokens is not None else self.share_of_steps
        assert known is not None  # a source knows one of them, and an empty stratum is left out
        return known


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
        return self.source in ("step log", "emulator")


_COUNTS: dict[str, Any] = {
    "by": pl.String,
    "bin": pl.Int64,
    "class": pl.String,
    "steps": pl.Int64,
    "tokens": pl.Int64,
    "full": pl.Int64,
}
"""One block's sums: by "concurrency" (index into CONCURRENCY, -1 if unknown) or "context" (into CONTEXT). ``full``:
tokens of steps in FULL graphs without prompt rows."""


class Stretch(msgspec.Struct, frozen=True):
    """A measured stretch of time whose decode steps are judged: the window of a block, or part of it. ``turns``: the
    measured ones (reports.measures.measured). ``steps``: folder of the step log."""

    of: Measurement
    turns: pl.DataFrame
    steps: Path
    start_ns: int
    end_ns: int


_Read = Callable[[Stretch, PathRule | None], pl.DataFrame | None]


def coverage(run: Run, by_block: list[pl.DataFrame]) -> list[PathCoverage]:
    """The path coverage of both backends, baseline first. ``by_block``: measured turns of each finished block
    (reports.measures.measured). Raises UserError for a damaged log."""
    backends = run.manifest.backends
    stretches: dict[str, list[Stretch]] = {backend.name: [] for backend in backends}
    for loaded, turns in zip(run.blocks, by_block, strict=True):
        block = loaded.block
        assert block.ended_ns is not None  # reports.run judges finished blocks only
        steps = steps_folder(run.path, loaded)
        stretches[block.backend].append(Stretch(loaded, turns, steps, block.started_ns, block.ended_ns))
    return [covered(backend, rule_for(backend, backends), stretches[backend.name]) for backend in backends]


def rule_for(backend: Backend, backends: list[Backend]) -> PathRule | None:
    """A backend's own rule; one that is not to run specialised is held against the other's, so that the same steps can
    be told on both sides."""
    if backend.path is not None or backend.decode_backend == SPECIALISED:
        return backend.path
    return next((other.path for other in backends if other.path is not None), None)


def covered(backend: Backend, rule: PathRule | None, stretches: list[Stretch]) -> PathCoverage:
    """The path coverage of one backend over stretches of time. Raises UserError for a damaged log."""
    heads = [head for folder in {stretch.steps for stretch in stretches} for head, _ in _logs(folder)]
    set_by_server = sorted({head.decode_backend or "not set" for head in heads})
    found = ((source, _all(stretches, rule, read)) for source, read in _SOURCES)
    best = next(((source, counts) for source, counts in found if counts is not None), None)
    if best is None:
        return PathCoverage(
            backend=backend.name, source="none", means=_MEANS["none"], counted="", total=None, at_least=None,
            at_most=None, full_graphs=None, by_concurrency=[], by_context=[], set_by_server=set_by_server,
            advice="", notes=[],
        )  # fmt: skip
    source, counts = best
    steps = counts.filter(pl.col("by") == "concurrency")
    total = _stratum("all", steps)
    by_context = _strata(counts.filter(pl.col("by") == "context"), CONTEXT)
    seen, notes = 1.0, _notes(source, heads)
    if source in ("step log", "emulator") and total.tokens:
        received = sum(stratum.tokens or 0 for stratum in by_context)
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
        full_graphs=_ratio(int(steps["full"].sum()), total.tokens) if source == "step log" else None,
        by_concurrency=_strata(steps, CONCURRENCY),
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


def _notes(source: Source, heads: list[StepLog]) -> list[str]:
    notes = []
    if source == "step log":
        if not all(head.cudagraph_metrics for head in heads):
            notes.append("Without --cudagraph-metrics the log shows no batch sizes and no graph modes")
        if len({head.engine for head in heads}) > 1:
            notes.append("Several engines: chunks are assigned to the nearest step of any of them")
    return notes


def _all(stretches: list[Stretch], rule: PathRule | None, read: _Read) -> pl.DataFrame | None:
    """The counts of all stretches; None unless the source has some for each."""
    found = []
    for stretch in stretches:
        counts = read(stretch, rule)
        if counts is None or not len(counts):
            return None
        found.append(counts)
    return pl.concat(found) if found else None


# The step log


def steps_folder(run: Path, measured: Measurement) -> Path:
    """Of the server's start, or what was copied from a server that we did not start."""
    return (run / measured.server if measured.server is not None else measured.path) / "steps"


def _logs(folder: Path) -> list[tuple[StepLog, Path]]:
    """Heads and record files, one of each engine and process."""
    found = []
    for head in sorted(folder.glob("*.json")):
        try:
            read = msgspec.json.decode(head.read_bytes(), type=StepLog)
        except msgspec.MsgspecError as error:
            raise UserError(f"{head} is damaged: {error}. Move it away to judge the run without it") from None
        if read.schema_version > SCHEMA_VERSION:
            raise UserError(f"{head} has schema_version {read.schema_version}: upgrade decodegate")
        found.append((read, head.with_suffix(".bin")))
    return found


def _from_step_log(stretch: Stretch, rule: PathRule | None) -> pl.DataFrame | None:
    parts = []
    for _, file in _logs(stretch.steps):
        records = file.stat().st_size // STEP.itemsize if file.exists() else 0
        if not records:
            continue
        steps = np.memmap(file, dtype=STEP, mode="r", shape=(records,))  # a torn last record is left out
        inside = (steps["t_ns"] >= stretch.start_ns) & (steps["t_ns"] <= stretch.end_ns)
        inside &= steps["decode_tokens"] > 0
        parts.append(steps[inside])
    if not parts:
        return None
    log = np.concatenate(parts)
    columns = {name: log[name].astype(np.int64) for name in _STEP_COLUMNS}
    return _counts(stretch, classified(pl.DataFrame(columns), rule))


_STEP_COLUMNS = (
    "t_ns", "prompt_tokens", "first_tokens", "decode_tokens", "unpadded", "padded", "draft_requests", "draft_tokens",
    "accepted_tokens", "mode",
)  # fmt: skip


def classified(log: pl.DataFrame, rule: PathRule | None) -> pl.DataFrame:
    """Decode steps from STEP records (fields as columns) with ``t_ns``, ``steps``, ``tokens``, ``decoding`` (requests),
    ``class`` and ``full`` (FULL graph without prompt rows).

    By ``rule`` a step is counted if it is a FULL graph, holds no prompt rows, no more requests than the rule allows,
    every one with as many tokens, and was padded to one of its sizes; without a rule the first two alone.
    """
    known = log.with_columns(pl.col("draft_requests", "draft_tokens", "accepted_tokens").clip(lower_bound=0))
    # Either is exact but for a case of its own: requests without drafts, and drafts beyond a reply's last token.
    decoding = pl.max_horizontal("draft_requests", pl.col("decode_tokens") - pl.col("accepted_tokens"))
    shown = pl.col("unpadded") >= 0
    prompt = (pl.col("prompt_tokens") > 0) | (pl.col("first_tokens") > 0)
    full = pl.col("mode") == STEP_MODES.index("FULL")
    others = [STEP_MODES.index(mode) for mode in ("NONE", "PIECEWISE") if mode not in _modes(rule)]
    reasons = [(prompt, PROMPT), (pl.col("mode").is_in(others), EAGER)]
    if rule is not None:
        each = rule.tokens_per_request
        # With async scheduling a request that ended in the step before takes a row once more, and yields nothing.
        rows = pl.max_horizontal("decoding", pl.col("unpadded") // each)
        even = (
            (pl.col("unpadded") == rows * each)
            & (pl.col("draft_tokens") == pl.col("draft_requests") * (each - 1))
            & ((pl.col("draft_requests") > 0) | (each == 1))
        )
        reasons += [
            (rows > rule.max_requests, TOO_MANY),
            (shown & ~even, RAGGED),
            (shown & ~pl.col("padded").is_in(rule.sizes), UNPREPARED),
        ]
    return known.with_columns(decoding=decoding).select(
        "t_ns",
        "decoding",
        _class([*reasons, (~shown | (pl.col("mode") == STEP_MODES.index("unknown")), NOT_SHOWN)]),
        steps=pl.lit(1, pl.Int64),
        tokens=pl.col("decode_tokens"),
        full=full & ~prompt,
    )


def _modes(rule: PathRule | None) -> tuple[str, ...]:
    """CUDA-graph modes whose steps count."""
    return ("FULL",) if rule is None or rule.graphs_only else ("FULL", "NONE")


# The emulator's log


_EMULATED: dict[str, Any] = {
    "t_ns": pl.Int64,
    "end_ns": pl.Int64,
    "steps": pl.Int64,
    "rows": pl.Int64,
    "prompt_tokens": pl.Int64,
    "decode_tokens": pl.Int64,
    "specialised": pl.Boolean,
    "reason": pl.String,
}
_EMULATED_REASONS = {
    "prompt rows": PROMPT,
    "uneven drafts": RAGGED,
    "over 64 tokens": TOO_MANY,
    "no captured size": UNPREPARED,
    "": "no reason given",
}


def _from_emulator(stretch: Stretch, _: PathRule | None) -> pl.DataFrame | None:
    file = stretch.of.path / "server" / "steps.jsonl"
    if not file.exists():
        return None
    lines = file.read_bytes().rpartition(b"\n")[0]  # without what a kill left of the last line
    try:
        log = pl.read_ndjson(lines, schema=_EMULATED)
    except pl.exceptions.ComputeError as error:
        raise UserError(f"{file} is damaged: {error}. Move it away to judge the run without it") from None
    log = _within(log, stretch.start_ns, stretch.end_ns)
    return _counts(
        stretch,
        log.select(
            pl.when("specialised")
            .then(pl.lit(COVERED))
            .otherwise(pl.col("reason").replace(_EMULATED_REASONS))
            .alias("class"),
            # when the run's first step had ended, and its tokens came
            t_ns=pl.col("t_ns") + (pl.col("end_ns") - pl.col("t_ns")) // pl.col("steps"),
            steps=pl.col("steps"),
            tokens=pl.col("decode_tokens"),
            decoding=pl.when(pl.col("prompt_tokens") > 0)
            .then(pl.min_horizontal(pl.col("rows") - 1, "decode_tokens"))  # at most: some of its rows are of prompts
            .otherwise(pl.col("rows")),
            full=pl.lit(False),
        ),
    )


def _within(log: pl.DataFrame, start_ns: int, end_ns: int) -> pl.DataFrame:
    """Decode steps between two times; of a run of steps that reaches beyond them, the steps and tokens of its share."""
    begins, ends = pl.max_horizontal("t_ns", pl.lit(start_ns)), pl.min_horizontal("end_ns", pl.lit(end_ns))
    steps = (pl.col("steps") * (ends - begins) / (pl.col("end_ns") - pl.col("t_ns"))).round()
    inside = log.filter((pl.col("end_ns") > start_ns) & (pl.col("t_ns") < end_ns) & (pl.col("end_ns") > pl.col("t_ns")))
    return inside.with_columns(
        steps.cast(pl.Int64),
        (pl.col("decode_tokens") * steps / pl.col("steps")).round().cast(pl.Int64),
        t_ns=begins,
        end_ns=ends,
    ).filter((pl.col("steps") > 0) & (pl.col("decode_tokens") > 0))


# The tables of --cudagraph-metrics


def _from_graph_table(stretch: Stretch, rule: PathRule | None) -> pl.DataFrame | None:
    file = stretch.of.path / "graph_table.json"
    if not file.exists():
        return None
    try:
        table = msgspec.json.decode(file.read_bytes(), type=GraphTable)
    except msgspec.MsgspecError as error:
        raise UserError(f"{file} is damaged: {error}. Move it away to judge the run without it") from None
    schema = {"unpadded": pl.Int64, "padded": pl.Int64, "mode": pl.String, "count": pl.Int64}
    rows = [msgspec.structs.astuple(each) for each in table.counts if each.count > 0]
    counts = pl.DataFrame(rows, schema=schema, orient="row")
    reasons = [(~pl.col("mode").is_in(_modes(rule)), EAGER)]
    if rule is not None:
        each = rule.tokens_per_request
        reasons += [
            (pl.col("unpadded") > rule.max_requests * each, TOO_MANY),
            (pl.col("unpadded") % each != 0, RAGGED),
            (~pl.col("padded").is_in(rule.sizes), UNPREPARED),
        ]
    sums = counts.group_by(_class(reasons)).agg(steps=pl.col("count").sum())
    unknown = {"by": pl.lit("concurrency"), "bin": pl.lit(-1), "tokens": pl.lit(None), "full": pl.lit(0)}
    return sums.with_columns(**unknown).select(pl.col(name).cast(kind) for name, kind in _COUNTS.items())


# The prediction


def _predicted(stretch: Stretch, rule: PathRule | None) -> pl.DataFrame | None:
    """Each decode chunk classified by the requests in flight at its arrival, as the client knows them."""
    if rule is None:
        return None
    rows = stretch.turns
    streamed = rows.filter(pl.col("first_token_ns").is_not_null() & pl.col("last_token_ns").is_not_null())
    first, last = (np.sort(streamed[name].to_numpy()) for name in ("first_token_ns", "last_token_ns"))
    sent = np.sort(rows["sent_ns"].to_numpy())
    answered = np.sort(rows["first_token_ns"].fill_null(rows["end_ns"]).to_numpy())
    reasons = [
        (pl.col("decoding") > rule.max_requests, TOO_MANY),
        (pl.col("decoding") * rule.tokens_per_request > max(rule.sizes, default=0), UNPREPARED),
        (pl.col("prefilling") > 0, PREFILLING),
    ]
    found = []
    for context, t_ns, tokens in _decode_chunks(stretch):
        decoding = np.searchsorted(first, t_ns, side="right") - np.searchsorted(last, t_ns, side="left")
        prefilling = np.searchsorted(sent, t_ns, side="right") - np.searchsorted(answered, t_ns, side="right")
        chunks = pl.DataFrame({"decoding": decoding, "prefilling": prefilling, "tokens": tokens})
        chunks = chunks.with_columns(_class(reasons), steps=pl.lit(None, pl.Int64), full=pl.lit(False))
        found += [_by_concurrency(chunks), _by_context(context, chunks["class"], tokens)]
    return pl.concat(found) if found else None


_SOURCES: list[tuple[Source, _Read]] = [
    ("step log", _from_step_log),
    ("emulator", _from_emulator),
    ("graph table", _from_graph_table),
    ("prediction", _predicted),
]
"""The best first."""


# Counting


def _class(reasons: list[tuple[pl.Expr, str]]) -> pl.Expr:
    """The column ``class``: the first reason whose condition holds, or COVERED."""
    found: pl.Expr = pl.lit(COVERED)
    for condition, reason in reversed(reasons):
        found = pl.when(condition).then(pl.lit(reason)).otherwise(found)
    return found.alias("class")


def _counts(stretch: Stretch, steps: pl.DataFrame) -> pl.DataFrame | None:
    """Sums over decode steps by concurrency, and over the client's decode chunks by context: a chunk is of the step
    whose tokens came last before it. ``steps`` is as ``classified`` gives it; None if it is empty."""
    if not len(steps):
        return None
    steps = steps.sort("t_ns")
    found = [_by_concurrency(steps)]
    came = steps["t_ns"].to_numpy()
    for context, t_ns, tokens in _decode_chunks(stretch):
        at = np.maximum(np.searchsorted(came, t_ns, side="right") - 1, 0)
        found.append(_by_context(context, steps["class"].gather(at), tokens))
    return pl.concat(found)


def _decode_chunks(stretch: Stretch) -> Iterator[tuple[Ints, Ints, Ints]]:
    """(context, t_ns, tokens) of every chunk that arrived in the stretch, first chunks left out. Context: the
    request's tokens before it, prompt and output."""
    rows = stretch.turns
    prompt = rows["input_tokens"].fill_null(rows["asked_input"]).to_numpy()
    for row, t_ns, tokens in slabs(stretch.of, rows):
        starts = np.flatnonzero(np.diff(row, prepend=-1))
        before = np.cumsum(tokens) - tokens
        output = before - np.repeat(before[starts], np.diff(np.append(starts, len(row))))
        kept = (t_ns >= stretch.start_ns) & (t_ns <= stretch.end_ns) & (tokens > 0)
        kept[starts] = False
        yield (prompt[row] + output)[kept], t_ns[kept], tokens[kept]


def _by_concurrency(steps: pl.DataFrame) -> pl.DataFrame:
    bins = np.searchsorted(_CONCURRENCY_FROM, steps["decoding"].to_numpy(), side="right")
    known = "steps" if steps["steps"].null_count() == 0 else None
    return _summed(steps.with_columns(bin=bins), "concurrency", known)


def _by_context(context: npt.NDArray[np.int64], classes: pl.Series, tokens: Ints) -> pl.DataFrame:
    bins = np.searchsorted(_CONTEXT_FROM, context, side="right")
    chunks = pl.DataFrame({"bin": bins, "class": classes, "tokens": tokens}).with_columns(full=pl.lit(False))
    return _summed(chunks, "context", None)


def _summed(rows: pl.DataFrame, by: str, steps: str | None) -> pl.DataFrame:
    sums = rows.group_by("bin", "class").agg(
        steps=pl.col(steps).sum() if steps else pl.lit(None, pl.Int64),
        tokens=pl.col("tokens").sum(),
        full=pl.col("tokens").filter(pl.col("full")).sum(),
    )
    return sums.with_columns(by=pl.lit(by)).select(pl.col(name).cast(kind) for name, kind in _COUNTS.items())


def _strata(counts: pl.DataFrame, labels: tuple[str, ...]) -> list[Stratum]:
    found = ((label, counts.filter(pl.col("bin") == index)) for index, label in enumerate(labels))
    return [_stratum(label, part) for label, part in found if len(part)]


def _stratum(label: str, counts: pl.DataFrame) -> Stratum:
    steps, tokens = _known(counts["steps"]), _known(counts["tokens"])
    by_class = counts.group_by("class").agg(pl.col("steps", "tokens").sum())
    unit, whole = ("tokens", tokens) if tokens is not None else ("steps", steps)
    rest = by_class.filter((pl.col("class") != COVERED) & (pl.col(unit) > 0))
    rest = rest.sort([unit, "class"], descending=[True, False])
    covered = counts.filter(pl.col("class") == COVERED)
    return Stratum(
        label=label,
        steps=steps,
        tokens=tokens,
        share_of_steps=_ratio(int(covered["steps"].sum()), steps),
        share_of_tokens=_ratio(int(covered["tokens"].sum()), tokens),
        reasons={str(name): part / whole for name, part in rest.select("class", unit).iter_rows()} if whole else {},
    )


def _known(values: pl.Series) -> int | None:
    return int(values.sum()) if values.null_count() < len(values) else None


def _ratio(part: int, whole: int | None) -> float | None:
    return part / whole if whole else None
