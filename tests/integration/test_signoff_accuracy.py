"""Backends of known quality sit exams through lm-eval, and the judging code says of them what is true.

Sizes are such that a right verdict does not hang on luck: each test computes what its size can see and asserts it. The
luck of the two emulators is independent, and fixed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from evals.records import Answer
from evals.tasks import mrcr
from replay.emulator import truth
from replay.experiment import frozen_yaml
from reports.accuracy.drop import equal_weight
from reports.accuracy.power import repeats_for_bound, repeats_needed
from reports.accuracy.result import Accuracy, TaskVerdict
from reports.accuracy.verdict import judge_folder
from tests.evals.exams import NAMES, Paper, aime, chats, gpqa, sitting
from tests.integration.runs import silent

pytest.importorskip("lm_eval")

from evals.harness import measure

pytestmark = pytest.mark.slow

SURE = 0.999
"""Power that is asked of sizes."""
ALPHA = 0.01
"""Of harm, over all tests of all tasks: the plan's default."""
LONG_BINS = ["128k-256k", "256k-512k", "512k-1M"]


def verdict(folder: Path, *papers: Paper, candidate: dict[str, float] | None = None) -> Accuracy:
    """Of the papers, sat by both."""
    with sitting(papers, folder, candidate=candidate) as experiment:
        measure(experiment, folder / "run", silent, lambda _: None)
    _, judged, notes = judge_folder(folder / "run" / "evals", NAMES)
    assert notes == []
    return judged


def by_name(judged: Accuracy) -> dict[str, TaskVerdict]:
    return {each.task: each for each in judged.tasks}


def needed(p: float, harm: float, items: int, alpha: float, scale: float = 1.0) -> int:
    """Repeats that find the harm nearly always. ``scale``: what a right answer adds to the score."""
    within = (p * (1 - p) + (p - harm) * (1 - p + harm)) / 2 * scale**2
    return repeats_needed(within, items, harm * scale, alpha, power=SURE)


def test_six_points_less_on_aime_fail_it_by_name(tmp_path: Path) -> None:
    exam, other = aime(40, 0.97, harm=0.06), gpqa(2, 0.97)
    assert needed(0.97, 0.06, len(exam.rows), ALPHA / 2) <= exam.repeats
    judged = verdict(tmp_path, exam, other)
    assert judged.outcome == "FAIL"
    assert judged.reasons[0].startswith("AIME25: The candidate answers worse")
    assert all(reason.startswith("AIME25: ") for reason in judged.reasons)
    assert by_name(judged)["gpqa_diamond"].outcome != "FAIL"


def test_four_points_less_on_gpqa_fail_it_by_name(tmp_path: Path) -> None:
    exam, other = gpqa(16, 0.94, harm=0.04), aime(4, 0.97)
    assert needed(0.94, 0.04, len(exam.rows), ALPHA / 2) <= exam.repeats
    judged = verdict(tmp_path, exam, other)
    assert judged.outcome == "FAIL"
    assert judged.reasons[0].startswith("GPQA-Diamond: The candidate answers worse")
    assert all(reason.startswith("GPQA-Diamond: ") for reason in judged.reasons)
    assert by_name(judged)["aime25"].outcome != "FAIL"


def test_harm_beyond_128k_tokens_fails_mrcr_and_names_the_bins(tmp_path: Path) -> None:
    harm: Callable[[mrcr.Question], float] = lambda item: 0.3 if (item.tokens or 0) > 131_072 else 0.0  # noqa: E731
    exam = chats(5, 0.9, per_bin=30, harm=harm)
    judged = verdict(tmp_path, exam)
    (task,) = judged.tasks
    assert task.measured is not None
    assert [each.name for each in task.measured.bins] == mrcr.BINS[1:-1]
    scale = 1 - wrong_piece(exam)
    # every bin is found by itself, at the first step of Holm's adjustment over eight
    assert needed(exam.p, 0.3, 30, ALPHA / 8, scale) <= exam.repeats
    assert judged.outcome == "FAIL"
    assert judged.reasons[0].startswith("MRCR: The candidate answers worse")
    assert [each.name for each in task.measured.bins if each.holm_p <= ALPHA] == LONG_BINS
    named = judged.reasons[1]
    assert named.startswith("MRCR: It is worse in ")
    assert [name for name in mrcr.BINS if f"{name} (by" in named] == LONG_BINS


