"""Reading RUN/evals, and what makes two sets of answers the same exam."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from evals.records import Answer, Repeat
from reports.accuracy.answers import context_tokens, ended, frame, pair, read_answers
from reports.accuracy.verdict import judge_folder
from tests.reports.accuracy.exams import Exam, plan
from workloads.errors import UserError

EXAM = Exam("mrcr", 2, 0.03, np.ones(2), ["4k-8k", "512k-1M"])


def answer(item: int, repeat: int, score: float = 1.0, **changed: object) -> Answer:
    sat = Answer(
        item=item,
        item_hash=f"i{item}",
        prompt_hash=f"p{item}",
        repeat=repeat,
        seed=1000 + repeat,
        outcome="right" if score else "wrong",
        score=score,
        stratum={"needles": "4", "bin": ["4k-8k", "512k-1M"][item]},
    )
    return msgspec.structs.replace(sat, **changed)


def write(folder: Path, repeat: int, answers: list[Answer], *, done: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"r{repeat:03d}.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in answers))
    if done:
        end = Repeat(
            backend="b",
            task="mrcr",
            repeat=repeat,
            seed=1000 + repeat,
            started_unix_s=0.0,
            ended_unix_s=1.0,
            answers=len(answers),
        )
        path.with_suffix(".json").write_bytes(msgspec.json.encode(end))
    return path


def test_repeats_that_ended_are_read_and_no_others(tmp_path: Path) -> None:
    folder = tmp_path / "b" / "mrcr"
    write(folder, 0, [answer(1, 0, 0.5), answer(0, 0)])
    torn = write(folder, 1, [answer(0, 1)], done=False)
    torn.write_bytes(torn.read_bytes() + b'{"item":1,"item_ha')
    notes: list[str] = []
    found = frame(read_answers(tmp_path, "b", "mrcr", notes))
    assert found.select("item", "repeat", "score", "bin", "cell").rows() == [
        (1, 0, 0.5, "512k-1M", "bin 512k-1M, needles 4"),
        (0, 0, 1.0, "4k-8k", "bin 4k-8k, needles 4"),
    ]
    assert ended(found) == 1
    assert notes == ["b/mrcr/r001.jsonl: not counted, the repeat has not ended"]
    assert read_answers(tmp_path, "other", "mrcr", notes) == []


def test_a_run_directory_is_judged_from_its_files(tmp_path: Path) -> None:
    for backend, score in (("auto", 1.0), ("special", 0.5)):
        for repeat in (0, 1):
            write(tmp_path / backend / "mrcr", repeat, [answer(item, repeat, score) for item in (0, 1)])
    with pytest.raises(UserError, match=r"plan\.json"):
        judge_folder(tmp_path, ("auto", "special"))
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(plan(EXAM)))
    read_plan, found, notes = judge_folder(tmp_path, ("auto", "special"))
    assert (read_plan, notes) == (plan(EXAM), [])
    (task,) = found.tasks
    assert task.ended_repeats == {"auto": 2, "special": 2}
    assert task.measured is not None
    assert task.measured.drop.value == 0.5
    assert msgspec.json.encode(judge_folder(tmp_path, ("auto", "special"))[1]) == msgspec.json.encode(found)


def test_a_damaged_or_shortened_repeat_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "b" / "mrcr", 0, [answer(0, 0), answer(1, 0)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-20] + b"\n")
    with pytest.raises(UserError, match=r"r000\.jsonl:2 is damaged"):
        read_answers(tmp_path, "b", "mrcr", [])
    path.write_bytes(whole.splitlines(keepends=True)[0])
    with pytest.raises(UserError, match=r"holds 1 answers, r000.json says 2"):
        read_answers(tmp_path, "b", "mrcr", [])


def test_repeats_count_up_to_the_first_gap() -> None:
    assert ended(frame([])) == 0
    assert ended(frame([answer(0, 0), answer(0, 1), answer(0, 3)])) == 2
    assert ended(frame([answer(0, 1)])) == 0


def everything(**of_last: object) -> list[Answer]:
    answers = [answer(item, repeat) for repeat in (0, 1) for item in (1, 0)]
    return [*answers[:-1], msgspec.structs.replace(answers[-1], **of_last)]


def test_an_exam_is_in_order_of_item_and_repeat() -> None:
    task = plan(EXAM).tasks[0]
    found = pair(task, 2, 2, (frame(everything()), frame(everything(score=0.25))), ("a", "b"))
    assert not isinstance(found, list)
    assert found.candidate.tolist() == [[1, 0.25], [1, 1]]
    assert found.bin == ["4k-8k", "512k-1M"]


@pytest.mark.parametrize(
    ("candidate", "problem"),
    [
        (everything()[:-1], "b answered 1 to 2 items a repeat where 2 were planned."),
        ([answer(0, 0), answer(0, 1)], "b answered 1 items a repeat where 2 were planned."),
        ([*everything(), answer(0, 1)], "b has 1 answers to an item that it had answered in the same repeat."),
        (everything(seed=1000), "b was asked with other seeds than planned in 1 of 4 answers."),
        (everything(score=1.5), "b has 1 scores that this task does not give."),
        (everything(score=float("nan")), "b has 1 scores that this task does not give."),
        (
            everything(stratum={}),
            "b has 1 answers to items without a bin of context: give every item of the data its bin.",
        ),
        (everything(item_hash="x"), "Other content stood behind the same item in 1 of 4 answers."),
        (everything(prompt_hash="x"), "Prompts differed between the backends in 1 of 4 answers."),
        (everything(stratum={"bin": "8k-16k"}), "The same item was counted to different strata in 1 of 4 answers."),
    ],
)
def test_another_exam_is_told(candidate: list[Answer], problem: str) -> None:
    task = plan(EXAM).tasks[0]
    assert pair(task, 2, 2, (frame(everything()), frame(candidate)), ("a", "b")) == [problem]


def test_other_items_are_told() -> None:
    other = [msgspec.structs.replace(each, item=each.item + 5) for each in everything()]
    found = pair(plan(EXAM).tasks[0], 2, 2, (frame(everything()), frame(other)), ("a", "b"))
    assert found == ["The backends were asked different items."]


def test_bins_are_known_by_their_upper_edge() -> None:
    assert [context_tokens(each) for each in ("4k-8k", "512k-1M", "0-512")] == [8192, 2**20, 512]
    with pytest.raises(UserError, match="'long' is no bin of context"):
        context_tokens("long")
