"""P5: decode at long contexts: outliers by context, and a mean KL that grows with it."""

from __future__ import annotations

import numpy as np

from reports.parity.arms import HARMLESS_KL, Arms, aligned, smallest, strata
from reports.parity.ratio import by_prompt, context_trend
from reports.parity.result import Measure, Seen

CHECK = "P5"


def judge(arms: Arms) -> Seen:
    """Harm is a rate of outliers beyond the limit at one context, or a growth of KL that is more than harmless from
    the shortest to the longest."""
    cases, floor = arms.cases(CHECK), arms.floor(CHECK)
    tokens = np.ones(max(cases) + 1)
    for number, case in cases.items():
        tokens[number] = case.prompt_tokens + (case.cut or 0)
    rows, measures = strata(arms, CHECK, "context", lambda case: case.stratum.get("context", str(case.prompt_tokens)))
    for pair in arms.pairs(CHECK):
        arms.tally(CHECK, pair)
        if not len(pair.kl) or not len(floor.kl):
            continue
        mine, theirs = aligned(pair, floor)
        prompt = pair.case[mine].astype(np.int64)
        candidate, base = (by_prompt(each.astype(np.float64), prompt) for each in (pair.kl[mine], floor.kl[theirs]))
        context = tokens[np.unique(prompt)]
        found = context_trend(candidate, base, context)
        grown = (found.statistic or 0.0) * float(np.ptp(np.log2(context)))
        harm_p = found.p if found.p is None or grown > HARMLESS_KL else 1.0
        measures.append(Measure(of="growth of KL with context", pair=pair.name, found=found, harm_p=harm_p))
    longest = int(tokens[list(cases)].max())
    return Seen(
        said=f"{len(rows):,} contexts, up to {longest:,} tokens.",
        measures=measures,
        strata=rows,
        reproducer=smallest(arms, CHECK),
    )
