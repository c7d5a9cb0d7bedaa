"""Acceptance of drafts by position (S1): a changed distribution accepts more or fewer of the same drafter's tokens.

Drafts come in windows (a request, or the counters' growth between two readings): those of one window are more alike
than others, so that counts vary more than binomially. The spread between windows of an arm says by how much (Pearson's
χ² by its degrees of freedom, 1 at least), and the difference of shares is held against that with Student's t,
two-sided, Holm over positions.
"""

from __future__ import annotations

import math

import msgspec
from scipy import stats

from reports.accuracy.harm import holm
from reports.parity.divergences import Floats
from reports.parity.result import Finding

WINDOWS = 5
"""Of both arms together, at least."""


class Position(msgspec.Struct, frozen=True):
    """Of a draft, from 1."""

    position: int
    found: Finding
    """Shares of drafts accepted up to here; the floor is the baseline's."""
    holm_p: float | None


def acceptance(accepted: Floats, drafts: Floats, floor_accepted: Floats, floor_drafts: Floats) -> list[Position]:
    """Accepted tokens [windows, positions] of ``drafts`` [windows]: the candidate's, and the baseline's. Windows
    without drafts are left out."""
    arms = [(each[of > 0], of[of > 0]) for each, of in ((accepted, drafts), (floor_accepted, floor_drafts))]
    found = [_position(*((each[:, position], of) for each, of in arms)) for position in range(accepted.shape[1])]
    adjusted = iter(holm([each.p for each in found if each.p is not None]))
    return [
        Position(position, each, None if each.p is None else next(adjusted)) for position, each in enumerate(found, 1)
    ]


def _position(mine: tuple[Floats, Floats], theirs: tuple[Floats, Floats]) -> Finding:
    n = int(mine[1].sum())
    if not n or not theirs[1].sum():
        return Finding(n=n, unit="drafts", reason="An arm drafted nothing.")
    shares = [float(each.sum() / of.sum()) for each, of in (mine, theirs)]
    windows = len(mine[1]) + len(theirs[1])
    if min(len(mine[1]), len(theirs[1])) < 2 or windows < WINDOWS:
        reason = f"{windows} windows of counts cannot tell how far drafts of one window are alike."
        return Finding(n=n, unit="drafts", statistic=shares[0], floor=shares[1], reason=reason)
    pooled = float((mine[0].sum() + theirs[0].sum()) / (mine[1].sum() + theirs[1].sum()))
    if not 0 < pooled < 1:
        return Finding(n=n, unit="drafts", statistic=shares[0], floor=shares[1], p=1.0)
    variance = pooled * (1 - pooled)
    spread = sum(
        float(((each - of * share) ** 2 / of).sum()) / variance
        for (each, of), share in zip((mine, theirs), shares, strict=True)
    )
    overdispersion = max(1.0, spread / (windows - 2))
    error = math.sqrt(overdispersion * variance * float(1 / mine[1].sum() + 1 / theirs[1].sum()))
    t = (shares[0] - shares[1]) / error
    return Finding(
        n=n,
        unit="drafts",
        statistic=shares[0],
        floor=shares[1],
        p=2 * float(stats.t.sf(abs(t), windows - 2)),
    )
