"""Quantiles against their definition, intervals against simulated truth, the noise floor by hand."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports.intervals import Effect, effects, estimate, inverse, level, noise_floor, quantiles, resample
from tests.reports.experiments import CASES, Case, coverage, experiment

REPLICATES = 400  # fewer than in a report, for speed; the simulated coverage is the same within a per cent


def expanded(values: list[float], counts: list[int], p: float) -> float:
    """Linear interpolation at (n - 1) p of the sample in which each value stands as often as it counts."""
    sample = sorted(v for v, c in zip(values, counts, strict=True) for _ in range(c))
    if not sample:
        return math.nan
    rank = (len(sample) - 1) * p
    low, high = sample[math.floor(rank)], sample[math.ceil(rank)]
    return low if low == high or rank == math.floor(rank) else low + (rank - math.floor(rank)) * (high - low)


@given(
    data=st.lists(
        st.tuples(st.one_of(st.floats(0, 100), st.just(math.inf)), st.integers(0, 3)), min_size=1, max_size=40
    ),
    counts=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    p=st.floats(0, 1),
)
@settings(max_examples=200, deadline=None)
def test_weighted_quantile_is_that_of_the_expanded_sample(
    data: list[tuple[float, int]], counts: list[int], p: float
) -> None:
    values, session = [v for v, _ in data], [s for _, s in data]
    found = quantiles(np.array(values), np.array(session), np.array([counts], float), [p])[0, 0]
    expected = expanded(values, [counts[s] for s in session], p)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)


def test_percentile_is_linear_at_n_minus_1() -> None:
    values = np.array([1000, 910, 820, 730, 640, 550, 460, 370, 280, 190.0])
    assert quantiles(values, np.zeros(10, int), np.ones((1, 1)), [0.9])[0, 0] == pytest.approx(919)


def test_p90_interactivity_is_inverted_after_the_mean_in_time() -> None:
    baseline_1, candidate_1 = np.full(10, 0.010), np.full(10, 0.005)
    baseline_2, candidate_2 = np.full(10, 0.030), np.full(10, 0.015)
    values = np.array([baseline_1, candidate_1, candidate_2, baseline_2])
    session = np.arange(10)
    found = effects(values, session, np.array([False, True, True, False]), resample(10), [0.9], rate=True)[0]
    assert found.baseline.value == pytest.approx(1 / 0.020)
    assert found.candidate.value == pytest.approx(1 / 0.010)
    assert found.ratio.value == pytest.approx(2.0)
    assert found.difference.value == pytest.approx(50.0)
    assert found.blocks == pytest.approx([100, 200, 1 / 0.015, 1 / 0.030])


@pytest.mark.parametrize("name", ["24 sessions, ratio 1.3", "24 sessions, heavy tails"])
def test_interval_covers_the_true_ratio_in_95_per_cent(name: str) -> None:
    assert 0.93 <= coverage(CASES[name], range(500), replicates=REPLICATES) <= 0.97


def test_br_29_interval_covers_one_for_equal_backends_under_drift() -> None:
    case = CASES["A against A, drift 1 %/min, 24 sessions"]
    assert 0.93 <= coverage(case, range(500), replicates=REPLICATES) <= 0.97


def test_br_29_a_then_b_takes_drift_for_an_effect() -> None:
    """What the balanced order is for: the same drift, measured A then B, is found as a difference nearly always."""
    case = msgspec.structs.replace(
        CASES["A against A, drift 1 %/min, 24 sessions"], order="AB", session_block_noise=0.01
    )
    assert coverage(case, range(40), replicates=REPLICATES) < 0.2


def test_linear_drift_cancels_in_the_mean_of_blocks_but_not_in_a_pooled_percentile() -> None:
    case = Case(sessions=40, ratio=1.0, drift_per_minute=0.03, turn_noise=0.0, session_block_noise=0.0)
    values, session = experiment(case, 1)
    candidate = np.array([False, True, True, False])
    found = effects(values, session, candidate, resample(40, 50), [0.9], rate=True)[0].ratio.value
    pooled = np.quantile(values[~candidate], 0.9) / np.quantile(values[candidate], 0.9)
    assert found == pytest.approx(1, abs=0.005)
    assert abs(pooled - 1) > 0.05


def test_interval_widens_with_fewer_sessions() -> None:
    def width(sessions: int) -> float:
        case = Case(sessions=sessions, length_spread=0.1)
        values, session = experiment(case, 5)
        candidate = np.array([False, True, True, False])
        found = effects(values, session, candidate, resample(sessions), [0.9], rate=True)[0].ratio
        assert found.low is not None
        assert found.high is not None
        return math.log(found.high / found.low)

    assert width(6) > 1.5 * width(60)


def test_failures_beyond_the_percentile_are_not_reached() -> None:
    values, session = np.array([0.1] * 8 + [math.inf] * 2), np.arange(10)
    median, p90 = level([(values, session)], resample(10), [0.5, 0.9])
    assert median.value == pytest.approx(0.1)
    assert p90.value is None
    assert "not reached" in p90.reason


def test_failures_near_the_percentile_leave_the_upper_end_open() -> None:
    values, session = np.array([0.1 + 0.001 * n for n in range(74)] + [math.inf] * 6), np.arange(80)
    (p90,) = level([(values, session)], resample(80), [0.9])
    assert p90.value is not None
    assert p90.low is not None
    assert p90.high is None
    rate = inverse(p90)
    assert rate.low is None
    assert rate.high == pytest.approx(1 / p90.low)


def test_one_session_has_a_value_and_no_interval() -> None:
    found = estimate(np.full(11, 2.0), np.ones((11, 1)), np.array([5]))
    assert (found.value, found.low, found.high) == (2.0, None, None)
    assert "two sessions" in found.reason


@pytest.mark.parametrize("value", [2.0, 1 / 3, 0.0])
def test_no_variation_is_no_certainty(value: float) -> None:
    weights = resample(6, 200)
    wobble = value * (1 + 1e-15 * (np.arange(201) % 2))  # rounding is no variation
    for statistic in (np.full(201, value), wobble):
        for log in (True, False):
            found = estimate(statistic, weights, np.full(6, 5), log=log)
            assert (found.value, found.low, found.high) == (value, None, None)
            assert "no variation" in found.reason


def test_nothing_is_null_with_a_reason() -> None:
    (found,) = level([(np.array([]), np.array([], int))], resample(3), [0.9])
    assert found.value is None
    assert found.reason


@given(scale=st.floats(0.001, 1000))
@settings(max_examples=20, deadline=None)
def test_ratio_does_not_depend_on_the_unit(scale: float) -> None:
    values, session = experiment(Case(sessions=6, median_turns=5), 2)
    candidate = np.array([False, True, True, False])

    def of(factor: float) -> Effect:
        return effects(values * factor, session, candidate, resample(6, 100), [0.9])[0]

    assert of(scale).ratio.value == pytest.approx(of(1).ratio.value)
    assert of(scale).ratio.low == pytest.approx(of(1).ratio.low)


@pytest.mark.filterwarnings("error")
def test_figures_of_zero_make_no_ratio_and_no_warning() -> None:
    session, weights = np.repeat(np.arange(4), 20), resample(4, 50)
    values = np.zeros((4, 80))
    candidate = np.array([False, True, True, False])
    for rate in (False, True):
        (found,) = effects(values, session, candidate, weights, [0.9], rate=rate)
        assert found.ratio.value is None
        assert found.ratio.reason
        assert all(math.isfinite(value) for value in found.blocks)
    values[candidate] = 1.0
    (found,) = effects(values, session, candidate, weights, [0.9])
    assert (found.ratio.value, found.candidate.value, found.baseline.value) == (None, 1.0, 0.0)
    assert "baseline's figure is 0" in found.ratio.reason


def test_without_percentiles_the_noise_floor_says_so() -> None:
    found = noise_floor([], np.array([False, True, True, False]), np.arange(4.0), 2)
    assert (found.relative, found.reason) == (None, "no turn has a decode rate in every block")


ABBA = np.array([False, True, True, False])
POSITIONS = np.arange(1.0, 5.0)


def test_noise_floor_sees_neither_the_effect_nor_a_linear_drift() -> None:
    position = np.arange(1.0, 9.0)
    candidate = np.array([False, True, True, False] * 2)
    blocks = 50 * np.exp(0.4 * candidate + 0.05 * position)
    found = noise_floor(blocks.tolist(), candidate, position, 2)
    assert found.relative == pytest.approx(0, abs=1e-9)
    assert found.drift_per_block == pytest.approx(math.expm1(0.05))
    assert found.degrees == 5


def test_noise_floor_by_hand() -> None:
    d = 0.01
    blocks = np.exp([d, -d, d, -d]).tolist()
    # backend effect 0, slope on centred positions -2d/5: of the sum of squares 4d^2 the slope explains (2d)^2 / 5
    error = math.sqrt(3.2 * d * d / 1 * (1 / 2 + 1 / 2))
    assert noise_floor(blocks, ABBA, POSITIONS, 2).relative == pytest.approx(math.expm1(2 * error))


@pytest.mark.parametrize("order", ["AB", "ABB", "ABBB"])
def test_noise_floor_is_unknown_with_too_few_blocks(order: str) -> None:
    candidate = np.array([letter == "B" for letter in order])
    found = noise_floor([100.0] * len(order), candidate, np.arange(float(len(order))), 2)
    assert found.relative is None
    assert found.reason
