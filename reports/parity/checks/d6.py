"""D6: tool calls fit what was declared, and tools are called when the baseline calls them."""

from __future__ import annotations

from evals.records import ArmName, ParityReply
from reports.parity.arms import BASELINES, Arms, first, share
from reports.parity.result import Seen

CHECK = "D6"
LIMIT = 0.005


def judge(arms: Arms) -> Seen:
    """Harm is a larger share of broken calls, of calls in the wrong place, or of prompts at which a tool is called by
    one arm only, than the baseline has."""
    floors = [reply for arm in BASELINES for reply in _replies(arms, arm).values()]
    measures, shown = [], None
    for arm in arms.candidates:
        found = _replies(arms, arm)
        calls, base = (
            [each.valid_call is False for each in of if each.valid_call is not None]
            for of in (list(found.values()), floors)
        )
        measures.append(share("broken calls", f"{arm}-A", calls, base, limit=LIMIT))
        wrong, base = ([each.problem is not None for each in of] for of in (list(found.values()), floors))
        measures.append(share("replies with something wrong", f"{arm}-A", wrong, base))
        other = _called_otherwise(arms, BASELINES[0], BASELINES[1])
        measures.append(
            share("prompts called otherwise", f"{arm}-A1", _called_otherwise(arms, BASELINES[0], arm), other)
        )
        broken = [at for at, each in found.items() if each.problem is not None]
        shown = shown or first(CHECK, arms.cases(CHECK), broken, arm)
    said = f"{sum(bool(each.called) for each in floors) // len(BASELINES):,} calls by an arm of the baseline."
    return Seen(said=said, measures=measures, reproducer=shown)


def _replies(arms: Arms, arm: ArmName) -> dict[tuple[int, int], ParityReply]:
    return {at: each for at, each in arms.replies(CHECK, arm).items() if each.error is None}


def _called_otherwise(arms: Arms, one: ArmName, other: ArmName) -> list[bool]:
    mine, theirs = _replies(arms, one), _replies(arms, other)
    return [mine[at].called != theirs[at].called for at in mine.keys() & theirs.keys()]
