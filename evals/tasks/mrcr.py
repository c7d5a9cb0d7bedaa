"""OpenAI MRCR: find one of several alike pieces of writing in a long chat, and give it back word for word.

Columns as on the hub (openai/mrcr): prompt (a JSON string: the chat), answer, random_string_to_prepend, n_needles.

Score, as published: 0 unless the reply starts with the random string; else the ratio of
difflib.SequenceMatcher(None, reply, answer) after the string is taken off both. Of the secondary scores only the first
is other than 0 where the official score is 0:

* after_newlines: the official score of the reply without leading newlines (evalscope's rule).
* without_autojunk: the ratio with autojunk=False. Left out of replies over four times as long as the answer.
* exact: 1 for the answer and nothing else.
* common_prefix: characters up to the first difference, as a share of the answer.
* right_needle: 1 if the piece given back is the one asked for, whatever its damage.

``given`` counts which of the alike pieces came back, from 1. The outcome is right for an exact answer; unparsed for a
whole reply without the random string.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from itertools import pairwise, takewhile

import msgspec

from evals.tasks.items import Item, Messages
from evals.tasks.replies import Judged, Reply, lost, nothing_found, said

NAME = "mrcr"
COUNT = 2400
HUB_CONFIG, HUB_SPLIT = None, "train"

EDGES = [4096 * 2**power for power in range(9)]
"""Of the bins, in o200k_base tokens of prompt and answer. A bin holds its right edge; the first holds both."""
_NAMES = ["4k", "8k", "16k", "32k", "64k", "128k", "256k", "512k", "1M"]
BINS = [f"<{_NAMES[0]}", *(f"{low}-{high}" for low, high in pairwise(_NAMES)), f">{_NAMES[-1]}"]

_LONG = 4
_SAME_PIECE = 0.3
"""Share of a reply's runs of three words that must stand in a piece to be called that piece."""


class _Message(msgspec.Struct):
    role: str
    content: str


class Question(Item, kw_only=True):
    """A chat and the answer that it asks for."""

    prompt: str
    """The chat as JSON, as it stands in the data: messages are made when they are needed, for the chats are long."""
    answer: str
    prefix: str
    needles: int


class _Row(msgspec.Struct):
    prompt: str
    answer: str
    random_string_to_prepend: str
    n_needles: int


def question(row: int, record: Mapping[str, object]) -> Question:
    """The item of a record. Raises ValueError, in words that quote nothing of it."""
    found = msgspec.convert(record, _Row, strict=False)
    try:
        chat = msgspec.json.decode(found.prompt, type=list[_Message])
    except msgspec.DecodeError as error:
        raise ValueError(f"prompt is not the JSON of a chat: {error}") from None
    if any(message.role not in ("system", "user", "assistant") for message in chat):
        raise ValueError("prompt has a role other than system, user and assistant")
    if found.n_needles not in (2, 4, 8):
        raise ValueError("n_needles is none of 2, 4 and 8")
    if not chat or chat[-1].role != "user":
        raise ValueError("prompt does not end in a message of the user")
    if not found.random_string_to_prepend or not found.answer.startswith(found.random_string_to_prepend):
        raise ValueError("answer does not start with random_string_to_prepend")
    return Question(
        row=row,
        id=hashlib.sha256(f"{found.prompt}\0{found.answer}".encode()).hexdigest()[:16],
        prompt=found.prompt,
        answer=found.answer,
        prefix=found.random_string_to_prepend,
        needles=found.n_needles,
    )


def messages(item: Question, repeat: int) -> Messages:
    """The chat to send, turn by turn; the same in every repeat."""
    return msgspec.json.decode(item.prompt, type=Messages)


def judge(item: Question, reply: Reply, repeat: int) -> Judged:
    """What the reply is worth: 0 to 1. Takes tenths of a second if it is not exact, seconds if it is endless."""
    text = said(reply)
    if lost(reply) or not text.startswith(item.prefix):
        after_newlines = official(text.lstrip("\n"), item)
        return msgspec.structs.replace(nothing_found(reply), scores={"after_newlines": after_newlines})
    score = official(text, item)
    given, answer = text.removeprefix(item.prefix), item.answer.removeprefix(item.prefix)
    exact = given == answer
    pieces = needles(item)
    which = closest(given, pieces)
    scores = {
        "after_newlines": score,
        "exact": float(exact),
        "common_prefix": _alike(given, answer) / max(len(answer), 1),
        "right_needle": float(exact or (which is not None and pieces[which].strip() == answer.strip())),
    }
    if len(given) <= _LONG * len(answer):
        scores["without_autojunk"] = 1.0 if exact else SequenceMatcher(None, given, answer, autojunk=False).ratio()
    return Judged(
        outcome="right" if exact else "wrong",
        score=score,
        given=None if which is None else str(which + 1),
        route="random_string",
        scores=scores,
    )


def strata(item: Question) -> dict[str, str]:
    """Needles, and the bin of its length where that is known."""
    return {"needles": str(item.needles)} | ({} if item.tokens is None else {"bin": length_bin(item.tokens)})


def summary(items: list[Question]) -> list[str]:
    """What the data hold, in lines to print."""
    lines = []
    for count in sorted({item.needles for item in items}):
        bins = Counter(length_bin(item.tokens) for item in items if item.needles == count and item.tokens is not None)
        sizes = ", ".join(f"{name} {bins[name]}" for name in BINS if bins[name])
        lines.append(f"{count} needles: {sizes or 'lengths unknown'}")
    if not items:
        return []
    alike = sum(len(needles(item)) != item.needles for item in items)
    return [
        *lines,
        "bins: o200k_base tokens of prompt and answer; a bin holds its right edge (8,192 is in 4k-8k)",
        *([f"{alike} items in which other than n_needles alike pieces were found"] if alike else []),
    ]


def texts(item: Question) -> Iterable[str]:
    """Whose tokens make the item's length: what all messages say, and the answer."""
    yield from (message["content"] for message in messages(item, 0))
    yield item.answer


def official(response: str, item: Question) -> float:
    """The published score: see the module. The order of the matcher's arguments matters."""
    if not response.startswith(item.prefix):
        return 0.0
    given, answer = response.removeprefix(item.prefix), item.answer.removeprefix(item.prefix)
    return 1.0 if given == answer else SequenceMatcher(None, given, answer).ratio()


def length_bin(tokens: int) -> str:
    """The name of the bin that holds a length."""
    return BINS[1] if tokens == EDGES[0] else BINS[bisect_left(EDGES, tokens)]


def needles(item: Question) -> list[str]:
    """The alike pieces of writing, in order: replies to the same request as the one asked for. Empty if not found."""
    chat = messages(item, 0)
    asked = item.answer.removeprefix(item.prefix).strip()
    turns = [
        (before["content"], after["content"])
        for before, after in pairwise(chat)
        if (before["role"], after["role"]) == ("user", "assistant")
    ]
    request = next((request for request, piece in turns if piece.strip() == asked), None)
    return [piece for other, piece in turns if other == request]


def closest(given: str, pieces: list[str]) -> int | None:
    """Which piece the text is, by the share of its runs of three words that stand in it; None if it is none of them."""
    runs = _runs(given)
    shares = [len(runs & _runs(piece)) / len(runs) for piece in pieces] if runs else []
    best = max(range(len(shares)), key=shares.__getitem__, default=None)
    return best if best is not None and shares[best] >= _SAME_PIECE else None


def _runs(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return set(zip(words, words[1:], words[2:], strict=False))


def _alike(given: str, answer: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(given, answer, strict=False)))
