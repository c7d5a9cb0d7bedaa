"""V4: hygiene. All were answered, by servers that did not change, and no reply is another arm's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from evals.records import ArmName
from reports.parity.arms import BASELINES, TOKEN_CHECKS, Arms, share
from reports.parity.compare import compare
from reports.parity.result import Seen

CHECK = "V4"
_LEAST = 16
"""Positions whose logprobs are no other's by chance."""
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
    missing += [*_cached(arms), *_drawn_twice(arms)]
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
        if n >= _LEAST and not (each.delta > 0).any():
            yield (
                f"{each.other} gave the logprobs of {each.one} to the last bit, at {n:,} positions of {check}, and "
                "the baseline does not repeat itself so: a cache answered. Ask the server itself."
            )


def _drawn_twice(arms: Arms) -> Iterator[str]:
    """Arms of the candidate that drew the baseline's replies without a seed, although the baseline's own arms drew
    others: it shows a cache also where the baseline repeats its logprobs exactly."""
    if {*BASELINES, *arms.candidates} - set(arms.records.arms(_SAMPLED)) or _shared(arms, *BASELINES):
        return
    for arm in arms.candidates:
        for base in BASELINES:
            if count := _shared(arms, base, arm):
                yield (
                    f"{arm} drew {count:,} replies of {base} once more, token for token and without a seed: a cache "
                    "answered. Ask the server itself."
                )


def _shared(arms: Arms, one: ArmName, other: ArmName) -> int:
    """Unseeded replies of both that are the same, and hardly so by chance."""
    mine, theirs = arms.replies(_SAMPLED, one), arms.replies(_SAMPLED, other)
    return sum(mine[at].ids_hash == theirs[at].ids_hash for at in _rare(arms, one) & mine.keys() & theirs.keys())


def _rare(arms: Arms, arm: ArmName) -> set[tuple[int, int]]:
    """Case and repeat of the unseeded replies that are hardly drawn twice: sharp distributions say much the same again,
    however long."""
    cases = arms.cases(_SAMPLED)
    log_top_p = {number: np.log(case.top_p) for number, case in cases.items() if case.seed is None and case.temperature}
    if not log_top_p:
        return set()
    sheet = arms.records.sheets[arm, _SAMPLED]
    found = sheet.positions(min(log_top_p), max(log_top_p), lists=False).of({each: each for each in log_top_p})
    replies, which = np.unique(found.key >> 32, return_inverse=True)
    chance = np.bincount(which, found.logprob - np.array([log_top_p[case] for case in found.case.tolist()]))
    return {(reply >> 16, reply & 0xFFFF) for reply in replies[chance < np.log(_CHANCE)].tolist()}
