"""What every check of output parity says, in one shape."""

from __future__ import annotations

from typing import Literal

import msgspec

LEVEL = 0.95
"""One-sided, of every bound."""

Unit = Literal["positions", "steps", "prompts", "pairs", "requests", "drafts"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Candidate against baseline, beside baseline against itself (the floor). Null where nothing can be said;
    ``reason`` says why."""

    n: int
    """Of the candidate, in ``unit``."""
    unit: Unit
    statistic: float | None = None
    """The candidate's."""
    floor: float | None = None
    """The same statistic of the floor."""
    bound: float | None = None
    """Upper, of what ``limit`` is held against."""
    limit: float | None = None
    """That the bound has to stay within; null where the check has no margin."""
    p: float | None = None
    """Of as much or more, if the candidate were like the baseline."""
    p_limit: float | None = None
    """Of as much or more, if the candidate were at the limit."""
    reason: str = ""
