"""P2: outliers of all positions that arms were compared at (P1, P3 to P7) together: the rate, and its bound."""

from __future__ import annotations

from reports.parity.arms import TOKEN_CHECKS, Arms, Tally, rate
from reports.parity.result import Seen

CHECK = "P2"


def judge(arms: Arms) -> Seen:
    """Harm is a rate beyond the limit."""
    pairs: dict[str, list[Tally]] = {}
    for check in TOKEN_CHECKS:
        if {"A1", "A2", *arms.candidates} <= set(arms.records.arms(check)):
            for arm in arms.candidates:
                for base in ("A1", "A2"):
                    name = f"{arm}-{base}"
                    tally = arms.compared.tallies.get((check, name)) or arms.tally(
                        check, arms.compared.pair(check, base, arm)
                    )
                    pairs.setdefault(name, []).append(tally)
    measures = [
        rate(
            "outliers",
            name,
            Tally(*(sum(getattr(each, field) for each in tallies) for field in Tally.__struct_fields__)),
            held=True,
        )
        for name, tallies in pairs.items()
    ]
    if not measures:
        return Seen(said="No positions were compared.", missing=["No check that compares positions has ended."])
    worst = max(measures, key=lambda each: each.found.statistic or 0.0)
    events, n = round((worst.found.statistic or 0.0) * worst.found.n), worst.found.n
    shown = min(
        arms.compared.shown.values(),
        key=lambda each: (each.batch, each.prompt_tokens, each.position or 0),
        default=None,
    )
    missing = [arms.thresholds.reason] if arms.thresholds.reason else []
    said = f"At most {events:,} outliers in {n:,} positions, beyond {arms.thresholds.tau:.2g} nats."
    return Seen(said=said, measures=measures, missing=missing, reproducer=shown if events else None)
