"""The emulator's exams: known rates, the same luck on both backends, replies as the tasks read them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from evals import invented
from evals.answer_key import exams_for, write_exams
from evals.tasks import TASKS
from evals.tasks.replies import Judged, Reply
from replay import backends
from replay.emulator import exams, language, process
from replay.emulator.exams import Question
from replay.emulator.requests import Refused
from replay.emulator.scheduler import Scheduler
from replay.emulator.scheduler import Sequence as Request
from replay.emulator.settings import EmulatorSettings, resolve
from replay.emulator.speculation import Speculation
from replay.experiment import load_experiment
from tests.evals.fixtures import items_of
from workloads.errors import UserError

AUTO = EmulatorSettings(time_scale=1000)
SPECIALISED = EmulatorSettings(
    time_scale=1000,
    decode_backend="latency_specialized",
    speculation=Speculation(draft_tokens=3, acceptance_length=2.5),
)
TEXT = 'Gödel said: "1 < 2"\n\tand \\boxed{漢字} 🎓 bado'
ODD = Question(match="odd", answer=TEXT, thinking_tokens=40)
ROWS = {"aime25": invented.aime25(), "gpqa_diamond": invented.gpqa_diamond(60), "mrcr": invented.mrcr(12)}
ITEMS = {task: items_of(task, rows) for task, rows in ROWS.items()}


@contextlib.contextmanager
def running(settings: EmulatorSettings, questions: Sequence[Question], folder: Path) -> Iterator[process.Emulator]:
    folder.mkdir()
    path = write_exams(questions, folder / "exams.json")
    emulator = process.start(msgspec.structs.replace(settings, exams=str(path)), folder / "log")
    try:
        yield emulator
    finally:
        process.stop(emulator)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[process.Emulator]]:
    """Both backends, before all three tasks and a text of odd characters."""
    figures = {"aime25": (0.8, 0.2), "gpqa_diamond": (0.7, 0.3), "mrcr": (0.6, 0.4)}
    questions = [ODD]
    for task, (p, harm) in figures.items():
        questions += exams_for(ITEMS[task], p=p, harm=harm, thinking_tokens=30)
    folder = tmp_path_factory.mktemp("exams")
    with running(AUTO, questions, folder / "a") as auto, running(SPECIALISED, questions, folder / "b") as specialised:
        yield [auto, specialised]


def ask(emulator: process.Emulator, *bodies: dict[str, Any]) -> list[tuple[int, str]]:
    """Status and body of each, all asked at once."""

    async def main() -> list[tuple[int, str]]:
        async with aiohttp.ClientSession(emulator.url, connector=aiohttp.TCPConnector(limit=64)) as client:

            async def post(body: dict[str, Any]) -> tuple[int, str]:
                async with client.post("/v1/chat/completions", json=body) as response:
                    return response.status, (await response.read()).decode()

            return await asyncio.gather(*map(post, bodies))

    return asyncio.run(main())


def body(text: str, seed: int = 0, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 5000, "seed": seed, **more}


def spoken(answer: tuple[int, str]) -> Reply:
    """A reply without streaming, as an eval sees it."""
    status, text = answer
    if status != 200:
        return Reply(error=str(status))
    choice = json.loads(text)["choices"][0]
    message = choice["message"]
    return Reply(text=message["content"], reasoning=message["reasoning"], finish_reason=choice["finish_reason"])


def judged(emulator: process.Emulator, task: str, repeats: int) -> list[Judged]:
    asked = [(item, repeat) for repeat in range(repeats) for item in ITEMS[task]]
    bodies = [
        {"messages": TASKS[task].messages(item, repeat), "max_tokens": 5000, "seed": repeat} for item, repeat in asked
    ]
    replies = map(spoken, ask(emulator, *bodies))
    return [TASKS[task].judge(item, reply, repeat) for (item, repeat), reply in zip(asked, replies, strict=True)]


def said(question: Question, seed: int, *, specialised: bool = False) -> str:
    return language.decode(exams.reply(question, question.match, 10**6, seed, specialised=specialised).tokens)


# --- what is drawn ----------------------------------------------------------------------------------------------------


def near(count: int, share: float, of: int) -> bool:
    """Within four standard deviations of a binomial count: a fair draw fails this once in 16,000."""
    return abs(count - share * of) <= 4 * sqrt(of * share * (1 - share))


def test_rates_are_those_of_the_file_and_harm_only_turns_right_into_wrong() -> None:
    questions = [
        Question(match=f"question {number}", answer="right", wrong=("wrong", "worse"), p=0.7, harm=0.1)
        for number in range(40)
    ]
    pairs = [
        (said(question, seed), said(question, seed, specialised=True)) for question in questions for seed in range(50)
    ]
    counts = Counter(pairs)
    assert near(sum(before == "right" for before, _ in pairs), 0.7, 2000)
    assert near(sum(after == "right" for _, after in pairs), 0.6, 2000)
    assert near(counts["right", "wrong"] + counts["right", "worse"], 0.1, 2000)
    assert near(counts["wrong", "wrong"], 0.15, 2000)
    # an answer that was wrong stays word for word
    assert set(counts) == {(a, b) for a, b in counts if a in ("right", b)}


def test_seeds_of_a_question_and_questions_of_a_seed_are_drawn_apart() -> None:
    questions = [Question(match=f"q{number}", answer="1", wrong=("0",), p=0.5) for number in range(200)]
    marks = np.array([[int(said(question, seed)) for seed in range(40)] for question in questions])
    # were they drawn together, the means of rows or columns would spread more than 40 or 200 fair coins do
    assert marks.mean(axis=1).std() == pytest.approx(0.5 / sqrt(40), rel=0.25)
    assert marks.mean(axis=0).std() == pytest.approx(0.5 / sqrt(200), rel=0.5)


def test_fates_have_their_shares_and_are_the_same_on_both_backends() -> None:
    question = Question(match="q", answer="1", wrong=("0",), p=0.9, harm=0.5, error=0.2, truncate=0.3, null=0.1)

    def fate(seed: int, specialised: bool) -> str:
        try:
            script = exams.reply(question, "q", 7, seed, specialised=specialised)
        except Refused as refused:
            return "error" if refused.status == 500 else "refused"
        if script.tokens == [language.EOS]:
            return "null"
        return "truncated" if script.thought == 7 else "answered"

    fates = [fate(seed, False) for seed in range(2000)]
    assert fates == [fate(seed, True) for seed in range(2000)]
    for name, share in {"error": 0.2, "truncated": 0.3, "null": 0.1, "answered": 0.4}.items():
        assert near(fates.count(name), share, 2000), name


# --- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "repeats", "routes"),
    [
        ("aime25", 6, {"boxed", "phrase", "last_line"}),
        ("gpqa_diamond", 4, {"answer_line", "boxed", "phrase", "last_line"}),
        ("mrcr", 8, {"random_string"}),
    ],
)
def test_the_tasks_read_every_form_and_only_harm_tells_the_backends_apart(
    both: list[process.Emulator], task: str, repeats: int, routes: set[str]
) -> None:
    p, less = {"aime25": (0.8, 0.6), "gpqa_diamond": (0.7, 0.4), "mrcr": (0.6, 0.2)}[task]
    before, after = (judged(emulator, task, repeats) for emulator in both)
    outcomes = [[result.outcome for result in results] for results in (before, after)]
    assert set(outcomes[0] + outcomes[1]) == {"right", "wrong"}
    assert near(outcomes[0].count("right"), p, len(before))
    assert near(outcomes[1].count("right"), less, len(after))
    assert {(a, b) for a, b in zip(*outcomes, strict=True)} == {
        ("right", "right"),
        ("right", "wrong"),
        ("wrong", "wrong"),
    }
    assert {result.route for result in before} == routes
    assert [result.route for result in before] == [result.route for result in after]


def test_thoughts_are_counted_and_a_stream_says_the_same(both: list[process.Emulator]) -> None:
    stream: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    asked = [body("an odd question", return_token_ids=True), body("an odd question", **stream)]
    for emulator in both:
        (_, whole), (_, streamed) = ask(emulator, *asked)
        one = json.loads(whole)
        choice = one["choices"][0]
        assert choice["message"]["content"] == TEXT
        assert language.encode(choice["message"]["reasoning"]) == choice["token_ids"][:40]
        assert choice["token_ids"][40:] == [*language.encode(TEXT), language.EOS]
        assert choice["finish_reason"] == "stop"
        assert one["usage"]["completion_tokens"] == len(choice["token_ids"])
        assert one["usage"]["completion_tokens_details"] == {"reasoning_tokens": 40}

        lines = [line.removeprefix("data: ") for line in streamed.split("\n") if line.startswith("data: ")]
        *chunks, last = map(json.loads, lines[:-1])
        assert {kind: last["usage"][kind] for kind in one["usage"] if kind != "prompt_tokens_details"} == {
            kind: count for kind, count in one["usage"].items() if kind != "prompt_tokens_details"
        }
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content", "") for delta in deltas) == TEXT
        assert "".join(delta.get("reasoning", "") for delta in deltas) == choice["message"]["reasoning"]
        if emulator is both[0]:  # the other one's drafts put several tokens into a chunk
            assert len(chunks) == 1 + len(choice["token_ids"])  # streamed, every token takes its step
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert last["system_fingerprint"] == one["system_fingerprint"]


def test_max_tokens_cuts_thought_or_answer(both: list[process.Emulator]) -> None:
    for limit, thought, content in [(12, 12, None), (40, 40, None), (41, 40, "G"), (5000, 40, TEXT)]:
        [(_, text)] = ask(both[0], body("odd", max_tokens=limit))
        reply = json.loads(text)
        choice = reply["choices"][0]
        assert choice["message"]["content"] == content
        assert len(language.encode(choice["message"]["reasoning"])) == thought
        assert choice["finish_reason"] == ("stop" if limit == 5000 else "length")
        assert reply["usage"]["completion_tokens"] == min(limit, 41 + len(language.encode(TEXT)))


def test_errors_endless_thoughts_and_silence(tmp_path: Path) -> None:
    rest: dict[str, Any] = {"answer": "7", "thinking_tokens": 5}
    questions = [
        Question(match="fails", error=1, **rest),
        Question(match="never ends", truncate=1, **rest),
        Question(match="is silent", null=1, **rest),
        Question(match="fails, but only at first sight", **rest),  # the longest match counts
    ]
    item = next(iter(ITEMS["aime25"]))
    with running(AUTO, questions, tmp_path / "exams") as emulator:
        answers = ask(emulator, *[body(f"It {question.match}.", max_tokens=300) for question in questions])
    replies = list(map(spoken, answers))
    outcomes = [TASKS["aime25"].judge(item, reply, 0).outcome for reply in replies]
    assert outcomes == ["error", "truncated", "error", "wrong"]
    assert [status for status, _ in answers] == [500, 200, 200, 200]
    assert "exams" in json.loads(answers[0][1])["error"]["message"]
    assert (replies[1].text, replies[1].finish_reason) == (None, "length")
    assert len(language.encode(replies[1].reasoning or "")) == 300
    assert (replies[2].text, replies[2].reasoning, replies[2].finish_reason) == (None, None, "stop")
    usages = [json.loads(text)["usage"]["completion_tokens"] for status, text in answers if status == 200]
    assert usages == [300, 1, 7]


def test_what_is_no_question_is_answered_as_before(both: list[process.Emulator], tmp_path: Path) -> None:
    bodies = [
        body(" bado fika"),
        body("odd", ignore_eos=True, max_tokens=20),
        {**body(""), "messages": [{"role": "user", "content": "odd"}, {"role": "user", "content": " bado"}]},
    ]
    plain = process.start(AUTO, tmp_path / "log")
    try:
        expected = [json.loads(text)["choices"] for _, text in ask(plain, *bodies)]
    finally:
        process.stop(plain)
    assert [json.loads(text)["choices"] for _, text in ask(both[0], *bodies)] == expected


def test_an_option_that_is_not_in_the_message_is_refused(both: list[process.Emulator]) -> None:
    [(status, text)] = ask(both[0], body(ROWS["gpqa_diamond"][3]["Question"] + "\n\nA) nothing\nB) of the kind"))
    assert status == 400
    assert "option" in json.loads(text)["error"]["message"]


def test_the_fingerprint_follows_settings_and_content_not_the_place_of_the_file(
    both: list[process.Emulator], tmp_path: Path
) -> None:
    def fingerprint(emulator: process.Emulator) -> str:
        return str(json.loads(ask(emulator, body("odd"))[0][1])["system_fingerprint"])

    found = []
    for name, questions in {"a": [ODD], "b": [ODD], "c": [msgspec.structs.replace(ODD, p=0.5, wrong=("x",))]}.items():
        with running(AUTO, questions, tmp_path / name) as emulator:
            found.append(fingerprint(emulator))
    assert found[0] == found[1] != found[2]
    assert fingerprint(both[0]) != fingerprint(both[1])


# --- the step loop, the files -----------------------------------------------------------------------------------------


def test_a_thought_comes_with_the_end_of_the_prompt_and_fills_kv_blocks() -> None:
    scheduler = Scheduler(EmulatorSettings())  # blocks of 64
    script = [*range(1000, 1200), language.EOS]
    prompt = np.arange(1000, 1064, dtype=np.int32)
    request = Request(prompt, limit=len(script), script=script, at_once=190)
    scheduler.add(request)
    lengths = []
    while step := scheduler.begin():
        lengths += [len(tokens) for _, tokens in scheduler.end(step)]
    assert lengths == [190] + [1] * 11
    assert (request.finish, request.output, scheduler.counts.generation_tokens) == ("stop", 201, 201)

    again = Request(np.array([*prompt, *script, 1000], dtype=np.int32), limit=1)
    scheduler.add(again)
    scheduler.begin()
    assert again.cached == 64 + 192  # what was said is found again: the blocks that the 264 computed tokens filled


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"harm": 0.9}, "question 0: harm 0.9 is more than p 0.8"),
        ({"wrong": []}, "question 0: some answers are wrong"),
        ({"wrong": ["7"]}, "answer stands in wrong"),
        ({"error": 0.6, "null": 0.6}, "add up to more than 1"),
        ({"p": 1.5}, "$[0].p"),
        ({"forms": ["sung"]}, "sung"),
        ({"forms": []}, "$[0].forms"),
        ({"match": ""}, "$[0].match"),
        ({"harms": 0.1}, "harms"),
    ],
)
def test_files_that_make_no_sense_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "exams.json"
    path.write_text(json.dumps([{"match": "q", "answer": "7", "wrong": ["8"], "p": 0.8, **change}]))
    with pytest.raises(UserError) as error:
        resolve(EmulatorSettings(exams=str(path)))
    assert words in str(error.value)
    assert "exams.json" in str(error.value)


def test_a_file_that_is_missing_or_asks_a_question_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.json cannot be read"):
        exams.load(tmp_path / "nowhere.json")
    with pytest.raises(UserError, match="the same match"):
        exams.load(write_exams([ODD, ODD], tmp_path / "exams.json"))


def test_an_experiment_names_its_exams_from_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    backend = "{emulator: {exams: exams.json}}"
    path.write_text(f"model: m\nworkload: {{demo: true}}\nbackends: {{baseline: {backend}, candidate: {backend}}}\n")
    whole = load_experiment(path)
    for name in backends.NAMES:
        assert backends.emulator_settings(whole, name).exams == str(tmp_path.resolve() / "exams.json")
        assert backends.described(whole, name).settings["exams"] == "exams.json"
