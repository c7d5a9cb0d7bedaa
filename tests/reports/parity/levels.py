"""Simulated levels: how often a test rejects where there is nothing to find."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np


def holds(
    draw: Callable[[np.random.Generator], float], *, times: int, levels: tuple[float, ...] = (0.05, 0.01)
) -> None:
    """``draw`` makes data without a fault and gives the test's p: ``keeps`` for so many of them."""
    rng = np.random.default_rng(0)
    keeps([draw(rng) for _ in range(times)], levels)


def keeps(ps: list[float], levels: tuple[float, ...] = (0.05, 0.01)) -> None:
    """p up to a level do not come more often than it, within Monte-Carlo error (z = 2.33)."""
    for level in levels:
        assert np.mean(np.array(ps) <= level) <= level + 2.33 * math.sqrt(level * (1 - level) / len(ps)), level


def power(draw: Callable[[np.random.Generator], float], level: float, *, times: int) -> float:
    """How often p is up to ``level``."""
    rng = np.random.default_rng(1)
    return float(np.mean([draw(rng) <= level for _ in range(times)]))


def known(value: float | None) -> float:
    assert value is not None
    return value
