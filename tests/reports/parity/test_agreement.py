"""Top-1 agreement: by hand, levels, and prompts that never differ."""

from __future__ import annotations

import numpy as np
import pytest

from reports.parity.agreement import agreement
from reports.parity.divergences import Flags
from tests.reports.parity.levels import holds, known

PROMPT = np.repeat(np.arange(40), 100)


def differing(rng: np.random.Generator, rate: float) -> tuple[Flags, Flags]:
    """Two runs, at rates of the prompts."""
    rates = np.repeat(rng.gamma(1, rate, 40), 100)
    return rng.random(4000) < rates, rng.random(4000) < rates


def test_by_hand() -> None:
    found = agreement(np.array([1, 0, 1, 1], bool), np.array([0, 0, 0, 1], bool), np.array([0, 0, 1, 1]))
    assert (found.n, found.statistic, found.floor) == (2, 0.75, 0.25)
    assert found.p == 1 / 4


@pytest.mark.parametrize("rate", [0.001, 0.02])
def test_levels(rate: float) -> None:
    holds(lambda rng: known(agreement(*differing(rng, rate), PROMPT).p), times=800)

    def falsely_passed(rng: np.random.Generator) -> float:
        differs, floor = differing(rng, rate)
        differs = differs | (rng.random(4000) < 0.002 / (1 - rate))
        found = agreement(differs, floor, PROMPT)
        return 0.0 if known(found.bound) <= known(found.limit) else 1.0

    holds(falsely_passed, times=800, levels=(0.05,))


def test_runs_that_never_differ_are_not_certain() -> None:
    never = np.zeros(20_000, bool)
    found = agreement(never, never, np.repeat(np.arange(40), 500))
    assert (found.statistic, found.p) == (0, 1)
    assert 0 < known(found.bound) < 0.002
    assert agreement(never[:100], never[:100], PROMPT[:100]).reason
