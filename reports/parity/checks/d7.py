"""D7: no reply is garbage."""

from __future__ import annotations

from reports.parity.arms import Arms, invariant
from reports.parity.result import Seen

CHECK = "D7"


def judge(arms: Arms) -> Seen:
    """Wrong is one token over and over, broken characters, or a marker as text."""
    found = invariant(arms, CHECK, lambda reply: reply.problem)
    return Seen(
        said=f"{len(arms.cases(CHECK)):,} replies.",
        measures=found.measures,
        broken=found.broken,
        reproducer=found.reproducer,
    )
