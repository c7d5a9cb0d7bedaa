"""Evals from the experiment to RUN/evals, against scripted servers and emulators with a known truth."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from evals import invented
from evals.answer_key import exams_for, write_exams
from evals.records import DIED, Answer, EvalManifest, EvalPlan, Repeat
from evals.tasks import gpqa_diamond
from replay import rundir
from replay.emulator import language
from replay.experiment import Experiment
from replay.preflight import without_servers
from replay.records import PathRule
from replay.servers import Servers
from reports.accuracy.verdict import judge_folder
from tests.evals import fixtures
from tests.evals.chats import all_asked, asked, completion, said
from tests.evals.fixtures import items_of
from tests.integration import runs
from tests.integration.runs import silent
from tests.scripted_server import Request, ScriptedServer, Step, reply, serve
from workloads.errors import UserError

pytest.importorskip("lm_eval")

from evals import fitting, harness, model, registration
from evals.harness import Progress, measure

NAMES = ("baseline", "candidate")
ITEMS = 10

Answers = Callable[[int, dict[str, Any]], list[Step]]
"""From an item's row and the request's body to the reply."""


def nothing(_: Progress) -> None:
    """Shows nobody."""


def row_of(body: dict[str, Any]) -> int:
    return next(row for row, each in enumerate(invented.aime25(ITEMS)) if said(body).startswith(each["problem"]))


def right(row: int, body: dict[str, Any]) -> list[Step]:
    return completion(rf"\boxed{{{invented.aime25(ITEMS)[row]['answer']}}}")


class School:
    """Two scripted servers, the data, and the experiment with both."""

    def __init__(self, folder: Path, servers: dict[str, ScriptedServer], answers: dict[str, Answers]) -> None:
        self.folder, self.servers, self.answers = folder, servers, answers
        self.run = folder / "run"
        self.evals = self.run / "evals"
        self.data = fixtures.write(invented.aime25(ITEMS), folder / "aime25.jsonl")

    def experiment(self, **changes: Any) -> Experiment:
        aime25 = {"data": str(self.data), "subset": True, "repeats": 2, "concurrency": 4}
        evals = {"aime25": aime25 | changes.pop("aime25", {}), "timeout_s": 5, **changes}
        gpus = {"count": 1, "kind": "GB300", "layout": {"tp": 1}}
        servers = {name: {"url": server.url, "gpus": gpus} for name, server in self.servers.items()}
        servers["candidate"] |= {"decode_backend": "latency_specialized", "model": "other-name"}
        return runs.experiment(evals=evals).model_copy(
            update={"backends": runs.experiment().backends.model_validate(servers), "model": "m"}
        )

    def sit(
        self, experiment: Experiment | None = None, show: Callable[[Progress], None] = nothing, **more: Any
    ) -> None:
        measure(experiment or self.experiment(), self.run, silent, show, **more)

    def sat(self, name: str, repeat: int) -> list[Answer]:
        lines = (self.evals / name / "aime25" / f"r{repeat:03d}.jsonl").read_bytes().splitlines()
        return sorted((msgspec.json.decode(line, type=Answer) for line in lines), key=lambda each: each.item)

    def asked(self, name: str) -> list[tuple[int, int]]:
        """(row, seed) of every chat request."""
        return [(row_of(body), body["seed"]) for body in all_asked(self.servers[name])]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "FIRST_WAIT_S", 0.01)


@pytest.fixture
def shown() -> dict[str, Any]:
    """What preflight sees: settings of both backends, the candidate's path rule, the longest context."""
    return {"settings": {"baseline": {}, "candidate": {}}, "path": None, "max_model_len": None}


