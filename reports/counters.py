"""A server's own counters over the measured windows: what /metrics said at their edges and in between."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec
import polars as pl

from replay.records import MetricsSample
from reports.run import Measurement, Run

Sample = tuple[str, dict[str, str], float]


class Delta(msgspec.Struct, frozen=True):
    """By how much one series of a counter, or of a histogram's sum or count, grew. ``reset``: it was below what it had
    been, so that the server was started anew in between, and ``value`` is only what it counted since."""

    name: str
    """Without "vllm:" and without "_total"."""
    labels: dict[str, str]
    value: float
    reset: bool


class Work(msgspec.Struct, frozen=True):
    """Tokens of one block: those that the server counted, and the most that our own requests account for: what replies
    that are ok report, and what was asked by the others. Null: not counted."""

    block: str
    generated: int | None
    generated_for_us: int
    prompts: int | None
    prompts_for_us: int


class ServerCounters(msgspec.Struct, frozen=True, kw_only=True):
    """One backend's counters, summed over its blocks and over its engines before any ratio. Null (or empty, for a
    breakdown): the server has no such counter. Times are seconds of the hardware (server seconds x time scale)."""

    backend: str
    blocks: int
    """Blocks with a reading at both edges; the others are left out, and ``notes`` says why."""
    generation_tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_tokens_by_source: dict[str, int] = {}
    prefix_cache_hits: int | None = None
    prefix_cache_queries: int | None = None
    hit_rate: float | None = None
    """Prefix-cache hits / queries, in tokens."""
    preemptions: int | None = None
    finished: dict[str, int] = {}
    """Requests by finish reason; vLLM counts none whose client left."""
    waiting_mean: float | None = None
    """This and the other gauges: over the readings between the edges, engines added up."""
    waiting_max: int | None = None
    running_max: int | None = None
    kv_use_max: float | None = None
    """Of the fullest engine."""
    drafts: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    acceptance_length: float | None = None
    """1 + accepted tokens / drafts: tokens that a step with drafts yields a request."""
    acceptance_by_position: list[float] = []
    """Accepted at each draft position / drafts."""
    ttft_mean_s: float | None = None
    """From the request's arrival in the server."""
    ttft_count: int | None = None
    itl_mean_s: float | None = None
    """Σ time between outputs / tokens after the first ones."""
    work: list[Work] = []
    notes: list[str] = []

    @property
    def without_speculation(self) -> bool:
        """The server's counters are known, and those of drafts are not among them: vLLM has them only if it drafts."""
        return self.generation_tokens is not None and self.drafts is None


def deltas(before: Iterable[Sample], after: Iterable[Sample]) -> list[Delta]:
    """Growth of the counters that are read here, by (name, labels), in the order of ``after``. Names with and without
    "_total" are the same counter, as in vLLM's changes of them.

    A series that is new was made at 0 in between; one that is gone, while its counter is not, was reset and shows none
    yet. A counter that is missing from ``after`` is absent from the result, never 0.
    """
    was = dict(_series(before))
    now = dict(_series(after))
    names = {name for name, _ in now}
    now |= {key: 0.0 for key in was if key not in now and key[0] in names}
    found = []
    for (name, labels), value in now.items():
        earlier = was.get((name, labels), 0.0)
        reset = value < earlier
        found.append(Delta(name, dict(labels), value if reset else value - earlier, reset))
    return found


_COUNTERS = frozenset(
    {
        "generation_tokens",
        "prompt_tokens",
        "prompt_tokens_by_source",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "num_preemptions",
        "request_success",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "time_to_first_token_seconds_sum",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_sum",
    }
)

_Series = tuple[str, tuple[tuple[str, str], ...]]


def _series(samples: Iterable[Sample]) -> Iterable[tuple[_Series, float]]:
    for name, labels, value in samples:
        plain = name.removeprefix("vllm:").removesuffix("_total")
        if plain in _COUNTERS:
            yield (plain, tuple(sorted(labels.items()))), value


def total(grown: Sequence[Delta], name: str) -> float | None:
    """Sum of a counter over all its series: engines, and blocks where ``grown`` is of several. None: absent."""
    values = [delta.value for delta in grown if delta.name == name]
    return math.fsum(values) if values else None


def by_label(grown: Sequence[Delta], name: str, label: str) -> dict[str, int]:
    """The same for each value of one label; empty if absent."""
    found: Counter[str] = Counter()
    for delta in grown:
        if delta.name == name:
            found[delta.labels.get(label, "")] += round(delta.value)
    return dict(sorted(found.items()))


