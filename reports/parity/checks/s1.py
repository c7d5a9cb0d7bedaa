"""S1: drafts are accepted as often, position by position."""

from __future__ import annotations

import numpy as np

from evals.records import ArmName
from reports.parity.acceptance import acceptance
from reports.parity.arms import BASELINES, Arms
from reports.parity.divergences import Floats
from reports.parity.result import Measure, Seen

CHECK = "S1"


def judge(arms: Arms) -> Seen:
    """Harm is another share of accepted drafts, higher or lower, at some position. All runs of each side together: the
    windows between two readings of the counters are what varies."""
    mine, drafts = _windows(arms, arms.candidates)
    theirs, floor_drafts = _windows(arms, BASELINES)
    positions = min(mine.shape[1], theirs.shape[1])
    if not positions:
        return Seen(said="Nothing was drafted.", missing=["The servers' counters tell no accepted drafts by position."])
    found = acceptance(mine[:, :positions], drafts, theirs[:, :positions], floor_drafts)
    pair = f"{'+'.join(arms.candidates)}-{'+'.join(BASELINES)}"
    return Seen(
        said=f"{int(drafts.sum()):,} drafts in {len(drafts):,} windows.",
        measures=[
            Measure(
                of=f"accepted up to draft position {each.position}", pair=pair, found=each.found, harm_p=each.found.p
            )
            for each in found
        ],
    )


def _windows(arms: Arms, some: tuple[ArmName, ...]) -> tuple[Floats, Floats]:
    """Accepted [windows, positions] of drafts [windows]."""
    told = [
        reply
        for arm in some
        for reply in arms.records.sheets[arm, CHECK].replies
        if reply.drafts is not None and reply.accepted
    ]
    width = min((len(reply.accepted) for reply in told), default=0)
    accepted = np.array([reply.accepted[:width] for reply in told], np.float64).reshape(len(told), width)
    return accepted, np.array([reply.drafts for reply in told], np.float64)
