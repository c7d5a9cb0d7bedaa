"""Why windows have no result, told of each, and of many together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec


class Reason(msgspec.Struct, frozen=True):
    """Of one kind, whatever its figure. ``figure``: the greater, the worse; ``told``: the same in words."""

    kind: str
    figure: float | None = None
    told: str = ""
    advice: str = ""

    def __str__(self) -> str:
        return _text(self, "")


def grouped(reasons: Iterable[Reason]) -> dict[str, int]:
    """How often each kind occurs, the most frequent first; in words, with the worst figure."""
    kinds: dict[tuple[str, str], list[Reason]] = defaultdict(list)
    for reason in reasons:
        kinds[reason.kind, reason.advice].append(reason)
    found = {}
    for same in sorted(kinds.values(), key=len, reverse=True):
        worst = max(same, key=lambda each: each.figure or 0.0)
        found[_text(worst, "worst " if len({each.told for each in same}) > 1 else "")] = len(same)
    return found


def _text(reason: Reason, which: str) -> str:
    told = f", {which}{reason.told}" if reason.told else ""
    return f"{reason.kind}{told}" + (f": {reason.advice}" if reason.advice else "")
