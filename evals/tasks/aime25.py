r"""AIME 2025: 30 questions, whose answers are integers from 0 to 999.

Columns as on the hub (math-ai/aime25): id, problem, answer. Routes to an answer, in order; what is not found is
unparsed, never guessed at:

* boxed: the last ``\boxed{...}`` holds an integer, whatever wraps it (``073``, ``\text{73}``, ``m+n=73``, ``73.0``).
  A last box that is never closed hides the answer: no earlier box takes its place. After one that holds something else,
  only what follows it is looked at.
* phrase: the last "answer is ..." or "answer: ..." that goes on with an integer.
* last_line: the last line is an integer and nothing else.

In a reply that its length limit ended, only a box counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from evals.tasks.boxes import last_box, plain
from evals.tasks.items import Item, Messages
from evals.tasks.replies import Found, Judged, Reply, compare

NAME = "aime25"
COUNT = 30
HUB_CONFIG, HUB_SPLIT = None, "test"

_INSTRUCTION = r"Please reason step by step, and put your final answer, an integer, within \boxed{}."

_INTEGER = re.compile(r"([+-]?)0*([0-9]{1,18})(?:\.0*)?")
_DEGREES = re.compile(r"(?<=[0-9])\s*(?:\^?\s*\\circ|°|degrees?\b)")
_ENDS = " .,;:!*_()[]\"'`"
_PHRASE = re.compile(r"\banswer\b[^\n.:=0-9]{0,60}?(?:\bis\b|[:=])\s*([^\n]*)", re.IGNORECASE)
_CLAUSE = re.compile(r"[.,;!]\s|\s(?:since|because|which|where|as|so)\b|\s\(")


class Question(Item, kw_only=True):
    """A problem and its answer."""

    problem: str
    answer: int


class _Row(msgspec.Struct):
    id: str | int
    problem: str
    answer: str | int | float


def question(row: int, record: Mapping[str, object]) -> Question:
    """The item of a record. Raises ValueError, in words that quote nothing of it."""
    found = msgspec.convert(record, _Row, strict=False)
    answer = integer(str(found.answer))
    if answer is None or not 0 <= answer <= 999:
        raise ValueError("answer is not an integer from 0 to 999")
    if not found.problem.strip():
        raise ValueError("problem is empty")
    return Question(row=row, id=str(found.id), problem=found.problem, answer=answer)


def messages(item: Question, repeat: int) -> Messages:
    """The chat to send; the same in every repeat."""
    return [{"role": "user", "content": f"{item.problem.strip()}\n\n{_INSTRUCTION}"}]


def judge(item: Question, reply: Reply, repeat: int) -> Judged:
    """What the reply is worth: 1 or 0."""
    return compare(reply, str(item.answer), find)


def strata(item: Question) -> dict[str, str]:
    """None: the questions are one set."""
    return {}


def summary(items: list[Question]) -> list[str]:
    """What the data hold, in lines to print."""
    answers = [item.answer for item in items]
    return [f"answers: integers from {min(answers)} to {max(answers)}"] if answers else []


def find(text: str, cut: bool) -> Found | None:
    """The answer in what was said, and its route: see the module."""
    box = last_box(text)
    if box is not None:
        if box.content is None:
            return None
        number = integer(box.content)
        if number is not None:
            return Found(str(number), "boxed")
        text = text[box.end :]
    if cut:
        return None
    text = plain(text)
    for rest in reversed(_PHRASE.findall(text)):
        number = integer(_CLAUSE.split(rest, maxsplit=1)[0])
        if number is not None:
            return Found(str(number), "phrase")
    last = text.rstrip().rpartition("\n")[2]
    number = None if "=" in last else integer(last)
    return None if number is None else Found(str(number), "last_line")


def integer(text: str) -> int | None:
    """The integer that the text is, or that its equation ends in, without its wrapping; None if it is none."""
    bare = _DEGREES.sub("", plain(text).replace("\u2212", "-")).rpartition("=")[2].strip().strip(_ENDS)
    whole = _INTEGER.fullmatch(bare)
    return None if whole is None else int(whole[1] + whole[2])
