"""The arithmetic of one window: what its streams' arrivals say. Pure functions on arrays, small enough to follow by
hand."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

FEWEST_STEPS = 10
"""A common decode window of fewer steps says nothing: one step more or less would be a tenth of it."""
_PIECE = 0.1
"""Gaps shorter than this share of a stream's mean gap lie between pieces of one step."""


class Stream(msgspec.Struct, frozen=True):
    """One stream of a window that came to its end: chunk ``i`` arrived at ``t_ns[i]`` with ``tokens[i]`` tokens."""

    sent_ns: int
    t_ns: Ints
    tokens: Ints

    @property
    def ttft_ns(self) -> int:
        """From being sent to the first token."""
        return int(self.t_ns[0]) - self.sent_ns

    @property
    def e2e_ns(self) -> int:
        """From being sent to the last token."""
        return int(self.t_ns[-1]) - self.sent_ns

    @property
    def output(self) -> int:
        """Output tokens."""
        return int(self.tokens.sum())


class Common(msgspec.Struct, frozen=True):
    """The common decode window: every stream decodes in all of it. Nanoseconds of the client."""

    opens_ns: int
    closes_ns: int
    gap_ns: float
    """Median time between consecutive chunks of a stream: a step, where each step sends a chunk."""
    tokens: int
    """Of all streams, arrived in it."""
    chunks: int

    @property
    def length_ns(self) -> int:
        """From its opening to its close."""
        return self.closes_ns - self.opens_ns

    @property
    def steps(self) -> int:
        """Gaps between a stream's chunks that it holds."""
        return round(self.length_ns / self.gap_ns)


def common(streams: list[Stream]) -> Common | None:
    """The common decode window of the streams; None if they never all decode at once.

    It opens with the last first-token arrival and closes with the earliest last-token arrival, so a stream that starts
    late or ends early makes it shorter and biases nothing. Chunks of one step arrive microseconds apart, before or
    after the one that sets an edge. So both edges are moved later by half the median gap between chunks of a stream:
    each then falls between two steps, and the length stays the same. The step of the opening is out, that of the close
    is in.
    """
    opens = max(int(stream.t_ns[0]) for stream in streams)
    closes = min(int(stream.t_ns[-1]) for stream in streams)
    gaps = np.concatenate([_gaps(stream.t_ns[(stream.t_ns >= opens) & (stream.t_ns <= closes)]) for stream in streams])
    if closes <= opens or not len(gaps):
        return None
    gap = float(np.median(gaps))
    shift = round(gap / 2)
    inside = [(stream.t_ns > opens + shift) & (stream.t_ns <= closes + shift) for stream in streams]
    return Common(
        opens_ns=opens + shift,
        closes_ns=closes + shift,
        gap_ns=gap,
        tokens=sum(int(stream.tokens[mine].sum()) for stream, mine in zip(streams, inside, strict=True)),
        chunks=sum(int(mine.sum()) for mine in inside),
    )


def _gaps(t_ns: Ints) -> Ints:
    """Gaps between steps, those between pieces of one step left out."""
    gaps = np.diff(t_ns)
    return gaps[gaps > _PIECE * gaps.mean()] if len(gaps) else gaps


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What one window measured. Seconds are the client's times ``time_scale``; rates are over them. Null: unknown, or
    nothing to divide by."""

    decode_tokens_per_s: float
    tokens_in_window: int
    share_in_window: float
    """Of the streams' output tokens, those that arrived in the common decode window."""
    window_s: float
    step_s: float
    """Median gap between chunks of a stream."""
    steps: int
    prefill_tokens_per_s: float | None
    ttft_median_s: float
    ttft_worst_s: float
    tpot_mean_s: float
    tpot_median_s: float
    output_rate_median: float
    e2e_median_s: float
    e2e_worst_s: float


FORMULAS = {
    "Decode rate": "Tokens of all streams that arrived in the common decode window / its length. Prefill is excluded.",
    "Common decode window": "From the last first-token arrival of any stream to the earliest last-token arrival, both "
    "edges moved later by half the median gap between chunks of a stream, so that each falls between two steps: the "
    "step of the opening is out, that of the close in, and the length is the same.",
    "Prefill throughput": "Σ (I − cached tokens) over the streams / (last first-token arrival − first send). Unknown "
    "where the server does not report cached tokens.",
    "TTFT": "first − sent.",
    "TPOT": "(E2E − TTFT) / (O − 1) = (last − first) / (O − 1) of each stream: what vllm bench serve prints. Where the "
    "first chunk holds several tokens it is too low.",
    "Output rate over the request": "O / E2E of each stream, prefill included.",
    "Request latency (E2E)": "last − sent.",
    "Share in the window": "Tokens that arrived in the common decode window / all output tokens of the streams.",
}


def figures(streams: list[Stream], window: Common, uncached_prompt: int | None, time_scale: float) -> Figures:
    """Every figure of a window. ``uncached_prompt``: prompt tokens of all streams that no cache held; None: unknown.
    The streams have several output tokens each."""
    scale = time_scale * 1e-9
    ttft, e2e, output = (
        np.array([getattr(stream, name) for stream in streams], np.float64) for name in ("ttft_ns", "e2e_ns", "output")
    )
    tpot = (e2e - ttft) / (output - 1)
    prefill = max(int(stream.t_ns[0]) for stream in streams) - min(stream.sent_ns for stream in streams)
    return Figures(
        decode_tokens_per_s=window.tokens / (window.length_ns * scale),
        tokens_in_window=window.tokens,
        share_in_window=window.tokens / float(output.sum()),
        window_s=window.length_ns * scale,
        step_s=window.gap_ns * scale,
        steps=window.steps,
        prefill_tokens_per_s=uncached_prompt / (prefill * scale) if uncached_prompt is not None and prefill else None,
        ttft_median_s=float(np.median(ttft)) * scale,
        ttft_worst_s=float(ttft.max()) * scale,
        tpot_mean_s=float(tpot.mean()) * scale,
        tpot_median_s=float(np.median(tpot)) * scale,
        output_rate_median=float(np.median(output / e2e)) / scale,
        e2e_median_s=float(np.median(e2e)) * scale,
        e2e_worst_s=float(e2e.max()) * scale,
    )
