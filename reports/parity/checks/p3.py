"""P3: free replies, and the token at which they first differ.

Two things are harm. That replies part earlier than the baseline's own, and at more than so many tokens as rounding
turns. And that greedy replies part where the baseline was sure: at a gap between its two likeliest tokens that noise
does not reach. One of these that comes back in both runs of the candidate is a defect by itself."""

from __future__ import annotations

import numpy as np
from scipy import stats

from reports.parity.arms import BASELINES, HARMLESS_DRAWS, HARMLESS_SHIFT, HARMLESS_TURNS, Arms, reproducer, strata
from reports.parity.compare import Ends, Ints, Pair
from reports.parity.divergences import Flags
from reports.parity.outliers import Threshold
from reports.parity.result import Finding, Measure, NamedCurve, Reproducer, Seen
from reports.parity.survival import big_gaps, curve, gap_threshold, log_rank

CHECK = "P3"


def judge(arms: Arms) -> Seen:
    """Divergences by variant (greedy, sampled), greedy ones at sure places, and survival curves."""
    cases, floor = arms.cases(CHECK), arms.floor(CHECK)
    greedy = np.array([number for number, case in cases.items() if case.temperature == 0])
    variants = list(dict.fromkeys(case.variant for case in cases.values()))
    measures: list[Measure] = []
    sure: dict[str, dict[tuple[int, int, int], float]] = {}
    for pair in arms.pairs(CHECK):
        arms.tally(CHECK, pair)
        for variant in variants:
            numbers = np.array([number for number, case in cases.items() if case.variant == variant])
            harmless = HARMLESS_DRAWS if cases[int(numbers[0])].temperature > 0 else HARMLESS_TURNS
            measures.append(_earlier(pair, floor, numbers, variant, harmless))
        measure, places = _at_sure(pair, floor, greedy)
        measures.append(measure)
        sure[pair.name] = places
    again = _again(sure, arms.candidates)
    shown = [(cases[case].batch, steps, case, repeat, arm) for arm, of in again.items() for case, repeat, steps in of]
    shown = shown or [
        (cases[case].batch, steps, case, repeat, name.split("-")[0])
        for name, places in sure.items()
        for case, repeat, steps in places
    ]
    twice = len(set().union(*again.values())) if len(arms.candidates) > 1 else 0
    both = f"{twice:,} greedy replies leave the baseline where it is sure, in both runs of the candidate."
    rows, _ = strata(arms, CHECK, "variant", lambda case: case.variant)
    return Seen(
        said=_said(floor, list(arms.pairs(CHECK))),
        measures=measures,
        strata=rows,
        curves=[
            _curve(pair, np.array([n for n, case in cases.items() if case.variant == variant]), variant)
            for variant in variants
            for pair in (floor, *arms.pairs(CHECK))
        ],
        broken=[both] if twice else [],
        reproducer=_shown(arms, min(shown)) if shown else _first(arms),
    )


def _of(ends: Ends, numbers: Ints) -> Ends:
    kept: Flags = np.isin(ends.case, numbers)
    return Ends(*(getattr(ends, name)[kept] for name in Ends.__struct_fields__))


def _earlier(pair: Pair, floor: Pair, numbers: Ints, variant: str, harmless: float) -> Measure:
    mine, theirs = _of(pair.ends, numbers), _of(floor.ends, numbers)
    key, floor_key = (each.case << 16 | each.repeat for each in (mine, theirs))
    _, at, floor_at = np.intersect1d(key, floor_key, assume_unique=True, return_indices=True)
    found = log_rank(
        mine.steps[at], mine.diverged[at], theirs.steps[floor_at], theirs.diverged[floor_at], mine.case[at]
    )
    tokens, events = int((mine.steps + mine.diverged)[at].sum()), int(mine.diverged[at].sum())
    by_noise = float(stats.poisson.sf(events - 1, tokens * max(2 * (found.floor or 0.0), harmless)))
    harm_p = None if found.p is None else max(found.p, by_noise)
    return Measure(of=f"first divergence, {variant}", pair=pair.name, found=found, harm_p=harm_p)