@pytest.fixture
def school(tmp_path: Path, shown: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[School]:
    def prepared(experiment: Experiment, *_: Any, **__: Any) -> Any:
        matching = without_servers(experiment, silent)
        matching.backends[1].path = shown["path"]
        facts = SimpleNamespace(max_model_len=shown["max_model_len"], time_scale=1.0)
        return SimpleNamespace(settings=shown["settings"], matching=matching, facts=dict.fromkeys(NAMES, facts))

    monkeypatch.setattr(harness, "prepare", prepared)
    answers: dict[str, Answers] = dict.fromkeys(NAMES, right)

    def script(name: str) -> Callable[[Request], list[Step]]:
        def answer(request: Request) -> list[Step]:
            body = asked(request)
            return reply(404, {}) if body is None else answers[name](row_of(body), body)

        return answer

    with ExitStack() as stack:
        servers = {name: stack.enter_context(serve(script(name))) for name in NAMES}
        yield School(tmp_path, servers, answers)


def test_both_backends_get_the_same_questions_with_the_same_seeds(school: School) -> None:
    school.sit()
    wanted = Counter((row, seed) for row in range(ITEMS) for seed in (1000, 1001))
    assert Counter(school.asked("baseline")) == Counter(school.asked("candidate")) == wanted
    for repeat in (0, 1):
        one, other = (school.sat(name, repeat) for name in NAMES)
        assert [each.item for each in one] == list(range(ITEMS))
        for mine, theirs in zip(one, other, strict=True):
            assert (mine.outcome, mine.score, mine.given, mine.route) == ("right", 1.0, mine.given, "boxed")
            assert (mine.item_hash, mine.prompt_hash) == (theirs.item_hash, theirs.prompt_hash)
            assert mine.seed == theirs.seed == 1000 + repeat
            assert mine.finish_reason == "stop"
            assert (mine.prompt_tokens, mine.completion_tokens, mine.reasoning_tokens) == (11, 3, 2)
            assert mine.fingerprint == "f1"
            assert mine.prompt_ids_hash == theirs.prompt_ids_hash is not None
    # seeds are no part of the prompt
    assert [each.prompt_hash for each in school.sat("baseline", 0)] == [
        each.prompt_hash for each in school.sat("baseline", 1)
    ]
    assert len({each.item_hash for each in school.sat("baseline", 0)}) == ITEMS
    ended = msgspec.json.decode((school.evals / "candidate" / "aime25" / "r001.json").read_bytes(), type=Repeat)
    assert (ended.backend, ended.repeat, ended.seed, ended.answers) == ("candidate", 1, 1001, ITEMS)
    assert "lm-eval" in ended.versions
    assert ended.started_ns is not None
    assert ended.ended_ns is not None
    for each in school.sat("candidate", 1):
        assert each.sent_ns is not None
        assert each.ended_ns is not None
        assert ended.started_ns < each.sent_ns < each.ended_ns < ended.ended_ns
        assert each.latency_s == (each.ended_ns - each.sent_ns) / 1e9
    _, judged, notes = judge_folder(school.evals, NAMES)
    assert not notes
    assert judged.tasks[0].counts["candidate"].right == 2 * ITEMS


def test_the_plan_is_registered_before_the_first_request(school: School) -> None:
    seen = []

    def answer(row: int, body: dict[str, Any]) -> list[Step]:
        seen.append((school.evals / "plan.json").exists())
        return right(row, body)

    school.answers.update(dict.fromkeys(NAMES, answer))
    school.sit()
    assert len(seen) == 4 * ITEMS
    assert all(seen)
    manifest = rundir.read_manifest(school.evals, EvalManifest)
    assert manifest.plan_sha256 == registration.sha256(school.evals / "plan.json")


def test_br_45_every_kind_of_reply_is_told_apart(school: School) -> None:
    """Six right, one wrong, a slow one, HTTP 500 twice then right, and one that never answers."""
    tried: Counter[int] = Counter()

    def answer(row: int, body: dict[str, Any]) -> list[Step]:
        tried[row] += 1
        match row:
            case 6:
                return completion(r"\boxed{999}")
            case 7:
                return completion(rf"\boxed{{{invented.aime25(ITEMS)[7]['answer']}}}", at_ms=300)
            case 8 if tried[8] <= 2:
                return reply(500, {"error": said(body)})
            case 9:
                return completion("x", at_ms=60_000)
        return right(row, body)

    school.answers["baseline"] = answer
    school.sit(school.experiment(aime25={"repeats": 1}, timeout_s=1.5))
    found = school.sat("baseline", 0)
    assert [each.outcome for each in found] == [*["right"] * 6, "wrong", "right", "right", "error"]
    assert sum(each.score for each in found) == 8
    assert [each.attempts for each in found] == [*[1] * 8, 3, 1]
    assert found[9].error == "timeout"


@pytest.mark.parametrize(
    ("steps", "outcome", "error"),
    [
        (completion(None, reasoning=r"so \boxed{1}", finish="length"), "truncated", None),
        (completion("I cannot say", finish="stop"), "unparsed", None),
        (completion(None), "error", "empty reply"),
        (completion("x", finish="abort"), "error", "empty reply"),
        (reply(503, {"error": "away"}), "error", "HTTP 503"),
    ],
)
def test_no_fault_passes_for_a_wrong_answer(steps: list[Step], outcome: str, error: str | None, school: School) -> None:
    school.answers["candidate"] = lambda row, body: steps if row == 3 else right(row, body)
    school.sit(school.experiment(aime25={"repeats": 1}, retries=0))
    found = school.sat("candidate", 0)
    assert (found[3].outcome, found[3].score, found[3].error) == (outcome, 0.0, error)
    assert {each.outcome for each in found if each.item != 3} == {"right"}


def test_prompts_that_are_other_tokens_are_seen(school: School) -> None:
    """Hashes are of the ids, salted, and null where the server tells none."""
    told = {0: [1, 2], 1: [1, 3], 2: None}

    def answer(row: int, body: dict[str, Any]) -> list[Step]:
        return completion("x", prompt_ids=told.get(row, [1, 2]))

    school.answers["candidate"] = answer
    school.sit(school.experiment(aime25={"repeats": 1}))
    first, other, none, again = (each.prompt_ids_hash for each in school.sat("candidate", 0)[:4])
    assert first == again == school.sat("baseline", 0)[0].prompt_ids_hash
    assert other not in (None, first)
    assert none is None
    assert first != hashlib.sha256(b"[1,2]").hexdigest()[:16]


@pytest.mark.parametrize(
    "text",
    [
        r"<think>\boxed{1}",
        r"so \boxed{1} or not</think>\boxed{2}",
        r"<|open|>think<|sep|>\boxed{1}",
        r"\boxed{1} hm<|close|> think <|sep|>\boxed{2}",
        r"\boxed{1} hmthinkresponse\boxed{2}",
    ],
)
def test_thoughts_in_the_text_stop_the_run(text: str, school: School) -> None:
    school.answers["candidate"] = lambda row, body: completion(text) if row == 3 else right(row, body)
    with pytest.raises(UserError, match=r"the candidate's replies hold thoughts .*--reasoning-parser") as refused:
        school.sit(school.experiment(aime25={"concurrency": 1}))
    assert "boxed" not in str(refused.value)
    assert 3 not in {each.item for each in school.sat("candidate", 0)}


def test_a_slip_of_the_model_does_not_stop_the_run(school: School) -> None:
    """A marker beside thoughts that a parser cut off, or in a later sitting, says nothing of the server."""

    def answer(row: int, body: dict[str, Any]) -> list[Step]:
        if row == 3 and body["seed"] == 1000:
            return completion(r"</think>\boxed{3}", reasoning="hm")
        return completion(r"</think>\boxed{3}") if row == 3 else right(row, body)

    school.answers.update(dict.fromkeys(NAMES, answer))
    school.sit()
    assert len(school.sat("candidate", 1)) == ITEMS


def test_a_backend_that_answers_nothing_is_no_score(school: School) -> None:
    school.answers["candidate"] = lambda row, body: completion(None)
    school.sit()
    _, judged, _ = judge_folder(school.evals, NAMES)
    assert judged.outcome == "INCONCLUSIVE"
    assert judged.tasks[0].counts["candidate"].error == 2 * ITEMS


def test_a_backend_that_takes_up_nothing_stops_the_run(school: School) -> None:
    """A field that the server refuses, say: hours of it would help nobody."""
    school.answers["baseline"] = lambda row, body: reply(400, {"error": said(body)})
    with pytest.raises(UserError, match=r"the baseline took up no request of aime25 \(HTTP 400\)") as refused:
        school.sit()
    assert "crate" not in str(refused.value)
    assert not list(school.evals.glob("*/*/*.json"))
    assert school.asked("candidate") == []
    school.answers["baseline"] = right
    school.sit(resume=True)
    assert {each.attempts for each in school.sat("baseline", 0)} == {2}


def interrupt_at(number: int, answered: int) -> Callable[[Progress], None]:
    def show(at: Progress) -> None:
        if (at.number, at.answered) == (number, answered):
            raise KeyboardInterrupt

    return show


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("number", [1, 3])
def test_br_45_resume_asks_no_item_twice(number: int, torn: bool, school: School) -> None:
    with pytest.raises(KeyboardInterrupt):
        school.sit(show=interrupt_at(number, 5))
    sitting = "baseline/aime25/r000" if number == 1 else "candidate/aime25/r001"
    path = school.evals / f"{sitting}.jsonl"
    before = path.read_bytes()
    assert len(before.splitlines()) >= 5
    assert not path.with_suffix(".json").exists()
    if torn:
        path.write_bytes(before + b'{"item":9,"item_ha')
    had = {msgspec.json.decode(line, type=Answer).item for line in before.splitlines()}
    asked_before = {name: Counter(school.asked(name)) for name in NAMES}
    school.sit(resume=True)
    seed = 1000 if number == 1 else 1001
    who = sitting.partition("/")[0]
    again = Counter(school.asked(who)) - asked_before[who]
    assert {row for row, its in again if its == seed} == set(range(ITEMS)) - had
    for name in NAMES:
        for repeat in (0, 1):
            assert [each.item for each in school.sat(name, repeat)] == list(range(ITEMS))
    assert path.read_bytes().startswith(before)
    assert (path.parent / f"{path.stem}.interrupted-1").is_dir()  # what was seen of the server
    total = sum(map(len, map(school.asked, NAMES)))
    school.sit(resume=True)
    assert sum(map(len, map(school.asked, NAMES))) == total


def test_br_45_a_request_without_reply_is_asked_again_after_an_interruption(school: School) -> None:
    """No failure is kept as an answer; its attempts stay counted."""
    school.answers["baseline"] = lambda row, body: reply(500, {}) if row < 5 else completion("x", at_ms=60_000)
    with pytest.raises(KeyboardInterrupt):
        school.sit(school.experiment(aime25={"concurrency": 10}, retries=1), show=interrupt_at(1, 5))
    school.answers["baseline"] = right
    school.sit(school.experiment(aime25={"concurrency": 10}, retries=1), resume=True)
    found = school.sat("baseline", 0)
    assert [each.attempts for each in found] == [3] * 5 + [1] * 5
    assert {each.outcome for each in found} == {"right"}


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("r000.jsonl", "r000.jsonl:2 is damaged: .*Take the line out"),
        ("r000.json", "r000.json is damaged: .*Delete it"),
    ],
)
def test_damaged_records_are_named_when_a_run_is_taken_up_again(file: str, said: str, school: School) -> None:
    school.sit()
    folder = school.evals / "candidate" / "aime25"
    if file.endswith("l"):
        lines = (folder / file).read_bytes().splitlines(True)
        (folder / file).write_bytes(b"".join([lines[0], b"{garbage\n", *lines[1:]]))
        (folder / "r000.json").unlink()
    else:
        (folder / file).write_text("{")
        (folder / "r001.json").unlink()
    with pytest.raises(UserError, match=said):
        school.sit(resume=True)


