r"""GPQA-Diamond: 198 questions of four options each.

Columns as on the hub (Idavidrein/gpqa, gpqa_diamond): Record ID, Question, Correct Answer, Incorrect Answer 1 to 3.
The order of the options is a pure function of (Record ID, repeat): the same on every backend and in every process.

Routes to a letter, in order; letters are upper case, and of several matches the last counts:

* answer_line: the last line that starts with "Answer:", as the prompt asks, goes on with a letter. If it goes on with
  something else, only that is looked at.
* boxed: the last ``\boxed{...}`` holds a letter.
* phrase: "the answer is (C)", "the correct option is C", "(C) is correct".
* last_line: the last line is a letter and nothing else.
* conclusion: "so (B).", "final: C", "we get C." at the end of a clause.

In a reply that its length limit ended, only whole lines and the first two routes count.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from itertools import permutations

import msgspec

from evals.tasks.boxes import last_box, plain
from evals.tasks.items import Item, Messages
from evals.tasks.replies import Found, Judged, Reply, compare

NAME = "gpqa_diamond"
COUNT = 198
HUB_CONFIG, HUB_SPLIT = "gpqa_diamond", "train"

LETTERS = "ABCD"
_ORDERS = list(permutations(range(4)))
_INSTRUCTION = (
    "Think step by step. The last line of your reply must be of the form 'Answer: LETTER' (without quotes), "
    "where LETTER is one of A, B, C and D."
)

# an upper-case letter that is no part of a word or formula, not the article "A", and not one of "C or D"
_LETTER = (
    r"[(\[\"'`*]*([A-D])(?![\w'’°+=-])(?!\s*[=<>≈])"
    r"(?!(?<=A)[ ]+(?!(?:because|since|as|due|is)\b)[a-z])(?![)\]]?\s*(?:or|and|/)\s*[(\[]?[A-D]\b)"
)
_LINE = re.compile(r"(?m:^)[ \t>#*-]*(?i:(?:the\s+)?(?:(?:correct|final|best|my)\s+)*answer\s*(?:is\s*)?[:：])\s*")
_OPTION = re.compile(_LETTER)
_PHRASE = re.compile(
    r"(?i:\b(?:answer|correct\s+(?:option|choice|one|statement))(?:\s+(?:choice|option|letter|to\s+[^\n.;:]{1,40}))?"
    r"\s*(?:\bis\b|\bwould\s+be\b|\bmust\s+be\b|:)\s*(?:(?:therefore|thus|clearly|option|choice|letter|answer)\b\s*|[:,]\s*){0,4})"
    rf"{_LETTER}"
    r"|(?<![\w°])\(?([A-D])\)?\s+(?i:is\s+(?:the\s+|therefore\s+)*(?:correct|right))\b"
)
_CONCLUSION = re.compile(
    r"(?i:\b(?:final(?:ly)?|so|thus|hence|therefore|conclude|go\s+with|(?:we|i)\s+(?:get|choose|pick|select))\b[\s:,]*"
    r"(?:(?:it|that|the|this|is|must|be|option|choice|answer|letter)\b\s*){0,5})"
    r"(?:\(([A-D])\)(?!\s+(?:is|are|was|can|cannot|does|looks?|seems?|fails?|has)\b)|([A-D])(?=\s*(?:[.;!]|(?m:$))))"
)
_LAST_LINE = re.compile(r"(?m:^)[^\w°\n]*(?:(?i:option|choice)\s+)?([A-D])[^\w°]*\Z")
_BOXED = re.compile(r"[^\w°]*([A-D])(?:[).:\]].*|[^\w°]*)", re.DOTALL)


class Question(Item, kw_only=True):
    """A question and its options, the correct one first."""

    question: str
    options: tuple[str, str, str, str]


class _Row(msgspec.Struct):
    id: str = msgspec.field(name="Record ID")
    question: str = msgspec.field(name="Question")
    correct: str = msgspec.field(name="Correct Answer")
    incorrect_1: str = msgspec.field(name="Incorrect Answer 1")
    incorrect_2: str = msgspec.field(name="Incorrect Answer 2")
    incorrect_3: str = msgspec.field(name="Incorrect Answer 3")


def question(row: int, record: Mapping[str, object]) -> Question:
    """The item of a record. Raises ValueError, in words that quote nothing of it."""
    found = msgspec.convert(record, _Row)
    texts = (found.correct, found.incorrect_1, found.incorrect_2, found.incorrect_3)
    first, second, third, fourth = (text.strip() for text in texts)
    options = (first, second, third, fourth)
    if not found.id.strip() or not found.question.strip() or not all(options):
        raise ValueError("Record ID, Question or an option is empty")
    if len(set(options)) < len(options):
        raise ValueError("two options are the same")
    return Question(row=row, id=found.id.strip(), question=found.question.strip(), options=options)


def order(record_id: str, repeat: int) -> tuple[int, ...]:
    """Which option stands at A, B, C and D; option 0 is the correct one. Each of the 24 orders is equally likely."""
    digest = hashlib.sha256(f"{record_id}\0{repeat}".encode()).digest()
    return _ORDERS[int.from_bytes(digest, "big") % len(_ORDERS)]


def key(item: Question, repeat: int) -> str:
    """The letter of the correct option."""
    return LETTERS[order(item.id, repeat).index(0)]


def messages(item: Question, repeat: int) -> Messages:
    """The chat to send: question, options in the repeat's order, and how to answer."""
    places = zip(LETTERS, order(item.id, repeat), strict=True)
    options = "\n".join(f"{letter}) {item.options[place]}" for letter, place in places)
    return [{"role": "user", "content": f"{item.question}\n\n{options}\n\n{_INSTRUCTION}"}]


def judge(item: Question, reply: Reply, repeat: int) -> Judged:
    """What the reply is worth: 1 or 0."""
    return compare(reply, key(item, repeat), find)


def strata(item: Question) -> dict[str, str]:
    """None: the questions are one set."""
    return {}


def summary(items: list[Question]) -> list[str]:
    """What the data hold, in lines to print."""
    keys = [key(item, 0) for item in items]
    counts = ", ".join(f"{letter} {keys.count(letter)}" for letter in LETTERS)
    return [f"correct letters in repeat 0: {counts}"] if items else []


def find(text: str, cut: bool) -> Found | None:
    """The letter in what was said, and its route: see the module."""
    if cut:
        text = text.rpartition("\n")[0]
    bare = plain(text)
    lines = list(_LINE.finditer(bare))
    if lines:
        bare = bare[lines[-1].end() :]
        if letter := _OPTION.match(bare):
            return Found(letter[1], "answer_line")
    elif letter := _boxed(text):
        return Found(letter[1], "boxed")
    if cut:
        return None
    for route, pattern in (("phrase", _PHRASE), ("last_line", _LAST_LINE), ("conclusion", _CONCLUSION)):
        matches = list(pattern.finditer(bare))
        if matches:
            return Found(matches[-1][matches[-1].lastindex or 0], route)
    return None


def _boxed(text: str) -> re.Match[str] | None:
    box = last_box(text)
    return _BOXED.fullmatch(plain(box.content)) if box and box.content else None
