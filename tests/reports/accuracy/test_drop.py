"""The drop and its bounds: by hand, and as properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports.accuracy.drop import Drop, Floats, drop, equal_weight, seed_correlation, within_variance
from reports.accuracy.measure import cells_alike


def both(baseline: list[list[float]], candidate: list[list[float]], *, binary: bool = True) -> Drop:
    return drop(np.array(baseline, float), np.array(candidate, float), equal_weight(len(baseline)), binary=binary)


def test_bounds_by_hand() -> None:
    # means 1 and .5 against .5 and .5: d = .5, 0; drop .25, sd .353553, standard error .25
    found = both([[1, 1], [1, 0]], [[1, 0], [0, 1]])
    assert (found.baseline, found.candidate, found.value) == (0.75, 0.5, 0.25)
    assert found.bound_t == pytest.approx(0.25 + 6.313752 * 0.25)  # t, one degree of freedom, .95
    assert found.high == pytest.approx(0.25 + 12.706205 * 0.25)
    assert found.low == pytest.approx(0.25 - 12.706205 * 0.25)
    # smoothed shares 2.5/3 and 1.5/3 three times: variances / 2 = .069444 and .125
    error = math.sqrt((0.069444 + 3 * 0.125) / 4)
    assert found.bound_stratified == pytest.approx(0.25 + 1.644854 * error, abs=1e-5)
    assert found.bound == found.bound_t


def test_items_always_right_are_not_certain() -> None:
    found = both([[1] * 4] * 30, [[1] * 4] * 30)
    assert found.value == 0
    assert (found.low, found.high) == (None, None)
    # smoothed share .9: √(2 · 30 · .9 · .1 / 4 / 900)
    assert found.bound == pytest.approx(1.644854 * math.sqrt(0.0015), abs=1e-6)


def test_scores_that_are_not_binary_have_the_t_bound_alone_from_100_items_on() -> None:
    rng = np.random.default_rng(0)
    for items, alone in ((99, False), (100, True)):
        baseline = np.repeat(rng.uniform(size=(items, 1)), 3, axis=1)
        found = drop(baseline, baseline - 1e-3 * rng.uniform(size=(items, 1)), equal_weight(items), binary=False)
        assert found.bound is not None
        assert (found.bound == found.bound_t) is alone
        assert found.bound <= found.bound_stratified


def test_one_item_has_no_bound() -> None:
    assert both([[1, 1]], [[1, 0]]).bound is None


scores = st.integers(2, 8).flatmap(
    lambda items: st.lists(
        st.tuples(st.lists(st.booleans(), min_size=3, max_size=3), st.lists(st.booleans(), min_size=3, max_size=3)),
        min_size=items,
        max_size=items,
    )
)


def arrays(data: list[tuple[list[bool], list[bool]]]) -> tuple[Floats, Floats]:
    return np.array([a for a, _ in data], float), np.array([b for _, b in data], float)


@given(scores, st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_order_of_items_changes_nothing(data: list[tuple[list[bool], list[bool]]], random: object) -> None:
    baseline, candidate = arrays(data)
    order = np.random.default_rng(0).permutation(len(data))
    weight = equal_weight(len(data))
    first = drop(baseline, candidate, weight, binary=True)
    second = drop(baseline[order], candidate[order], weight, binary=True)
    assert first.value == pytest.approx(second.value, abs=1e-12)
    assert first.bound == pytest.approx(second.bound, abs=1e-12)


@given(scores, st.floats(0.001, 0.2))
@settings(max_examples=100, deadline=None)
def test_a_constant_harm_moves_the_t_bound_by_itself(data: list[tuple[list[bool], list[bool]]], harm: float) -> None:
    baseline, candidate = arrays(data)
    weight = equal_weight(len(data))
    before = drop(baseline, candidate, weight, binary=True).bound_t
    after = drop(baseline, candidate - harm, weight, binary=True).bound_t
    assert before is not None
    assert after == pytest.approx(before + harm, abs=1e-9)


@given(scores, st.data())
@settings(max_examples=100, deadline=None)
def test_one_more_wrong_answer_never_lowers_the_drop(
    data: list[tuple[list[bool], list[bool]]], draw: st.DataObject
) -> None:
    baseline, candidate = arrays(data)
    right = np.argwhere(candidate == 1)
    if not len(right):
        return
    worse = candidate.copy()
    worse[tuple(right[draw.draw(st.integers(0, len(right) - 1))])] = 0
    weight = equal_weight(len(data))
    assert drop(baseline, worse, weight, binary=True).value > drop(baseline, candidate, weight, binary=True).value


def test_cells_of_unlike_size_weigh_alike() -> None:
    weight = cells_alike(["a", "b", "b", "b"])
    assert weight == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6])
    found = drop(np.array([[1.0], [0], [0], [0]]), np.zeros((4, 1)), weight, binary=False)
    assert (found.baseline, found.value) == (pytest.approx(0.5), pytest.approx(0.5))


def test_a_drop_in_a_stratum_of_few_items_passes_no_more_often_than_another() -> None:
    """Seven bins of 100 items and one of 2, which is a quarter of the error and all of the drop: t takes those two for
    as certain as 702, and alone would pass a drop of the margin twice as often as one time of twenty."""
    rng, margin, repeats = np.random.default_rng(0), 0.03, 5
    cell = [str(bin) for bin in range(7) for _ in range(100)] + ["few"] * 2
    weight, few = cells_alike(cell), np.array(cell) == "few"
    passed = {"t": 0, "both": 0}
    runs = 1000
    for _ in range(runs):
        rates = rng.beta(1.3, 0.7, len(cell))
        rates[few] = rng.uniform(8 * margin, 1, 2)
        worse = np.where(few, rates - 8 * margin, rates)
        baseline, candidate = (
            (rng.random((len(cell), repeats)) < chance[:, None]).astype(float) for chance in (rates, worse)
        )
        found = drop(baseline, candidate, weight, binary=False)
        assert found.bound_t is not None
        assert found.bound is not None
        passed["t"] += found.bound_t <= margin
        passed["both"] += found.bound <= margin
    assert passed["both"] <= (0.05 + 2.33 * math.sqrt(0.05 * 0.95 / runs)) * runs
    assert passed["t"] > 0.1 * runs


def test_variance_and_correlation_by_hand() -> None:
    baseline, candidate = np.array([[1.0, 0], [1, 1]]), np.array([[1.0, 0], [0, 1]])
    assert within_variance(baseline) == pytest.approx(0.25)  # (.5 + 0) / 2
    assert within_variance(baseline[:, :1]) is None
    # around items' means: ±.5 twice equal, and 0 against ±.5: .5 / √(.5 · 1)
    assert seed_correlation(baseline, candidate) == pytest.approx(math.sqrt(0.5))
    assert seed_correlation(np.ones((2, 2)), candidate) is None


def test_correlated_seeds_narrow_the_t_bound_alone() -> None:
    rng = np.random.default_rng(1)
    noise = rng.uniform(size=(200, 4))
    rates = rng.uniform(0.5, 1, size=(200, 1))
    baseline = (noise < rates).astype(float)
    paired, unpaired = baseline, (rng.uniform(size=(200, 4)) < rates).astype(float)
    weight = equal_weight(200)
    with_pairs, without = (drop(baseline, each, weight, binary=True) for each in (paired, unpaired))
    assert seed_correlation(baseline, paired) == pytest.approx(1)
    assert with_pairs.bound_t == 0
    assert with_pairs.bound == with_pairs.bound_stratified
    assert without.bound_t is not None
    assert without.bound_t - without.value > 0.02
