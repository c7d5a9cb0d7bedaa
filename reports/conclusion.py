"""What the measurement says of the candidate's speed, and whether it may be said at all."""

from __future__ import annotations

from typing import Literal

import msgspec

from reports.gates.gate import Gate
from reports.intervals import Effect

Outcome = Literal["candidate faster", "candidate slower", "no difference", "INCONCLUSIVE"]


class Conclusion(msgspec.Struct, frozen=True):
    """``reasons`` say why this outcome; ``caveats`` what could not be checked."""

    outcome: Outcome
    reasons: list[str]
    caveats: list[str]


def conclude(interactivity: Effect | None, gates: list[Gate]) -> Conclusion:
    """INCONCLUSIVE if a gate failed or there is no ratio with an interval; otherwise by whether the interval of the
    candidate/baseline ratio of P90 interactivity lies above 1, below 1, or around it."""
    caveats = [f"{gate.title}: unknown. {gate.explanation}" for gate in gates if gate.status == "unknown"]
    reasons = [f"{gate.title}: {gate.explanation}" for gate in gates if gate.status == "fail"]
    ratio = interactivity.ratio if interactivity else None
    if ratio is None or ratio.value is None:
        reasons.insert(0, "No turn completed in every block with a decode rate: there is nothing to compare.")
    elif ratio.low is None or ratio.high is None:
        reasons.insert(0, f"The ratio has no interval: {ratio.reason}.")
    if reasons or ratio is None or ratio.low is None or ratio.high is None:
        return Conclusion("INCONCLUSIVE", reasons, caveats)
    between = f"the 95 % interval of the P90 interactivity ratio, {ratio.low:.3f} to {ratio.high:.3f},"
    if ratio.low > 1:
        return Conclusion("candidate faster", [f"All of {between} lies above 1."], caveats)
    if ratio.high < 1:
        return Conclusion("candidate slower", [f"All of {between} lies below 1."], caveats)
    excluded = max(ratio.high, 1 / ratio.low) - 1
    return Conclusion(
        "no difference",
        [f"1 lies in {between} so none is shown; one of more than {excluded:.1%} is unlikely."],
        caveats,
    )
