"""Lengths: levels, and the faults of accuracy.md's table (2, 16)."""

from __future__ import annotations

import numpy as np

from reports.parity.lengths import length_stops, lengths
from reports.parity.ratio import Ints
from tests.reports.parity.levels import holds, known, power


def answers(rng: np.random.Generator, n: int, scale: float = 1.0) -> Ints:
    """Of prompts whose length varies, two thirds in common to all runs of a seed."""
    return (scale * np.exp(rng.normal(6, 0.4, n))).astype(int)


def test_level_with_runs_that_are_often_equal() -> None:
    def draw(rng: np.random.Generator) -> float:
        base = answers(rng, 40)
        candidate = np.where(rng.random(40) < 0.5, base, answers(rng, 40))
        return known(lengths(candidate, base, base).p)

    holds(draw, times=1_500)


def test_stops_that_come_early_are_seen_in_100_outputs() -> None:
    seen = power(
        lambda rng: known(lengths(answers(rng, 100, 0.7), answers(rng, 100), answers(rng, 100)).p), 0.01, times=200
    )
    assert seen > 0.9


def test_by_hand() -> None:
    found = lengths(np.array([8, 8, 8, 8]), np.array([10, 12, 14, 16]), np.array([10, 12, 14, 29]))
    assert (found.n, found.statistic, found.floor) == (4, 32 / 52, 65 / 52)
    assert found.p == 1 / 8  # all four shorter, two-sided
    same = np.array([3, 4])
    assert lengths(same, same, same).p == 1
    assert lengths(same[:0], same[:0], same[:0]).reason


def test_truncation_is_seen_in_ten_answers() -> None:
    none, all_ten = np.zeros(10, bool), np.ones(10, bool)
    found = length_stops(all_ten, none, none)
    assert (found.statistic, found.floor, found.p) == (1, 0, 2 / 1024)
    assert length_stops(none, none, none).p == 1
    assert length_stops(none[:0], none[:0], none[:0]).reason


def test_level_of_length_stops() -> None:
    def draw(rng: np.random.Generator) -> float:
        rates = rng.beta(0.5, 2, 60)
        mine, base, floor = rng.random((3, 60)) < rates
        return known(length_stops(mine, base, floor).p)

    holds(draw, times=1_500)
