"""What the measurement says of the candidate's speed, and whether it may be said at all."""

from __future__ import annotations

from typing import Literal

import msgspec

from replay.records import Manifest
from reports.coverage import SPECIALISED
from reports.gates.gate import Gate, Thresholds
from reports.intervals import Effect
from reports.power import sessions_needed

Outcome = Literal["candidate faster", "candidate slower", "no difference", "INCONCLUSIVE"]

_TWO_DEPLOYMENTS = (
    "What is compared here is two deployments. That the decode path makes the difference is not proven: which path the "
    "decode steps took is unknown."
)


class Conclusion(msgspec.Struct, frozen=True):
    """``reasons`` say why this outcome; ``caveats`` what could not be checked."""

    outcome: Outcome
    reasons: list[str]
    caveats: list[str]


def compared(manifest: Manifest, gates: list[Gate]) -> str:
    """What the ratio is of, in a sentence, where it is not of the decode path for certain; else empty."""
    if all(backend.decode_backend != SPECIALISED for backend in manifest.backends):
        told = [f"{each.key} ({each.values})" for each in manifest.differences if each.under_test]
        others = [name for name in manifest.under_test if not name.endswith("decode_backend")]
        what = ", ".join(told or others) or "two deployments"
        return f"What is compared here is {what}: neither backend is set to the specialised decode path."
    return _TWO_DEPLOYMENTS if any(gate.id == "path_proof" and gate.status == "unknown" for gate in gates) else ""


def conclude(
    interactivity: Effect | None,
    gates: list[Gate],
    thresholds: Thresholds,
    nothing: str = "No decode rate is known.",
    comparison: str = "",
) -> Conclusion:
    """INCONCLUSIVE if a gate failed, a required one is unknown, or there is no ratio with an interval; otherwise by
    whether the interval of the candidate/baseline ratio of P90 interactivity lies above 1, below 1, or around it.
    Around it is "no difference" only if all of it lies within what may be called none; a wider one is too little
    data. ``nothing``: why there is no ratio, if there is none. ``comparison``: what is compared, to be said first."""
    unknown = [gate for gate in gates if gate.status == "unknown"]
    caveats = [f"{gate.title}: unknown. {gate.explanation}" for gate in unknown if not gate.required]
    against = [
        f"{gate.title}: {problem}"
        for gate in gates
        if gate.status == "fail"
        for problem in gate.problems or [gate.explanation]
    ]
    against += [f"{gate.title}: unknown, and required. {gate.explanation}" for gate in unknown if gate.required]
    first = [comparison] if comparison else []
    ratio = interactivity.ratio if interactivity else None
    if ratio is None or ratio.value is None:
        against.insert(0, f"There is nothing to compare. {nothing}")
    elif ratio.low is None or ratio.high is None:
        against.insert(0, f"The ratio has no interval: {ratio.reason.removeprefix('no interval: ')}.")
    if against or ratio is None or ratio.value is None or ratio.low is None or ratio.high is None:
        return Conclusion("INCONCLUSIVE", first + against, caveats)
    between = f"the 95 % interval of the P90 interactivity ratio, {ratio.low:.3f} to {ratio.high:.3f},"
    most = 1 + thresholds.equal_within
    small = f" It is shown, but small: less than the {thresholds.equal_within:.0%} that may be called none."
    small = small if 1 / most <= ratio.low and ratio.high <= most else ""
    if ratio.low > 1:
        return Conclusion("candidate faster", [*first, f"All of {between} lies above 1.{small}"], caveats)
    if ratio.high < 1:
        return Conclusion("candidate slower", [*first, f"All of {between} lies below 1.{small}"], caveats)
    if 1 / most <= ratio.low and ratio.high <= most:
        none = f"All of {between} lies around 1 and within {1 / most:.3f} to {most:.3f}: {thresholds.equal_within:.0%}"
        return Conclusion("no difference", [*first, f"{none} at most may be called none."], caveats)
    needed = sessions_needed(ratio.low, ratio.value, ratio.high, ratio.sessions, most)
    return Conclusion(
        "INCONCLUSIVE",
        [
            *first,
            f"Too few sessions: {between} holds 1 and reaches beyond {1 / most:.3f} to {most:.3f}, so neither an "
            f"effect nor its absence is shown. About {needed:,} sessions like these would be needed; "
            f"{ratio.sessions:,} were compared.",
        ],
        caveats,
    )
