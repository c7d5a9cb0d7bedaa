"""Every fault against the check that is to see it, and harmless changes against the whole battery: counts over seeds,
on the code that measures and the code that judges. Writes docs/faults.md; half an hour of two cores."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import msgspec

from tests.benchmarks.wire_cases import CORES, ROOT, Row
from tests.reports.parity import injected
from tests.reports.parity.injected import A2_FOR_A1, Control, Trial

SEEDS = 20
ALARM_SEEDS = 200
LEAST = 15
"""Seeds of SEEDS in which a check of power .9 sees a fault, at least, but for one time in a hundred."""
MOST_ALARMS = 0.05
PAGE = ROOT / "docs" / "faults.md"

Job = tuple[str, int, int]
"""Kind, number in its list, seed."""


class Outcome(msgspec.Struct, frozen=True):
    """One battery. ``seen``: by the check that is expected to."""

    job: Job
    seen: bool
    failed: list[str]
    """Ids of the checks that failed."""
    unproved: list[str]
    """Of a harmless change: of those that did not pass though they were run."""


def jobs(trials: Sequence[Trial], controls: Sequence[Control]) -> list[Job]:
    """All batteries, the long ones of a fault one after the other."""
    seeds = range(1, SEEDS + 1)
    made = [("fault", at, seed) for at in range(len(trials)) for seed in seeds]
    made += [("control", at, seed) for at in range(len(controls)) for seed in seeds]
    alarm = next(at for at, control in enumerate(controls) if control.name == A2_FOR_A1)
    return made + [("control", alarm, seed) for seed in range(SEEDS + 1, ALARM_SEEDS + 1)]


def outcome(url: str, job: Job) -> Outcome:
    """Run one battery. Every other seed has a floor of exactly 0. ``url``: of the emulator."""
    kind, at, seed = job
    if kind == "fault":
        trial = injected.trials(url, full=True)[at]
        parity = injected.judged(trial, seed, injected.NOISE if seed % 2 else 0.0)
        seen = injected.saw(parity, trial.expected)
    else:
        parity, seen = injected.harmless(injected.controls(url)[at], seed), False
    run = [each for each in parity.checks if each.outcome != "not run"]
    return Outcome(
        job,
        seen,
        [each.id for each in run if each.outcome == "FAIL"],
        [each.id for each in run if each.outcome == "INCONCLUSIVE"],
    )


def faults() -> list[Row]:
    """Faults seen, of 20 seeds, and harmless changes taken for one; writes docs/faults.md."""
    os.sched_setaffinity(0, CORES)
    os.environ["POLARS_MAX_THREADS"] = "1"  # of the processes that are started
    with injected.emulator() as url, ProcessPoolExecutor(len(CORES)) as pool:
        trials, controls = injected.trials(url, full=True), injected.controls(url)
        found = list(pool.map(partial(outcome, url), jobs(trials, controls)))
    PAGE.write_text(page(PAGE.read_text(), found, trials, controls))
    return list(_rows(found, trials, controls))


def _rows(found: Sequence[Outcome], trials: Sequence[Trial], controls: Sequence[Control]) -> Iterator[Row]:
    for at, trial in enumerate(trials):
        name = f"{injected.number(trial.fault)} {_title(trial)}: seen by {trial.expected}"
        yield Row(name, sum(each.seen for each in _of(found, "fault", at)), f"/{SEEDS}", LEAST)
    for at, control in enumerate(controls):
        batteries = _of(found, "control", at)
        failed = sum(bool(each.failed) for each in batteries)
        if control.name == A2_FOR_A1:
            yield Row(f"{control.name}: failed", failed, f"/{len(batteries)}", MOST_ALARMS * len(batteries), "less")
        else:
            yield Row(f"{control.name}: failed", failed, f"/{len(batteries)}", 0, "less")


def _of(found: Sequence[Outcome], kind: str, at: int) -> list[Outcome]:
    return [each for each in found if each.job[:2] == (kind, at)]


def _title(trial: Trial) -> str:
    return f"{trial.fault} ({trial.size})" if trial.size else trial.fault


# -- the page ----------------------------------------------------------------------------------------------------------


def page(text: str, found: Sequence[Outcome], trials: Sequence[Trial], controls: Sequence[Control]) -> str:
    """docs/faults.md, ``text``, with what was found between its marks."""
    made = {
        "faults": _fault_lines(found, trials),
        "controls": _control_lines(found, controls),
        "alarms": _alarm_lines(found, controls),
    }
    for name, lines in made.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(start)
        text = before + start + "".join(f"{line}\n" for line in lines) + end + rest.split(end)[1]
    return text


def _fault_lines(found: Sequence[Outcome], trials: Sequence[Trial]) -> Iterator[str]:
    yield "| # | fault | check | n of an arm | section (f) names | seen | also failed, of as many |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for at, trial in enumerate(trials):
        batteries = _of(found, "fault", at)
        seen = sum(each.seen for each in batteries)
        also = Counter(id for each in batteries for id in each.failed if id != trial.expected)
        others = ", ".join(f"{id} {count}" for id, count in also.most_common())
        named, unit = injected.named(trial)
        n = f"{trial.n:,} {unit}"
        cells = [injected.number(trial.fault), _title(trial), trial.expected, n, named, f"{seen} of {len(batteries)}"]
        yield f"| {' | '.join(map(str, cells))} | {others or '-'} |"


def _control_lines(found: Sequence[Outcome], controls: Sequence[Control]) -> Iterator[str]:
    yield "| candidate | checks | failed | by |"
    yield "| --- | --- | --- | --- |"
    for at, control in enumerate(controls):
        batteries = [each for each in _of(found, "control", at) if each.job[2] <= SEEDS]
        failed = sum(bool(each.failed) for each in batteries)
        yield f"| {control.name} | {len(control.checks)} | {failed} of {len(batteries)} | {_whose(batteries)} |"


def _whose(batteries: Sequence[Outcome]) -> str:
    by = Counter(id for each in batteries for id in each.failed)
    return ", ".join(f"{id} {count}" for id, count in by.most_common()) or "-"


def _alarm_lines(found: Sequence[Outcome], controls: Sequence[Control]) -> Iterator[str]:
    at = next(at for at, control in enumerate(controls) if control.name == A2_FOR_A1)
    batteries = _of(found, "control", at)
    failed = sum(bool(each.failed) for each in batteries)
    yield f"**{failed} of {len(batteries)}** batteries failed, by: {_whose(batteries)}."