def _at_sure(pair: Pair, floor: Pair, greedy: Ints) -> tuple[Measure, dict[tuple[int, int, int], float]]:
    mine, theirs = _of(pair.ends, greedy), _of(floor.ends, greedy)
    gaps, floor_gaps = (each.gap[each.diverged & np.isfinite(each.gap)] for each in (mine, theirs))
    positions, floor_positions = (int((each.steps + each.diverged).sum()) for each in (mine, theirs))
    shifts = floor.shifts.astype(np.float64)
    of = "greedy divergence where the baseline is sure"
    if not len(shifts):
        none = Finding(n=positions, unit="positions", reason="No likely tokens were told: gaps are not known.")
        return Measure(of=of, pair=pair.name, found=none, harm_p=None), {}
    own = gap_threshold(shifts, floor_gaps)
    largest = max(float(np.abs(shifts).max()), float(floor_gaps.max(initial=0.0)))
    sure = max(own.tau if own.tau is not None else largest, HARMLESS_SHIFT)
    tau = Threshold(
        n=own.n,
        tau=sure,
        by=own.by,
        target=own.target,
        floor_outliers=own.floor_outliers,
    )
    found = big_gaps(gaps, positions, floor_gaps, floor_positions, tau).found
    there = mine.diverged & (np.nan_to_num(mine.gap) > sure)
    keys = zip(mine.case[there].tolist(), mine.repeat[there].tolist(), mine.steps[there].tolist(), strict=True)
    places = dict(zip(keys, mine.gap[there].tolist(), strict=True))
    return Measure(of=of, pair=pair.name, found=found, harm_p=found.p_limit), places


def _again(
    sure: dict[str, dict[tuple[int, int, int], float]], candidates: tuple[str, ...]
) -> dict[str, set[tuple[int, int, int]]]:
    """Places at which every arm of the candidate leaves both of the baseline."""
    of_arm = {
        arm: set(sure.get(f"{arm}-{BASELINES[0]}", ())) & set(sure.get(f"{arm}-{BASELINES[1]}", ()))
        for arm in candidates
    }
    common = set.intersection(*of_arm.values()) if of_arm else set()
    return dict.fromkeys(of_arm, common)


def _shown(arms: Arms, found: tuple[int, int, int, int, str]) -> Reproducer:
    _, steps, case, repeat, arm = found
    return reproducer(CHECK, arms.cases(CHECK)[case], arm, repeat=repeat, position=steps)


def _first(arms: Arms) -> Reproducer | None:
    """The earliest divergence of all."""
    found = [
        (int(ends.steps[at]), int(ends.case[at]), int(ends.repeat[at]), pair.other)
        for pair in arms.pairs(CHECK)
        for ends in [pair.ends]
        if ends.diverged.any()
        for at in [int(np.where(ends.diverged, ends.steps, np.iinfo(np.int64).max).argmin())]
    ]
    if not found:
        return None
    steps, case, repeat, arm = min(found)
    return _shown(arms, (0, steps, case, repeat, arm))


def _said(floor: Pair, pairs: list[Pair]) -> str:
    shares = [int(pair.ends.diverged.sum()) for pair in pairs]
    return (
        f"Of {len(floor.ends.case):,} pairs of replies at most {max(shares, default=0):,} differ somewhere, of the "
        f"baseline's own {int(floor.ends.diverged.sum()):,}."
    )


def _curve(pair: Pair, numbers: Ints, variant: str) -> NamedCurve:
    ends = _of(pair.ends, numbers)
    found = curve(ends.steps, ends.diverged)
    return NamedCurve(
        pair=pair.name,
        variant=variant,
        pairs=found.pairs,
        diverged=found.diverged,
        steps=found.steps,
        survival=found.survival,
        low=found.low,
        high=found.high,
    )
