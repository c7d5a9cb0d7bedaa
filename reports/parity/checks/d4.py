"""D4: a reply depends on its prompt and seed alone. Pairs of replies of one arm that must be alike, or must not be."""

from __future__ import annotations

from evals.records import ArmName
from reports.parity.arms import BASELINES, Arms, first, share
from reports.parity.result import Seen

CHECK = "D4"
_ALIKE = (("first", "again"), ("first", "no logprobs"), ("calls", "n"), ("first", "alone"))
_UNLIKE = ("first", "other seed")


def judge(arms: Arms) -> Seen:
    """Harm is a larger share of wrong pairs than the baseline has, one kind of pair at a time."""
    measures, shown = [], None
    for one, other in (*_ALIKE, _UNLIKE):
        floor = [wrong for arm in BASELINES for wrong in _wrong(arms, arm, one, other).values()]
        for arm in arms.candidates:
            found = _wrong(arms, arm, one, other)
            if not found and not floor:
                continue
            measures.append(share(f"{other} against {one}", f"{arm}-A", found.values(), floor))
            if sum(found.values()) * max(len(floor), 1) > sum(floor) * max(len(found), 1):
                wrong = [at for at, each in found.items() if each]
                shown = shown or first(CHECK, arms.cases(CHECK), wrong, arm)
    pairs = sum(each.found.n for each in measures)
    return Seen(said=f"{pairs:,} pairs of replies.", measures=measures, reproducer=shown)


def _wrong(arms: Arms, arm: ArmName, one: str, other: str) -> dict[tuple[int, int], bool]:
    """By case and repeat of the other: with the same ids where they should differ, or the other way round."""
    cases = arms.cases(CHECK)
    of_one: dict[tuple[int, int], str] = {}
    of_other: dict[tuple[int, int], tuple[tuple[int, int], str]] = {}
    seen: dict[tuple[str, int], int] = {}
    for (number, repeat), reply in sorted(arms.replies(CHECK, arm).items()):
        case = cases[number]
        index = seen.get((case.variant, case.prompt_seed), 0)  # several replies to a prompt: in their order
        seen[case.variant, case.prompt_seed] = index + 1
        if reply.error is not None:
            continue
        if case.variant == one:
            of_one[case.prompt_seed, index] = reply.ids_hash
        elif case.variant == other:
            of_other[case.prompt_seed, index] = (number, repeat), reply.ids_hash
    return {
        of_other[key][0]: (of_one[key] == of_other[key][1]) == ((one, other) == _UNLIKE)
        for key in of_one.keys() & of_other.keys()
    }
