"""The answer key with which the emulator sits an exam (replay/emulator/exams.py), from the items of a task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from evals.tasks import aime25, gpqa_diamond, mrcr
from evals.tasks.items import Item
from replay.emulator.exams import Question

Figure = float | Callable[[Any], float]
"""One number for all items, or that of each item: lambda item: 0.3 if item.tokens > 131072 else 0."""


def exams_for(
    items: Sequence[Any], *, p: Figure = 0.8, harm: Figure = 0.0, thinking_tokens: int = 0, **shares: float
) -> list[Question]:
    """The exam of items of any task: ``p`` right, less ``harm`` on the specialised backend. ``shares``: of truncate,
    error and null."""
    return [
        msgspec.structs.replace(
            _known(item), p=_of(p, item), harm=_of(harm, item), thinking_tokens=thinking_tokens, **shares
        )
        for item in items
    ]


def write_exams(questions: Sequence[Question], path: Path) -> Path:
    """The file for ``emulator.exams``."""
    path.write_bytes(msgspec.json.encode(questions))
    return path


def _of(figure: Figure, item: Item) -> float:
    return figure(item) if callable(figure) else figure


def _known(item: Item) -> Question:
    match item:
        case aime25.Question():
            return Question(
                match=item.problem.strip(),
                answer=str(item.answer),
                wrong=tuple(str((item.answer + by) % 1000) for by in (1, 10, 500)),
                forms=("boxed", "phrase", "plain"),
            )
        case gpqa_diamond.Question():
            right, *wrong = item.options
            return Question(
                match=item.question,
                answer=right,
                wrong=tuple(wrong),
                lettered=True,
                forms=("answer_line", "boxed", "phrase", "plain"),
            )
        case mrcr.Question():
            others = [piece for piece in mrcr.needles(item) if item.prefix + piece != item.answer]
            return Question(match=item.prefix, answer=item.answer, wrong=tuple(item.prefix + piece for piece in others))
    raise TypeError(f"no exam for {type(item)}")
