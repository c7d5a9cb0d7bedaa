"""Which items the servers' context does not hold: prompts as long as the model's own tokenizer makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from evals.records import TaskPlan
from evals.tasks import TASKS
from evals.tasks.items import Item, Messages
from replay.pages import page
from replay.wire import Wire

_BEYOND = 2
"""A prompt of so many times the room in o200k_base tokens is too long in any tokens, and not worth counting."""


class _Counted(msgspec.Struct):
    count: int


async def too_long(wire: Wire, model: str, task: TaskPlan, items: Sequence[Item], room: int) -> list[int] | None:
    """Rows of the items whose prompts take more than ``room`` tokens, in order; None if the server does not count them
    (/tokenize). From the longest down they are counted until one takes half the room: shorter ones fit."""
    found = []
    for item in sorted(items, key=_length, reverse=True):
        if _length(item) <= _BEYOND * room:
            tokens = await _count(wire, model, TASKS[task.task].messages(item, 0), task.sampling)
            if tokens is None:
                return None
            if tokens <= room // 2:
                break
            if tokens <= room:
                continue
        found.append(item.row)
    return sorted(found)


def sizes(task: TaskPlan, items: Sequence[Item]) -> str:
    """How many items each bin of lengths holds, shortest first."""
    bins: dict[str, int] = {}
    for item in sorted(items, key=_length):
        name = TASKS[task.task].strata(item)["bin"]
        bins[name] = bins.get(name, 0) + 1
    return ", ".join(f"{name} {count:,}" for name, count in bins.items())


def _length(item: Item) -> int:
    assert item.tokens is not None  # by evals.data, of tasks with bins
    return item.tokens


async def _count(wire: Wire, model: str, chat: Messages, sampling: Mapping[str, object]) -> int | None:
    """Tokens of a chat as it will be sent. What vLLM makes of reasoning_effort in a request, its /tokenize has to be
    told."""
    effort = sampling.get("reasoning_effort")
    thinking = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    asked = {"model": model, "messages": chat, "chat_template_kwargs": thinking}
    reply = await page(wire, "/tokenize", msgspec.json.encode(asked), method="POST")
    if reply.failure is not None or reply.http_status != 200:
        return None
    try:
        return msgspec.json.decode(reply.body, type=_Counted).count
    except msgspec.MsgspecError:
        return None
