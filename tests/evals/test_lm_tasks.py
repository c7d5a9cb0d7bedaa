"""lm-eval finds the tasks, sends their chats as they are, and takes their scores."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from evals import invented
from evals.tasks import INCLUDE_PATH, TASKS, aime25, gpqa_diamond
from tests.evals import fixtures
from workloads.errors import UserError

lm_eval = pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    rows = {"aime25": invented.aime25(6), "gpqa_diamond": invented.gpqa_diamond(6), "mrcr": invented.mrcr(6)}
    paths = {task: fixtures.write(rows[task], folder / f"{task}.jsonl") for task in TASKS}
    fixtures.write_lengths(paths["mrcr"], hashlib.sha256(paths["mrcr"].read_bytes()).hexdigest(), [5000] * 6)
    return paths


def _tasks(name: str, **metadata: Any) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(INCLUDE_PATH), include_defaults=False, metadata=metadata)
    assert manager.all_tasks == [f"signoff_{task}" for task in sorted(TASKS)]
    loaded: dict[str, Any] = manager.load([f"signoff_{name}"])
    return loaded


@pytest.mark.parametrize("name", TASKS)
def test_lm_eval_sends_the_chat_and_scores_the_reply(name: str, files: dict[str, Path]) -> None:
    from lm_eval.api.model import LM
    from lm_eval.evaluator import evaluate

    class Model(LM):  # type: ignore[misc]
        """Answers the first three questions right, the others not at all."""

        tokenizer_name = ""
        sent: list[tuple[list[dict[str, str]], dict[str, Any]]]

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            self.sent = [(json.loads(request.args[0].prompt), request.args[1]) for request in requests]
            return [answers[request.doc["row"]] for request in requests[:3]] + ["no idea"] * 3

        def loglikelihood(self, requests: list[Any]) -> list[Any]:
            raise NotImplementedError

        def loglikelihood_rolling(self, requests: list[Any]) -> list[Any]:
            raise NotImplementedError

        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            raise AssertionError("the chat is made by the task")

    repeat = 5
    loaded = _tasks(name, data=str(files[name]), subset=True, repeat=repeat, model="x", base_url="y")
    records = [json.loads(line) for line in files[name].read_text().splitlines()]
    items: list[Any] = [TASKS[name].question(row, record) for row, record in enumerate(records)]
    right = {
        "aime25": lambda item: rf"\boxed{{{item.answer}}}",
        "gpqa_diamond": lambda item: f"Answer: {gpqa_diamond.key(item, repeat)}",
        "mrcr": lambda item: item.answer,
    }
    answers = [right[name](item) for item in items]
    model = Model()
    results = evaluate(lm=model, task_dict=loaded, apply_chat_template=True, log_samples=True, bootstrap_iters=0)
    assert [chat for chat, _ in model.sent] == [TASKS[name].messages(item, repeat) for item in items]
    for _, sent in model.sent:
        assert sent["until"] == []
        assert (sent["temperature"], sent["top_p"], sent["max_gen_toks"]) == (1.0, 0.95, 131072)
        assert sent["reasoning_effort"] == "max"
    found = results["results"][f"signoff_{name}"]
    assert [sample["doc"] for sample in results["samples"][f"signoff_{name}"]] == [
        {"row": row, "place": row} for row in range(6)
    ]  # no text
    assert (found["score,none"], found["unparsed,none"]) == (0.5, 0.5)


def test_a_wrong_hash_stops_lm_eval(files: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="other data"):
        _tasks("aime25", data=str(files["aime25"]), sha256="0" * 64, subset=True)


def test_option_order_does_not_depend_on_tasks_that_ran_before(files: dict[str, Path]) -> None:
    def chats(*before: str) -> list[Any]:
        for name in (*before, "gpqa_diamond"):
            loaded = _tasks(name, data=str(files[name]), subset=True, repeat=1)
        (task,) = loaded["tasks"].values()
        return [task.fewshot_context(doc, 0).prompt for doc in task.test_docs()]

    assert chats() == chats("aime25", "mrcr")


def test_the_answers_of_the_fixtures_are_in_range() -> None:
    assert all(0 <= aime25.question(0, row).answer <= 999 for row in invented.aime25())