def test_a_changed_plan_is_not_resumed(school: School) -> None:
    with pytest.raises(KeyboardInterrupt):
        school.sit(show=interrupt_at(2, 1))
    for changed in (school.experiment(aime25={"margin": 0.05}), school.experiment(seed=5)):
        with pytest.raises(UserError, match="the plan was changed after the first candidate request"):
            school.sit(changed, resume=True)
    with pytest.raises(UserError, match="experiment differs"):
        school.sit(school.experiment(retries=0), resume=True)
    rows = invented.aime25(ITEMS)
    fixtures.write([rows[0] | {"answer": "500"}, *rows[1:]], school.data)
    with pytest.raises(UserError, match=r"after the first candidate request \(tasks\.0\.data\.sha256\)"):
        school.sit(resume=True)
    fixtures.write(rows, school.data)
    path = school.evals / "plan.json"
    path.write_text(path.read_text().replace("0.03", "0.04"))
    with pytest.raises(UserError, match="the plan was changed"):
        school.sit(resume=True)
    with pytest.raises(UserError, match="not the one that was registered"):  # by both hands
        school.sit(school.experiment(aime25={"margin": 0.04}), resume=True)


def test_other_data_than_agreed_on_are_not_asked(school: School) -> None:
    with pytest.raises(UserError, match="other data"):
        school.sit(school.experiment(aime25={"sha256": "0" * 64}))
    assert not school.run.exists()
    assert all(not server.requests for server in school.servers.values())


