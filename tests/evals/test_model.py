"""What the backend is asked, and what is kept of its replies, through lm-eval."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evals import invented
from evals.tasks import INCLUDE_PATH
from tests.evals import fixtures
from tests.evals.chats import all_asked, asked, completion, said
from tests.scripted_server import Request, ScriptedServer, Step, reply, serve

pytest.importorskip("lm_eval")

from lm_eval.api.registry import get_model
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from evals import model
from evals.model import Asked, Examinee

SAMPLING = {"until": [], "temperature": 1.0, "top_p": 0.95, "top_k": 0, "max_tokens": 77, "reasoning_effort": "max"}
ITEMS = 6

Answers = Callable[[dict[str, Any], Request], list[Step]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "FIRST_WAIT_S", 0.01)


def sat(
    answers: Answers, folder: Path, *, concurrency: int = 4, timeout: float = 5.0, retries: int = 2
) -> tuple[list[Asked], ScriptedServer]:
    """All items asked of a server that answers so; by row."""
    data = fixtures.write(invented.aime25(ITEMS), folder / "aime25.jsonl")
    metadata = {"data": str(data), "subset": True}
    manager = TaskManager(include_path=str(INCLUDE_PATH), include_defaults=False, metadata=metadata)
    loaded = manager.load(["signoff_aime25"])
    (task,) = loaded["tasks"].values()
    task.set_config("generation_kwargs", SAMPLING)
    kept: list[Asked] = []
    with serve(lambda request: answers(asked(request) or {}, request)) as server:
        examinee = Examinee(
            model="m",
            base_url=f"{server.url}/v1/chat/completions",
            header={"X-Team": "a"},
            num_concurrent=concurrency,
            seed=1003,
            timeout=timeout,
            retries=retries,
            keep=kept.append,
        )
        evaluate(lm=examinee, task_dict=loaded, apply_chat_template=True, log_samples=False, bootstrap_iters=0)
    return sorted(kept, key=lambda each: each.doc["row"]), server


def is_item(body: dict[str, Any], row: int) -> bool:
    return said(body).startswith(invented.aime25(ITEMS)[row]["problem"])


def fine(body: dict[str, Any], request: Request) -> list[Step]:
    return completion(r"\boxed{1}")


@pytest.mark.parametrize("concurrency", [1, 4])
def test_every_sampling_field_is_sent_and_nothing_else(concurrency: int, tmp_path: Path) -> None:
    """No stop string, at any concurrency: lm-eval's own sends eos_string at 1 and leaves it out above."""
    _, server = sat(fine, tmp_path, concurrency=concurrency)
    sent = all_asked(server)
    assert len(sent) == ITEMS
    for body in sent:
        assert body.pop("messages")[0]["role"] == "user"
        assert body == {
            "model": "m",
            "seed": 1003,
            "stop": [],
            "return_token_ids": True,
            **{name: value for name, value in SAMPLING.items() if name != "until"},
        }
    assert {request.header("x-team") for request in server.requests} == {"a"}
    assert {request.header("authorization") for request in server.requests} == {None}


def test_lm_eval_knows_the_model() -> None:
    assert get_model(model.NAME) is Examinee


def test_all_that_the_server_tells_is_kept(tmp_path: Path) -> None:
    kept, _ = sat(lambda body, request: completion("so", reasoning="hm", finish="length"), tmp_path)
    assert [each.doc["row"] for each in kept] == list(range(ITEMS))
    received = kept[0].received
    assert (received.reply.text, received.reply.reasoning, received.reply.finish_reason) == ("so", "hm", "length")
    assert (received.prompt_tokens, received.completion_tokens, received.reasoning_tokens) == (11, 3, 2)
    assert (received.fingerprint, received.prompt_token_ids, received.token_ids) == ("f1", [1, 2], [5, 6, 7])
    assert kept[0].attempts == 1


def test_text_in_the_place_of_a_name_is_a_digest(tmp_path: Path) -> None:
    """Finish reason and fingerprint go into records that others read."""

    def quoting(body: dict[str, Any], request: Request) -> list[Step]:
        return completion("so", finish=said(body), fingerprint=said(body))

    kept, _ = sat(quoting, tmp_path)
    digests = {each.received.reply.finish_reason for each in kept}
    assert digests == {each.received.fingerprint for each in kept}
    assert len(digests) == ITEMS
    assert all(re.fullmatch("digest-[0-9a-f]{16}", each or "") for each in digests)


def test_null_stays_null(tmp_path: Path) -> None:
    """A reply that is cut off while thinking has no content: it is not an empty answer."""
    kept, _ = sat(lambda body, request: completion(None, reasoning="hm", finish="length"), tmp_path)
    assert {each.received.reply.text for each in kept} == {None}


