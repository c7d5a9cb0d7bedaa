"""What a check's judge looks at: the candidate's arms beside both of the baseline's, and what checks share in judging.

Every arm of the candidate is held against both of the baseline, and each of these pairs against A1-A2, the floor. Pairs
share runs, and are not independent: harm is a matter of the smallest p over all pairs and measures (Bonferroni), and a
margin has to hold for each.

**What is harmless anyway.** A baseline may repeat itself exactly, so that its distance from itself says nothing of how
far a sound kernel may be. What rounding to bf16 does (accuracy.md, section (f): logits with a standard deviation of .01
to .03, mean KL 2e-5 to 2e-4, up to 0.3 % of likeliest tokens turned) is no harm, whatever the floor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec
import numpy as np
from scipy import stats

from evals.records import ArmName, Case, ParityReply
from reports.accuracy.harm import holm
from reports.parity.compare import Ints, Pair, compare
from reports.parity.divergences import Flags, Floats
from reports.parity.load import Records
from reports.parity.outliers import LEAST, TARGET, outliers, threshold
from reports.parity.ratio import LIMIT
from reports.parity.result import Measure, Reproducer, Stratum, Thresholds, Unit
from reports.parity.shares import shares

BASELINES: tuple[ArmName, ArmName] = ("A1", "A2")
TOKEN_CHECKS = ("P1", "P3", "P4", "P5", "P6", "P7")
"""Whose arms are compared position by position."""

HARMLESS_SHIFT = 0.5
"""Nats: no smaller difference of a logprob, or of the gap between two, is called an outlier. bf16 tells logits between
16 and 32 from each other in steps of 0.125."""
HARMLESS_KL = 2e-4
HARMLESS_TURNS = 0.003
"""Share of positions at which the likeliest token is another."""
HARMLESS_DRAWS = 0.02
"""Share of positions at which the same seed draws another token at temperature 1: twice the distance in total variation
that such noise makes, which is .4 of its standard deviation at most."""


class Tally(msgspec.Struct, frozen=True):
    """Outliers of one pair, and of the floor."""

    events: int
    n: int
    floor_events: int
    floor_n: int


class Compared:
    """Pairs of arms, those of one check at a time: of another, they are read again."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.tallies: dict[tuple[str, str], Tally] = {}
        self.own: dict[str, float] = {}
        """Thresholds that the checks' own floors tell."""
        self.shown: dict[str, Reproducer] = {}
        """Smallest outliers that were looked for, by check."""
        self._of: str = ""
        self._pairs: dict[str, Pair] = {}

    def pair(self, check: str, one: ArmName, other: ArmName) -> Pair:
        """Raises KeyError for arms on which the check has not ended."""
        if self._of != check:
            there = self.records.arms(check)
            baselines = [arm for arm in there if arm in BASELINES]
            pairs = [(base, arm) for base in baselines for arm in there if arm != base and (base, arm) != ("A2", "A1")]
            if {"B1", "B2"} <= set(there):
                pairs.append(("B1", "B2"))
            self._pairs = {each.name: each for each in compare(self.records, check, pairs)} if pairs else {}
            self._of = check
        return self._pairs[f"{other}-{one}"]


class Arms(msgspec.Struct, frozen=True):
    """``candidates``: the arms that are judged, B1 and B2, or X."""

    records: Records
    candidates: tuple[ArmName, ...]
    thresholds: Thresholds
    compared: Compared

    def cases(self, check: str) -> dict[int, Case]:
        return self.records.case[check]

    def replies(self, check: str, arm: ArmName) -> dict[tuple[int, int], ParityReply]:
        """By case and repeat."""
        return {(each.case, each.repeat): each for each in self.records.sheets[arm, check].replies}

    def floor(self, check: str) -> Pair:
        return self.compared.pair(check, *BASELINES)

    def pairs(self, check: str) -> Iterator[Pair]:
        """Every arm of the candidate against every one of the baseline."""
        for arm in self.candidates:
            for base in BASELINES:
                yield self.compared.pair(check, base, arm)

    def tau(self, check: str) -> float:
        """Of all checks' floor, or of this one's own, whichever is larger: their conditions differ."""
        if check not in self.compared.own:
            self.compared.own[check] = own_tau(self.floor(check))
        return max(self.thresholds.tau, self.compared.own[check])

    def tally(self, check: str, pair: Pair) -> Tally:
        """Kept for P2, which takes all checks together."""
        key = check, pair.name
        if key not in self.compared.tallies:
            tau, floor = self.tau(check), self.floor(check)
            self.compared.tallies[key] = Tally(
                int((pair.delta > tau).sum()),
                int(pair.told.sum()),
                int((floor.delta > tau).sum()),
                int(floor.told.sum()),
            )
        return self.compared.tallies[key]


