"""D2: replies end exactly where they were asked to."""

from __future__ import annotations

from reports.parity.arms import Arms, invariant
from reports.parity.result import Seen

CHECK = "D2"


def judge(arms: Arms) -> Seen:
    """Wrong is a reply that ends elsewhere, or whose usage counts other tokens than came."""
    found = invariant(arms, CHECK, lambda reply: reply.problem)
    longest = max(case.output_tokens for case in arms.cases(CHECK).values())
    return Seen(
        said=f"{len(arms.cases(CHECK)):,} replies, up to {longest:,} tokens.",
        measures=found.measures,
        broken=found.broken,
        reproducer=found.reproducer,
    )
