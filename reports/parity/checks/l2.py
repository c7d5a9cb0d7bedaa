"""L2: long replies do not run into loops."""

from __future__ import annotations

import numpy as np

from evals.records import ArmName
from reports.parity.arms import BASELINES, Arms, reproducer
from reports.parity.repetition import LOOPS, loops, more_repetition, repeated_share
from reports.parity.result import Measure, Seen

CHECK = "L2"


def judge(arms: Arms) -> Seen:
    """Harm is more replies that loop, or a larger share of repeated 32-grams, than the baseline has. The candidate's
    runs together against as many of the baseline's."""
    bases = BASELINES[: len(arms.candidates)]
    of = {arm: _repeated(arms, arm) for arm in (*bases, *arms.candidates)}
    keys = sorted(set.intersection(*(set(each) for each in of.values())))
    mine, theirs = (np.array([[of[arm][key] for arm in some] for key in keys]) for some in (arms.candidates, bases))
    pair = f"{'+'.join(arms.candidates)}-{'+'.join(bases)}"
    found = [
        ("replies that loop", loops(mine >= LOOPS, theirs >= LOOPS)),
        ("repeated 32-grams", more_repetition(mine, theirs)),
    ]
    shown = None
    if keys:
        place, arm = np.unravel_index(int(mine.argmax()), mine.shape)
        shown = reproducer(CHECK, arms.cases(CHECK)[keys[place][0]], arms.candidates[arm])
    return Seen(
        said=f"{len(keys):,} replies an arm that are long enough.",
        measures=[Measure(of=what, pair=pair, found=each, harm_p=each.p) for what, each in found],
        reproducer=shown,
    )


def _repeated(arms: Arms, arm: ArmName) -> dict[tuple[int, int], float]:
    """Share of repeated n-grams at the end of each reply that is long enough."""
    sheet, found = arms.records.sheets[arm, CHECK], dict[tuple[int, int], float]()
    for first, last in sheet.slices():
        positions = sheet.positions(first, last, lists=False)
        replies, starts = np.unique(positions.key >> 32, return_index=True)
        for reply, tokens in zip(replies.tolist(), np.split(positions.token, starts[1:]), strict=True):
            share = repeated_share(tokens)
            if share is not None:
                found[reply >> 16, reply & 0xFFFF] = share
    return found
