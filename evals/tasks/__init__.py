"""The benchmarks: one module each, listed in TASKS. lm_task.py and the YAML files offer them to lm-eval.

A task module offers what ``Task`` says. Words for people name items by their row; they never quote the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from evals.tasks import aime25, gpqa_diamond, mrcr
from evals.tasks.items import Item, Messages
from evals.tasks.replies import Judged, Reply

INCLUDE_PATH = Path(__file__).parent
"""For lm-eval: the folder of the YAML files. Their tasks are called signoff_NAME."""


class Task(Protocol):
    """What a task module offers. Items are of its own class, ``Question``."""

    NAME: str
    COUNT: int
    """Items of the whole benchmark."""
    HUB_SPLIT: str

    @property
    def HUB_CONFIG(self) -> str | None:
        """The hub's name for the part of its repository."""

    @property
    def Question(self) -> type[Item]:
        """The class of its items."""

    def question(self, row: int, record: Mapping[str, object], /) -> Item:
        """The item of a record. Raises ValueError, in words that quote nothing of it."""

    def messages(self, item: Any, repeat: int, /) -> Messages:
        """The chat to send."""

    def judge(self, item: Any, reply: Reply, repeat: int, /) -> Judged:
        """What a reply is worth."""

    def strata(self, item: Any, /) -> dict[str, str]:
        """By what results are split."""

    def summary(self, items: Any, /) -> list[str]:
        """What the data hold, in lines to print."""


TASKS: dict[str, Task] = {aime25.NAME: aime25, gpqa_diamond.NAME: gpqa_diamond, mrcr.NAME: mrcr}

TEXTS: dict[str, Callable[[Any], Iterable[str]]] = {mrcr.NAME: mrcr.texts}
"""Of tasks whose strata need the length of items: the texts that make it."""
