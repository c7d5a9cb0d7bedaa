"""Acceptance by draft position: windows whose rates differ, as those of a server do."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from reports.parity.acceptance import acceptance
from reports.parity.divergences import Floats
from tests.reports.parity.levels import holds, known

RATES = np.array([0.85, 0.7, 0.55])


def counted(rng: np.random.Generator, rates: Floats, windows: int = 12) -> tuple[Floats, Floats]:
    """A window's rates are its own, around these."""
    drafts = rng.integers(2_000, 6_000, windows)
    own = rng.beta(rates * 60, (1 - rates) * 60, (windows, len(rates)))
    return rng.binomial(drafts[:, None], own).astype(float), drafts.astype(float)


def test_level_where_windows_differ() -> None:
    def least(rng: np.random.Generator) -> float:
        return min(known(each.holm_p) for each in acceptance(*counted(rng, RATES), *counted(rng, RATES)))

    holds(least, times=1_000)


def test_a_position_that_accepts_less_is_named() -> None:
    rng = np.random.default_rng(0)
    found = acceptance(*counted(rng, RATES - [0, 0, 0.3]), *counted(rng, RATES))
    assert [each.position for each in found if known(each.holm_p) < 0.01] == [3]
    assert known(found[2].found.statistic) < known(found[2].found.floor)


def test_by_hand() -> None:
    # .5 of 400 against .4 of 400, each window like its arm: no spread, so binomial; 4 degrees of freedom
    mine, theirs = np.array([[50.0], [50], [100]]), np.array([[40.0], [40], [80]])
    drafts = np.array([100.0, 100, 200])
    found = acceptance(mine, drafts, theirs, drafts)[0].found
    assert (found.n, found.statistic, found.floor) == (400, 0.5, 0.4)
    assert found.p == pytest.approx(2 * stats.t.sf(0.1 / np.sqrt(0.45 * 0.55 / 200), 4))


def test_what_cannot_be_said() -> None:
    one = np.array([[5.0]]), np.array([10.0])
    found = acceptance(*one, *one)[0]
    assert (found.holm_p, found.found.p, found.found.statistic) == (None, None, 0.5)
    assert "2 windows" in found.found.reason
    empty = acceptance(np.zeros((3, 1)), np.zeros(3), np.ones((3, 1)), np.ones(3))[0]
    assert "drafted nothing" in empty.found.reason
    full = acceptance(np.ones((3, 1)), np.ones(3), np.ones((3, 1)), np.ones(3))[0]
    assert full.found.p == 1
