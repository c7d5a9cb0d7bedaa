"""What a workload is, in numbers: lengths, pauses, reuse, context need, and what they ask of a lane.

Definitions, the same as in the published statistics of the kv-cache-tester sessions:

* Reuse counts whole blocks only, with an unlimited cache and sessions isolated from each other, requests in order of
  their start. "previous": the common prefix with the stream's request before; "set": the leading run of blocks that
  the session has seen anywhere; "trie": the longest prefix that is a prefix of an earlier prompt of the session,
  which is what a prefix cache can serve.
* An idle gap lies between the end of a request and the start of the next in the same stream; one that started before
  the end counts as 0. Requests whose service time was estimated take part in gaps and spans, not in rates.
* Percentiles interpolate linearly between the two nearest values, at (n - 1) p. What has no values is null.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from workloads.trace import Stream, Trace, Turn, prompts

CONTEXT_LIMITS = (32_768, 65_536, 131_072, 200_000, 262_144, 524_288, 1_000_000)
IDLE_LIMITS_S = (1.0, 10.0, 60.0, 300.0, 600.0, 3600.0)
PAUSE_CAPS_S = (0.0, 2.0, 10.0, 60.0, 300.0, None)
PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
REWIND_SIZES = ((1, "1"), (16, "2-16"), (512, "17-512"), (None, "over 512"))


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Values of one kind: how many, and their mean, extremes and percentiles; null where there are none."""

    n: int
    mean: float | None = None
    min: float | None = None
    p1: float | None = None
    p5: float | None = None
    p10: float | None = None
    p25: float | None = None
    p50: float | None = None
    p75: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


class Reuse(msgspec.Struct, frozen=True, kw_only=True):
    """Share of whole prompt blocks that an unlimited prefix cache would hold, 0 to 1, by definition; ``tokens`` is the
    trie's share of all prompt tokens. Null if there are no blocks."""

    previous: float | None
    set: float | None
    trie: float | None
    tokens: float | None


class ContextLimit(msgspec.Struct, frozen=True, kw_only=True):
    """Requests whose input and output together need more than ``limit`` tokens, and sessions with such a request."""

    limit: int
    requests: int
    requests_share: float | None
    sessions: int
    sessions_share: float | None


class IdleShare(msgspec.Struct, frozen=True, kw_only=True):
    """Share of idle gaps longer than ``above_s`` seconds, and of all idle time that lies in them."""

    above_s: float
    gaps_share: float | None
    time_share: float | None


class Duty(msgspec.Struct, frozen=True, kw_only=True):
    """A lane that plays these sessions at recorded service times, with no idle time longer than ``cap_s`` seconds
    (null: as recorded): share of its time with a request in service, and its mean hours per session."""

    cap_s: float | None
    duty: float | None
    hours_per_session: float | None


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. Keys of ``distributions`` and ``curves`` end in their unit; ``curves`` holds 101 quantiles each."""

    counts: dict[str, int]
    labels: dict[str, dict[str, int]]
    distributions: dict[str, Distribution]
    curves: dict[str, list[float]]
    reuse: Reuse
    context_limits: list[ContextLimit]
    idle: list[IdleShare]
    duty: list[Duty]


DISTRIBUTIONS = (
    "requests_per_session",
    "input_tokens",
    "output_tokens",
    "uncached_tokens",
    "input_growth_tokens",
    "first_input_tokens",
    "peak_context_tokens",
    "unique_tokens",
    "declared_prefix_tokens",
    "rewind_blocks",
    "idle_gap_s",
    "idle_gap_after_tool_s",
    "idle_gap_after_user_s",
    "start_to_start_s",
    "service_s",
    "ttft_s",
    "decode_tok_s",
    "e2e_tok_s",
    "session_span_s",
    "session_service_s",
    "session_reuse_share",
    "peak_in_flight",
    "subagents_per_session",
    "requests_per_subagent",
    "subagent_duration_s",
)

CURVES = ("input_tokens", "output_tokens", "uncached_tokens", "idle_gap_after_tool_s", "idle_gap_after_user_s",
          "session_reuse_share", "peak_context_tokens")  # fmt: skip

COUNTS = (
    "sessions",
    "requests",
    "main_requests",
    "subagents",
    "subagent_requests",
    "parallel_streams",
    "transitions",
    "input_tokens",
    "output_tokens",
    "uncached_tokens",
    "rewinds",
    "rewinds_to_zero",
    "input_shrinks",
    "retries",
    "zero_output",
    "service_estimated",
    "model_switches",
    "input_multiple_of_block",
    "tool_stop_without_tool_result",
)


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-th percentile (0 to 100) by linear interpolation; None of nothing."""
    return float(np.percentile(np.asarray(values, dtype=np.float64), q)) if len(values) else None


def distribution(values: Sequence[float]) -> Distribution:
    """Summary of some values."""
    if not len(values):
        return Distribution(n=0)
    data = np.asarray(values, dtype=np.float64)
    points = dict(zip((f"p{q}" for q in PERCENTILES), np.percentile(data, PERCENTILES).tolist(), strict=True))
    return Distribution(n=len(data), mean=float(data.mean()), min=float(data.min()), max=float(data.max()), **points)


