"""Verdicts on exams of known truth."""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl
import pytest
from scipy import stats

from reports.accuracy.answers import COLUMNS
from reports.accuracy.drop import Floats
from reports.accuracy.looks import level_at
from reports.accuracy.result import Accuracy, Counts, Flips, Table
from reports.accuracy.verdict import judge
from tests.reports.accuracy.exams import BINS, Exam, aime, answers, gpqa, harmed, mrcr, plan, sit

QUARTERS = (0.25, 0.5, 0.75, 1.0)


def verdict(
    exam: Exam, rates: Floats, seed: int = 0, *, looks: tuple[float, ...] = (1.0,), repeats: int | None = None
) -> Accuracy:
    """On a candidate with these chances, after ``repeats``."""
    rng = np.random.default_rng(seed)
    sheets = [sit(exam, each, rng).filter(pl.col("repeat") < (repeats or exam.repeats)) for each in (exam.rates, rates)]
    return judge(plan(exam, looks=looks), {exam.task: sheets[0]}, {exam.task: sheets[1]})


@pytest.mark.parametrize("exam", [aime(), gpqa(), mrcr()], ids=lambda exam: exam.task)
def test_equal_backends_of_the_planned_size_pass(exam: Exam) -> None:
    found = verdict(exam, exam.rates)
    assert found.outcome == "PASS", found.reasons
    (task,) = found.tasks
    assert task.measured is not None
    assert task.measured.drop.bound is not None
    assert task.measured.drop.bound <= exam.margin
    assert task.measured.repeats_needed is not None
    assert task.measured.repeats_needed <= exam.repeats


@pytest.mark.parametrize(
    ("exam", "drop", "where"),
    [(aime(), 0.06, "everywhere"), (gpqa(), 0.04, "uncertain"), (mrcr(), 0.04, "long")],
    ids=["aime25", "gpqa_diamond", "mrcr"],
)
def test_harm_fails_and_is_named(exam: Exam, drop: float, where: str) -> None:
    found = verdict(exam, harmed(exam, drop, where))
    assert found.outcome == "FAIL"
    assert found.reasons[0].startswith(f"{found.tasks[0].title}: The candidate answers worse")
    if exam.task == "mrcr":
        assert found.reasons[1].startswith("MRCR: It is worse in ")
        assert all(name in BINS[-3:] for name in BINS if f"{name} (by" in found.reasons[1])
        assert any(f"{name} (by" in found.reasons[1] for name in BINS[-3:])


def test_one_harmed_task_of_three_fails_by_name() -> None:
    rng = np.random.default_rng(0)
    exams = [aime(), gpqa(), mrcr()]
    worse = {"gpqa_diamond": harmed(exams[1], 0.04, "everywhere")}
    baseline = {exam.task: sit(exam, exam.rates, rng) for exam in exams}
    candidate = {exam.task: sit(exam, worse.get(exam.task, exam.rates), rng) for exam in exams}
    found = judge(plan(*exams), baseline, candidate)
    assert [task.outcome for task in found.tasks] == ["PASS", "FAIL", "PASS"]
    assert all(reason.startswith("GPQA-Diamond: ") for reason in found.reasons)
    # Holm: three tasks, and the smallest of the planned p first
    (p,) = [test.p for test in found.tasks[1].measured.tests] if found.tasks[1].measured else []
    (adjusted,) = [test.holm_p for test in found.tasks[1].measured.tests] if found.tasks[1].measured else []
    assert adjusted == pytest.approx(3 * p)


def test_too_few_repeats_say_how_many_it_takes() -> None:
    exam = aime(8)
    found = verdict(exam, exam.rates)
    assert found.outcome == "INCONCLUSIVE"
    assert found.tasks[0].measured is not None
    needed = found.tasks[0].measured.repeats_needed
    assert needed is not None
    assert needed > 8
    assert (
        f"Needs {needed} repeats of AIME25 for 3.0 points at the observed variance, 8 were planned" in found.reasons[0]
    )
    larger = aime(needed)
    passed = sum(verdict(larger, larger.rates, seed).outcome == "PASS" for seed in range(40))
    assert passed >= 30  # nine of ten were asked for, at a variance that 8 repeats gave


