"""What gates of the sign-off look at, and how they say what they found."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from reports.accuracy.result import Outcome
from reports.signoff.parts import Parts
from reports.signoff.result import Control, ExamPath, Gate, LimitIs, Unit

COVERAGE = 0.90
"""Share of decode tokens that ran specialised on the candidate, of each benchmark and stratum, at least."""
LENGTH_STOPS = 0.01
"""Share of the baseline's answers that were cut off at the length limit, at most: beyond it the limit is measured, and
not the model."""
RETRIED_MORE = 0.01
"""Level of Fisher's exact test of "the candidate's requests were sent again more often"."""


class Evidence(msgspec.Struct, frozen=True):
    """All that gates look at."""

    parts: Parts
    coverage: list[ExamPath]
    controls: list[Control]


Judge = Callable[[Evidence], list[Gate]]
"""None for a gate of a part that was not measured: that it is missing is a gate of its own."""


def gate(
    id: str,
    title: str,
    said: str,
    missing: list[str],
    *,
    harmed: bool = False,
    number: float | None = None,
    limit: float | None = None,
    limit_is: LimitIs = "",
    unit: Unit = "",
) -> Gate:
    """A gate that passes if nothing is ``missing``; otherwise it is INCONCLUSIVE, or FAIL if the candidate is
    ``harmed``."""
    outcome: Outcome = "PASS" if not missing else "FAIL" if harmed else "INCONCLUSIVE"
    return Gate(
        id=id,
        title=title,
        outcome=outcome,
        said=said,
        number=number,
        limit=limit,
        limit_is=limit_is,
        unit=unit,
        reasons=missing,
    )
