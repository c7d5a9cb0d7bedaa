"""D3: does the sampler draw what its own logprobs say?

Each arm is held against its own distributions; the baseline's arms say whether these tests hold on this server at all.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from evals.records import ArmName
from reports.parity.arms import BASELINES, Arms, reproducer
from reports.parity.calibration import calibration, greedy
from reports.parity.load import Positions
from reports.parity.result import Finding, Measure, Reproducer, Seen
from reports.parity.shares import shares

CHECK = "D3"
_OFF = 0.001
"""The baseline's p from which on it is itself no sampler of its logprobs."""


class _Drawn(msgspec.Struct, frozen=True):
    """What an arm drew. Shares are of positions that must not be: outside of the nucleus, or not the likeliest."""

    rank_one: Finding
    surprisal: Finding
    outside: Finding
    turned: Finding


def judge(arms: Arms) -> Seen:
    """Harm is a z of rank 1 or surprisal that the baseline does not have, or a larger share than the baseline's of
    draws outside of the nucleus, or not greedy at temperature 0."""
    found = {arm: _drawn(arms, arm) for arm in (*BASELINES, *arms.candidates)}
    measures = []
    off = {
        name
        for name in ("rank_one", "surprisal")
        for arm in BASELINES
        if (p := getattr(found[arm], name).p) is not None and p <= _OFF
    }
    missing = [f"The baseline's own draws are not those of its logprobs: {_TITLES[name]}." for name in sorted(off)]
    for arm in arms.candidates:
        for name in ("rank_one", "surprisal"):
            each: Finding = getattr(found[arm], name)
            measures.append(Measure(of=_TITLES[name], pair=arm, found=each, harm_p=None if name in off else each.p))
        for name in ("outside", "turned"):
            wrong, n = _count(getattr(found[arm], name))
            base = [_count(getattr(found[other], name)) for other in BASELINES]
            compared = shares(wrong, n, sum(each for each, _ in base), sum(each for _, each in base), unit="positions")
            measures.append(Measure(of=_TITLES[name], pair=f"{arm}-A", found=compared, harm_p=compared.p))
    drawn = max((each.found.n for each in measures), default=0)
    return Seen(
        said=f"Up to {drawn:,} drawn tokens an arm.",
        measures=measures,
        missing=missing,
        reproducer=_reproducer(arms),
    )


_TITLES = {
    "rank_one": "likeliest tokens drawn",
    "surprisal": "surprisal of draws",
    "outside": "draws outside of the nucleus",
    "turned": "draws at temperature 0 that are not the likeliest",
}


def _count(found: Finding) -> tuple[int, int]:
    return round((found.statistic or 0.0) * found.n), found.n


def _drawn(arms: Arms, arm: ArmName) -> _Drawn:
    sampled, at_zero, how = _positions(arms, arm, greedy=False), _positions(arms, arm, greedy=True), _sampling(arms)
    none = Finding(n=0, unit="positions", reason="No likely tokens were told.")
    turned: Finding = none if at_zero is None else greedy(at_zero.logprob, at_zero.top_logprobs)
    if sampled is None or how is None:
        return _Drawn(none, none, none, turned)
    with np.errstate(all="ignore"):  # logprobs that are no numbers
        drawn = calibration(sampled.token, sampled.logprob, sampled.top_ids, sampled.top_logprobs, *how)
    return _Drawn(drawn.rank_one, drawn.surprisal, drawn.outside, turned)


def _sampling(arms: Arms) -> tuple[float, float] | None:
    return next(((case.temperature, case.top_p) for case in arms.cases(CHECK).values() if case.temperature > 0), None)


def _positions(arms: Arms, arm: ArmName, *, greedy: bool) -> Positions | None:
    """Of the cases at temperature 0, or of the others; None without lists of likely tokens."""
    numbers = [number for number, case in arms.cases(CHECK).items() if (case.temperature == 0) == greedy]
    sheet = arms.records.sheets[arm, CHECK]
    if not numbers:
        return None
    found = sheet.positions(min(numbers), max(numbers)).of({number: number for number in numbers})
    return found if found.top_ids.shape[1] > 1 and found.told.any() else None


def _reproducer(arms: Arms) -> Reproducer | None:
    """Any sampled reply shows it."""
    cases: Iterator[Reproducer] = (
        reproducer(CHECK, case, arms.candidates[0]) for case in arms.cases(CHECK).values() if case.temperature > 0
    )
    return next(cases, None)
