"""Bounds of several looks: the tabulated ones, and that they keep the level."""

from __future__ import annotations

import numpy as np
import pytest

from reports.accuracy.looks import level_at, overall_p, z_bounds

QUARTERS = (0.25, 0.5, 0.75, 1.0)


def test_published_bounds() -> None:
    assert z_bounds(0.05, QUARTERS) == pytest.approx([3.75, 2.54, 2.02, 1.72], abs=0.005)
    # the design notes say "none" and 3.47: 3.4602 by integration, and by spending alone, as 2.6e-7 was spent before
    assert z_bounds(0.01, QUARTERS)[1:] == pytest.approx([3.46, 2.76, 2.36], abs=0.005)
    assert z_bounds(0.01, QUARTERS)[0] > 5
    assert z_bounds(0.05, (0.125, 0.25, 0.5, 1.0))[2:] == pytest.approx([2.54, 1.66], abs=0.005)


def test_one_look_spends_all() -> None:
    assert level_at(0.05, (1.0,), 0) == 0.05
    assert z_bounds(0.05, (1.0,)) == pytest.approx([1.644854])
    assert overall_p(0.03, (1.0,), 0) == 0.03


def test_a_very_early_look_has_no_bound() -> None:
    assert z_bounds(0.01, (0.05, 1.0)) == pytest.approx([np.inf, 2.326348])


def test_bounds_keep_the_level() -> None:
    walk = np.cumsum(np.random.default_rng(0).normal(0, 0.5, (400_000, 4)), axis=1) / np.sqrt(QUARTERS)
    for alpha in (0.05, 0.01):
        crossed = (walk >= z_bounds(alpha, QUARTERS)).any(axis=1).mean()
        assert crossed == pytest.approx(alpha, abs=4 * (alpha / 400_000) ** 0.5)


@pytest.mark.parametrize("look", [1, 2, 3])
def test_overall_p_is_the_level_at_which_a_look_is_just_significant(look: int) -> None:
    for alpha in (0.05, 0.004):
        assert overall_p(level_at(alpha, QUARTERS, look), QUARTERS, look) == pytest.approx(alpha, rel=1e-3)
    assert overall_p(0.9, QUARTERS, look) == 1
