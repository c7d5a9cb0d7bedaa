"""The arithmetic of one window, by hand and by its properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.decode.window import Stream, common, figures

MS = 1_000_000


def stream(*arrivals: tuple[int, int], sent_ms: int = 0) -> Stream:
    """From (arrival in ms, tokens)."""
    t_ms, tokens = zip(*arrivals, strict=True)
    return Stream(sent_ms * MS, np.array(t_ms, np.int64) * MS, np.array(tokens, np.int64))


def regular(first: int, steps: int, *, step_ns: int = 10 * MS, per_step: int = 1, offset_ns: int = 0) -> Stream:
    """First token in step number ``first``, then a chunk in each of ``steps`` steps."""
    t_ns = (np.arange(first, first + steps + 1) * step_ns + offset_ns).astype(np.int64)
    return Stream(0, t_ns, np.array([1] + [per_step] * steps, np.int64))


def rate(streams: list[Stream]) -> float:
    """Tokens a second."""
    found = common(streams)
    assert found is not None
    return found.tokens / (found.length_ns * 1e-9)


def test_two_streams_by_hand() -> None:
    """Opens with B's first token (120), closes with A's last (160), both 10 later: half of the median gap of 20."""
    a = stream((100, 1), (120, 2), (140, 2), (160, 2))
    b = stream((120, 1), (140, 2), (160, 3), (180, 2))
    found = common([a, b])
    assert found is not None
    assert (found.opens_ns, found.closes_ns, found.gap_ns) == (130 * MS, 170 * MS, 20 * MS)
    assert (found.tokens, found.chunks, found.steps) == (2 + 2 + 2 + 3, 4, 2)
    figure = figures([a, b], found, uncached_prompt=240, time_scale=1.0)
    assert figure.decode_tokens_per_s == pytest.approx(9 / 0.04)
    assert figure.share_in_window == pytest.approx(9 / 15)
    assert figure.prefill_tokens_per_s == pytest.approx(240 / 0.12)
    assert (figure.ttft_median_s, figure.ttft_worst_s) == pytest.approx((0.11, 0.12))
    # A: 60 ms over 6 tokens; B: 60 ms over 7
    assert figure.tpot_mean_s == pytest.approx((60 / 6 + 60 / 7) / 2 * 1e-3)
    assert figure.output_rate_median == pytest.approx((7 / 0.16 + 8 / 0.18) / 2)
    assert (figure.e2e_median_s, figure.e2e_worst_s) == pytest.approx((0.17, 0.18))


def test_emulated_time_scales_every_time_and_rate() -> None:
    streams = [regular(3, 20), regular(4, 20)]
    found = common(streams)
    assert found is not None
    plain, scaled = (figures(streams, found, 100, scale) for scale in (1.0, 20.0))
    assert scaled.decode_tokens_per_s == pytest.approx(plain.decode_tokens_per_s / 20)
    assert scaled.prefill_tokens_per_s == pytest.approx((plain.prefill_tokens_per_s or 0) / 20)
    assert scaled.tpot_mean_s == pytest.approx(plain.tpot_mean_s * 20)
    assert scaled.output_rate_median == pytest.approx(plain.output_rate_median / 20)
    assert (scaled.steps, scaled.share_in_window) == (plain.steps, plain.share_in_window)


def test_streams_that_never_decode_together_have_no_window() -> None:
    assert common([regular(0, 5), regular(5, 5)]) is None
    assert common([regular(0, 5), stream((30, 7))]) is None


def test_prefill_throughput_is_unknown_without_cached_tokens() -> None:
    streams = [regular(3, 20)]
    found = common(streams)
    assert found is not None
    assert figures(streams, found, None, 1.0).prefill_tokens_per_s is None


@given(st.integers(1, 16), st.integers(0, 40), st.integers(0, 40), st.integers(1, 6), st.integers(-5_000, 5_000))
def test_a_straggler_does_not_change_the_rate(batch: int, late: int, early: int, per_step: int, apart_ns: int) -> None:
    """One stream starts ``late`` steps after the others, another ends ``early``: shorter window, same rate."""
    others = [regular(1, 100, per_step=per_step, offset_ns=number * 1000) for number in range(batch)]
    straggler = regular(1 + late, 100, per_step=per_step, offset_ns=apart_ns)
    hasty = regular(1, 100 - early, per_step=per_step, offset_ns=-apart_ns)
    streams = [*others, straggler, hasty]
    found = common(streams)
    assert found is not None
    assert found.tokens == (100 - late - early) * per_step * len(streams)
    assert rate(streams) == pytest.approx(per_step * len(streams) / 0.01, rel=1e-2 / max(1, 100 - late - early))


@given(st.integers(1, 8), st.integers(20, 200), st.integers(0, 2**32 - 1))
def test_jitter_below_half_a_gap_moves_the_rate_by_no_more_than_a_step(batch: int, steps: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    jitter = 2 * MS  # of a gap of 10 ms
    streams = []
    for _ in range(batch):
        exact = regular(1, steps)
        streams.append(Stream(0, exact.t_ns + rng.integers(0, jitter, steps + 1), exact.tokens))
    assert rate(streams) == pytest.approx(batch / 0.01, rel=1 / steps)


def test_pieces_of_one_step_are_one_gap() -> None:
    """Six chunks a step, 0.1 ms apart: the edges still fall between steps."""
    t_ns = np.array([100 * step * MS + piece * MS // 10 for step in range(1, 31) for piece in range(6)], np.int64)
    streams = [Stream(0, t_ns, np.ones(len(t_ns), np.int64)), Stream(0, t_ns + 1000, np.ones(len(t_ns), np.int64))]
    found = common(streams)
    assert found is not None
    assert found.gap_ns == pytest.approx(100 * MS, rel=0.01)
    assert rate(streams) == pytest.approx(2 * 6 / 0.1, rel=0.01)
