"""The classes of decode steps: counted, or why not; and what to do about each reason."""

from __future__ import annotations

import polars as pl

from replay.records import PathRule

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


def class_of(reasons: list[tuple[pl.Expr, str]]) -> pl.Expr:
    """The column ``class``: the first reason whose condition holds, or COVERED."""
    found: pl.Expr = pl.lit(COVERED)
    for condition, reason in reversed(reasons):
        found = pl.when(condition).then(pl.lit(reason)).otherwise(found)
    return found.alias("class")


def counted_modes(rule: PathRule | None) -> tuple[str, ...]:
    """CUDA-graph modes whose steps count."""
    return ("FULL",) if rule is None or rule.graphs_only else ("FULL", "NONE")
