"""Looks: a result that is looked at several times has as many chances to be wrong, unless each look spends a part of
the level.

Lan and DeMets' spending of O'Brien-Fleming type: by the share t of the repeats, 2 − 2 Φ(z_{α/2} / √t) of the one-sided
level α is spent; almost none of it early. The bound of each look follows from those before it by integrating over the
score process, B(t) ~ N(0, t) with independent increments (Armitage, McPherson and Rowe 1969), on Gauss-Legendre nodes.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy import optimize, stats

from reports.accuracy.drop import Floats

_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(160)
_FAR = 9.0
"""Standard deviations beyond which nothing is left to integrate."""
_NONE = 1e-14
"""A look that would spend less than this has no bound: rounding is larger."""


@lru_cache(1024)
def z_bounds(alpha: float, looks: tuple[float, ...]) -> tuple[float, ...]:
    """The one-sided bound of z at each of ``looks`` (shares, rising, the last 1); infinite where nothing can be
    spent."""
    bounds: list[float] = []
    before, spent = 0.0, 0.0
    points, density = np.zeros(1), np.ones(1)  # of B at the look before, with what was stopped taken out
    for share in looks:
        step = np.sqrt(share - before)
        part = 2 * float(stats.norm.sf(stats.norm.isf(alpha / 2) / np.sqrt(share))) - spent
        far = _FAR * np.sqrt(share)
        at = far
        if part > _NONE:
            at = float(optimize.brentq(_beyond, -far, far, args=(points, density, step, part), xtol=1e-12))
            spent += part
        bounds.append(at / float(np.sqrt(share)) if at < far else np.inf)
        nodes = (at + far) / 2 * (_NODES + 1) - far
        mass = (stats.norm.pdf((nodes[:, None] - points) / step) / step) @ density
        points, density = nodes, mass * _NODE_WEIGHTS * (at + far) / 2
        before = share
    return tuple(bounds)


def _beyond(at: float, points: Floats, density: Floats, step: float, part: float) -> float:
    """By how much the chance that B's next value is above ``at`` exceeds ``part``."""
    return float(density @ stats.norm.sf((at - points) / step)) - part


def level_at(alpha: float, looks: tuple[float, ...], look: int) -> float:
    """The one-sided level of look number ``look``, from 0, that keeps the whole at ``alpha``."""
    return float(stats.norm.sf(z_bounds(alpha, looks)[look])) if len(looks) > 1 else alpha


def overall_p(p: float, looks: tuple[float, ...], look: int) -> float:
    """The least level of the whole at which ``p``, seen at this look, is significant there: what Holm's adjustment
    takes. 1 where half a chance would not do."""
    if len(looks) == 1:
        return p
    least, most = 1e-12, 0.5
    if p > level_at(most, looks, look):
        return 1.0
    if p <= level_at(least, looks, look):
        return least

    def short(logarithm: float) -> float:
        return level_at(float(np.exp(logarithm)), looks, look) - p

    return float(np.exp(optimize.brentq(short, np.log(least), np.log(most), xtol=1e-6)))
