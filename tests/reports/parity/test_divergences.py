"""Divergences against the definition over a whole vocabulary."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.parity.divergences import Floats, Ids, Logprobs, deltas, gaps, kl, same_top


def top(logprobs: Floats, k: int) -> tuple[Ids, Logprobs]:
    ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :k]
    return ids.astype(np.int32), np.take_along_axis(logprobs, ids, axis=1).astype(np.float32)


def both(seed: int, n: int, k: int, noise: float, vocabulary: int = 64) -> tuple[Floats, Floats, Floats]:
    """Logprobs of two runs, and their KL from the top k."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, vocabulary)) * 3
    runs = [
        each - np.logaddexp.reduce(each, axis=1, keepdims=True)
        for each in (logits, logits + rng.normal(size=logits.shape) * noise)
    ]
    return runs[0], runs[1], kl(*top(runs[0], k), *top(runs[1], k))


def test_by_hand() -> None:
    # shared: tokens 1 and 2, .5 and .2 against .4 and .4; the rest is .3 against .2
    first = np.array([[1, 2, 3]], np.int32), np.log([[0.5, 0.2, 0.2]]).astype(np.float32)
    second = np.array([[2, 1, 4]], np.int32), np.log([[0.4, 0.4, 0.1]]).astype(np.float32)
    expected = 0.5 * math.log(0.5 / 0.4) + 0.2 * math.log(0.2 / 0.4) + 0.3 * math.log(0.3 / 0.2)
    assert kl(*first, *second) == pytest.approx([expected], rel=1e-5)


def test_the_whole_vocabulary_gives_the_true_divergence() -> None:
    mine, theirs, found = both(0, 200, 64, 0.3)
    assert found == pytest.approx((np.exp(mine) * (mine - theirs)).sum(axis=1), rel=1e-4, abs=2e-6)


@given(st.integers(0, 1000), st.integers(2, 20), st.floats(0.01, 2))
def test_never_more_than_the_true_divergence_and_never_negative(seed: int, k: int, noise: float) -> None:
    mine, theirs, found = both(seed, 20, k, noise)
    assert (found >= 0).all()
    assert (found <= (np.exp(mine) * (mine - theirs)).sum(axis=1) + 2e-6).all()


def test_equal_runs_do_not_diverge_and_slices_join() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(20_000, 30)) * 3
    run = top(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True), 20)
    assert (kl(*run, *run) == 0).all()
    moved = run[1] + rng.normal(size=run[1].shape).astype(np.float32) * 0.01
    whole = kl(*run, run[0], moved)
    assert (whole[-3:] == kl(run[0][-3:], run[1][-3:], run[0][-3:], moved[-3:])).all()


def test_short_lists_are_filled_up() -> None:
    ids, logprobs = np.array([[7, 8]], np.int32), np.log([[0.9, 0.1]]).astype(np.float32)
    filled = np.array([[7, 8, -1]], np.int32), np.append(logprobs, [[-np.inf]], axis=1).astype(np.float32)
    assert kl(*filled, *filled) == pytest.approx([0], abs=1e-7)
    other = np.log([[0.8, 0.2]]).astype(np.float32)
    other_filled = np.append(other, [[-np.inf]], axis=1).astype(np.float32)
    assert kl(*filled, filled[0], other_filled) == pytest.approx(kl(ids, logprobs, ids, other), abs=1e-6)


def test_nan_is_far_from_everything() -> None:
    ids, logprobs = np.array([[1, 2]], np.int32), np.array([[-0.1, -3]], np.float32)
    broken = np.array([[np.nan, -3]], np.float32)
    assert kl(ids, logprobs, ids, broken) == np.inf
    assert kl(ids, broken, ids, broken) == np.inf
    assert deltas(np.array([np.nan, -np.inf, -np.inf, -1]), np.array([-1, -1, -np.inf, -1.5])) == pytest.approx(
        [np.inf, np.inf, 0, 0.5]
    )


def test_unlike_shapes_are_refused() -> None:
    ids, logprobs = np.zeros((2, 3), np.int32), np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match="one shape"):
        kl(ids, logprobs, ids[:1], logprobs[:1])


def test_memory_does_not_grow_with_positions() -> None:
    ids = np.tile(np.arange(20, dtype=np.int32), (100_000, 1))
    logprobs = np.tile(np.log(np.full(20, 0.05, np.float32)), (100_000, 1))
    tracemalloc.start()
    kl(ids, logprobs, ids, logprobs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40e6  # a slice's 20 x 20 comparisons of all positions at once: 40 MB for flags alone


def test_tops_and_gaps() -> None:
    assert same_top(np.array([[1, 2], [1, 2]]), np.array([[1, 3], [2, 1]])).tolist() == [True, False]
    assert gaps(np.array([[-0.5, -2.0, -3.0]])) == pytest.approx([1.5])
