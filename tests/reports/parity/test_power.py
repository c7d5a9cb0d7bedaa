"""The numbers of accuracy.md, section (d), at token level, and of (f)."""

from __future__ import annotations

import pytest
from scipy import stats

from reports.parity.power import (
    prompts_for_divergence,
    prompts_for_ratio,
    requests_for_one,
    requests_for_shares,
    units_for_outliers,
)

FLOORS = (0, 1e-6, 1e-5, 1e-4, 1e-3)


@pytest.mark.parametrize(
    ("every", "published", "exact"),
    [
        (500, [1.2e3, 2.0e3, 1.9e3, 3.2e3, 8.7e3], [1_152, 1_944, 1_936, 3_182, 8_253]),
        (10_000, [23e3, 39e3, 73e3, 285e3, 2.0e6], [23_026, 38_513, 72_669, 268_913, 1_993_089]),
        (100_000, [234e3, 737e3, 2.8e6, 20e6, 192e6], [230_259, 726_690, 2_689_126, 19_930_889, 191_948_184]),
    ],
)
def test_published_positions(every: int, published: list[float], exact: list[int]) -> None:
    """Published ones are up to 6 % more: they were looked for on a coarse grid."""
    found = [units_for_outliers(1 / every, floor) for floor in FLOORS]
    assert found == exact
    for mine, theirs in zip(found, published, strict=True):
        assert 0.97 < theirs / mine < 1.065


@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize("fault", [1 / 500, 1e-4])
def test_no_fewer_positions_have_the_power(fault: float, floor: float) -> None:
    n = units_for_outliers(fault, floor)

    def power(n: int) -> float:
        events = int(stats.poisson.isf(0.001, n * floor)) + 1 if floor else 1
        return float(stats.poisson.sf(events - 1, n * (fault + floor)))

    assert power(n) >= 0.9
    assert all(power(fewer) < 0.9 for fewer in range(1, n, max(1, n // 500)))


@pytest.mark.parametrize(
    ("every", "floor", "prompts"),
    [(500, 1 / 1000, 24), (2_000, 1 / 1000, 174), (10_000, 1 / 1000, 3_246), (10_000, 1 / 300, 29_826)],
)
def test_published_prompts_for_divergence(every: int, floor: float, prompts: int) -> None:
    """Published as 24, 174, 3,247 and 29,826."""
    assert prompts_for_divergence(1 / every, floor, 2_048) == prompts


def test_published_prompts_and_requests() -> None:
    assert (prompts_for_ratio(1.5, 1.0), prompts_for_ratio(1.25, 1.0)) == (105, 417)
    assert (requests_for_shares(0.01, 0), requests_for_shares(0.02, 0.005)) == (1_293, 1_426)
    assert (requests_for_one(1 / 200), requests_for_one(1 / 200, power=0.99)) == (460, 919)
