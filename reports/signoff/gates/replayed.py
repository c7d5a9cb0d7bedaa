"""The replay of recorded traffic: whether the candidate's slow tail is at least as fast, and on which path."""

from __future__ import annotations

from reports.coverage import SPECIALISED
from reports.signoff.gates.evidence import Evidence, gate
from reports.signoff.result import Gate


def judge(evidence: Evidence) -> list[Gate]:
    """FAIL if the candidate is slower by more than may be called none; INCONCLUSIVE as the replay's own report is, and
    where the path is not proved."""
    replay = evidence.parts.replay
    if replay is None:
        return []
    analysis = replay.analysis
    outcome = analysis.conclusion.outcome
    ratio = analysis.headlines[0].effect.ratio if analysis.headlines[0].effect is not None else None
    said = f"The replay's conclusion: {outcome}."
    small = ratio is not None and ratio.low is not None and ratio.low >= 1 / (1 + analysis.thresholds.equal_within)
    slower = outcome == "candidate slower" and not small
    if outcome == "candidate slower" and small:
        said += f" By less than the {analysis.thresholds.equal_within:.0%} that may be called none."
    if outcome == "INCONCLUSIVE":
        reasons = list(analysis.conclusion.reasons)
    elif slower:
        reasons = ["The slow tail of users is slower on the candidate. " + analysis.conclusion.reasons[-1]]
    else:
        reasons = []
    speed = gate(
        "replayed",
        "P90 interactivity",
        said,
        reasons,
        harmed=slower,
        number=ratio.value if ratio is not None else None,
    )
    proof = next(each for each in analysis.gates if each.id == "path_proof")
    asked = replay.manifest.backends[1].decode_backend == SPECIALISED
    unproved = asked and proof.status != "pass"
    path = gate(
        "replay_path",
        "Replay ran specialised",
        proof.explanation,
        [f"{proof.explanation} See the report's section Decode path."] if unproved else [],
        number=proof.number if not proof.number_is else None,  # one that is predicted, or of steps, is another
        limit=proof.limit,
        limit_is="at least",
        unit="share",
    )
    return [speed, path]
