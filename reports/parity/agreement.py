"""Top-1 agreement (P1): how much more often the candidate's most probable token is another than the baseline's, beyond
what the baseline's own is.

Prompts are pairs, as in ratio.py. The bound is the larger of Student's t on the prompts' differences and of a normal
bound with the binomial variance of each prompt's share, smoothed by half a position: where hardly any prompt differs, t
takes the rest for certain.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from reports.accuracy.harm import sign_flip
from reports.parity.divergences import Flags
from reports.parity.ratio import Ints
from reports.parity.result import LEVEL, Finding

LIMIT = 0.002
"""More positions that differ, as a share."""


def agreement(differs: Flags, floor_differs: Flags, prompt: Ints, limit: float = LIMIT) -> Finding:
    """From positions at which the most probable tokens differ, of candidate and floor, and each position's prompt. The
    statistic and the floor are shares of positions that differ, as means over prompts; the bound is of their
    difference."""
    _, which = np.unique(prompt, return_inverse=True)
    positions = np.bincount(which)
    n = len(positions)
    if n < 2:
        return Finding(n=n, unit="prompts", limit=limit, reason=f"{n} prompts cannot tell how far prompts differ.")
    counts = [np.bincount(which, each) for each in (differs, floor_differs)]
    shares = [count / positions for count in counts]
    each = shares[0] - shares[1]
    smoothed = np.array([(count + 0.5) / (positions + 1) for count in counts])
    by_t = float(stats.t.isf(1 - LEVEL, n - 1)) * float(each.std(ddof=1)) / math.sqrt(n)
    by_position = float(stats.norm.isf(1 - LEVEL)) * math.sqrt(float((smoothed * (1 - smoothed) / positions).sum())) / n
    return Finding(
        n=n,
        unit="prompts",
        statistic=float(shares[0].mean()),
        floor=float(shares[1].mean()),
        bound=float(each.mean()) + max(by_t, by_position),
        limit=limit,
        p=sign_flip(each),
        p_limit=sign_flip(each - limit),
    )
