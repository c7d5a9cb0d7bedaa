"""Draws against their logprobs: a sampler written out here, and the faults in it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from reports.parity.calibration import Calibration, calibration, greedy
from reports.parity.divergences import Floats, Ids
from tests.reports.parity.levels import keeps, known

Draws = tuple[Ids, Floats, Ids, Floats]


def logprobs(rng: np.random.Generator, n: int, spread: float = 3.0, vocabulary: int = 64) -> Floats:
    logits = rng.gumbel(size=(n, vocabulary)) * rng.gamma(2, spread / 2, (n, 1))
    found: Floats = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    return found


def sample(rng: np.random.Generator, all_logprobs: Floats, temperature: float, top_p: float) -> Draws:
    """Tokens drawn, their logprobs, and the 20 most probable."""
    ids = np.argsort(-all_logprobs, axis=1)
    ordered = np.take_along_axis(all_logprobs, ids, axis=1)
    shares = np.exp((ordered - ordered[:, :1]) / temperature)
    shares /= shares.sum(axis=1, keepdims=True)
    shares[shares.cumsum(axis=1) - shares >= top_p] = 0
    upto = shares.cumsum(axis=1)
    place = (rng.random((len(ids), 1)) * upto[:, -1:] >= upto).sum(axis=1)
    rows = np.arange(len(ids))
    return ids[rows, place], ordered[rows, place], ids[:, :20], ordered[:, :20]


def judged(rng: np.random.Generator, n: int, temperature: float, top_p: float, spread: float = 3.0) -> Calibration:
    return calibration(*sample(rng, logprobs(rng, n, spread), temperature, top_p), temperature, top_p)


@pytest.mark.parametrize("spread", [3.0, 12.0])  # most probable token: .66, .9 on average
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 0.95), (1.0, 1.0), (0.7, 0.9)])
def test_levels(temperature: float, top_p: float, spread: float) -> None:
    rng = np.random.default_rng(0)
    found = [judged(rng, 600, temperature, top_p, spread) for _ in range(300)]
    keeps([known(each.rank_one.p) for each in found])
    keeps([known(each.surprisal.p) for each in found])
    assert all(each.outside.statistic == 0 for each in found)
    assert all(each.rank_one.n > 200 for each in found)


def test_by_hand() -> None:
    # two tokens of .6 and .4, four draws, all of the first
    ids, given = np.tile([5, 6], (4, 1)), np.tile(np.log([0.6, 0.4]), (4, 1))
    found = calibration(np.full(4, 5), np.log(np.full(4, 0.6)), ids, given, 1.0, 1.0)
    assert found.rank_one.statistic == pytest.approx((4 - 2.4) / np.sqrt(4 * 0.24))
    assert found.rank_one.p == pytest.approx(2 * 0.6**4)
    assert "too little choice" in found.surprisal.reason


def test_temperature_ignored_is_seen_in_300_tokens() -> None:
    rng = np.random.default_rng(0)
    greedily = sample(rng, logprobs(rng, 300, 12), 1e-6, 1.0)
    assert known(calibration(*greedily, 1.0, 0.95).rank_one.p) < 1e-6


def test_top_p_ignored_is_seen_in_500_tokens() -> None:
    rng = np.random.default_rng(0)
    found = calibration(*sample(rng, logprobs(rng, 500), 1.0, 1.0), 1.0, 0.95)
    assert found.outside.p == 0
    assert 0.005 < known(found.outside.statistic) < 0.05


def test_the_wrong_temperature_shows_in_surprisal() -> None:
    rng = np.random.default_rng(0)
    warm = sample(rng, logprobs(rng, 3_000), 1.3, 0.95)
    found = calibration(*warm, 1.0, 0.95)
    assert known(found.surprisal.statistic) > 4
    assert known(found.rank_one.statistic) < -4


def test_ties_at_the_edge_are_inside() -> None:
    # .5, and two of .25: which of them is in the nucleus of .7 is open
    ids, given = np.array([[1, 2, 3]]), np.log([[0.5, 0.25, 0.25]])
    assert calibration(np.array([3]), np.log([0.25]), ids, given, 1.0, 0.7).outside.statistic == 0
    assert calibration(np.array([3]), np.log([0.25]), ids, given, 1.0, 0.4).outside.statistic == 1
    beyond = calibration(np.array([9]), np.log([0.001]), ids, np.log([[0.5, 0.25, 0.249]]), 1.0, 0.9)
    assert beyond.outside.statistic == 1


def test_what_cannot_be_judged() -> None:
    rng = np.random.default_rng(0)
    for temperature, top_p in ((1.5, 0.95), (0.7, 1.0)):
        found = judged(rng, 50, temperature, top_p)
        assert found.rank_one.p is None
        assert "too little" in found.rank_one.reason
    flat = np.full((10, 64), -np.log(64))  # 20 tokens are a third: the nucleus is not in the list
    found = calibration(*sample(rng, flat, 1.0, 0.95), 1.0, 0.95)
    assert (found.rank_one.n, found.rank_one.p) == (0, None)
    with pytest.raises(ValueError, match="temperature above 0"):
        calibration(*sample(rng, flat, 1.0, 1.0), 1.0, 0.0)


def test_many_positions_are_judged_by_the_normal_distribution() -> None:
    rng = np.random.default_rng(0)
    found = calibration(*sample(rng, logprobs(rng, 20_000), 1.0, 0.95), 1.0, 0.95).rank_one
    assert known(found.p) == pytest.approx(2 * stats.norm.sf(abs(known(found.statistic))))
    assert known(found.p) > 0.001


def test_greedy_takes_the_most_probable() -> None:
    given = np.array([[-0.1, -3.0], [-0.7, -0.7], [-0.1, -3.0], [-0.1, -3.0]])
    found = greedy(np.array([-0.1, -0.7, -3.0, np.nan]), given)
    assert (found.n, found.statistic, found.p) == (4, 0.5, 0)
    assert greedy(given[:, 0], given).p == 1
    assert greedy(given[:0, 0], given[:0]).reason
