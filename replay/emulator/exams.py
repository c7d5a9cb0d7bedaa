"""Exams with a known truth: the emulator answers the questions of a file right with the probabilities that it gives.

The file is a JSON list of ``Question``; both backends take the same one. What decides is drawn from the question's
``match``, the sampling seed (see requests.sampling_seed) and the server's noise seed alone, so that the same request
gets the same luck on every backend with the same two seeds: first its fate (error, truncated, nothing, an answer), then
whether the answer is right, then which wrong one and in which form. On the specialised backend ``harm`` lowers the bar
that the same number must stay under: it turns right answers into wrong ones and changes nothing else.

A reply runs through the engine like any other: its tokens (thought, answer, the end) are counted, take KV blocks and,
streamed, come in steps of the usual length. In a reply that is not streamed the whole thought comes with the end of the
prompt: it is counted, and takes no time. Stop strings are not looked for.

Only chats sit exams; requests that ignore the end of the text do not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from replay.emulator import language
from replay.emulator.noise import mix, text_number, unit
from replay.emulator.requests import Refused
from workloads.errors import UserError

FORMS = {
    "plain": "{}",
    "boxed": "Step by step we get there.\n\nTherefore the final answer is $\\boxed{{{}}}$.",
    "answer_line": "Step by step we get there.\n\nAnswer: {}",
    "phrase": "Step by step we get there, and so the answer is {}.",
}
"""How an answer is put: name -> the text, with {} for the answer."""
Form = Literal["plain", "boxed", "answer_line", "phrase"]

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]

_FATE, _LUCK, _WRONG, _FORM, _WORDS = range(0xE8A0, 0xE8A5)  # what a number is drawn for
_THOUGHTS = range(language.FIRST_WORD, language.VOCAB_SIZE)


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One question, and how well it is answered."""

    match: Annotated[str, msgspec.Meta(min_length=1)]
    """The question is asked where the chat's last message of a user holds this text. Of several the longest counts."""
    answer: str
    """The right answer."""
    wrong: tuple[str, ...] = ()
    """Wrong answers, equally likely."""
    lettered: bool = False
    """The answers are texts of options: given is the letter before the option in the message, as in "B) text"."""
    forms: Annotated[tuple[Form, ...], msgspec.Meta(min_length=1)] = ("plain",)
    """Equally likely."""
    p: Share = 1.0
    """Probability that an answer is right."""
    harm: Share = 0.0
    """What the specialised backend takes from ``p``."""
    thinking_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Tokens of reasoning before the answer."""
    error: Share = 0.0
    """Share of requests that fail with status 500."""
    truncate: Share = 0.0
    """Share of replies that think until their length limit."""
    null: Share = 0.0
    """Share of replies that hold nothing."""


class Script(NamedTuple):
    """A reply's output tokens, the end of the text included; the first ``thought`` of them are reasoning."""

    tokens: list[int]
    thought: int


def load(path: Path) -> list[Question]:
    """Read the questions of a file, longest ``match`` first. Raises UserError for a file that is not a list of them."""
    try:
        questions = msgspec.json.decode(path.read_bytes(), type=list[Question])
    except OSError as error:
        raise UserError(f"exams {path} cannot be read ({error.strerror}): give a JSON file of questions") from None
    except msgspec.DecodeError as error:
        raise UserError(f"exams {path}: {error}") from None
    for number, question in enumerate(questions):
        fault = _fault(question)
        if fault:
            raise UserError(f"exams {path}, question {number}: {fault}")
    if len({question.match for question in questions}) < len(questions):
        raise UserError(f"exams {path}: two questions have the same match; one of them would never be asked")
    return sorted(questions, key=lambda question: -len(question.match))


def _fault(question: Question) -> str:
    if question.harm > question.p:
        return f"harm {question.harm:g} is more than p {question.p:g}; there is no more to take"
    if question.p - question.harm < 1 and not question.wrong:
        return "some answers are wrong; give at least one text in wrong"
    if question.answer in question.wrong:
        return "answer stands in wrong, too"
    if question.error + question.truncate + question.null > 1:
        return "error, truncate and null add up to more than 1"
    return ""


def find(questions: Sequence[Question], message: str) -> Question | None:
    """The question that a message asks; None if it asks none. ``questions`` as ``load`` gives them."""
    return next((question for question in questions if question.match in message), None)


def reply(question: Question, message: str, limit: int, seed: int, *, specialised: bool) -> Script:
    """What to say to a question, ``limit`` output tokens at most. Raises Refused where the reply is an error."""
    subject = text_number(question.match)
    fate = unit(subject, seed, _FATE)
    if fate < question.error:
        raise Refused(500, "EngineCore encountered an issue (exams: error)", "InternalServerError")
    if fate < question.error + question.truncate:
        return Script(_thought(limit, mix(subject, seed, _WORDS)), limit)
    if fate < question.error + question.truncate + question.null:
        return Script([language.EOS], 0)
    right = unit(subject, seed, _LUCK) < question.p - (question.harm if specialised else 0.0)
    answer = question.answer if right else question.wrong[mix(subject, seed, _WRONG) % len(question.wrong)]
    if question.lettered:
        answer = _letter(answer, message)
    form = question.forms[mix(subject, seed, _FORM) % len(question.forms)]
    thought = _thought(question.thinking_tokens, mix(subject, seed, _WORDS))
    tokens = [*thought, *language.encode(FORMS[form].format(answer)), language.EOS]
    return Script(tokens[:limit], min(len(thought), limit))


def _letter(option: str, message: str) -> str:
    found = re.search(rf"^\(?([A-Z])[).:]\s*{re.escape(option)}\s*$", message, re.MULTILINE)
    if found is None:
        raise Refused(400, "exams: an option of this question does not stand in the message", param="messages")
    return found[1]


def _thought(length: int, luck: int) -> list[int]:
    """Words in the language's own order from one drawn: a thought is long, and nobody reads it."""
    start = luck % len(_THOUGHTS)
    rounds = -(-(start + length) // len(_THOUGHTS))
    return (list(_THOUGHTS) * rounds)[start : start + length]
