"""Tests of harm against naive forms of the same definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from reports.accuracy.harm import holm, mcnemar, sign_flip, sign_test, stratified, trend


@given(
    st.lists(
        st.tuples(st.lists(st.booleans(), min_size=2, max_size=2), st.lists(st.booleans(), min_size=2, max_size=2)),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=60, deadline=None)
def test_stratified_is_the_share_of_exchanges_as_extreme(items: list[tuple[list[bool], list[bool]]]) -> None:
    baseline, candidate = (np.array([pair[side] for pair in items], float) for side in (0, 1))
    deals = [
        [sum(each[place] for place in mine) for mine in itertools.combinations(range(4), 2)]
        for each in np.hstack([baseline, candidate])
    ]
    sums = [sum(deal) for deal in itertools.product(*deals)]
    expected = sum(each >= baseline.sum() for each in sums) / len(sums)
    assert stratified(baseline, candidate) == pytest.approx(expected)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_stratified_is_mcnemar_for_one_repeat(pairs: list[tuple[bool, bool]]) -> None:
    baseline, candidate = (np.array([[pair[side]] for pair in pairs], float) for side in (0, 1))
    lost, gained = int((baseline > candidate).sum()), int((baseline < candidate).sum())
    assert stratified(baseline, candidate) == pytest.approx(stats.binom.sf(lost - 1, lost + gained, 0.5))


def test_stratified_holds_its_level_where_items_differ() -> None:
    rng = np.random.default_rng(0)
    rates = np.array([[0.99]] * 20 + [[0.5]] * 5)
    ps = np.array([stratified(*(rng.random((2, 25, 8)) < rates).astype(float)) for _ in range(1500)])
    assert (ps <= 0.05).mean() <= 0.05 + 2.33 * math.sqrt(0.05 * 0.95 / 1500)
    assert (ps <= 0.05).mean() >= 0.02  # of some use


@pytest.mark.parametrize(("differences", "p"), [([1, 1, 1], 1 / 8), ([2, -1, 0], 1 / 2), ([-1, -1], 1), ([0, 0], 1)])
def test_sign_flip_by_hand(differences: list[float], p: float) -> None:
    assert sign_flip(np.array(differences, float)) == p


@pytest.mark.parametrize("shift", [-0.3, 0.0, 0.3, 0.6])
@pytest.mark.parametrize("seed", range(3))
def test_sign_flip_is_the_share_of_signs_as_extreme(shift: float, seed: int) -> None:
    each = np.random.default_rng(seed).standard_t(3, 14) / 2 + shift
    signs = np.array(list(itertools.product([1, -1], repeat=14)))
    exact = float((signs @ each >= each.sum() - 1e-9).mean())
    assert sign_flip(each) == pytest.approx(exact, rel=0.03, abs=3 * 2**-14)  # differences are rounded


@pytest.mark.parametrize("values", [[-0.4, -0.2, 0, 0.2, 0.4], [-1, 0, 0, 0, 0, 1], [-0.9, -0.1, 0.1, 0.9]])
def test_sign_flip_holds_its_level_where_differences_tie(values: list[float]) -> None:
    rng = np.random.default_rng(0)
    ps = np.array([sign_flip(rng.choice(values, 30)) for _ in range(1500)])
    for level in (0.05, 0.01):
        assert (ps <= level).mean() <= level + 2.33 * math.sqrt(level * (1 - level) / 1500)


def test_sign_flip_at_its_ends() -> None:
    assert sign_flip(np.full(40, 0.1)) == pytest.approx(2**-40)
    assert sign_flip(np.full(40, -0.1)) == pytest.approx(1)
    assert sign_flip(np.tile([0.1, -0.1], 200)) == pytest.approx(0.52, abs=0.01)  # half, and half of the tie at 0


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=30), st.sampled_from([0.25, 4.0]))
@settings(max_examples=50, deadline=None)
def test_sign_flip_knows_no_unit(each: list[float], scale: float) -> None:
    values = np.round(np.array(each), 3)
    assert sign_flip(values * scale) == pytest.approx(sign_flip(values))


def test_trend_sees_a_drop_that_grows_and_no_gain_on_short_contexts() -> None:
    context = np.repeat(np.arange(13, 21), 50).astype(float)
    noise = np.random.default_rng(0).normal(0, 0.2, len(context))
    assert trend(noise + 0.03 * (context - 13), context) < 1e-4
    assert trend(noise, context) > 0.05
    assert trend(noise - 0.03 * (20 - context), context) > 0.05  # slope as above, nothing lost anywhere


def test_sign_test_over_strata() -> None:
    assert sign_test(np.full(8, 0.01)) == pytest.approx(1 / 256)
    assert sign_test(np.array([0.1, 0.2, 0, -0.1])) == pytest.approx(0.5)
    assert sign_test(np.zeros(3)) == 1


def test_mcnemar_by_hand() -> None:
    assert mcnemar(0, 0) == 1
    assert mcnemar(5, 0) == mcnemar(0, 5) == pytest.approx(1 / 16)
    assert mcnemar(3, 2) == 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.001, 0.5))
def test_holm_is_the_step_down_procedure(ps: list[float], level: float) -> None:
    rejected = set()
    for step, index in enumerate(sorted(range(len(ps)), key=lambda index: ps[index])):
        if ps[index] * (len(ps) - step) > level:
            break
        rejected.add(index)
    assert {index for index, p in enumerate(holm(ps)) if p <= level} == rejected


def test_holm_by_hand_and_weighted() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    # half and two quarters: .004 / .5 first, then .006 / .25 · .5, then .9
    assert holm([0.004, 0.006, 0.9], [0.5, 0.25, 0.25]) == pytest.approx([0.008, 0.012, 0.9])
