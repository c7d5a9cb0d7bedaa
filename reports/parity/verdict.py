"""PASS, FAIL or INCONCLUSIVE: does the candidate emit what the baseline emits, but for noise?

A1 against A2 sets the threshold of outliers before the candidate is looked at, and the records have to prove the order.
Both of the candidate's arms are then held against both of the baseline's, by all checks.

**FAIL**: something that must never happen did, on the candidate and not on the baseline; or a test of harm is
significant at ALPHA by Holm over the checks, each by the smallest p of its measures (Bonferroni).

**PASS**: every check passes. A check does if nothing is missing and every bound that is held is within its limit (each
at its own level: as all must be, together they pass a harmful candidate no more often than one of them would). Bounds
are not held in a quick battery, which is too short for them: it says that nothing is plainly broken.

**INCONCLUSIVE**: all else, with what is missing.

X, the baseline behind a fault, is judged by the same battery as a candidate would be: PASS needs that those checks see
the fault that are to see it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from evals.records import ArmName
from reports.accuracy.harm import holm
from reports.parity import arms as judging
from reports.parity.arms import BASELINES, TOKEN_CHECKS, Arms, Compared, Tally, rate
from reports.parity.checks import CHECKS, Judged
from reports.parity.faults import CAUGHT_BY
from reports.parity.load import Records, load
from reports.parity.result import CheckVerdict, FaultSeen, Measure, Order, Parity, Seen, Thresholds, Verdict

ALPHA = 0.01
"""Family level of the tests of harm."""
CANDIDATES: tuple[ArmName, ...] = ("B1", "B2")
_UNPLANNED = "it was not planned."
_FAULTY: tuple[ArmName, ...] = ("X",)


def judge_parity(run_parity: Path) -> Parity:
    """Judge RUN/parity. Raises UserError for a folder that is none, and for damaged files."""
    records = load(run_parity)
    return judge(records)


def judge(records: Records) -> Parity:
    """Judge what was recorded."""
    groups = [CANDIDATES, *([_FAULTY] if "X" in records.plan.arms else [])]
    thresholds = judging.thresholds(records)
    compared = Compared(records)
    seen: dict[tuple[ArmName, ...], dict[str, Seen]] = {group: {} for group in groups}
    itself: list[Tally] = []
    for each in CHECKS:  # all that is read of a check is read once
        for group in groups:
            if (found := _seen(records, each, group, thresholds, compared)) is not None:
                seen[group][each.id] = found
        if each.id in TOKEN_CHECKS and {*BASELINES, *CANDIDATES} <= set(records.arms(each.id)):
            arms = Arms(records, CANDIDATES, thresholds, compared)
            itself.append(arms.tally(each.id, compared.pair(each.id, "B1", "B2")))
    checks = _verdicts(records, seen[CANDIDATES], CANDIDATES)
    fault = _fault(records, _verdicts(records, seen[_FAULTY], _FAULTY)) if len(groups) > 1 else None
    order = _order(records)
    unordered = list(_unordered(records, order))
    outcome, reasons = _conclude(checks, unordered, fault)
    return Parity(
        outcome=outcome,
        reasons=reasons,
        budget=records.plan.budget,
        arms=[arm for arm in records.plan.arms if any(arm == each for each, _ in records.sheets)],
        positions=sum(sheet.run.positions for sheet in records.sheets.values()),
        order=order,
        unordered=unordered,
        thresholds=thresholds,
        checks=checks,
        itself=_itself(itself),
        curves=[curve for found in seen[CANDIDATES].values() for curve in found.curves],
        fault=fault,
        not_covered=[f"{each.title}: {each.said}" for each in checks if each.outcome == "not run"],
        notes=records.notes,
    )


def _seen(
    records: Records, check: Judged, group: tuple[ArmName, ...], thresholds: Thresholds, compared: Compared
) -> Seen | None:
    """What a check shows of the arms of a group; None where there is nothing to judge."""
    asked = {arm for arm, id in records.sheets if id == check.id or not check.asks}
    there = tuple(arm for arm in group if arm in asked)
    if not there or not set(BASELINES) <= asked:
        return None
    return check.judge(Arms(records, there, thresholds, compared))


def _verdicts(records: Records, seen: dict[str, Seen], group: tuple[ArmName, ...]) -> list[CheckVerdict]:
    ps = {id: _p(found) for id, found in seen.items()}
    tested = [id for id, p in ps.items() if p is not None]
    adjusted = dict(zip(tested, holm([p for p in ps.values() if p is not None]), strict=True))
    return [
        _verdict(records, check, seen.get(check.id), group, ps.get(check.id), adjusted.get(check.id))
        for check in CHECKS
    ]


def _p(seen: Seen) -> float | None:
    ps = [each.harm_p for each in seen.measures if each.harm_p is not None]
    return min(1.0, min(ps) * len(ps)) if ps else None


def _verdict(
    records: Records,
    check: Judged,
    seen: Seen | None,
    group: tuple[ArmName, ...],
    p: float | None,
    holm_p: float | None,
) -> CheckVerdict:
    if seen is None and (why := _not_run(records, check)) is not None:
        outcome, reasons, seen = "not run", [why], Seen(said=why)
    else:
        missing = [] if not check.asks else list(_incomplete(records, check.id, group))
        if seen is None:
            seen = Seen(said="There is nothing to judge.")
            missing = missing or ["There is nothing to judge: no check of both of the baseline's arms has ended."]
        missing += [*seen.missing, *_unbounded(seen, check, quick=records.plan.budget == "quick")]
        harm = [*seen.broken, *(_worse(seen, holm_p) if holm_p is not None and holm_p <= ALPHA else [])]
        outcome = "FAIL" if harm else "INCONCLUSIVE" if missing else "PASS"
        reasons = harm or missing
    headline = min(
        (each for each in seen.measures if each.harm_p is not None),
        key=lambda each: (each.harm_p, -(each.found.statistic or 0.0)),
        default=next(iter(seen.measures), None),
    )
    return msgspec.convert(
        {
            "id": check.id,
            "title": check.title,
            "family": check.family,
            "outcome": outcome,
            "said": seen.said,
            "reasons": reasons,
            "of": f"{headline.of} ({headline.pair})" if headline is not None else "",
            "finding": headline.found if headline is not None else None,
            "p": p,
            "holm_p": holm_p,
            "measures": seen.measures,
            "strata": seen.strata,
            "reproducer": seen.reproducer if outcome == "FAIL" else None,
        },
        CheckVerdict,
    )


def _not_run(records: Records, check: Judged) -> str | None:
    """Why a check was run on no arm; None if it was to be run, or asks nothing itself."""
    if not check.asks:
        return None
    planned = next((each for each in records.plan.checks if each.id == check.id), None)
    if planned is None:
        return _UNPLANNED
    return planned.not_run or next((why for (_, id), why in records.not_run.items() if id == check.id), None)


def _incomplete(records: Records, check: str, group: tuple[ArmName, ...]) -> Iterator[str]:
    for arm in (*BASELINES, *group):
        sheet = records.sheets.get((arm, check))
        if sheet is None:
            yield f"{arm} has not ended it: go on with --resume."
            continue
        failed = sum(reply.error is not None for reply in sheet.replies)
        silent = len(records.cases[check]) - len({reply.case for reply in sheet.replies})
        if failed or silent:
            yield f"{arm}: {failed + silent:,} of {len(records.cases[check]):,} cases got no reply."


def _unbounded(seen: Seen, check: Judged, *, quick: bool) -> Iterator[str]:
    """What cannot be said, and bounds that reach beyond their limits. A quick battery has to say something only."""
    if check.family == "validity" or not seen.measures:
        return
    silent = [each for each in seen.measures if each.harm_p is None]
    if quick:
        if len(silent) == len(seen.measures):
            yield from dict.fromkeys(each.found.reason for each in silent)
        return
    yield from dict.fromkeys(f"{each.of}: {each.found.reason}" for each in silent if each.found.reason)
    for each in seen.measures:
        found = each.found
        if each.held and found.limit is not None and each.harm_p is not None:
            if found.bound is None:
                yield f"{each.of} ({each.pair}): {found.reason or 'it has no bound.'}"
            elif found.bound > found.limit:
                yield (
                    f"{each.of} ({each.pair}): may be as much as {found.bound:.3g}, and {found.limit:.3g} is allowed: "
                    f"{found.n:,} {found.unit} are too few, or it is worse."
                )


def _worse(seen: Seen, holm_p: float) -> Iterator[str]:
    """The measures that show harm, the clearest first."""
    tested = sorted((each for each in seen.measures if each.harm_p is not None), key=lambda each: each.harm_p or 0.0)
    count = len(tested)
    for each in tested[:3]:
        if each is tested[0] or (each.harm_p or 0.0) * count <= ALPHA:
            found = each.found
            against = "" if found.floor is None else f", the floor's {found.floor:.3g}"
            told = "" if found.statistic is None else f" {found.statistic:.3g}{against}"
            yield (
                f"{each.of} ({each.pair}):{told} in {found.n:,} {found.unit}; p = {holm_p:.2g} after Holm's adjustment."
            )


def _fault(records: Records, verdicts: list[CheckVerdict]) -> FaultSeen:
    name = (records.plan.fault or "").partition(":")[0]
    number, expected = CAUGHT_BY.get(name, (None, ()))
    seen = [
        each
        for each in verdicts
        if each.outcome == "FAIL"
        or (each.id in expected and each.family == "validity" and each.outcome == "INCONCLUSIVE")
    ]
    by = next((each for id in expected for each in seen if each.id == id), None)
    return FaultSeen(
        fault=records.plan.fault or "",
        number=number,
        expected=list(expected),
        seen=[each.id for each in seen],
        n=by.finding.n if by is not None and by.finding is not None else None,
        unit=by.finding.unit if by is not None and by.finding is not None else "",
        holds=by is not None if expected else not seen,
    )


def _itself(tallies: list[Tally]) -> list[Measure]:
    if not tallies:
        return []
    whole = Tally(*(sum(getattr(each, name) for each in tallies) for name in Tally.__struct_fields__))
    return [rate("outliers", "B2-B1", whole)]


def _order(records: Records) -> Order:
    sent = [
        reply.sent_unix_s
        for (arm, _), sheet in records.sheets.items()
        if arm in CANDIDATES
        for reply in sheet.replies
        if reply.sent_unix_s is not None
    ]
    return Order(
        registered_utc=records.plan.registered_utc,
        floor_fixed_utc=_utc(records.floor.fixed_unix_s) if records.floor is not None else None,
        first_candidate_request_utc=_utc(min(sent)) if sent else None,
        plan_sha256=records.plan_sha256,
    )


def _utc(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")


def _unordered(records: Records, order: Order) -> Iterator[str]:
    """Why the records do not prove that plan and floor were fixed before the candidate was asked."""
    anew = "Measure anew, in a new folder."
    if records.plan_sha256 != records.manifest.plan_sha256:
        yield f"plan.json is not the one that was registered (its SHA-256 differs from manifest.json's). {anew}"
    asked = any(arm in CANDIDATES for arm, _ in records.sheets)
    if records.floor is None:
        if asked:
            yield f"The candidate was asked although no floor was fixed: there is no floor.json. {anew}"
        return
    if (changed := _changed(records)) is not None:
        yield f"{changed} is not as it was when the floor was fixed: thresholds may have been chosen since. {anew}"
    first = order.first_candidate_request_utc
    if asked and first is None:
        yield f"When the candidate was first asked is not on record: the floor cannot be shown to be older. {anew}"
    for what, at in (("The floor was fixed", order.floor_fixed_utc), ("The plan was registered", order.registered_utc)):
        if first is not None and at and datetime.fromisoformat(at) > datetime.fromisoformat(first):
            yield f"{what} at {at}, after the candidate's first request ({first}). {anew}"


def _changed(records: Records) -> str | None:
    """A file of the floor that is not as it was fixed."""
    assert records.floor is not None
    fixed = records.floor.sha256
    there = {
        path.relative_to(records.folder).as_posix(): path
        for arm in BASELINES
        for path in (records.folder / arm).rglob("*")
        if path.is_file()
    }
    for name in sorted(fixed.keys() | there.keys()):
        if name not in there or name not in fixed:
            return name
        with there[name].open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != fixed[name]:
                return name
    return None


def blocking(checks: list[CheckVerdict]) -> list[CheckVerdict]:
    """Those that stand against PASS: all that do not pass, but for ones that could not be run and that others stand in
    for, or without which something is not covered and no more."""
    passed = {each.id for each in checks if each.outcome == "PASS"}
    instead = {each.id: each.instead for each in CHECKS}

    def replaced(check: CheckVerdict) -> bool:
        by = instead[check.id]
        return check.outcome == "not run" and check.said != _UNPLANNED and by is not None and set(by) <= passed

    return [each for each in checks if each.outcome != "PASS" and not replaced(each)]


def _conclude(checks: list[CheckVerdict], unordered: list[str], fault: FaultSeen | None) -> tuple[Verdict, list[str]]:
    if unordered:
        return "INCONCLUSIVE", unordered
    failed = [f"{each.id} {each.title}: {why}" for each in checks if each.outcome == "FAIL" for why in each.reasons]
    if failed:
        return "FAIL", failed
    missing = [f"{each.id} {each.title}: {why}" for each in blocking(checks) for why in each.reasons]
    if fault is not None and not fault.holds:
        what = f"none of {', '.join(fault.expected)} saw it" if fault.expected else f"{', '.join(fault.seen)} saw it"
        missing.append(f"Control X, the baseline with {fault.fault}: {what}. The battery cannot be trusted.")
    if missing:
        return "INCONCLUSIVE", missing
    return "PASS", [f"All of {sum(each.outcome == 'PASS' for each in checks):,} checks that were run pass."]
