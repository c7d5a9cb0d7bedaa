"""What every page of a report must say first: that its figures are no measurement, or not of the decode path alone."""

from __future__ import annotations

from replay.records import RunFacts


def stamps(facts: RunFacts) -> list[str]:
    """In words; the word before a colon is the stamp's short form."""
    found = []
    if facts.emulated:
        faster = f", clock {facts.time_scale:g} times as fast" if facts.time_scale != 1 else ""
        found.append(
            f"EMULATED: these figures come from the embedded emulator{faster}; they say nothing about hardware"
        )
    if not facts.matched_gpus:
        found.append("not matched: does not isolate the decode path")
    return found