def test_a_run_without_all_its_repeats_is_judged_at_its_planned_looks_alone() -> None:
    exam = aime()
    early = verdict(exam, exam.rates, repeats=31)
    assert early.outcome == "INCONCLUSIVE"
    assert early.tasks[0].measured is None
    assert "ended 31 and candidate 31 of 32 repeats; the result may be looked at from 32 on" in early.reasons[0]
    worse = harmed(exam, 0.15, "everywhere")
    first = verdict(exam, worse, looks=QUARTERS, repeats=15)
    assert first.tasks[0].measured is not None
    assert first.tasks[0].measured.repeats == 8
    assert verdict(exam, worse, looks=QUARTERS, repeats=16).outcome == "FAIL"


def test_early_pass_from_half_on() -> None:
    exam = msgspec.structs.replace(aime(64), margin=0.15)
    quarter, half = (verdict(exam, exam.rates, looks=QUARTERS, repeats=each) for each in (16, 32))
    assert quarter.outcome == "INCONCLUSIVE"
    assert "too few to pass early" in quarter.reasons[0]
    assert half.outcome == "PASS"
    assert half.tasks[0].measured is not None
    assert half.tasks[0].measured.level == pytest.approx(0.0055, abs=1e-4)  # z = 2.54


def test_repeats_are_counted_for_the_last_look() -> None:
    """An early look's stricter level asks for no new run where finishing this one will do."""
    exam = aime(40)
    found = verdict(exam, exam.rates, seed=6, looks=QUARTERS, repeats=20)
    measured = found.tasks[0].measured
    assert measured is not None
    assert measured.repeats_needed is not None
    z, last_z = (stats.norm.isf([level, 0.1]).sum() for level in (measured.level, level_at(0.05, QUARTERS, 3)))
    assert measured.repeats_needed <= 40 < measured.repeats_needed * (z / last_z) ** 2
    assert found.outcome == "INCONCLUSIVE"
    assert found.reasons[0].endswith("20 of 40 repeats were judged: finish the run.")


def test_a_limit_can_pass_nothing() -> None:
    exam = msgspec.structs.replace(aime(), rates=np.ones(30))
    sheet = sit(exam, exam.rates, np.random.default_rng(0)).filter(pl.col("item") < 20)
    found = judge(plan(exam, limit=20), {"aime25": sheet}, {"aime25": sheet})
    assert found.outcome == "INCONCLUSIVE"
    assert found.reasons[0] == "AIME25: Only the first 20 of 30 items were asked: a smoke test."


def errors(sheet: pl.DataFrame, where: pl.Expr) -> pl.DataFrame:
    return sheet.with_columns(
        outcome=pl.when(where).then(pl.lit("error")).otherwise("outcome"),
        score=pl.when(where).then(0.0).otherwise("score"),
    )


@pytest.mark.parametrize("silent", [0, 1])
def test_a_backend_that_answers_nothing_has_no_score(silent: int) -> None:
    exam = aime()
    sheets = [sit(exam, exam.rates, np.random.default_rng(0))] * 2
    sheets[silent] = errors(sheets[silent], pl.lit(True))
    found = judge(plan(exam), {"aime25": sheets[0]}, {"aime25": sheets[1]})
    assert found.outcome == "INCONCLUSIVE"
    assert found.tasks[0].measured is None
    name = ("baseline", "candidate")[silent]
    assert found.reasons == [f"AIME25: {name} answered nothing: none of 960 requests got a reply."]


def test_requests_without_reply_stand_against_pass_and_make_no_harm() -> None:
    exam = aime()
    sheet = sit(exam, exam.rates, np.random.default_rng(0))
    found = judge(plan(exam), {"aime25": sheet}, {"aime25": errors(sheet, pl.col("repeat") < 8)})
    assert found.outcome == "INCONCLUSIVE"
    assert "240 of 960 requests to candidate got no reply" in found.reasons[0]
    assert found.tasks[0].measured is not None
    assert found.tasks[0].measured.drop.value > 0.2
    strata = mrcr()
    sheet = sit(strata, strata.rates, np.random.default_rng(0))
    found = judge(plan(strata), {"mrcr": sheet}, {"mrcr": errors(sheet, pl.col("repeat") < 2)})
    assert found.outcome == "INCONCLUSIVE"


def test_garbage_is_an_answer() -> None:
    exam = aime()
    sheet = sit(exam, exam.rates, np.random.default_rng(0))
    garbage = sheet.with_columns(outcome=pl.lit("unparsed"), score=pl.lit(0.0))
    assert judge(plan(exam), {"aime25": sheet}, {"aime25": garbage}).outcome == "FAIL"
    both = judge(plan(exam), {"aime25": garbage}, {"aime25": garbage})
    assert both.outcome == "INCONCLUSIVE"
    assert "baseline itself scores 0.0%" in both.reasons[0]