def wrong_piece(exam: Paper) -> float:
    """Mean score of the piece that was not asked for."""
    scores = []
    for row, record in enumerate(exam.rows):
        item = mrcr.question(row, record)
        scores += [
            mrcr.official(item.prefix + piece, item)
            for piece in mrcr.needles(item)
            if item.prefix + piece != item.answer
        ]
    return float(np.mean(scores))


def test_equal_backends_of_a_designed_size_pass_everywhere(tmp_path: Path) -> None:
    papers = [aime(40, 0.99), gpqa(20, 0.99), chats(4, 0.99, per_bin=20)]
    margins = {"aime25": 0.03, "gpqa_diamond": 0.02, "mrcr": 0.03}  # the defaults
    for paper in papers:
        rates = np.full(len(paper.rows), paper.p)
        if paper.task == "mrcr":
            within = paper.p * (1 - paper.p) * (1 - wrong_piece(paper)) ** 2
            enough = repeats_needed(within, len(rates), margins[paper.task], 0.05, power=SURE)
        else:
            weight = equal_weight(len(rates))
            enough = repeats_for_bound(rates, rates, weight, margins[paper.task], 0.05, power=SURE)
        assert enough <= paper.repeats, paper.task
    judged = verdict(tmp_path, *papers)
    assert judged.outcome == "PASS", judged.reasons
    assert [each.outcome for each in judged.tasks] == ["PASS"] * 3
    for each in judged.tasks:
        assert each.measured is not None
        assert each.margin == margins[each.task]
        # the same questions, other luck: not one backend twice
        assert each.measured.drop.value != 0


@pytest.mark.parametrize("fault", ["null", "error"])
def test_a_backend_that_answers_nothing_is_inconclusive_without_a_score(fault: str, tmp_path: Path) -> None:
    judged = verdict(tmp_path, aime(2, 0.97), candidate={fault: 1.0})
    (task,) = judged.tasks
    assert (judged.outcome, task.measured) == ("INCONCLUSIVE", None)
    assert judged.reasons == ["AIME25: candidate answered nothing: none of 60 requests got a reply."]
    assert task.counts["candidate"].error == 60
    assert task.counts["baseline"].error == 0


def test_a_run_that_is_killed_in_its_third_repeat_of_eight_asks_no_item_twice(tmp_path: Path) -> None:
    paper = aime(8, 0.97)
    with sitting([paper], tmp_path, concurrency=2, time_scale=5) as experiment:
        described = tmp_path / "experiment.yaml"
        described.write_text(frozen_yaml(experiment))
        run = tmp_path / "run"
        command = [sys.executable, "-m", "decodegate", "eval", str(described), "--run", str(run)]
        with (tmp_path / "said").open("w") as said:
            first = subprocess.Popen(command, stdout=said, stderr=said)
        killed_in = run / "evals" / "candidate" / "aime25" / "r002.jsonl"
        while not (killed_in.exists() and killed_in.read_bytes().count(b"\n") >= 5):
            assert first.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.005)
        first.kill()
        first.wait()
        assert not killed_in.with_suffix(".json").exists()
        had = whole_lines(run)
        again = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=300)
        assert again.returncode in (0, 2), again.stderr
    found = whole_lines(run)
    assert {place: len(lines) for place, lines in found.items()} == {
        f"{name}/aime25/r{repeat:03d}.jsonl": 30 for name in NAMES for repeat in range(8)
    }
    answers = {place: [msgspec.json.decode(line, type=Answer) for line in lines] for place, lines in found.items()}
    for place, lines in found.items():
        assert lines[: len(had.get(place, []))] == had.get(place, [])
        assert len({each.item for each in answers[place]}) == 30
    for name in NAMES:
        kept = Counter(each.prompt_tokens for place, of in answers.items() if place.startswith(name) for each in of)
        log = truth.read_emissions(tmp_path / f"{name}.log")
        asked = Counter(each.prompt_tokens for each in log if each.prompt_tokens in kept)
        again_asked = (asked - kept).total()
        assert not kept - asked
        # those in flight at the kill, and those whose lines it came before: two each at most
        assert again_asked <= (4 if name == "candidate" else 0)


def whole_lines(run: Path) -> dict[str, list[bytes]]:
    """Of every file of answers."""
    return {
        str(path.relative_to(run / "evals")): [
            line for line in path.read_bytes().splitlines(True) if line[-1:] == b"\n"
        ]
        for name in NAMES
        for path in (run / "evals" / name).glob("*/r*.jsonl")
    }
