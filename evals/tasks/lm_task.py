"""The benchmarks as tasks of lm-eval: what the YAML files beside this name.

Each is sent as the chat that its module makes, turn by turn. lm-eval's --metadata carries ``data`` (see evals.data),
``sha256``, ``repeat`` and ``subset``; another hash stops the run. lm-eval's documents hold rows, no text: chats are
long, and its logs are not private. (Its --log_samples would write the chats all the same.)
"""

from __future__ import annotations

import json
from typing import Any

import datasets
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.api_models import JsonChatStr

from evals.data import load
from evals.tasks import TASKS
from evals.tasks.replies import Reply

_Doc = dict[str, int]
"""{row, place}: of the item in the data, and in ``items``."""


class ChatTask(ConfigurableTask):  # type: ignore[misc]  # lm-eval has no types
    """A task whose prompts are whole chats. Raises UserError if the data are not fit for use."""

    def __init__(self, config: dict[str, Any]) -> None:
        own = {key: value for key, value in config.items() if key != "class"}
        # the field only has to be set: without it lm-eval looks for metrics of our names on the hub
        super().__init__(config=own | {"process_results": "by the method of this name"})

    def download(self, *_: object, **__: object) -> None:
        """Read the items."""
        given: dict[str, Any] = self.config.metadata
        name = given["benchmark"]
        self.module, self.repeat = TASKS[name], given.get("repeat", 0)
        self.items = load(name, given["data"], sha256=given.get("sha256"), subset=given.get("subset", False)).items
        docs = [{"row": item.row, "place": place} for place, item in enumerate(self.items)]
        self.dataset = {"test": datasets.Dataset.from_list(docs)}

    def fewshot_context(self, doc: _Doc, *_: object, **__: object) -> JsonChatStr:
        """The chat, in the form that lm-eval's chat models send as it is."""
        return JsonChatStr(self.doc_to_text(doc))

    def doc_to_text(self, doc: _Doc, *_: object) -> str:
        """The chat as JSON."""
        return json.dumps(self.module.messages(self.items[doc["place"]], self.repeat), ensure_ascii=False)

    def doc_to_target(self, doc: _Doc, *_: object) -> str:
        """Nothing: replies are judged by the task's module."""
        return ""

    def process_results(self, doc: _Doc, results: list[str]) -> dict[str, float]:
        """Score of a reply of which only the text is known: it passes for whole."""
        judged = self.module.judge(self.items[doc["place"]], Reply(text=results[0]), self.repeat)
        return {"score": judged.score, "unparsed": float(judged.outcome == "unparsed")}
