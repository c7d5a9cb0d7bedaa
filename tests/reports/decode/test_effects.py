"""Intervals, ratio and noise floor, against hand computation, scipy and simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from reports.decode.effects import level, noise_floor, ratio


def test_level_by_hand() -> None:
    """10, 20, 40: mean of logs log 20, standard error log 2 / √3, t(0.975; 2) 4.303."""
    found = level([10.0, 20.0, 40.0])
    assert (found.value, found.n) == (pytest.approx(20.0), 3)
    assert found.high == pytest.approx(20 * 2 ** (4.3027 / 3**0.5), rel=1e-4)
    assert found.low == pytest.approx(20 / 2 ** (4.3027 / 3**0.5), rel=1e-4)
    assert level([10.0]).low is None
    assert level([]).value is None


def test_levels_and_ratio_agree_however_windows_scatter() -> None:
    baseline, candidate = [100.0, 330.0], [90.0, 500.0, 120.0]
    levels = [level(each) for each in (baseline, candidate)]
    assert all(each.low and each.low > 0 for each in levels)
    assert ratio(baseline, candidate).value == pytest.approx((levels[1].value or 0) / (levels[0].value or 1))


def test_ratio_is_welchs() -> None:
    baseline, candidate = [100.0, 101.0, 99.0, 100.5], [150.0, 153.0, 149.0]
    found = ratio(baseline, candidate)
    test = stats.ttest_ind(np.log(candidate), np.log(baseline), equal_var=False)
    low, high = np.exp(test.confidence_interval(0.95))
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.value == pytest.approx((low * high) ** 0.5)


def test_windows_without_any_spread_have_an_interval_without_width() -> None:
    assert ratio([100.0, 100.0], [150.0, 150.0]).low == pytest.approx(1.5)
    assert ratio([100.0], [150.0, 150.0]).low is None
    assert ratio([], [150.0]).value is None


def test_noise_floor_needs_two_passes() -> None:
    assert noise_floor([[100.0, 101.0]], [[150.0]]).relative is None
    assert noise_floor([[100.0], [100.0]], [[150.0]]).relative == 0.0


def test_a_against_a_with_noise_between_starts_is_seldom_called() -> None:
    """Starts differ by 1 %, windows of a start by 0.1 %: intervals over windows exclude 1 most of the time, effects
    above the floor are left in about 5 %."""
    rng = np.random.default_rng(1)
    excluded = called = 0
    for _ in range(400):
        sides = [
            [list(start * np.exp(rng.normal(0, 0.001, 5))) for start in np.exp(rng.normal(0, 0.01, 2))]
            for _ in range(2)
        ]
        found = ratio(*([rate for windows in passes for rate in windows] for passes in sides))
        noise = noise_floor(*sides)
        assert found.value is not None
        assert found.low is not None
        assert found.high is not None
        assert noise.relative is not None
        outside = not found.low <= 1 <= found.high
        excluded += outside
        called += outside and abs(np.log(found.value)) > np.log1p(noise.relative)
    assert excluded > 80
    assert called < 40
