"""Outliers: the threshold from the floor alone, levels of both tests, and the faults that they see."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from reports.parity.divergences import Floats
from reports.parity.outliers import TARGET, outliers, rate_bound, steps_hit, threshold
from tests.reports.parity.levels import keeps, known, power

TAILS = {
    "half-normal": (lambda rng, n: np.abs(rng.normal(size=n)), lambda tau: 2 * stats.norm.sf(tau)),
    "exponential": (lambda rng, n: rng.exponential(size=n), lambda tau: np.exp(-tau)),
    "lognormal": (lambda rng, n: rng.lognormal(0, 1, n), lambda tau: stats.norm.sf(np.log(tau))),
    "Student's, 3": (lambda rng, n: np.abs(rng.standard_t(3, n)), lambda tau: 2 * stats.t.sf(tau, 3)),
}


def test_a_long_floor_is_counted() -> None:
    floor = np.random.default_rng(0).permutation(1_000_000).astype(float)
    found = threshold(floor)
    assert (found.by, found.floor_outliers, found.tau) == ("counted", 10, 999_989)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("n", [2_000, 20_000])
def test_a_short_floor_is_extrapolated_to_no_more_than_the_target(tail: str, n: int) -> None:
    draw, above = TAILS[tail]
    rng = np.random.default_rng(0)
    rates = []
    for _ in range(200):
        floor = draw(rng, n)
        found = threshold(floor)
        assert found.by == "extrapolated"
        assert known(found.tau) >= floor.max()
        rates.append(float(above(found.tau)))
    assert np.mean(np.array(rates) > TARGET) <= 0.05 + 2.33 * np.sqrt(0.05 * 0.95 / 200)


def test_a_floor_that_says_nothing() -> None:
    assert threshold(np.ones(999)).tau is None
    assert "too few" in threshold(np.ones(999)).reason
    broken = np.ones(5_000)
    broken[:3] = np.inf
    assert threshold(broken).tau is None
    assert "3 of 5,000" in threshold(broken).reason
    same = threshold(np.zeros(5_000))
    assert (same.tau, same.floor_outliers) == (0.0, 0)


def test_by_hand() -> None:
    found = outliers(3, 100_000, 1, 300_000)
    assert (found.statistic, found.floor, found.limit) == (3e-5, 1 / 300_000, TARGET)
    assert found.p == pytest.approx(4 * 0.25**3 * 0.75 + 0.25**4)  # three or four of four at 1/4
    assert found.p_limit == pytest.approx(stats.poisson.sf(2, 1))
    assert outliers(0, 10, 60, 1_000_000).limit == pytest.approx(1.2e-4)  # twice the floor
    assert outliers(0, 10, 0, 10, limit=0.1).limit == 0.1
    assert outliers(0, 0, 0, 10).reason == "Nothing was recorded of the candidate."


def test_rule_of_three() -> None:
    assert rate_bound(0, 300_000) == pytest.approx(1e-5, rel=2e-3)
    assert rate_bound(0, 1_000_000) == pytest.approx(3e-6, rel=2e-3)
    clean = outliers(0, 300_000, 0, 300_000)
    assert known(clean.bound) <= known(clean.limit)
    assert (clean.p, clean.p_limit) == (1, 1)


def test_the_bound_covers() -> None:
    counts = np.random.default_rng(0).poisson(7.3, 4_000)
    missed = np.mean([rate_bound(int(count), 1_000) < 7.3e-3 for count in counts])
    assert missed <= 0.05 + 2.33 * np.sqrt(0.05 * 0.95 / 4_000)


def replayed(rng: np.random.Generator, n: int) -> Floats:
    return np.abs(rng.standard_t(3, n))


@pytest.mark.parametrize(
    ("n", "floor_n", "target"), [(3_000, 5_000, 1e-2), (20_000, 5_000, 1e-3), (2_000, 20_000, 1e-5)]
)
def test_levels_with_the_threshold_from_the_same_floor(n: int, floor_n: int, target: float) -> None:
    rng = np.random.default_rng(0)
    counted, limited = [], []
    for _ in range(1_000):
        found = threshold(replayed(rng, floor_n), target)
        events = int((replayed(rng, n) > known(found.tau)).sum())
        limit = max(2 * found.floor_outliers / floor_n, target)
        judged = outliers(events, n, found.floor_outliers, floor_n, limit=limit)
        counted.append(known(judged.p))
        limited.append(known(judged.p_limit))
    keeps(counted)
    keeps(limited)


@pytest.mark.parametrize(("rate", "n"), [(1 / 500, 2_000), (1 / 10_000, 73_000)])
def test_faults_are_seen_at_the_published_n(rate: float, n: int) -> None:
    """1 token in 500 at 2k replayed tokens, a race in 1 of 10,000 steps at 73k steps; noise at the target."""

    def draw(rng: np.random.Generator) -> float:
        return known(outliers(int(rng.poisson(n * (rate + TARGET))), n, 0, 100_000).p_limit)

    assert power(draw, 0.001, times=2_000) >= 0.9 - 2.33 * np.sqrt(0.09 / 2_000)


def test_the_test_of_counts_needs_a_long_floor() -> None:
    assert known(outliers(4, 2_000, 0, 2_000).p) > 0.05
    assert known(outliers(4, 2_000, 0, 100_000).p) < 1e-6


def test_steps_are_counted_once() -> None:
    step = np.repeat(np.arange(5), 4)
    hit = np.zeros(20, bool)
    hit[[0, 1, 2, 17]] = True
    assert steps_hit(hit, step) == (2, 5)
