"""How often the verdict on accuracy is wrong, simulated on the code that judges. Minutes; the table of
docs/error-rates.md is `python -m tests.benchmarks.error_rates_case`."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator

import msgspec
import numpy as np

from reports.accuracy.verdict import judge
from tests.benchmarks.wire_cases import Row
from tests.reports.accuracy.exams import Exam, aime, gpqa, harmed, mrcr, plan, sit


class Design(msgspec.Struct, frozen=True):
    """An exam, with what is asked of it, in per cent: PASS if the backends are equal, at least; FAIL at a drop of the
    margin, as published in the design notes. ``where``: see ``exams.harmed``."""

    name: str
    exam: Exam
    where: list[str]
    simulations: int
    least_pass: float | None = None
    published_fail: float | None = None


DESIGNS = [
    Design("AIME25 k=32, 3 pt", aime(), ["everywhere", "uncertain", "few", "tenth"], 2000, 95),
    Design("AIME25 k=64, 2 pt", aime(64, 0.02), ["uncertain"], 1000),
    Design("GPQA-D k=16, 2 pt", gpqa(), ["everywhere", "uncertain", "few", "tenth"], 2000, 99, 95),
    Design("GPQA-D k=8, 3 pt", gpqa(8, 0.03), ["uncertain"], 1000, 99, 94),
    Design("MRCR n=800 k=5, 3 pt, W=.108", mrcr(), ["everywhere", "proportion", "few", "long"], 1000, 97, 94),
    Design("MRCR n=800 k=3, 3 pt, W=.108", mrcr(3), ["proportion"], 500, 93, 78),
    Design("MRCR n=800 k=5, 3 pt, W=.06", mrcr(within=0.06), ["proportion"], 2000, 97, 94),
]
TOGETHER = [aime(), gpqa(), mrcr()]
TOGETHER_SIMULATIONS = 1000


def outcomes(exams: list[Exam], drops: dict[str, float], where: str, simulations: int) -> Counter[str]:
    """Verdicts on a candidate whose mean scores are lower by ``drops`` (by task): of all tasks, as "PASS", and of each,
    as "aime25 PASS". The same ones for the same arguments."""
    rng = np.random.default_rng(zlib.crc32(repr([(e.task, e.repeats, e.margin) for e in exams]).encode()))
    chances = {e.task: harmed(e, drops[e.task], where) if drops.get(e.task) else e.rates for e in exams}
    made = plan(*exams)
    found: Counter[str] = Counter()
    for _ in range(simulations):
        verdict = judge(
            made,
            {exam.task: sit(exam, exam.rates, rng) for exam in exams},
            {exam.task: sit(exam, chances[exam.task], rng) for exam in exams},
        )
        found.update([verdict.outcome, *(f"{task.task} {task.outcome}" for task in verdict.tasks)])
    return found


def error_rates() -> list[Row]:
    """Verdicts on simulated exams: PASS and FAIL of equal backends, and at a drop of the margin."""
    return [row for design in DESIGNS for row in _rows(design)] + list(_together())


def _rows(design: Design) -> Iterator[Row]:
    n = design.simulations
    equal = outcomes([design.exam], {}, "", n)
    yield Row(f"{design.name}: equal, PASS", _share(equal, "PASS", n), "%", _but_for_chance(design.least_pass, n))
    yield Row(f"{design.name}: equal, FAIL", _share(equal, "FAIL", n), "%", _and_chance(1, n), "less")
    for where in design.where:
        worse = outcomes([design.exam], {design.exam.task: design.exam.margin}, where, n)
        yield Row(f"{design.name}: {where}, PASS", _share(worse, "PASS", n), "%", _and_chance(5, n), "less")
        target = _but_for_chance(design.published_fail, n)
        yield Row(f"{design.name}: {where}, FAIL", _share(worse, "FAIL", n), "%", target)


def _together() -> Iterator[Row]:
    n = TOGETHER_SIMULATIONS
    equal = outcomes(TOGETHER, {}, "", n)
    for exam, least in zip(TOGETHER, (95, 99, 97), strict=True):
        passed = f"{exam.task} PASS"
        yield Row(f"all three: equal, {passed}", _share(equal, passed, n), "%", _but_for_chance(least, n))
    yield Row("all three: equal, PASS", _share(equal, "PASS", n), "%", _but_for_chance(95 * 0.99 * 0.97, n))
    yield Row("all three: equal, FAIL", _share(equal, "FAIL", n), "%", _and_chance(1, n), "less")
    for exam, drop, where in zip(TOGETHER, (0.06, 0.04, 0.03), ("uncertain", "uncertain", "long"), strict=True):
        worse = outcomes(TOGETHER, {exam.task: drop}, where, n // 4)
        name = f"all three: {exam.task} lower by {drop * 100:g} pt ({where}), FAIL"
        yield Row(name, _share(worse, "FAIL", n // 4), "%")


def _share(counts: Counter[str], outcome: str, n: int) -> float:
    return 100 * counts[outcome] / n


def _but_for_chance(least: float | None, n: int) -> float | None:
    """A rate that is at least ``least`` shows at least this in ``n`` simulations, but for one time in a hundred."""
    return None if least is None else round(least - 2.33 * (least * (100 - least) / n) ** 0.5, 1)


def _and_chance(most: float, n: int) -> float:
    return round(most + 2.33 * (most * (100 - most) / n) ** 0.5, 1)


if __name__ == "__main__":
    print("| design and truth | verdict | rate | asked for, with Monte-Carlo error |\n| --- | --- | --- | --- |")
    for row in (*(row for design in DESIGNS for row in _rows(design)), *_together()):
        name, verdict = row.name.rsplit(", ", 1)
        asked = "" if row.target is None else f"{'≥' if row.better == 'more' else '≤'} {row.target:g} %"
        print(f"| {name} | {verdict} | {row.value:.1f} % | {asked} |", flush=True)