def statistics(traces: Iterable[Trace]) -> Statistics:
    """Statistics of any number of sessions in one pass; memory grows with numbers per request, not with content."""
    tally = _Tally()
    for trace in traces:
        tally.add(trace)
    return tally.result()


class _Tally:
    """Values collected so far."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.labels: dict[str, Counter[str]] = {
            kind: Counter() for kind in ("stop", "model", "input", "agent", "join", "rewind_blocks")
        }
        self.values: dict[str, array[float]] = {name: array("d") for name in DISTRIBUTIONS}
        self.blocks: Counter[str] = Counter()
        self.over_limit: Counter[tuple[str, int]] = Counter()
        self.busy_s = 0.0
        self.lane_idle_s = array("d")

    def put(self, name: str, value: float) -> None:
        self.values[name].append(value)

    def add(self, trace: Trace) -> None:
        self.counts["sessions"] += 1
        turns = [turn for stream in trace.streams for turn in stream.turns]
        for turn in turns:
            self._turn(trace, turn)
        for stream in trace.streams:
            self._stream(trace, stream)
        self._reuse(trace)
        self._time(turns)

        contexts = [turn.input_tokens + _output(turn) for turn in turns]
        peak = max(contexts)
        for limit in CONTEXT_LIMITS:
            self.over_limit["requests", limit] += sum(context > limit for context in contexts)
            self.over_limit["sessions", limit] += peak > limit
        self.put("peak_context_tokens", peak)
        self.put("requests_per_session", len(turns))
        self.put("first_input_tokens", trace.streams[0].turns[0].input_tokens)
        self.put("declared_prefix_tokens", trace.system_tokens)
        self.put("subagents_per_session", sum(_is_subagent(stream) for stream in trace.streams))

    def _turn(self, trace: Trace, turn: Turn) -> None:
        output = _output(turn)
        self.counts["requests"] += 1
        self.counts["input_tokens"] += turn.input_tokens
        self.counts["output_tokens"] += output
        self.counts["zero_output"] += turn.zero_output
        self.counts["retries"] += turn.retry
        self.counts["service_estimated"] += turn.service_estimated
        self.counts["input_multiple_of_block"] += turn.input_tokens % trace.block_size == 0
        self.labels["stop"][turn.stop] += 1
        self.labels["model"][turn.model] += 1
        self.labels["input"]["+".join(turn.input_types)] += 1
        self.put("input_tokens", turn.input_tokens)
        self.put("output_tokens", output)
        if turn.ttft_s is not None:
            self.put("ttft_s", turn.ttft_s)
        if not turn.service_estimated:
            self.put("service_s", turn.service_s)
            if output and turn.service_s > 0:
                self.put("e2e_tok_s", output / turn.service_s)
            if turn.ttft_s is not None and output > 1 and turn.service_s > turn.ttft_s:
                self.put("decode_tok_s", (output - 1) / (turn.service_s - turn.ttft_s))

    def _stream(self, trace: Trace, stream: Stream) -> None:
        turns = stream.turns
        self.labels["agent"][stream.agent] += 1
        if stream.parent is None:
            self.counts["main_requests"] += len(turns)
        elif not _is_subagent(stream):
            self.counts["parallel_streams"] += 1
        else:
            self.counts["subagents"] += 1
            self.counts["subagent_requests"] += len(turns)
            self.labels["join"][_join(stream)] += 1
            self.put("requests_per_subagent", len(turns))
            self.put("subagent_duration_s", max(turn.start_s + turn.service_s for turn in turns) - turns[0].start_s)
        for before, turn in pairwise(turns):
            gap = max(0.0, turn.start_s - before.start_s - before.service_s)
            self.put("idle_gap_s", gap)
            self.put("idle_gap_after_tool_s" if before.stop == "tool_use" else "idle_gap_after_user_s", gap)
            self.put("start_to_start_s", turn.start_s - before.start_s)
            self.put("input_growth_tokens", turn.input_tokens - before.input_tokens)
            self.counts["transitions"] += 1
            self.counts["input_shrinks"] += turn.input_tokens < before.input_tokens
            self.counts["model_switches"] += turn.model != before.model
            unanswered = before.stop == "tool_use" and "tool_result" not in turn.input_types
            self.counts["tool_stop_without_tool_result"] += unanswered
            whole_before = before.input_tokens // trace.block_size
            kept = min(turn.keep, whole_before, turn.input_tokens // trace.block_size)
            if kept < whole_before:
                lost = whole_before - kept
                self.counts["rewinds"] += 1
                self.counts["rewinds_to_zero"] += kept == 0
                self.put("rewind_blocks", lost)
                size = next(name for most, name in REWIND_SIZES if most is None or lost <= most)
                self.labels["rewind_blocks"][size] += 1

    def _reuse(self, trace: Trace) -> None:
        """Walk the session's prompts in order of start with a set of seen blocks and a prefix tree of them."""
        size = trace.block_size
        walks = [_walk(stream) for stream in trace.streams]
        order = sorted(
            (turn.start_s, place, number)
            for place, stream in enumerate(trace.streams)
            for number, turn in enumerate(stream.turns)
        )
        tree: dict[tuple[int, int], int] = {}  # (node, next block) -> node; the root is 0
        paths: list[list[int]] = [[] for _ in trace.streams]  # nodes of each stream's last prompt
        seen: set[int] = set()
        hits = total = 0
        for _, place, _ in order:
            turn, blocks = next(walks[place])
            whole = turn.input_tokens // size
            path = paths[place]
            kept = min(turn.keep, len(path), whole)
            in_set = in_tree = kept
            for block in blocks[kept:whole]:
                if block not in seen:
                    break
                in_set += 1
            path = path[:kept]
            node = path[-1] if path else 0
            for block in blocks[kept:whole]:
                child = tree.get((node, block))
                if child is None:
                    child = tree[node, block] = len(tree) + 1
                else:
                    in_tree += 1
                path.append(child)
                node = child
            paths[place] = path
            seen.update(blocks[kept:whole])
            total += whole
            hits += in_tree
            self.blocks["total"] += whole
            self.blocks["previous"] += kept
            self.blocks["set"] += in_set
            self.blocks["trie"] += in_tree
            self.counts["uncached_tokens"] += turn.input_tokens - in_tree * size
            self.put("uncached_tokens", turn.input_tokens - in_tree * size)
        self.put("unique_tokens", len(seen) * size)
        if total:
            self.put("session_reuse_share", hits / total)

    def _time(self, turns: list[Turn]) -> None:
        """Busy and idle time of the whole tree, and the most requests in service at once."""
        spans = sorted((turn.start_s, turn.start_s + turn.service_s) for turn in turns)
        end = spans[0][0]
        for start, stop in spans:
            if start > end:
                self.lane_idle_s.append(start - end)
            self.busy_s += max(0.0, stop - max(start, end))
            end = max(end, stop)
        steps = sorted([(start, 1) for start, _ in spans] + [(stop, -1) for _, stop in spans])  # an end before a start
        in_flight = np.cumsum([step for _, step in steps])
        self.put("peak_in_flight", max(1, int(in_flight.max())))
        self.put("session_span_s", end - spans[0][0])
        self.put("session_service_s", sum(turn.service_s for turn in turns))

    def result(self) -> Statistics:
        blocks = self.blocks
        sessions, requests = self.counts["sessions"], self.counts["requests"]
        gaps = np.asarray(self.values["idle_gap_s"])
        return Statistics(
            counts={name: self.counts[name] for name in COUNTS},
            labels={kind: dict(counter.most_common()) for kind, counter in self.labels.items()},
            distributions={name: distribution(values) for name, values in self.values.items()},
            curves={
                name: np.percentile(np.asarray(self.values[name]), np.arange(101)).tolist()
                for name in CURVES
                if len(self.values[name])
            },
            reuse=Reuse(
                previous=_share(blocks["previous"], blocks["total"]),
                set=_share(blocks["set"], blocks["total"]),
                trie=_share(blocks["trie"], blocks["total"]),
                tokens=_share(
                    self.counts["input_tokens"] - self.counts["uncached_tokens"], self.counts["input_tokens"]
                ),
            ),
            context_limits=[
                ContextLimit(
                    limit=limit,
                    requests=self.over_limit["requests", limit],
                    requests_share=_share(self.over_limit["requests", limit], requests),
                    sessions=self.over_limit["sessions", limit],
                    sessions_share=_share(self.over_limit["sessions", limit], sessions),
                )
                for limit in CONTEXT_LIMITS
            ],
            idle=[
                IdleShare(
                    above_s=above,
                    gaps_share=_share(int((gaps > above).sum()), len(gaps)),
                    time_share=_share(float(gaps[gaps > above].sum()), float(gaps.sum())),
                )
                for above in IDLE_LIMITS_S
            ],
            duty=[self._duty(cap) for cap in PAUSE_CAPS_S],
        )

    def _duty(self, cap_s: float | None) -> Duty:
        idle = np.asarray(self.lane_idle_s)
        lane_s = self.busy_s + float((idle if cap_s is None else np.minimum(idle, cap_s)).sum())
        hours = _share(lane_s / 3600, self.counts["sessions"])
        return Duty(cap_s=cap_s, duty=_share(self.busy_s, lane_s), hours_per_session=hours)


def _output(turn: Turn) -> int:
    """Output tokens as recorded."""
    return 0 if turn.zero_output else turn.output_tokens


def _is_subagent(stream: Stream) -> bool:
    """Whether a stream is a subagent, not the main agent and not a piece of its parent that ran beside it."""
    return stream.parent is not None and not stream.agent.endswith("/parallel")


def _join(stream: Stream) -> str:
    if stream.background:
        return "background"
    if stream.join_turn is None:
        return "after the last turn"
    return "next turn" if stream.join_turn == (stream.spawn_turn or 0) + 1 else "later turn"


def _walk(stream: Stream) -> Iterator[tuple[Turn, list[int]]]:
    return zip(stream.turns, prompts(stream), strict=True)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
