"""Shares of requests: by hand, levels, and the published number of requests."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from reports.parity.shares import shares
from tests.reports.parity.levels import holds, known, power


def test_by_hand() -> None:
    found = shares(5, 5, 0, 5)
    assert (found.statistic, found.floor) == (1, 0)
    assert found.p == pytest.approx(1 / 252)
    # Newcombe's own example (56/70 − 48/80): .2, at 95 % two-sided to .3339; one-sided at 95 % as 90 % two-sided
    example = known(shares(56, 70, 48, 80).bound)
    low, high = (stats.binomtest(*each).proportion_ci(0.9, "wilson") for each in ((48, 80), (56, 70)))
    assert example == pytest.approx(0.2 + np.hypot(high.high - 0.8, 0.6 - low.low))


@pytest.mark.parametrize("rate", [0.005, 0.2])
def test_levels(rate: float) -> None:
    holds(lambda rng: known(shares(*_counts(rng, rate, rate)).p), times=2_000)

    def falsely_passed(rng: np.random.Generator) -> float:
        found = shares(*_counts(rng, rate + 0.02, rate), limit=0.02)
        return 0.0 if known(found.bound) <= known(found.limit) else 1.0

    holds(falsely_passed, times=2_000, levels=(0.05,))


def _counts(rng: np.random.Generator, mine: float, floor: float, n: int = 800) -> tuple[int, int, int, int]:
    return int(rng.binomial(n, mine)), n, int(rng.binomial(n, floor)), n


@pytest.mark.parametrize(("rate", "floor", "n", "least"), [(0.01, 0.0, 1_293, 0.9), (0.02, 0.005, 1_426, 0.85)])
def test_power_at_the_published_number_of_requests(rate: float, floor: float, n: int, least: float) -> None:
    """The exact test is a little behind the normal formula at .5 % against 2 %."""
    assert power(lambda rng: known(shares(*_counts(rng, rate, floor, n)).p), 0.01, times=1_000) > least


def test_nothing_recorded() -> None:
    assert "candidate" in shares(0, 0, 1, 5).reason
    assert "floor" in shares(0, 5, 0, 0).reason
