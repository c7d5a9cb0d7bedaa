"""V4: hygiene. All were answered, by servers that did not change, and no reply is another arm's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from evals.records import ArmName
from reports.parity.arms import BASELINES, TOKEN_CHECKS, Arms, share
from reports.parity.compare import compare
from reports.parity.result import Seen

CHECK = "V4"
_SAMPLED = "D3"
"""The check with unseeded replies."""
_CHANCE = 1e-6
"""Of being drawn once more, by its own logprobs, that an unseeded reply may have to be no other's by chance."""


def judge(arms: Arms) -> Seen:
    """Harm is a larger share of requests that failed than the baseline's."""
    failed = {arm: _failed(arms, arm) for arm in (*BASELINES, *arms.candidates)}
    floor = [each for arm in BASELINES for each in failed[arm]]
    measures = [share("requests that failed", f"{arm}-A", failed[arm], floor) for arm in arms.candidates]
    missing = []
    for arm in failed:
        whys = Counter(
            reply.error
            for (each, _), sheet in arms.records.sheets.items()
            if each == arm
            for reply in sheet.replies
            if reply.error is not None
        )
        if whys:
            said = ", ".join(f"{count:,} x {why}" for why, count in whys.most_common(3))
            missing.append(f"{arm}: requests got no reply: {said}. Go on with --resume in a new run.")
        starts = {sheet.run.server for (each, _), sheet in arms.records.sheets.items() if each == arm}
        if len(starts) > 1:
            missing.append(f"{arm}: its server was started {len(starts)} times: it was interrupted, and gone on with.")
    missing += _cached(arms)
    asked = sum(len(each) for each in failed.values())
    return Seen(said=f"{asked:,} requests.", measures=measures, missing=missing)


def _failed(arms: Arms, arm: ArmName) -> list[bool]:
    return [
        reply.error is not None
        for (each, _), sheet in arms.records.sheets.items()
        if each == arm
        for reply in sheet.replies
    ]


def _cached(arms: Arms) -> Iterator[str]:
    """Arms of the candidate whose logprobs are those of an arm of the baseline to the last bit, although the baseline's
    own arms differ."""
    asked = {*BASELINES, *arms.candidates}
    check = next((each for each in TOKEN_CHECKS if asked <= set(arms.records.arms(each))), None)
    if check is None:
        return
    pairs = [(base, arm) for arm in arms.candidates for base in BASELINES]
    floor, *found = compare(arms.records, check, [BASELINES, *pairs], lists=False)
    if not (floor.delta > 0).any():
        return
    for each in found:
        n = int(each.told.sum())
        if n >= _CHANCE and not (each.delta > 0).any():
            yield (
                f"{each.other} gave the logprobs of {each.one} to the last bit, at {n:,} positions of {check}, and "
                "the baseline does not repeat itself so: a cache answered. Ask the server itself."
            )
