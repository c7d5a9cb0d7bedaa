"""What every page of a report must say first: that its figures are no measurement, or not of the decode path alone."""

from __future__ import annotations

from collections.abc import Sequence

from replay.records import RunFacts, Setup


def stamps(facts: RunFacts, setups: Sequence[Setup] = ()) -> list[str]:
    """In words; what is before a colon is the stamp's short form. ``setups``: those that were seen, if there are
    several: each must be matched."""
    found = []
    if facts.emulated:
        faster = f", clock {facts.time_scale:g} times as fast" if facts.time_scale != 1 else ""
        found.append(
            f"EMULATED: these figures come from the embedded emulator{faster}; they say nothing about hardware"
        )
    if not (facts.matched_gpus and all(setup.matched_gpus for setup in setups)):
        found.append("not matched: does not isolate the decode path")
    return found