def test_nothing_at_all_is_inconclusive() -> None:
    assert judge(plan(aime()), {}, {}).outcome == "INCONCLUSIVE"
    assert judge(plan(), {}, {}).reasons == ["No task was planned."]


def test_another_exam_is_not_judged() -> None:
    exam = aime()
    sheet = sit(exam, exam.rates, np.random.default_rng(0))
    edited = sheet.with_columns(prompt_hash=pl.lit("edited"))
    found = judge(plan(exam), {"aime25": sheet}, {"aime25": edited})
    assert (found.outcome, found.tasks[0].measured) == ("INCONCLUSIVE", None)
    assert found.reasons == ["AIME25: Prompts differed between the backends in 960 of 960 answers."]


def test_a_bad_stratum_stands_against_pass() -> None:
    """Worse by 8 points in one bin and a little better elsewhere: the mean score shows nothing."""
    exam = mrcr(3)
    score = np.tile([0.9, 0.5, 0.7], (800, 1)) + np.random.default_rng(0).normal(0, 0.02, (800, 3))
    bad = np.array(exam.bins) == BINS[2]
    worse = np.where(bad[:, None], score - 0.08, score + 0.002)
    found = judge(plan(exam), {"mrcr": answers(exam, score, score > 0)}, {"mrcr": answers(exam, worse, worse > 0)})
    assert found.outcome == "FAIL"
    assert "shown by" in found.reasons[0]
    assert "single strata" in found.reasons[0]
    assert found.reasons[1] == "MRCR: It is worse in 16k-32k (by 8.0 points)."


def test_counts_table_and_flips_by_hand() -> None:
    exam = Exam("aime25", 3, 0.5, np.ones(2))
    before = answers(exam, np.array([[1.0, 1, 0], [1, 1, 1]]), np.array([[1, 1, 0], [1, 1, 1]]) == 1)
    after = answers(exam, np.array([[1.0, 0, 0], [1, 1, 1]]), np.array([[1, 0, 0], [1, 1, 1]]) == 1)
    after = after.with_columns(
        outcome=pl.Series(["right", "truncated", "unparsed", "right", "right", "right"]),
        attempts=pl.Series([1, 1, 1, 2, 1, 1]),
    )
    (task,) = judge(plan(exam), {"aime25": before}, {"aime25": after}, ("auto", "special")).tasks
    assert task.counts == {
        "auto": Counts(right=5, wrong=1, unparsed=0, truncated=0, error=0, retried=0),
        "special": Counts(right=4, wrong=0, unparsed=1, truncated=1, error=0, retried=1),
    }
    assert task.ended_repeats == {"auto": 3, "special": 3}
    assert task.measured is not None
    assert task.measured.table == Table(both=4, baseline_only=1, candidate_only=0, neither=1)
    assert task.measured.flips == Flips(lost=1, gained=0, p=1.0)
    assert task.measured.drop.value == pytest.approx(1 / 6)


def test_the_order_of_records_changes_nothing() -> None:
    exam = mrcr(2, per_bin=10)
    rng = np.random.default_rng(0)
    first, second = sit(exam, exam.rates, rng), sit(exam, exam.rates, rng)
    found = judge(plan(exam), {"mrcr": first}, {"mrcr": second})
    shuffled = judge(plan(exam), {"mrcr": first.sample(fraction=1, shuffle=True, seed=1)}, {"mrcr": second.reverse()})
    assert msgspec.json.encode(found) == msgspec.json.encode(shuffled)


def test_needles_make_cells_and_every_cell_weighs_alike() -> None:
    exam = mrcr(2, per_bin=4)
    sheet = sit(exam, exam.rates, np.random.default_rng(0))
    needles = sheet.with_columns(
        cell=pl.format("bin {}, needles {}", "bin", pl.when(pl.col("item") % 4 == 0).then(2).otherwise(8))
    ).select(list(COLUMNS))
    better = needles.with_columns(score=pl.when(pl.col("item") % 4 == 0).then(1.0).otherwise("score"))
    (task,) = judge(plan(exam), {"mrcr": needles}, {"mrcr": better}).tasks
    assert task.measured is not None
    assert len(task.measured.cells) == 16
    assert [each.name for each in task.measured.bins] == BINS
    gain = (better["score"] - needles["score"]).filter(needles["item"] % 4 == 0).mean()
    assert isinstance(gain, float)
    assert task.measured.drop.value == pytest.approx(-gain / 2)