def test_what_servers_show_is_refused_before_the_first_question(school: School, shown: dict[str, Any]) -> None:
    shown["settings"]["candidate"] = {"speculative-config.rejection_sample_method": "synthetic"}
    with pytest.raises(UserError, match=r"candidate: .* is synthetic"):
        school.sit()
    shown["settings"]["candidate"] = {"model": "Kimi-K3"}
    with pytest.raises(UserError, match=r"candidate: .* --reasoning-parser kimi_k3"):
        school.sit()
    shown["settings"]["candidate"] = {}
    shown["path"] = PathRule(model="K3", source="vLLM", sizes=[8], tokens_per_request=8, max_requests=1)
    with pytest.raises(UserError, match="Set it to 1 or less"):
        school.sit()
    shown["path"], shown["max_model_len"] = None, 4096
    with pytest.raises(UserError, match="room for 4,096"):
        school.sit()
    assert not school.run.exists()
    assert school.asked("baseline") == school.asked("candidate") == []


def test_a_server_that_ends_stops_the_run_and_its_errors_are_no_answers(
    school: School, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(row: int, body: dict[str, Any]) -> list[Step]:
        if row == 4:
            monkeypatch.setattr(Servers, "died", lambda *_: "exit status 1")
            return reply(500, {})
        return right(row, body)

    school.answers["candidate"] = answer
    with pytest.raises(UserError, match=r"(?s)candidate's server has ended: exit status 1.*--resume"):
        school.sit(school.experiment(aime25={"concurrency": 1}, retries=0))
    assert "error" not in {each.outcome for each in school.sat("candidate", 0)}
    assert not (school.evals / "candidate" / "aime25" / "r000.json").exists()
    assert (school.evals / "candidate" / "aime25" / "r000" / DIED).read_text() == "exit status 1\n"


def test_requests_without_reply_are_asked_again_when_the_run_is_gone_on_with(school: School) -> None:
    """A server at a url that was away for a while; what has a reply is not asked twice."""
    school.answers["candidate"] = lambda row, body: reply(500, {}) if row in (2, 5) else right(row, body)
    school.sit(school.experiment(retries=0))
    assert Counter(each.outcome for each in school.sat("candidate", 1)) == {"right": ITEMS - 2, "error": 2}
    asked = Counter(school.asked("candidate"))
    school.answers["candidate"] = right
    school.sit(school.experiment(retries=0), resume=True)
    again = Counter(school.asked("candidate")) - asked
    assert again == Counter((row, seed) for row in (2, 5) for seed in (1000, 1001))
    found = school.sat("candidate", 1)
    assert {each.outcome for each in found} == {"right"}
    assert [each.attempts for each in found if each.item in (2, 5)] == [2, 2], "the first attempt is not forgotten"


def test_the_first_items_only(school: School) -> None:
    school.sit(limit=3)
    assert Counter(school.asked("baseline")) == Counter((row, seed) for row in range(3) for seed in (1000, 1001))
    plan = msgspec.json.decode((school.evals / "plan.json").read_bytes(), type=EvalPlan)
    assert plan.limit == 3
    school.sit(resume=True)  # takes the limit from the plan
    with pytest.raises(UserError, match="limit"):
        school.sit(resume=True, limit=4)


def test_options_come_in_the_order_of_their_repeat_on_both_backends(tmp_path: Path) -> None:
    """The emulator knows the options by their texts; which letters are right is for the repeat to say."""
    rows = invented.gpqa_diamond(12)
    data = fixtures.write(rows, tmp_path / "gpqa.jsonl")
    items: list[Any] = items_of("gpqa_diamond", rows)
    exams = write_exams(exams_for(items, p=1.0), tmp_path / "exams")
    gpqa = {"data": str(data), "subset": True, "repeats": 2, "concurrency": 6}
    evals = {"gpqa_diamond": gpqa, "sampling": {"max_tokens": 200}}
    measure(runs.experiment(emulator={"exams": str(exams)}, evals=evals), tmp_path / "run", silent, nothing)
    given, prompts = {}, {}
    for name in NAMES:
        for repeat in (0, 1):
            path = tmp_path / "run" / "evals" / name / "gpqa_diamond" / f"r{repeat:03d}.jsonl"
            found = [msgspec.json.decode(line, type=Answer) for line in path.read_bytes().splitlines()]
            assert {each.outcome for each in found} == {"right"}
            given[name, repeat] = {each.item: each.given for each in found}
            prompts[name, repeat] = {each.item: each.prompt_hash for each in found}
    for repeat in (0, 1):
        keys: dict[int, str | None] = {item.row: gpqa_diamond.key(item, repeat) for item in items}
        assert given["baseline", repeat] == given["candidate", repeat] == keys
        assert prompts["baseline", repeat] == prompts["candidate", repeat]
    assert given["baseline", 0] != given["baseline", 1]


def test_long_items_are_left_out_of_a_chat_exam(tmp_path: Path) -> None:
    """MRCR on emulators: multi-turn chats, strata, secondary scores; the third item is too long."""
    rows = invented.mrcr(3)
    data = fixtures.write(rows, tmp_path / "mrcr.jsonl")
    fixtures.write_lengths(data, hashlib.sha256(data.read_bytes()).hexdigest(), [5000, 6000, 9000])
    exams = write_exams(exams_for(items_of("mrcr", rows), p=1.0), tmp_path / "exams")
    mrcr = {"data": str(data), "subset": True, "repeats": 1, "max_context": 8192}
    evals = {"mrcr": mrcr, "sampling": {"max_tokens": 2000}}
    measure(runs.experiment(emulator={"exams": str(exams)}, evals=evals), tmp_path / "run", silent, nothing)
    lines = (tmp_path / "run" / "evals" / "candidate" / "mrcr" / "r000.jsonl").read_bytes().splitlines()
    found = [msgspec.json.decode(line, type=Answer) for line in lines]
    assert [(each.item, each.outcome, each.score) for each in found] == [(0, "right", 1.0), (1, "right", 1.0)]
    assert [each.stratum for each in found] == [{"needles": "2", "bin": "4k-8k"}, {"needles": "4", "bin": "4k-8k"}]
    assert found[0].scores["right_needle"] == 1.0


def of_lengths(folder: Path, tokens: list[int]) -> tuple[dict[str, Any], list[int]]:
    """An MRCR exam with these lengths in its table, and the tokens that the emulator makes of its prompts."""
    rows = invented.mrcr(len(tokens))
    data = fixtures.write(rows, folder / "mrcr.jsonl")
    fixtures.write_lengths(data, hashlib.sha256(data.read_bytes()).hexdigest(), tokens)
    chats = [json.loads(row["prompt"]) for row in rows]
    own = [len(language.chat_prompt((each["role"], each["content"]) for each in chat)) for chat in chats]
    return {"data": str(data), "subset": True, "repeats": 1}, own


def test_items_that_the_context_does_not_hold_are_left_out_of_the_plan(tmp_path: Path) -> None:
    """By the emulator's own tokens, to the last one: the longest that fits is asked, and answered."""
    mrcr, own = of_lengths(tmp_path, [5000, 6000, 7000, 8000])
    exams = write_exams(exams_for(items_of("mrcr", invented.mrcr(4)), p=1.0), tmp_path / "exams")
    shortest, third, *_ = sorted(own)
    emulator = {"exams": str(exams), "max_model_len": third + 2000}
    described = runs.experiment(emulator=emulator, evals={"mrcr": mrcr, "sampling": {"max_tokens": 2000}})
    told: list[str] = []
    run = tmp_path / "run"
    measure(described, run, lambda event: told.append(event.text), nothing)
    fit = [row for row, tokens in enumerate(own) if tokens <= third]
    plan = msgspec.json.decode((run / "evals" / "plan.json").read_bytes(), type=EvalPlan)
    data = plan.tasks[0].data
    assert (data.items, data.unfit) == (2, [row for row in range(4) if row not in fit])
    assert data.dropped["do not fit the context, thoughts included"] == 2
    for name in NAMES:
        lines = (run / "evals" / name / "mrcr" / "r000.jsonl").read_bytes().splitlines()
        found = [msgspec.json.decode(line, type=Answer) for line in lines]
        assert [(each.item, each.outcome, each.prompt_tokens) for each in found] == [
            (row, "right", own[row]) for row in fit
        ]
    assert "mrcr: 2 items: 4k-8k 2; 2 do not fit the context, thoughts included" in told
    (run / "evals" / "candidate" / "mrcr" / "r000.json").unlink()
    measure(described, run, silent, nothing, resume=True)
    assert msgspec.json.decode((run / "evals" / "plan.json").read_bytes(), type=EvalPlan) == plan
    described = runs.experiment(
        emulator=emulator | {"max_model_len": shortest + 1999}, evals=described.evals and described.evals.model_dump()
    )
    with pytest.raises(UserError, match="no item of mrcr fits"):
        measure(described, tmp_path / "other", silent, nothing)


def test_lengths_that_a_server_does_not_count_are_said_to_be_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent_server(*_: object) -> None:
        return None

    monkeypatch.setattr(fitting, "too_long", silent_server)
    mrcr, _ = of_lengths(tmp_path, [5000, 6000, 9000])
    exams = write_exams(exams_for(items_of("mrcr", invented.mrcr(3)), p=1.0), tmp_path / "exams")
    evals = {"mrcr": mrcr | {"max_context": 8192}, "sampling": {"max_tokens": 2000}}
    told: list[str] = []
    whole = runs.experiment(emulator={"exams": str(exams)}, evals=evals)
    measure(whole, tmp_path / "run", lambda event: told.append(event.text), nothing)
    assert any(text.startswith("mrcr: prompts are as long as o200k_base and max_context say") for text in told)
    assert "mrcr: 2 items: 4k-8k 2" in told


def test_no_text_of_the_benchmark_or_of_a_reply_leaves_private(school: School) -> None:
    told: list[str] = []
    school.answers["baseline"] = lambda row, body: (
        reply(400, {"error": said(body)}) if row == 0 else completion("said this", reasoning="thought that")
    )
    measure(school.experiment(), school.run, lambda event: told.append(event.text), nothing)
    texts = re.compile("crate|pears|said this|thought that")
    private = school.evals / "private"
    for path in school.run.rglob("*"):
        if path.is_file() and private not in path.parents:
            assert not texts.search(path.read_text()), path
    assert not texts.search("".join(told))
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    raw = [json.loads(line) for line in (private / "baseline" / "aime25" / "r000.jsonl").read_text().splitlines()]
    by_row = {each["item"]: each for each in raw}
    assert "crate" in by_row[0]["body"]
    assert (by_row[1]["text"], by_row[1]["reasoning"], by_row[1]["token_ids"]) == (
        "said this",
        "thought that",
        [5, 6, 7],
    )


def test_hashes_cannot_be_made_from_the_texts_alone(school: School) -> None:
    school.sit()
    first = school.sat("baseline", 0)[0]
    school.run.rename(school.folder / "first")
    school.sit()
    again = school.sat("baseline", 0)[0]
    assert (first.item_hash, first.prompt_hash, first.reply_hash) != (
        again.item_hash,
        again.prompt_hash,
        again.reply_hash,
    )
    assert first.given == again.given


def test_a_replay_in_the_same_run_directory_is_left_alone(school: School) -> None:
    (school.run / "blocks").mkdir(parents=True)
    (school.run / "manifest.json").write_text("{}")
    school.sit()
    assert (school.run / "manifest.json").read_text() == "{}"
    with pytest.raises(UserError, match="not empty"):
        school.sit()


def test_two_emulators_with_a_known_truth(tmp_path: Path) -> None:
    """AIME in two repeats: the baseline knows all, the candidate nothing of what it should."""
    rows = invented.aime25(30)
    exams = write_exams(exams_for(items_of("aime25", rows), p=1.0, harm=1.0, thinking_tokens=20), tmp_path / "exams")
    data = fixtures.write(rows, tmp_path / "aime25.csv")
    evals = {"aime25": {"data": str(data), "repeats": 2}, "sampling": {"max_tokens": 200}}
    described = runs.experiment(emulator={"exams": str(exams)}, evals=evals)
    measure(described, tmp_path / "run", silent, nothing)
    plan, judged, notes = judge_folder(tmp_path / "run" / "evals", NAMES)
    assert (plan.tasks[0].data.items, notes) == (30, [])
    counts = judged.tasks[0].counts
    assert (counts["baseline"].right, counts["candidate"].wrong) == (60, 60)
    assert judged.outcome == "FAIL"
    answers = (tmp_path / "run" / "evals" / "baseline" / "aime25" / "r000.jsonl").read_bytes().splitlines()
    found = [msgspec.json.decode(line, type=Answer) for line in answers]
    assert {each.reply_hash is None for each in found} == {False}