def test_one_dead_request_costs_its_answer_only(tmp_path: Path) -> None:
    def answers(body: dict[str, Any], request: Request) -> list[Step]:
        return reply(500, {"error": said(body)}) if is_item(body, 2) else completion("x")

    kept, server = sat(answers, tmp_path, retries=1)
    assert [each.received.reply.error for each in kept] == [None, None, "HTTP 500", None, None, None]
    assert [each.attempts for each in kept] == [1, 1, 2, 1, 1, 1]
    assert len(all_asked(server)) == ITEMS + 1


@pytest.mark.parametrize("fault", ["HTTP 500", "HTTP 429", "reset"])
def test_retries_are_counted(fault: str, tmp_path: Path) -> None:
    tried: Counter[str] = Counter()

    def answers(body: dict[str, Any], request: Request) -> list[Step]:
        tried[said(body)] += 1
        if is_item(body, 1) and tried[said(body)] <= 2:
            return [Step(0.0, end="reset")] if fault == "reset" else reply(int(fault[-3:]), {})
        return completion("x")

    kept, _ = sat(answers, tmp_path, retries=2)
    assert [each.received.reply.error for each in kept] == [None] * ITEMS
    assert [each.attempts for each in kept] == [1, 3, 1, 1, 1, 1]


def test_times_are_those_of_the_last_attempt(tmp_path: Path) -> None:
    """The first attempt takes long; waiting before the second is no part of it either."""
    tried: Counter[str] = Counter()

    def answers(body: dict[str, Any], request: Request) -> list[Step]:
        tried[said(body)] += 1
        return reply(500, {}, at_ms=400) if tried[said(body)] == 1 else completion("x", at_ms=100)

    before = time.monotonic_ns()
    kept, _ = sat(answers, tmp_path)
    after = time.monotonic_ns()
    for each in kept:
        assert before + 0.4e9 < each.sent_ns < each.ended_ns < after
        assert each.ended_ns - each.sent_ns >= 0.1e9


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        (reply(400, {"error": "no"}), "HTTP 400"),
        (reply(200, b"<html>"), "no chat completion"),
        (reply(200, {"choices": []}), "no chat completion"),
    ],
)
def test_what_would_fail_again_is_not_sent_again(steps: list[Step], error: str, tmp_path: Path) -> None:
    kept, server = sat(lambda body, request: steps, tmp_path)
    assert {(each.received.reply.error, each.attempts) for each in kept} == {(error, 1)}
    assert len(all_asked(server)) == ITEMS


def test_the_time_limit_is_that_of_a_request_and_not_of_the_session(tmp_path: Path) -> None:
    """One at a time they take longer together than one may."""
    kept, _ = sat(lambda body, request: completion("x", at_ms=200), tmp_path, concurrency=1, timeout=0.8)
    assert [each.received.reply.error for each in kept] == [None] * ITEMS


def test_a_request_over_its_time_is_not_sent_again(tmp_path: Path) -> None:
    """The server still works on it."""

    def answers(body: dict[str, Any], request: Request) -> list[Step]:
        return completion("x", at_ms=60_000 if is_item(body, 3) else 0)

    kept, server = sat(answers, tmp_path, timeout=0.5)
    assert [each.received.reply.error for each in kept] == [None, None, None, "timeout", None, None]
    assert len(all_asked(server)) == ITEMS


def test_as_many_are_in_flight_as_planned(tmp_path: Path) -> None:
    _, server = sat(lambda body, request: completion("x", at_ms=100), tmp_path, concurrency=3)
    assert server.peak_in_flight == 3


def test_nothing_that_was_asked_or_said_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """lm-eval's own model logs bodies that it cannot use."""
    caplog.set_level(logging.DEBUG)

    def answers(body: dict[str, Any], request: Request) -> list[Step]:
        return reply(400, {"error": said(body)}) if is_item(body, 0) else completion(None, reasoning="secret thought")

    sat(answers, tmp_path)
    assert "crate" in invented.aime25(1)[0]["problem"]
    assert "crate" not in caplog.text
    assert "secret thought" not in caplog.text


def test_what_the_receiver_raises_ends_the_run(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def keep(_: Asked) -> None:
        raise Stop

    examinee = Examinee(
        model="m", base_url="http://127.0.0.1:9/", header={}, num_concurrent=1, seed=1, timeout=1, retries=0, keep=keep
    )
    data = fixtures.write(invented.aime25(ITEMS), tmp_path / "aime25.jsonl")
    metadata = {"data": str(data), "subset": True}
    loaded = TaskManager(include_path=str(INCLUDE_PATH), include_defaults=False, metadata=metadata).load(
        ["signoff_aime25"]
    )
    with pytest.raises(Stop):
        evaluate(lm=examinee, task_dict=loaded, apply_chat_template=True, log_samples=False, bootstrap_iters=0)
