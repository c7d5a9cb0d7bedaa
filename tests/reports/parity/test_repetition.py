"""Loops by construction, and the tests' levels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.parity.repetition import (
    LOOPS,
    Loop,
    compressed_share,
    longest_loop,
    longest_run,
    loops,
    more_repetition,
    repeated_share,
)
from tests.reports.parity.levels import holds, known


def text(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, n)


def test_repeated_share() -> None:
    assert repeated_share(text(0, 5_000)) == 0
    looping = np.append(text(0, 3_000), np.tile(text(1, 40), 60))
    assert repeated_share(looping) == pytest.approx(1 - 40 / (2_048 - 31))
    assert repeated_share(text(0, 63)) is None
    assert repeated_share(np.tile(text(0, 32), 2)) == pytest.approx(1 / 33)
    assert repeated_share(np.append(looping, text(2, 2_048))) == 0  # only its end counts


@given(st.integers(1, 60), st.integers(2, 20), st.integers(0, 100))
def test_longest_loop_is_the_one_built_in(period: int, times: int, before: int) -> None:
    sound, unit = np.arange(1_000, 1_000 + before), np.arange(period)
    after = np.arange(5_000, 5_010)
    found = longest_loop(np.concatenate([sound, np.tile(unit, times), after]))
    assert found == Loop(period, period * times)


def test_longest_loop_of_nothing() -> None:
    assert longest_loop(np.arange(100)) == Loop(0, 0)
    assert longest_loop(np.array([], int)) == Loop(0, 0)


def test_runs_of_one_token() -> None:
    assert longest_run(np.array([1, 0, 0, 0, 2, 2])) == 3
    assert longest_run(np.array([7])) == 1
    assert longest_run(np.array([], int)) == 0


def test_compression() -> None:
    assert known(compressed_share(np.zeros(2_048, int))) < 0.01
    assert known(compressed_share(text(0, 2_048))) > 0.5
    assert compressed_share(np.array([], int)) is None


def test_loops_of_five_outputs_are_seen_with_two_runs_of_each_arm() -> None:
    all_loop, none = np.ones((5, 2), bool), np.zeros((5, 2), bool)
    found = loops(all_loop, none)
    assert (found.statistic, found.floor, found.p) == (1, 0, pytest.approx(6.0**-5))
    assert loops(none, none).p == 1
    assert loops(none[:0], none[:0]).reason


def test_levels() -> None:
    def shares(rng: np.random.Generator) -> np.ndarray:
        """[arms, prompts, runs], by prompts that loop more or less."""
        return rng.beta(np.repeat(rng.gamma(1, 0.5, (1, 30, 1)), 2, axis=2), 2.0, (2, 30, 2))

    def looping(rng: np.random.Generator) -> float:
        mine, base = shares(rng) >= LOOPS
        return known(loops(mine, base).p)

    holds(looping, times=1_000)
    holds(lambda rng: known(more_repetition(*shares(rng)).p), times=1_000)


def test_more_repetition_by_hand() -> None:
    found = more_repetition(np.array([[0.2, 0.4], [0.1, 0.1]]), np.array([[0.1, 0.1], [0.0, 0.1]]))
    assert (found.n, found.statistic, found.floor) == (2, pytest.approx(0.2), pytest.approx(0.075))
    assert found.p == 1 / 4
    assert more_repetition(np.zeros((0, 2)), np.zeros((0, 2))).reason
