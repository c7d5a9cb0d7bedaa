"""V1: the backends differ in what is under test alone, and every reply is its own server's."""

from __future__ import annotations

from evals.records import ArmName
from reports.parity.arms import BASELINES, Arms
from reports.parity.result import Seen

CHECK = "V1"


def judge(arms: Arms) -> Seen:
    """Never harm: what does not hold says that something else was measured."""
    facts = arms.records.manifest
    missing = [f"not matched: {why}." for why in facts.unmatched_reasons]
    missing += [
        f"{each.key} differs and is not under test ({each.values})."
        for each in facts.differences
        if not each.under_test
    ]
    seen = {arm: _fingerprints(arms, arm) for arm in (*BASELINES, *arms.candidates)}
    for arm, told in seen.items():
        if len(told) > 1:
            missing.append(f"{arm}: its replies carry {len(told)} fingerprints: it was not one server.")
    base = set().union(*(seen[arm] for arm in BASELINES))
    baseline, candidate = (backend.settings.get("fingerprint") for backend in facts.backends)
    for arm in arms.candidates:
        if baseline != candidate and seen[arm] & base:
            missing.append(f"{arm}: replies carry the baseline's fingerprint: a cache's, or the wrong server's.")
    differ = [f"{each.key} ({each.values})" for each in facts.differences] or ["no setting that could be seen"]
    return Seen(said=f"What differs: {', '.join(differ)}.", missing=missing)


def _fingerprints(arms: Arms, arm: ArmName) -> set[str]:
    return {
        reply.fingerprint
        for (each, _), sheet in arms.records.sheets.items()
        if each == arm
        for reply in sheet.replies
        if reply.fingerprint is not None
    }