def server_counters(run: Run, requests: pl.DataFrame, name: str) -> ServerCounters:
    """Read one backend's counters. ``requests``: the measured turns of all blocks, with `block`, their number in
    ``run.blocks`` (reports.gates.gate.Evidence.requests)."""
    grown: list[Delta] = []
    between: list[MetricsSample] = []
    work: list[Work] = []
    notes: list[str] = []
    for index, loaded in enumerate(run.blocks):
        if loaded.block.backend != name or not loaded.metrics:
            continue
        edges = edge_readings(loaded)
        if isinstance(edges, str):
            notes.append(f"{loaded.name}: {edges}: left out")
            continue
        own = deltas(edges[0].samples, edges[1].samples)
        grown += own
        between += [sample for sample in loaded.metrics if sample.at == "between" and sample.error is None]
        if engines := sorted({delta.labels.get("engine", "?") for delta in own if delta.reset}):
            notes.append(
                f"{loaded.name}: counters of engine {', '.join(engines)} were reset inside the window: the server was "
                "started anew, and what it had counted before is lost"
            )
        work.append(_work(loaded.name, own, requests.filter(pl.col("block") == index)))
    drafts, accepted = total(grown, "spec_decode_num_drafts"), total(grown, "spec_decode_num_accepted_tokens")
    hits, queries = total(grown, "prefix_cache_hits"), total(grown, "prefix_cache_queries")
    generated = total(grown, "generation_tokens")
    firsts = total(grown, "time_to_first_token_seconds_count")
    later = generated - firsts if generated is not None and firsts is not None else None
    positions = by_label(grown, "spec_decode_num_accepted_tokens_per_pos", "position")
    waiting = _gauge(between, "num_requests_waiting", sum)
    scale = run.manifest.time_scale
    return ServerCounters(
        backend=name,
        blocks=len(work),
        generation_tokens=_whole(generated),
        prompt_tokens=_whole(total(grown, "prompt_tokens")),
        prompt_tokens_by_source=by_label(grown, "prompt_tokens_by_source", "source"),
        prefix_cache_hits=_whole(hits),
        prefix_cache_queries=_whole(queries),
        hit_rate=_ratio(hits, queries),
        preemptions=_whole(total(grown, "num_preemptions")),
        finished=by_label(grown, "request_success", "finished_reason"),
        waiting_mean=math.fsum(waiting) / len(waiting) if waiting else None,
        waiting_max=_whole(max(waiting, default=None)),
        running_max=_whole(max(_gauge(between, "num_requests_running", sum), default=None)),
        kv_use_max=max(_gauge(between, "kv_cache_usage_perc", max), default=None),
        drafts=_whole(drafts),
        draft_tokens=_whole(total(grown, "spec_decode_num_draft_tokens")),
        accepted_tokens=_whole(accepted),
        acceptance_length=1 + accepted / drafts if accepted is not None and drafts else None,
        acceptance_by_position=[positions[each] / drafts for each in sorted(positions, key=_number)] if drafts else [],
        ttft_mean_s=_ratio(total(grown, "time_to_first_token_seconds_sum"), firsts, scale),
        ttft_count=_whole(firsts),
        itl_mean_s=_ratio(total(grown, "inter_token_latency_seconds_sum"), later, scale),
        work=work,
        notes=notes,
    )


def edge_readings(loaded: Measurement) -> tuple[MetricsSample, MetricsSample] | str:
    """The readings at both edges, or why there are none."""
    first, last = (next((s for s in loaded.metrics if s.at == edge), None) for edge in ("start", "end"))
    for edge, sample in (("start", first), ("end", last)):
        if sample is not None and sample.error is not None:
            return f"/metrics could not be read at its {edge} ({sample.error})"
    if first is None or last is None or not first.samples or not last.samples:
        return "no counters of vLLM at both of its edges"
    return first, last


def _work(block: str, grown: Sequence[Delta], turns: pl.DataFrame) -> Work:
    again = pl.col("reset_retries")  # each such attempt may have run to its end, unseen
    asked = pl.col("asked_output")
    known = pl.col("output_tokens").is_not_null()
    output = (
        pl.when(known & (pl.col("status") == "ok"))
        .then(pl.col("output_tokens"))
        .otherwise(pl.max_horizontal(asked, "output_tokens"))
    )
    prompt = pl.coalesce("input_tokens", "asked_input")
    generated, prompts = turns.select((output + asked * again).sum(), prompt=(prompt * (1 + again)).sum()).row(0)
    return Work(
        block,
        _whole(total(grown, "generation_tokens")),
        int(generated),
        _whole(total(grown, "prompt_tokens")),
        int(prompts),
    )


def _gauge(readings: Sequence[MetricsSample], name: str, over: Callable[[list[float]], float]) -> list[float]:
    """A gauge's value in each reading that has it, engines combined by ``over``."""
    found = ([value for each, _, value in reading.samples if each == f"vllm:{name}"] for reading in readings)
    return [over(values) for values in found if values]


def _ratio(part: float | None, whole: float | None, scale: float = 1.0) -> float | None:
    return part / whole * scale if part is not None and whole else None


def _whole(value: float | None) -> int | None:
    return round(value) if value is not None else None


def _number(label: str) -> int:
    return int(label) if label.isdecimal() else 0
