"""The plan of the evals: as registered, in which order, and what it refuses."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals import invented, registration
from evals import plan as plans
from evals.data import load
from evals.plan import Sitting
from evals.records import DataFacts, EvalPlan, Repeat, TaskPlan
from replay.experiment import Experiment, frozen_yaml, load_experiment
from replay.records import Backend, PathRule
from tests.evals import fixtures
from tests.integration.runs import experiment
from workloads.errors import UserError


def task(name: Any = "aime25", **changes: Any) -> TaskPlan:
    given: dict[str, Any] = {
        "data": DataFacts(name="x", sha256="0", items=30),
        "repeats": 3,
        "seed": 7,
        "sampling": {"max_tokens": 100},
        "concurrency": 30,
        "margin": 0.03,
    }
    return TaskPlan(task=name, **(given | changes))


def plan(*tasks: TaskPlan, limit: int | None = None) -> EvalPlan:
    return EvalPlan(registered_utc="now", tasks=list(tasks), limit=limit)


def described(folder: Path, **evals: Any) -> Experiment:
    data = fixtures.write(invented.aime25(30), folder / "aime25.jsonl")
    return experiment(evals={"aime25": {"data": str(data)}, **evals})


def test_defaults_are_those_that_were_agreed_on(tmp_path: Path) -> None:
    found = plans.registered(described(tmp_path))
    assert [(each.task, each.repeats, each.margin, each.looks) for each in found.tasks] == [("aime25", 32, 0.03, [1.0])]
    (aime25,) = found.tasks
    assert aime25.data.sha256 == hashlib.sha256((tmp_path / "aime25.jsonl").read_bytes()).hexdigest()
    assert (aime25.data.items, aime25.concurrency, aime25.seed) == (30, 30, 1000)
    assert aime25.sampling == {
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 131_072,
        "reasoning_effort": "max",
    }
    assert found.limit is None


def test_other_data_than_agreed_on_stop_it(tmp_path: Path) -> None:
    changed = described(tmp_path, aime25={"data": str(tmp_path / "aime25.jsonl"), "sha256": "0" * 64})
    with pytest.raises(UserError, match="other data"):
        plans.registered(changed)


def test_one_question_missing_stops_it(tmp_path: Path) -> None:
    fixtures.write(invented.aime25(29), tmp_path / "29.jsonl")
    with pytest.raises(UserError, match="29 items"):
        plans.registered(described(tmp_path, aime25={"data": str(tmp_path / "29.jsonl")}))


@pytest.mark.parametrize(
    ("evals", "words"),
    [
        ({}, "at least one of"),
        ({"aime25": {"data": "x", "repeat": 3}}, "did you mean repeats"),
        ({"aime25": {"data": "x"}, "sampling": {"eos_string": "x"}}, "unknown key"),
        ({"aime25": {"data": "x"}, "use_cache": "x"}, "unknown key"),
        ({"aime25": {"data": "x", "looks": [0.5]}}, "the last must be 1"),
        ({"aime25": {"data": "x", "looks": [0.5, 0.25, 1]}}, "must rise"),
        ({"mrcr": {"data": "x", "margin": 0}}, "greater than 0"),
    ],
)
def test_a_slip_in_the_file_is_named(evals: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        experiment(evals=evals)


def test_paths_are_taken_from_the_file_and_the_frozen_file_is_the_same(tmp_path: Path) -> None:
    whole = described(tmp_path, aime25={"data": "aime25.jsonl"}, mrcr={"data": f"hub:openai/mrcr@{'0' * 40}"})
    (tmp_path / "one.yaml").write_text(frozen_yaml(whole))
    loaded = load_experiment(tmp_path / "one.yaml")
    assert loaded.evals is not None
    assert loaded.evals.exams["aime25"].data == str(tmp_path / "aime25.jsonl")
    assert loaded.evals.exams["mrcr"].data == f"hub:openai/mrcr@{'0' * 40}"
    (tmp_path / "two.yaml").write_text(frozen_yaml(loaded))
    assert load_experiment(tmp_path / "two.yaml") == loaded


def test_items_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    data = fixtures.write(invented.mrcr(6), tmp_path / "mrcr.jsonl")
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    fixtures.write_lengths(data, digest, [5000, 9000, 5000, 8192, 8193, 5000])
    mrcr = {"data": str(data), "subset": True}
    whole = experiment(evals={"mrcr": mrcr | {"max_context": 8192}})
    (found,) = plans.registered(whole).tasks
    assert found.data.items == 4
    assert found.data.dropped == {"longer than max_context": 2, "not in the data (a subset)": 2394}
    assert (found.repeats, found.margin, found.concurrency) == (5, 0.03, 1)
    exam, items = plans.described(whole).exams["mrcr"], load("mrcr", str(data), subset=True).items
    assert plans.places(exam, items) == [0, 2, 3, 5]
    assert plans.places(exam, items, limit=2) == [0, 2]
    with pytest.raises(UserError, match="raise max_context"):
        plans.registered(experiment(evals={"mrcr": mrcr | {"max_context": 4000}}))


def test_an_experiment_without_evals_is_told_what_it_lacks() -> None:
    with pytest.raises(UserError, match=r"no evals: give at least evals\.aime25\.data"):
        plans.registered(experiment())


def test_backends_take_turns_by_repeat() -> None:
    order = plans.sittings(plan(task(repeats=3), task("mrcr", repeats=1)))
    assert order == [
        Sitting("baseline", "aime25", 0),
        Sitting("baseline", "mrcr", 0),
        Sitting("candidate", "aime25", 0),
        Sitting("candidate", "mrcr", 0),
        Sitting("candidate", "aime25", 1),
        Sitting("baseline", "aime25", 1),
        Sitting("baseline", "aime25", 2),
        Sitting("candidate", "aime25", 2),
    ]
    assert [each.backend for each in plans.sittings(plan(task(repeats=4)), 2)] == [
        *["baseline"] * 2,
        *["candidate"] * 4,
        *["baseline"] * 2,
    ]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 4))
def test_each_repeat_is_sat_once_and_the_backends_never_drift_apart(repeats: list[int], per_start: int) -> None:
    names = ["aime25", "gpqa_diamond", "mrcr"]
    planned = plan(*(task(name, repeats=count) for name, count in zip(names, repeats, strict=False)))
    order = plans.sittings(planned, per_start)
    wanted = {
        Sitting(backend, each.task, repeat)
        for each in planned.tasks
        for repeat in range(each.repeats)
        for backend in ("baseline", "candidate")
    }
    assert Counter(order) == Counter(wanted)
    ahead = 0
    for sitting in order:
        ahead += 1 if sitting.backend == "baseline" else -1
        assert abs(ahead) <= per_start * len(planned.tasks)


def test_a_changed_plan_is_refused_and_the_change_named() -> None:
    before = plan(task())
    registration.refuse_changed(before, msgspec.structs.replace(plan(task()), registered_utc="later"), asked=True)
    changed = plan(task(margin=0.05, sampling={"max_tokens": 100, "top_k": 4}))
    with pytest.raises(UserError, match=r"after the first candidate request \(.*tasks\.0\.margin\)") as refused:
        registration.refuse_changed(before, changed, asked=True)
    assert "tasks.0.sampling.top_k" in str(refused.value)
    with pytest.raises(UserError, match="since it was registered"):
        registration.refuse_changed(before, plan(task(), limit=3), asked=False)


def test_synthetic_acceptance_sits_no_exam() -> None:
    real = {"speculative-config.rejection_sample_method": "strict"}
    plans.refuse_synthetic({"baseline": {}, "candidate": real})
    for name in ("baseline", "candidate"):
        with pytest.raises(UserError, match=f"{name}: .*synthetic"):
            plans.refuse_synthetic({name: {"speculative-config.rejection_sample_method": "synthetic"}})


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"model": "moonshotai/Kimi-K3"}, True),
        (
            {"model": "/models/kimi-k3", "structured-outputs-config.reasoning_parser": ""},
            True,
        ),  # /server_info's default
        ({"model": "/models/kimi-k3", "reasoning-parser": "kimi_k3"}, False),
        ({"model": "/models/kimi-k3", "structured-outputs-config.reasoning_parser": "kimi_k3"}, False),
        ({"model": "/models/kimi-k3", "image": "vllm/vllm-openai", "config": "/in/there.yaml"}, False),  # not known
        ({"model": "another/model"}, False),
        ({}, False),
    ],
)
def test_kimi_k3_needs_its_reasoning_parser(settings: dict[str, str], refused: bool) -> None:
    if not refused:
        plans.refuse_no_parser({"baseline": settings})
        return
    with pytest.raises(UserError, match=r"candidate: .*--reasoning-parser kimi_k3"):
        plans.refuse_no_parser({"baseline": {}, "candidate": settings})


def test_kimi_k3_is_known_by_its_folder_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k3"}')
    with pytest.raises(UserError, match="--reasoning-parser"):
        plans.refuse_no_parser({"baseline": {"model": str(tmp_path)}})


@pytest.mark.parametrize("option", ["enable-log-requests", "enable-log-outputs"])
def test_a_server_that_would_write_questions_into_its_log_is_refused(option: str) -> None:
    plans.refuse_telling({"baseline": {option: "false"}, "candidate": {}})
    with pytest.raises(UserError, match=f"candidate: its log would hold texts of the benchmarks: leave {option} out"):
        plans.refuse_telling({"baseline": {}, "candidate": {option: "true"}})


def test_items_that_do_not_fit_are_taken_out_of_the_plan(tmp_path: Path) -> None:
    data = fixtures.write(invented.mrcr(6), tmp_path / "mrcr.jsonl")
    fixtures.write_lengths(data, hashlib.sha256(data.read_bytes()).hexdigest(), [5000, 9000, 5000, 8192, 8193, 5000])
    whole = experiment(evals={"mrcr": {"data": str(data), "subset": True, "max_context": 8192}})
    registered = plans.registered(whole)
    assert plans.without(registered, {"mrcr": []}) == registered
    cut = plans.without(registered, {"mrcr": [2, 3]})
    assert cut.tasks[0].data.items == 2
    assert cut.tasks[0].data.dropped["do not fit the context, thoughts included"] == 2
    assert plans.unfit(cut) == {"mrcr": [2, 3]}
    registration.refuse_changed(cut, plans.without(plans.registered(whole), plans.unfit(cut)), asked=True)
    exam, items = plans.described(whole).exams["mrcr"], load("mrcr", str(data), subset=True).items
    assert plans.places(exam, items, unfit=[2, 3]) == [0, 5]
    assert plans.places(exam, items, limit=1, unfit=[0]) == [2]


def candidate(decode_backend: str, **rule: Any) -> Backend:
    given: dict[str, Any] = {"sizes": [8, 64], "tokens_per_request": 8, "max_requests": 8}
    path = PathRule(model="K3", source="vLLM", **(given | rule))
    return Backend(name="candidate", decode_backend=decode_backend, url=None, gpus=None, emulated=False, path=path)


def test_more_requests_than_the_specialised_path_takes_are_refused() -> None:
    specialised = candidate("latency_specialized")
    plans.refuse_stock(plan(task(concurrency=8)), specialised)
    with pytest.raises(UserError, match=r"evals\.aime25\.concurrency is 9, .* Set it to 8 or less"):
        plans.refuse_stock(plan(task(concurrency=9)), specialised)
    plans.refuse_stock(plan(task(concurrency=9)), candidate("auto"))
    plans.refuse_stock(plan(task(concurrency=9)), candidate("latency_specialized", max_requests=64))


def test_replies_must_fit_into_the_context() -> None:
    plans.refuse_no_room(plan(task()), {"baseline": 101, "candidate": None})
    with pytest.raises(UserError, match=r"max_tokens is 100, but the candidate has room for 100"):
        plans.refuse_no_room(plan(task()), {"baseline": 101, "candidate": 100})


def test_what_it_takes_is_said_before() -> None:
    planned = plan(task(), task("mrcr", repeats=1, data=DataFacts(name="y", sha256="1", items=800)))
    order = plans.sittings(planned)
    shown = plans.lines(planned, order)
    assert shown["requests"] == "1,780 in 8 runs of lm-eval"
    assert shown["tokens"] == "178,000 output tokens at most"
    # 6 sittings of 30 items and 2 of 800, 30 at once, of 100 tokens
    assert shown["time"].startswith("at 100 tokens/s and stream about 1 minutes at most")
    assert "known once" in shown["time"]
    usual = plan(task(repeats=32, sampling={"max_tokens": 131_072}))
    assert "about 23 hours at most" in plans.lines(usual, plans.sittings(usual))["time"]
    assert plans.lines(plan(task(), limit=4), plans.sittings(plan(task())))["requests"] == "24 in 6 runs of lm-eval"

    def ended(name: str, seconds: float) -> Repeat:
        return Repeat(
            backend="baseline", task=name, repeat=0, seed=7, started_unix_s=5, ended_unix_s=5 + seconds, answers=1
        )

    some = [ended("aime25", 60), ended("aime25", 180), ended("mrcr", 600)]
    assert plans.lines(planned, order, some)["time"] == "about 32 minutes"
    assert "known once" in plans.lines(planned, order, some[:2])["time"]