def own_tau(floor: Pair) -> float:
    """The threshold that a floor tells by itself; the largest difference of one that is short."""
    deltas = floor.delta[floor.told].astype(np.float64)
    if len(deltas) >= LEAST:
        return threshold(deltas).tau or 0.0
    finite = deltas[np.isfinite(deltas)]
    return float(finite.max()) if len(finite) else 0.0


def thresholds(records: Records) -> Thresholds:
    """From A1 and A2 alone."""
    deltas = [
        found.delta[found.told].astype(np.float64)
        for check in TOKEN_CHECKS
        if set(BASELINES) <= set(records.arms(check))
        for found in compare(records, check, [BASELINES], lists=False)
    ]
    found = threshold(np.concatenate(deltas) if deltas else np.empty(0))
    tau = found.tau
    return Thresholds(
        positions=found.n,
        tau=max(tau, HARMLESS_SHIFT) if tau is not None else HARMLESS_SHIFT,
        by="what is harmless anyway" if tau is None or tau < HARMLESS_SHIFT else f"the floor, {found.by}",
        reason=found.reason,
    )


def rate(of: str, pair: str, tally: Tally, *, held: bool = False, unit: Unit = "positions") -> Measure:
    """Outliers as a measure: harm is a rate above the limit."""
    found = outliers(tally.events, tally.n, tally.floor_events, tally.floor_n, unit=unit)
    return Measure(of=of, pair=pair, found=found, harm_p=found.p_limit, held=held)


def share(of: str, pair: str, wrong: Iterable[bool], floor: Iterable[bool], *, limit: float | None = None) -> Measure:
    """Replies that are wrong, as a measure: harm is a larger share than the floor's."""
    mine, theirs = list(wrong), list(floor)
    found = shares(sum(mine), len(mine), sum(theirs), len(theirs), limit=limit)
    return Measure(of=of, pair=pair, found=found, harm_p=found.p, held=limit is not None)


def strata(arms: Arms, check: str, by: str, name: Callable[[Case], str]) -> tuple[list[Stratum], list[Measure]]:
    """Positions by kind of case: one row a kind, of the pair with the smallest p, and one measure a pair, of its worst
    kind. Kinds are in order of first appearance."""
    cases, floor, tau = arms.cases(check), arms.floor(check), arms.tau(check)
    names = {number: name(case) for number, case in cases.items()}
    kinds = list(dict.fromkeys(names.values()))
    kind = np.array([kinds.index(names.get(number, kinds[0])) for number in range(max(names) + 1)])
    pairs = list(arms.pairs(check))
    floor_count = _count(floor, kind, len(kinds), tau)
    counts = [_count(each, kind, len(kinds), tau) for each in pairs]
    ps = np.array([_ps(each, floor_count) for each in counts])
    adjusted = np.array(holm(ps.ravel().tolist())).reshape(ps.shape)
    worst = ps.argmin(axis=0)
    rows = [
        Stratum(
            by=by,
            name=kinds[at],
            n=int(counts[worst[at]].n[at]),
            kl=_mean(counts[worst[at]], at),
            floor_kl=_mean(floor_count, at),
            outliers=int(counts[worst[at]].events[at]),
            floor_outliers=int(floor_count.events[at]),
            holm_p=float(adjusted[worst[at], at]),
        )
        for at in range(len(kinds))
        if counts[worst[at]].n[at]
    ]
    measures = []
    for each, count, of_pair in zip(pairs, counts, ps, strict=True):
        at = int(of_pair.argmin())
        tally = Tally(*(int(values[at]) for values in (count.events, count.n, floor_count.events, floor_count.n)))
        found = outliers(tally.events, tally.n, tally.floor_events, tally.floor_n)
        measures.append(
            Measure(
                of=f"outliers, {by} {kinds[at]}",
                pair=each.name,
                found=found,
                harm_p=min(1.0, float(of_pair[at]) * len(kinds)) if found.p_limit is not None else None,
            )
        )
    return rows, measures


class _Count(msgspec.Struct, frozen=True):
    """By kind."""

    events: Floats
    n: Floats
    kl: Floats
    listed: Floats


def _count(pair: Pair, kind: Ints, kinds: int, tau: float) -> _Count:
    at, told = kind[pair.case], pair.told
    listed = len(pair.kl) == len(at)
    nothing: Floats = np.zeros(kinds)

    def summed(of: Ints, weights: Floats) -> Floats:
        return np.bincount(of, weights, kinds).astype(np.float64)

    return _Count(
        events=summed(at[told], (pair.delta[told] > tau).astype(np.float64)),
        n=summed(at[told], np.ones(int(told.sum()))),
        kl=summed(at, pair.kl.astype(np.float64)) if listed else nothing,
        listed=summed(at, np.ones(len(at))) if listed else nothing,
    )


def _mean(count: _Count, at: int) -> float | None:
    value = count.kl[at] / count.listed[at] if count.listed[at] else np.nan
    return float(value) if np.isfinite(value) else None


