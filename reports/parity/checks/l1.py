"""L1: lengths of replies that may end by themselves, and stops at the limit, of the same prompts and seeds."""

from __future__ import annotations

import numpy as np

from evals.records import ArmName
from reports.parity.arms import BASELINES, Arms, reproducer
from reports.parity.lengths import length_stops, lengths
from reports.parity.result import Measure, Seen

CHECK = "L1"


def judge(arms: Arms) -> Seen:
    """Harm is other lengths, shorter or longer, or other numbers of stops at the limit, than the baseline's."""
    of = {arm: _tokens(arms, arm) for arm in (*BASELINES, *arms.candidates)}
    keys = sorted(set.intersection(*(set(each) for each in of.values())))
    found = {arm: np.array([each[key] for key in keys], np.int64).reshape(-1, 2) for arm, each in of.items()}
    measures = []
    for arm in arms.candidates:
        for base, other in (BASELINES, BASELINES[::-1]):
            tokens = [found[each][:, 0] for each in (arm, base, other)]
            stops = [found[each][:, 1] > 0 for each in (arm, base, other)]
            for of_what, each in (("lengths", lengths(*tokens)), ("stops at the limit", length_stops(*stops))):
                measures.append(Measure(of=of_what, pair=f"{arm}-{base}", found=each, harm_p=each.p))
    shown = None
    if keys:
        longer = np.abs(found[arms.candidates[0]][:, 0] - found[BASELINES[0]][:, 0])
        shown = reproducer(CHECK, arms.cases(CHECK)[keys[int(longer.argmax())][0]], arms.candidates[0])
    return Seen(said=f"{len(keys):,} replies that every arm gave.", measures=measures, reproducer=shown)


def _tokens(arms: Arms, arm: ArmName) -> dict[tuple[int, int], tuple[int, bool]]:
    """Tokens, by usage where it is told, and whether the limit ended the reply."""
    return {
        at: (each.completion_tokens if each.completion_tokens is not None else each.ids, each.finish_reason == "length")
        for at, each in arms.replies(CHECK, arm).items()
        if each.error is None
    }
