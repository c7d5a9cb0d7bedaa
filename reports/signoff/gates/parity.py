"""Output parity: does the candidate emit the same tokens, but for noise?"""

from __future__ import annotations

from reports.accuracy.result import Outcome
from reports.parity.result import CheckVerdict, Family, Parity
from reports.parity.verdict import blocking
from reports.signoff.gates.evidence import Evidence, gate
from reports.signoff.result import Gate

TITLES: dict[Family, str] = {
    "validity": "Parity: what was compared",
    "replies": "Parity: replies",
    "tokens": "Parity: tokens",
    "speculation": "Parity: drafts",
    "lengths": "Parity: lengths and loops",
}


def judge(evidence: Evidence) -> list[Gate]:
    """One gate for what makes the checks evidence (order, budget, control X), then one a family of checks."""
    part = evidence.parts.parity
    if part is None:
        return []
    blocked = {each.id for each in blocking(part.parity.checks)}
    return [_evidence(part.parity), *(_family(family, part.parity, blocked) for family in TITLES)]


def _evidence(parity: Parity) -> Gate:
    missing = list(parity.unordered)
    if parity.budget == "quick":
        missing.append("The battery is a quick one, which holds no bounds: use --budget standard or full.")
    if parity.fault is None:
        missing.append("No fault was put before the baseline: the battery is not shown to be able to fail (--fault).")
    elif not parity.fault.holds:
        missing.append(f"The baseline behind {parity.fault.fault} was not seen as it should be: see the controls.")
    order = parity.order
    said = (
        f"Floor fixed {order.floor_fixed_utc}, the candidate's first request {order.first_candidate_request_utc}; the "
        "plan's and the floor's hashes are the recorded ones."
    )
    return gate("parity", "Parity is evidence", "Not all of it holds." if missing else said, missing)


def _family(family: Family, parity: Parity, blocked: set[str]) -> Gate:
    checks = [each for each in parity.checks if each.family == family]
    outcomes = {each.outcome for each in checks if each.outcome == "FAIL" or each.id in blocked}
    outcome: Outcome = "FAIL" if "FAIL" in outcomes else "INCONCLUSIVE" if outcomes else "PASS"
    if outcome == "FAIL" and parity.unordered:
        outcome = "INCONCLUSIVE"  # by thresholds that may have been chosen since
    deciding = [each for each in checks if each.id in blocked and (outcome != "FAIL" or each.outcome == "FAIL")]
    return Gate(
        id=f"parity_{family}",
        title=TITLES[family],
        outcome=outcome,
        said=_tally(checks),
        reasons=[f"{each.id} {each.title}: {why}" for each in deciding for why in each.reasons],
    )


def _tally(checks: list[CheckVerdict]) -> str:
    named = {
        outcome: ", ".join(each.id for each in checks if each.outcome == outcome)
        for outcome in ("PASS", "FAIL", "INCONCLUSIVE", "not run")
    }
    return "; ".join(f"{outcome}: {ids}" for outcome, ids in named.items() if ids) + "."
