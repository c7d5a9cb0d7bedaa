"""What must be found is found, and what must not be found is not."""

from __future__ import annotations

from reports.signoff.gates.evidence import Evidence, gate
from reports.signoff.result import Gate


def judge(evidence: Evidence) -> list[Gate]:
    """Every control that was run holds; that none could be run is no pass."""
    if evidence.parts.evals is None and evidence.parts.parity is None:
        return []
    run = [each for each in evidence.controls if each.holds is not None]
    missing = [
        f"{each.name}: expected: {each.expected}; seen: {each.seen}. The measuring cannot be trusted."
        for each in run
        if not each.holds
    ]
    if not run:
        missing.append("No control could be run: too few repeats.")
    return [gate("controls_hold", "Controls", f"{sum(bool(each.holds) for each in run)} of {len(run)} hold.", missing)]
