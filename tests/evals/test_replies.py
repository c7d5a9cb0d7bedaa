"""Right, wrong, unparsed, truncated and error are told apart."""

from __future__ import annotations

import pytest

from evals.tasks import aime25, gpqa_diamond
from evals.tasks.replies import Reply, compare


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (Reply(text=r"\boxed{12}", finish_reason="stop"), "right"),
        (Reply(text=r"\boxed{13}", finish_reason="stop"), "wrong"),
        (Reply(text="No idea.", finish_reason="stop"), "unparsed"),
        (Reply(text=None, reasoning=r"maybe \boxed{12}", finish_reason="stop"), "unparsed"),
        (Reply(text=None, reasoning=r"maybe \boxed{12}", finish_reason="length"), "truncated"),
        (Reply(text=None, finish_reason="length"), "truncated"),
        (Reply(text=r"\boxed{12} and also \boxed{13", finish_reason="length"), "truncated"),
        (Reply(text="the answer is 12", finish_reason="length"), "truncated"),  # ... 12 thousand?
        (Reply(text=r"So \boxed{12}. To check,", finish_reason="length"), "right"),
        (Reply(text=None, finish_reason="stop"), "error"),
        (Reply(text="", finish_reason="stop"), "error"),
        (Reply(text=r"\boxed{12}", finish_reason="abort"), "error"),
        (Reply(error="HTTP 500"), "error"),
        # no reasoning parser on the server: a draft is no answer
        (Reply(text=r"<think>\boxed{12}</think>\boxed{13}", finish_reason="stop"), "wrong"),
        (Reply(text=r"<think>\boxed{12} no,", finish_reason="length"), "truncated"),
        (Reply(text=r"<think>\boxed{12}", finish_reason="stop"), "unparsed"),
    ],
)
def test_outcomes(reply: Reply, outcome: str) -> None:
    judged = compare(reply, "12", aime25.find)
    assert judged.outcome == outcome
    assert judged.score == (1.0 if outcome == "right" else 0.0)
    assert (judged.given is None) == (judged.route is None) == (outcome not in ("right", "wrong"))


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("Answer: C\nTo double-check, take", "right"),
        ("Let me see.\nAnswer: C", "truncated"),  # ... Cannot be told?
        ("So (C).\nTo double-check, take", "truncated"),
    ],
)
def test_a_cut_reply_needs_a_whole_answer_line(text: str, outcome: str) -> None:
    assert compare(Reply(text=text, finish_reason="length"), "C", gpqa_diamond.find).outcome == outcome
