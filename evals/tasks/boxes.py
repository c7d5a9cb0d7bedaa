r"""Answers in TeX and Markdown: the last ``\boxed{...}``, and text without its wrapping."""

from __future__ import annotations

import re
from typing import NamedTuple

_TOKEN = re.compile(r"(\\+(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_WRAPPING = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|rm|it|sf|tt)|bm|boldsymbol|boxed|fbox|mbox|displaystyle|left|right)"
    r"(?![a-zA-Z])|\\[()\[\]]|\*\*|__|[{}$]"
)
_SPACE = re.compile(r"\\(?:[,;:! ]|q?quad(?![a-zA-Z]))|[ \t~\u00a0]+")


class Box(NamedTuple):
    """The content of a box (None if it is never closed) and where the text goes on after it."""

    content: str | None
    end: int


def last_box(text: str) -> Box | None:
    r"""The last ``\boxed`` or ``\fbox``; of boxes in one another the outermost that is closed. Time is linear."""
    opened: list[int | None] = []  # where the content of each open brace starts, None for one that is no box
    closed: Box | None = None
    for token in _TOKEN.finditer(text):
        if token[1]:
            opened.append(token.end())
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened and (start := opened.pop()) is not None:
            closed = Box(text[start : token.start()], token.end())
    dangling = max((start for start in opened if start is not None), default=-1)
    return Box(None, dangling) if dangling > (closed.end if closed else -1) else closed


def plain(text: str) -> str:
    """The text without commands and signs that only change its looks. Lines stay lines."""
    return _SPACE.sub(" ", _WRAPPING.sub("", _SPACE.sub(" ", text)))
