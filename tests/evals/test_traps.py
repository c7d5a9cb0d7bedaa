r"""What lm-eval gets wrong, and what would make two exams unlike: each has a guard, and each guard a test.

What breaks in lm-eval (accuracy.md, section b):

=====================================  ===============================================================================
trap                                   tests of its guard
=====================================  ===============================================================================
300 s for a session, 3 retries         test_plan.py: test_defaults_are_those_that_were_agreed_on; test_model.py:
                                       test_the_time_limit_is_that_of_a_request_and_not_of_the_session,
                                       test_a_request_over_its_time_is_not_sent_again; below: the_defaults_wait_a_day
one dead request loses the run         test_model.py: test_one_dead_request_costs_its_answer_only; test_harness.py:
                                       test_br_45_resume_asks_no_item_twice
retries hide faults                    test_model.py: test_retries_are_counted; below: retries_are_shown; as a gate:
                                       tests/reports/signoff/test_gates.py:
                                       test_a_candidate_whose_requests_had_to_be_sent_again
max_gen_toks unset, stock until        test_model.py: test_every_sampling_field_is_sent_and_nothing_else
eos_string                             the same test, at concurrency 1 and 4; test_plan.py:
                                       test_a_slip_in_the_file_is_named
no reasoning parser                    test_harness.py: test_thoughts_in_the_text_stop_the_run; test_plan.py:
                                       test_kimi_k3_needs_its_reasoning_parser
--use_cache                            test_plan.py: test_a_slip_in_the_file_is_named; below: no_backend_gets_the_
                                       replies_of_the_other
server defaults                        test_model.py: test_every_sampling_field_is_sent_and_nothing_else;
                                       test_plan.py: test_defaults_are_those_that_were_agreed_on
lm-eval's own statistics               below: lm_eval_has_nothing_to_score
repeats: k sends one seed k times      test_harness.py: test_both_backends_get_the_same_questions_with_the_same_seeds
=====================================  ===============================================================================

What must stop the run or the verdict (issue 5):

=====================================  ===============================================================================
fault                                  tests of its guard
=====================================  ===============================================================================
swapped option order, edited prompt    below: another_exam_for_the_candidate_is_no_verdict (the verdict)
one question missing                   test_plan.py: test_one_question_missing_stops_it (the run); below, as before
wrong data hash                        test_harness.py: test_other_data_than_agreed_on_are_not_asked (the run)
unequal seeds                          below: another_exam_for_the_candidate_is_no_verdict (the verdict)
plan changed after the first request   test_harness.py: test_a_changed_plan_is_not_resumed (the run);
                                       tests/reports/signoff/test_gates.py: test_a_plan_that_was_changed (the verdict)
=====================================  ===============================================================================

Bug reports: test_br_41_* in test_aime25.py, test_br_43_* in test_gpqa_diamond.py, test_br_45_* in test_harness.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evals.records import Answer
from evals.tasks import gpqa_diamond
from replay.experiment import Evals, Experiment
from reports.accuracy.result import Accuracy
from reports.accuracy.verdict import judge_folder
from tests.evals.exams import NAMES, gpqa, sitting
from tests.evals.test_harness import School, quick, right, school, shown  # noqa: F401
from tests.integration.runs import silent
from tests.scripted_server import reply

pytest.importorskip("lm_eval")

from evals import harness
from evals.harness import measure

ITEMS = 12


@pytest.fixture(scope="module")
def exam(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experiment]:
    """A GPQA paper of two repeats, and two servers that know it."""
    with sitting([gpqa(2, p=0.9, items=ITEMS)], tmp_path_factory.mktemp("exam")) as experiment:
        yield experiment


def sat(exam: Experiment, folder: Path) -> Accuracy:
    measure(exam, folder / "run", silent, lambda _: None)
    return judge_folder(folder / "run" / "evals", NAMES)[1]


@pytest.fixture
def candidate_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes one fault in the candidate's sittings alone, by its name."""
    original, order, words = harness._Exams.sit, gpqa_diamond.order, gpqa_diamond._INSTRUCTION

    def turned(record_id: str, repeat: int) -> tuple[int, ...]:
        return order(record_id, repeat)[::-1]

    def make(fault: str) -> None:
        def sit(exams: Any, at: Any, show: Any) -> None:
            theirs = at.backend == "candidate"
            plan = exams.plan
            (task,) = plan.tasks
            with monkeypatch.context() as patch:
                match fault if theirs else None:
                    case "swapped options":
                        patch.setattr(gpqa_diamond, "order", turned)
                    case "edited prompt":
                        patch.setattr(gpqa_diamond, "_INSTRUCTION", words.replace("step by step", "hard"))
                    case "other seeds":
                        tasks = [msgspec.structs.replace(task, seed=task.seed + 100)]
                        exams = msgspec.structs.replace(exams, plan=msgspec.structs.replace(plan, tasks=tasks))
                    case "a question missing":
                        exams = msgspec.structs.replace(exams, plan=msgspec.structs.replace(plan, limit=ITEMS - 1))
                original(exams, at, show)

        monkeypatch.setattr(harness._Exams, "sit", sit)

    return make


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("swapped options", "Prompts differed between the backends in 24 of 24 answers."),
        ("edited prompt", "Prompts differed between the backends in 24 of 24 answers."),
        ("other seeds", "candidate was asked with other seeds than planned in 24 of 24 answers."),
        ("a question missing", "candidate answered 11 items a repeat where 12 were planned."),
    ],
)
def test_another_exam_for_the_candidate_is_no_verdict(
    fault: str, reason: str, exam: Experiment, candidate_only: Callable[[str], None], tmp_path: Path
) -> None:
    candidate_only(fault)
    judged = sat(exam, tmp_path)
    assert (judged.outcome, judged.reasons) == ("INCONCLUSIVE", [f"GPQA-Diamond: {reason}"])
    assert judged.tasks[0].measured is None