def _ps(count: _Count, floor: _Count) -> Floats:
    floor_rate = np.divide(floor.events, floor.n, out=np.zeros_like(floor.n), where=floor.n > 0)
    found: Floats = stats.poisson.sf(count.events - 1, count.n * np.maximum(2 * floor_rate, TARGET))
    return np.where(count.events > 0, found, 1.0)


def floor_by_prompt(floor: Floats) -> Floats:
    """The floor's mean KL by prompt, or, of one below what is harmless anyway, that."""
    harmless = HARMLESS_KL / LIMIT
    return floor if len(floor) and floor.mean() > harmless else np.full_like(floor, harmless)


def reproducer(check: str, case: Case, arm: str, *, repeat: int = 0, position: int | None = None) -> Reproducer:
    """A case as what shows a fault."""
    return Reproducer(
        check=check,
        case=case.number,
        prompt_digest=case.prompt_digest,
        prompt_tokens=case.prompt_tokens,
        seed=case.seed,
        temperature=case.temperature,
        batch=case.batch,
        arm=arm,
        repeat=repeat,
        position=position,
    )


def smallest(arms: Arms, check: str, where: Callable[[Pair], Flags] | None = None) -> Reproducer | None:
    """Of the outliers, the one with the fewest other replies beside it, the shortest prompt, and the earliest
    position; or of the positions that ``where`` tells. None without any."""
    cases, tau = arms.cases(check), arms.tau(check)
    size = np.zeros((max(cases, default=-1) + 1, 2), np.int64)
    for number, case in cases.items():
        size[number] = case.batch, case.prompt_tokens
    found = []
    for pair in arms.pairs(check):
        places = np.flatnonzero(where(pair) if where is not None else pair.delta > tau)
        if len(places):
            batch, tokens = size[pair.case[places]].T
            at = places[np.lexsort((pair.case[places], pair.position[places], tokens, batch))[0]]
            number = int(pair.case[at])
            found.append((*size[number].tolist(), int(pair.position[at]), number, int(pair.repeat[at]), pair.other))
    if not found:
        return None
    _, _, position, number, repeat, arm = min(found)
    shown = reproducer(check, cases[number], arm, repeat=repeat, position=position)
    if where is None:
        arms.compared.shown[check] = shown
    return shown


def first(check: str, cases: dict[int, Case], wrong: Iterable[tuple[int, int]], arm: str) -> Reproducer | None:
    """Of whole replies (case and repeat) that show it, the one of the smallest case."""
    found = min(wrong, key=lambda each: (cases[each[0]].batch, cases[each[0]].output_tokens, *each), default=None)
    return reproducer(check, cases[found[0]], arm, repeat=found[1]) if found is not None else None


class Broken(msgspec.Struct, frozen=True):
    """What came of an invariant: on the candidate alone, or as a share where the baseline breaks it as well."""

    broken: list[str]
    measures: list[Measure]
    reproducer: Reproducer | None


def invariant(
    arms: Arms, check: str, wrong: Callable[[ParityReply], str | None], counted: Callable[[Case], bool] = lambda _: True
) -> Broken:
    """``wrong``: what is wrong with a reply, None if nothing is. One wrong reply of the candidate is one too many,
    unless the baseline has wrong ones too: then no larger share of them is allowed. ``counted``: cases that count."""
    cases = arms.cases(check)
    found = {
        arm: {
            (each.case, each.repeat): wrong(each)
            for each in arms.records.sheets[arm, check].replies
            if each.error is None and counted(cases[each.case])
        }
        for arm in (*BASELINES, *arms.candidates)
    }
    floor = [why is not None for arm in BASELINES for why in found[arm].values()]
    broken, measures, shown = [], [], None
    for arm in arms.candidates:
        whys = [why for why in found[arm].values() if why is not None]
        if whys and not any(floor):
            commonest = max(set(whys), key=whys.count)
            broken.append(
                f"{arm}: {len(whys):,} of {len(found[arm]):,} replies: {commonest}; of the baseline none of "
                f"{len(floor):,}."
            )
        measures.append(share("wrong replies", f"{arm}-A", (why is not None for why in found[arm].values()), floor))
        shown = shown or first(check, cases, [at for at, why in found[arm].items() if why is not None], arm)
    return Broken(broken, measures, shown)


def aligned(pair: Pair, floor: Pair) -> tuple[Flags, Flags]:
    """Which positions of a pair, and of the floor, are those that both have."""
    keys = [each.case.astype(np.int64) << 32 | each.position for each in (pair, floor)]
    if len(keys[0]) == len(keys[1]) and (keys[0] == keys[1]).all():
        whole = np.ones(len(keys[0]), np.bool_)
        return whole, whole
    return np.isin(keys[0], keys[1]), np.isin(keys[1], keys[0])
