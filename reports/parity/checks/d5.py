"""D5: a prompt that comes from the prefix cache is answered as a cold one, at edges of blocks and around.

Each arm's warm replies are held against its own cold ones; the floor is the same of the baseline's arms."""

from __future__ import annotations

import numpy as np

from evals.records import ArmName, Case
from reports.parity.arms import BASELINES, HARMLESS_SHIFT, Arms, Tally, rate, reproducer
from reports.parity.compare import Ints, Pair, pair
from reports.parity.result import Measure, Reproducer, Seen

CHECK = "D5"
COLD, WARM = "cold", "warm"


def judge(arms: Arms) -> Seen:
    """Harm is a rate of outliers beyond the limit, of all prompts or of those at one distance to an edge."""
    cases = list(arms.cases(CHECK).values())
    cold = {(case.prompt_seed, case.prompt_tokens): case for case in cases if case.variant == COLD}
    warm = {(case.prompt_seed, case.prompt_tokens): case for case in cases if case.variant == WARM}
    asked = [(cold[key], warm[key]) for key in cold if key in warm]
    floors = [_compared(arms, arm, asked) for arm in BASELINES]
    base = np.concatenate([each.delta[each.told] for each in floors])
    finite = base[np.isfinite(base)]
    tau = max(arms.thresholds.tau, HARMLESS_SHIFT, float(finite.max(initial=0.0)))
    edges = list(dict.fromkeys(case.stratum.get("edge", "") for _, case in asked))
    edge = np.array([edges.index(case.stratum.get("edge", "")) for _, case in asked])
    measures: list[Measure] = []
    shown: list[tuple[int, int, int, str]] = []
    for arm in arms.candidates:
        found = _compared(arms, arm, asked)
        counts = [_count(each, tau, edge, len(edges)) for each in (found, *floors)]
        for at, where in enumerate(["", *(f", {name} of an edge" for name in edges)]):
            (events, n), *others = (each[at] for each in counts)
            tally = Tally(events, n, sum(each for each, _ in others), sum(each for _, each in others))
            measures.append(rate(f"outliers of warm replies{where}", f"{arm} warm-cold", tally))
        for place in np.flatnonzero(found.delta > tau):
            _, case = asked[found.case[place]]
            shown.append((case.prompt_tokens, int(found.position[place]), case.number, arm))
    return Seen(
        said=_said(arms, [case.number for _, case in asked]),
        measures=measures,
        reproducer=_shown(arms.cases(CHECK), shown),
    )


def _compared(arms: Arms, arm: ArmName, asked: list[tuple[Case, Case]]) -> Pair:
    """Cold against warm, numbered as they were asked."""
    sheet = arms.records.sheets[arm, CHECK]
    whole = sheet.positions(0, max(arms.cases(CHECK)))
    cold, warm = (whole.of({both[side].number: at for at, both in enumerate(asked)}) for side in (0, 1))
    return pair(COLD, WARM, cold, warm, lambda numbers: np.zeros(len(numbers), np.bool_))


def _count(found: Pair, tau: float, edge: Ints, edges: int) -> list[tuple[int, int]]:
    """Outliers and positions: of all, then at each distance to an edge."""
    at, told, beyond = edge[found.case], found.told, found.delta > tau
    kinds = [np.ones(len(at), np.bool_), *(at == each for each in range(edges))]
    return [(int(beyond[kind].sum()), int(told[kind].sum())) for kind in kinds]


def _said(arms: Arms, warm: list[int]) -> str:
    cached = [
        reply.cached_tokens
        for arm in arms.candidates
        for (number, _), reply in arms.replies(CHECK, arm).items()
        if number in set(warm)
    ]
    told = [each for each in cached if each is not None]
    if not told:
        return f"{len(warm):,} prompts, cold and warm; the servers do not tell what came from their cache."
    hits = sum(each > 0 for each in told)
    return f"{len(warm):,} prompts, cold and warm; {hits:,} of {len(told):,} warm ones found something in the cache."


def _shown(cases: dict[int, Case], found: list[tuple[int, int, int, str]]) -> Reproducer | None:
    if not found:
        return None
    _, position, number, arm = min(found)
    return reproducer(CHECK, cases[number], arm, position=position)
