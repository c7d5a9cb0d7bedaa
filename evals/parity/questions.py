"""Invented questions in words, for checks that go through chats: the same ones from the same seeds."""

from __future__ import annotations

from workloads.content import stable_random

_TASKS = (
    "Explain to a beginner how {a} work.",
    "Write a short story about {a} and {b}.",
    "Compare {a} with {b} in five points.",
    "Plan a weekend course on {a} for people who know about {b}.",
    "A shop sells {m} boxes of {a} and {n} boxes of {b} a day. How many boxes is that in three weeks? Show each step.",
    "List the ten most common mistakes that people make with {a}.",
    "Write a Python function that keeps a stock of {a} and {b}, and explain it line by line.",
    "Argue for {a}, then against them, then decide.",
)
_SUBJECTS = (
    "lighthouses",
    "beehives",
    "harbour cranes",
    "apple orchards",
    "night trains",
    "pocket watches",
    "clay ovens",
    "rowing boats",
    "weather balloons",
    "stone bridges",
    "card games",
    "church organs",
    "paper kites",
    "salt mines",
    "sailing maps",
    "wooden toys",
)


def question(seed: int) -> str:
    """One question."""
    draw = stable_random("parity question", seed).random
    a, b = (_SUBJECTS[int(draw() * len(_SUBJECTS))] for _ in range(2))
    m, n = (2 + int(draw() * 40) for _ in range(2))
    return _TASKS[int(draw() * len(_TASKS))].format(a=a, b=b, m=m, n=n)
