"""Records that were altered, damaged or put elsewhere end in an error, or in a gate that does not pass."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reports.signoff.document import inputs, signoff
from tests.reports.signoff import sat
from workloads.errors import UserError

EXAMS = [sat.exam("aime25", 30, 4, 0.97), sat.exam("mrcr", 20, 4, 0.97)]
Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return sat.write(tmp_path / "run", EXAMS)


def edit(path: Path, change: Change) -> None:
    whole = json.loads(path.read_text())
    change(whole)
    path.write_text(json.dumps(whole))


def edit_answers(folder: Path, change: Change) -> None:
    for path in folder.glob("r*.jsonl"):
        answers = [json.loads(line) for line in path.read_text().splitlines()]
        for answer in answers:
            change(answer)
        path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))


def edit_plan(run: Path, change: Change) -> None:
    """As one who also writes the new hash down."""
    plan = run / "evals" / "plan.json"
    edit(plan, change)
    digest = hashlib.sha256(plan.read_bytes()).hexdigest()
    edit(run / "evals" / "manifest.json", lambda manifest: manifest.update(plan_sha256=digest))


def reasons(run: Path, gate: str) -> list[str]:
    """Of a gate that must not pass."""
    (found,) = (each for each in signoff(run).gates if each.id == gate)
    assert found.outcome == "INCONCLUSIVE"
    return found.reasons


def test_folders_of_the_backends_that_were_swapped(run: Path) -> None:
    evals = run / "evals"
    (evals / "baseline").rename(evals / "spare")
    (evals / "candidate").rename(evals / "baseline")
    (evals / "spare").rename(evals / "candidate")
    with pytest.raises(UserError, match=r"baseline/aime25/r000\.json is repeat 0 of aime25 on candidate"):
        signoff(run)


def test_a_repeat_of_the_baseline_in_the_place_of_the_candidates(run: Path) -> None:
    for suffix in (".json", ".jsonl"):
        shutil.copy(run / f"evals/baseline/aime25/r001{suffix}", run / f"evals/candidate/aime25/r001{suffix}")
    with pytest.raises(UserError, match="is repeat 1 of aime25 on baseline"):
        signoff(run)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda plan: plan["tasks"][0].update(margin=0), "margin"),
        (lambda plan: plan["tasks"][0].update(repeats=0), "repeats"),
        (lambda plan: plan["tasks"][0].update(looks=[]), "looks"),
        (lambda plan: plan["tasks"][0].update(looks=[1, 0.5]), "looks must rise"),
        (lambda plan: plan["tasks"][0].update(looks=[0.5]), "looks must rise, and the last must be 1"),
        (lambda plan: plan["tasks"].append(plan["tasks"][0]), "planned twice"),
        (lambda plan: plan.update(alpha_pass=1), "alpha_pass"),
        (lambda plan: plan.update(limit=0), "limit"),
        (lambda plan: plan.update(registered_utc="yesterday"), "registered_utc"),
        (lambda plan: plan.update(registered_utc="2026-12-01T00:00:00"), "registered_utc"),
    ],
)
def test_a_plan_that_no_eval_registers(change: Change, said: str, run: Path) -> None:
    edit_plan(run, change)
    with pytest.raises(UserError, match=rf"plan\.json is damaged: .*{said}"):
        signoff(run)


def test_a_greedy_plan_cannot_pass(run: Path) -> None:
    edit_plan(run, lambda plan: plan["tasks"][0]["sampling"].update(temperature=0))
    assert "greedy" in reasons(run, "aime25")[0]


@pytest.mark.parametrize("task", ["aime25", "mrcr"])
def test_scores_that_do_not_fit_their_outcomes(task: str, run: Path) -> None:
    edit_answers(run / "evals" / "candidate" / task, lambda answer: answer.update(outcome="unparsed"))
    assert "scores that this task does not give" in reasons(run, task)[0]


def test_wrong_answers_with_the_score_of_right_ones(run: Path) -> None:
    edit_answers(run / "evals" / "candidate" / "aime25", lambda answer: answer.update(outcome="wrong", score=1.0))
    assert "scores that this task does not give" in reasons(run, "aime25")[0]


def test_answers_without_times_prove_no_order(run: Path) -> None:
    edit_answers(run / "evals" / "candidate" / "mrcr", lambda answer: answer.pop("sent_unix_s"))
    assert reasons(run, "plan_kept")[0].startswith("80 answers of candidate do not say when they were asked for")


def test_a_time_that_no_clock_has(run: Path) -> None:
    edit_answers(run / "evals" / "candidate" / "mrcr", lambda answer: answer.update(sent_unix_s=1e20))
    with pytest.raises(UserError, match=r"r000\.jsonl:1 is damaged: .*sent_unix_s"):
        signoff(run)


def test_a_backend_that_is_compared_with_itself(run: Path) -> None:
    def alike(manifest: dict[str, Any]) -> None:
        for backend in manifest["backends"]:
            backend["decode_backend"] = "auto"

    edit(run / "evals" / "manifest.json", alike)
    assert "compared with itself" in reasons(run, "one_difference")[0]


def test_what_signoff_left_when_it_was_killed_or_wrote_beside_is_no_input(run: Path) -> None:
    before = inputs(run)
    (run / "signoff.json.tmp").write_text("{")
    (run / "out").mkdir()
    (run / "out" / "signoff.html").write_text("")
    assert inputs(run) == before


def test_the_name_of_the_run_directory_is_not_in_the_document(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "copy")
    assert signoff(tmp_path / "copy") == signoff(run)
