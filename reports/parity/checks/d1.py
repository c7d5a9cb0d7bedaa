"""D1: streams and whole replies, usage and text, agree with the ids."""

from __future__ import annotations

from evals.records import ArmName, ParityReply
from reports.parity.arms import BASELINES, Arms, invariant, share
from reports.parity.result import Seen

CHECK = "D1"


def judge(arms: Arms) -> Seen:
    """Wrong is a reply whose usage or text is not that of its ids. Whether a stream has the whole reply's ids is a
    share, against the baseline's: in another batch noise may turn a token."""
    found = invariant(arms, CHECK, _wrong)
    floor = [each for arm in BASELINES for each in _unlike(arms, arm)]
    unlike = [share("streams unlike whole replies", f"{arm}-A", _unlike(arms, arm), floor) for arm in arms.candidates]
    return Seen(
        said=f"{len(arms.cases(CHECK)):,} replies, streamed and whole.",
        measures=[*found.measures, *unlike],
        broken=found.broken,
        reproducer=found.reproducer,
    )


def _wrong(reply: ParityReply) -> str | None:
    return reply.problem or ("the text is not that of the ids" if reply.text_agrees is False else None)


def _unlike(arms: Arms, arm: ArmName) -> list[bool]:
    """Of each prompt that came both ways."""
    by_prompt: dict[int, list[str]] = {}
    for (number, _), reply in arms.replies(CHECK, arm).items():
        if reply.error is None:
            by_prompt.setdefault(arms.cases(CHECK)[number].prompt_seed, []).append(reply.ids_hash)
    return [len(set(each)) > 1 for each in by_prompt.values() if len(each) == 2]
