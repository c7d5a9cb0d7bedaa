"""Accuracy floors: exact bounds, and the n that would be needed."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from reports.power import judge_floor, questions_needed, sessions_needed


def test_sessions_needed_follow_the_square_of_the_width() -> None:
    width = math.exp(0.2)
    assert sessions_needed(1 / width, 1.0, width, 10, 1.05) == math.ceil(10 * (0.2 / math.log(1.05)) ** 2)
    # a true ratio of 1.04 is told from 1 with fewer sessions than it is shown to lie below 1.05
    assert sessions_needed(1.04 / width, 1.04, 1.04 * width, 10, 1.05) == math.ceil(10 * (0.2 / math.log(1.04)) ** 2)
    assert sessions_needed(0.99, 1.04, 1.09, 10, 1.05) > 10


@pytest.mark.parametrize("right", [25, 26, 28])
def test_br_29_thirty_questions_are_too_few(right: int) -> None:
    found = judge_floor(right, 30, 0.85)
    assert found.outcome == "INCONCLUSIVE"
    assert found.low < 0.85 <= found.high


def test_br_29_says_how_many_are_needed() -> None:
    needed = questions_needed(0.87, 0.85)
    assert needed is not None
    # normal approximation: ((1.645 sqrt(.85 .15) + .842 sqrt(.87 .13)) / .02)^2 = 1,890
    assert needed == pytest.approx(1890, rel=0.03)


def test_needed_number_has_the_power_and_fewer_has_not() -> None:
    needed = questions_needed(0.95, 0.85)
    assert needed is not None

    def power(n: int) -> float:
        passing = next(k for k in range(n + 1) if judge(k, n) == "PASS")
        return float(stats.binom.sf(passing - 1, n, 0.95))

    def judge(k: int, n: int) -> str:
        low = stats.beta.ppf(0.05, k, n - k + 1) if k else 0.0
        return "PASS" if low >= 0.85 else "no"

    assert power(needed) >= 0.8
    assert power(int(needed * 0.85)) < 0.8


def test_clear_cases() -> None:
    assert judge_floor(980, 1000, 0.85).outcome == "PASS"
    assert judge_floor(700, 1000, 0.85).outcome == "FAIL"
    assert judge_floor(30, 30, 0.85).outcome == "PASS"  # 0.05 ** (1 / 30) = 0.905
    assert questions_needed(0.85, 0.85) is None


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="0 <= right <= n"):
        judge_floor(31, 30, 0.85)
