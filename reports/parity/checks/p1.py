"""P1: traces forced through decode. Mean KL by the floor's, likeliest tokens that differ, and drift: a distance that
grows with the step. Prompts are the traces, at whatever batch sizes they were replayed."""

from __future__ import annotations

import numpy as np

from reports.parity import agreement as tops
from reports.parity.agreement import agreement
from reports.parity.arms import HARMLESS_KL, HARMLESS_TURNS, Arms, aligned, floor_by_prompt, smallest, strata
from reports.parity.compare import Pair
from reports.parity.divergences import Flags
from reports.parity.ratio import PER, by_prompt, drift, ratio
from reports.parity.result import Measure, Reproducer, Seen

CHECK = "P1"


def judge(arms: Arms) -> Seen:
    """Harm is a mean KL, or a share of likeliest tokens that differ, beyond its limit, or a drift that is more than
    harmless by the end of the longest trace."""
    cases, floor = arms.cases(CHECK), arms.floor(CHECK)
    trace = np.zeros(max(cases) + 1, np.int64)
    for number, case in cases.items():
        trace[number] = number if case.trace is None else case.trace
    measures, kls = [], []
    for pair in arms.pairs(CHECK):
        arms.tally(CHECK, pair)  # for P2
        if not len(pair.kl) or not len(floor.kl):
            continue
        mine, theirs = aligned(pair, floor)
        prompt, step = trace[pair.case[mine]], pair.position[mine].astype(np.int64)
        kl, floor_kl = pair.kl[mine].astype(np.float64), floor.kl[theirs].astype(np.float64)
        candidate, base = by_prompt(kl, prompt), by_prompt(floor_kl, prompt)
        kls.append((candidate.mean(), base.mean()))
        found = ratio(candidate, floor_by_prompt(base))
        measures.append(Measure(of="mean KL", pair=pair.name, found=found, harm_p=found.p_limit, held=True))
        turned = floor.differs[theirs]
        limit = max(tops.LIMIT, HARMLESS_TURNS - float(turned.mean()))
        found = agreement(pair.differs[mine], turned, prompt, limit)
        measures.append(Measure(of="likeliest tokens", pair=pair.name, found=found, harm_p=found.p_limit, held=True))
        found = drift(kl, floor_kl, prompt, step)
        grown = (found.statistic or 0.0) * float(step.max(initial=0)) / PER
        harm_p = found.p if grown > HARMLESS_KL or found.p is None else 1.0
        measures.append(Measure(of="drift of KL", pair=pair.name, found=found, harm_p=harm_p))
    by_batch, _ = strata(arms, CHECK, "batch", lambda case: str(case.batch))
    missing = [] if measures else ["No lists of likely tokens were told: distances of distributions are not known."]
    said = "Nothing could be compared."
    if kls:
        most, base = max(kls)
        said = f"Mean KL at most {most:.2e} nats, of the baseline from itself {base:.2e}."
    return Seen(said=said, measures=measures, strata=by_batch, missing=missing, reproducer=_farthest(arms))


def _farthest(arms: Arms) -> Reproducer | None:
    """An outlier; where there is none, the position with the largest KL."""

    def largest(pair: Pair) -> Flags:
        found: Flags = pair.kl == pair.kl.max(initial=-1.0)
        return found if len(pair.kl) else np.zeros(len(pair.case), np.bool_)

    return smallest(arms, CHECK) or smallest(arms, CHECK, largest)