def test_the_same_exam_is_judged(exam: Experiment, candidate_only: Callable[[str], None], tmp_path: Path) -> None:
    """The faults above are what stops the verdict, not the way in which they are made."""
    candidate_only("none")
    judged = sat(exam, tmp_path)
    assert judged.tasks[0].measured is not None
    assert judged.tasks[0].measured.items == ITEMS


def test_no_backend_gets_the_replies_of_the_other(exam: Experiment, tmp_path: Path) -> None:
    """With lm-eval's cache the second one would be asked nothing. Nor does a second run get those of the first."""
    prints = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        sat(exam, folder)
        for name in NAMES:
            answers = [
                msgspec.json.decode(line, type=Answer)
                for path in sorted((folder / "run" / "evals" / name).glob("*/r*.jsonl"))
                for line in path.read_bytes().splitlines()
            ]
            assert len(answers) == 2 * ITEMS
            prints.append({each.fingerprint for each in answers})
    assert prints[0] == prints[2] != prints[1] == prints[3]
    assert [len(each) for each in prints] == [1] * 4


def test_the_defaults_wait_a_day_and_send_again_twice() -> None:
    evals = Evals.model_validate({"aime25": {"data": "x"}})
    assert (evals.timeout_s, evals.retries) == (86_400, 2)


def test_retries_are_shown_though_every_answer_is_right(school: School) -> None:  # noqa: F811
    """4 of 34 posts failed, and lm-eval's score was 1."""
    tried: Counter[tuple[int, int]] = Counter()

    def answer(row: int, body: dict[str, Any]) -> Any:
        tried[row, body["seed"]] += 1
        return reply(500, {}) if row < 2 and tried[row, body["seed"]] == 1 else right(row, body)

    school.answers["candidate"] = answer
    school.sit()
    _, judged, _ = judge_folder(school.evals, NAMES)
    counts = judged.tasks[0].counts
    assert (counts["candidate"].right, counts["candidate"].retried) == (20, 4)
    assert (counts["baseline"].right, counts["baseline"].retried) == (20, 0)


def test_lm_eval_has_nothing_to_score(
    school: School,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes repeats and questions as one sample, and knows no pairs: of it come requests, and no figure."""
    results: list[Any] = []
    evaluate = harness.evaluate

    def heard(**given: Any) -> Any:
        results.append(evaluate(**given))
        return results[-1]

    monkeypatch.setattr(harness, "evaluate", heard)
    school.sit()
    assert len(results) == 4
    for each in results:
        (found,) = each["results"].values()
        assert (found["score,none"], found["score_stderr,none"]) == (0.0, "N/A")
    _, judged, _ = judge_folder(school.evals, NAMES)
    assert judged.tasks[0].counts["candidate"].right == 20
    kept = "".join(path.read_text() for path in school.evals.rglob("*.json"))
    assert "stderr" not in kept
