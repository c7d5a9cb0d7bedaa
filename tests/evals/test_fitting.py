"""Prompts counted by a server's tokenizer: which do not fit, and which need no counting."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from evals import fitting, invented
from evals.records import DataFacts, TaskPlan
from evals.tasks import mrcr
from replay.wire import Limits, Wire
from tests.evals.fixtures import items_of
from tests.scripted_server import Request, Step, reply, serve

ROWS = invented.mrcr(6)
ITEMS: list[Any] = items_of("mrcr", ROWS)
TASK = TaskPlan(
    task="mrcr",
    data=DataFacts(name="x", sha256="0", items=6),
    repeats=1,
    seed=1,
    sampling={"max_tokens": 10, "reasoning_effort": "max"},
    concurrency=1,
    margin=0.1,
)


def asked_for(lengths: list[int], counts: list[int | None], room: int) -> tuple[list[int] | None, list[int]]:
    """What is too long, by o200k ``lengths`` and the server's ``counts``, and the rows that it had to count, in order;
    None: it fails at that one."""
    for item, length in zip(ITEMS, lengths, strict=True):
        item.tokens = length
    counted = []

    def answer(request: Request) -> list[Step]:
        body = json.loads(request.body)
        row = [json.loads(each["prompt"]) for each in ROWS].index(body["messages"])
        counted.append(row)
        assert (request.path, body["model"]) == ("/tokenize", "m")
        assert body["chat_template_kwargs"] == {"reasoning_effort": "max", "enable_thinking": True}
        count = counts[row]
        return reply(404, {}) if count is None else reply(200, {"count": count, "max_model_len": 1, "tokens": []})

    async def ask(url: str) -> list[int] | None:
        async with Wire(url, Limits(), connections=1, headers={}) as wire:
            return await fitting.too_long(wire, "m", TASK, ITEMS, room)

    with serve(answer) as server:
        return asyncio.run(ask(server.url)), counted


def test_the_longest_are_counted_until_one_takes_half_the_room() -> None:
    lengths, counts = [201, 120, 90, 60, 40, 10], [0, 101, 100, 50, 0, 0]
    assert asked_for(lengths, [*counts], room=100) == ([0, 1], [1, 2, 3])


def test_a_server_that_does_not_count_says_nothing() -> None:
    assert asked_for([90] * 6, [None] * 6, room=100) == (None, [0])


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=6, max_size=6), st.sampled_from([0.7, 1.0, 1.3, 4.0]))
def test_none_is_forgotten_whatever_the_tokenizer(lengths: list[int], ratio: float) -> None:
    counts = [round(length * ratio) for length in lengths]
    wanted = [row for row in range(6) if counts[row] > 100 or lengths[row] > 200]
    found, _ = asked_for(lengths, [*counts], room=100)
    assert found == wanted


def test_bins_are_counted_shortest_first() -> None:
    for item, length in zip(ITEMS, [9000, 5000, 70_000, 5000, 8192, 9000], strict=True):
        item.tokens = length
    assert fitting.sizes(TASK, ITEMS) == "4k-8k 3, 8k-16k 2, 64k-128k 1"
    assert {mrcr.length_bin(item.tokens) for item in ITEMS} == {"4k-8k", "8k-16k", "64k-128k"}
