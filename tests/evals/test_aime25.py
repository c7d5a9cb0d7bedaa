"""Integers in every wrapping; gold answers in range; nothing guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals import invented
from evals.tasks import aime25
from evals.tasks.replies import Reply
from tests.evals.growth import growth

NUMBERS = st.integers(0, 999)
WRAPPINGS = [r"\text{%s}", r"\mathbf{%s}", r"\mathrm{ %s }", "{%s}", "$%s$", " %s ", "%s.", "%s,", r"\boxed{%s}"]
WRAPPINGS += [r"\left(%s\right)", "**%s**", r"\(%s\)", r"\,%s\,"]


@pytest.mark.parametrize(
    ("text", "gold", "outcome"),
    [
        (r"\boxed{033}", "33", "right"),
        (r"\boxed{33}", "033", "right"),
        (r"\boxed {70}", "70", "right"),
        (r"We use \boxed notation here. … \boxed{70}", "70", "right"),
        (r"\boxed{\text{70}}", "70", "right"),
        (r"\boxed{70.0}", "70", "right"),
        (r"\boxed{468,}", "468", "right"),
        ("$x=1$ and the answer is $70$.", "70", "right"),
        (r"First \boxed{12}, no: \boxed{13}", "13", "right"),
        (r"\boxed{711}", "11", "wrong"),
        (r"\boxed{149}", "49", "wrong"),
    ],
)
def test_br_41_formatting_decides_nothing(text: str, gold: str, outcome: str) -> None:
    item = aime25.question(0, {"id": "0", "problem": "?", "answer": gold})
    assert aime25.judge(item, Reply(text=text, finish_reason="stop"), 0).outcome == outcome


def test_br_41_a_box_that_is_cut_off_is_no_answer() -> None:
    item = aime25.question(0, {"id": "0", "problem": "?", "answer": "12"})
    reply = Reply(text=r"\boxed{12} … \boxed{13", finish_reason="length")
    assert aime25.judge(item, reply, 0).outcome == "truncated"


@pytest.mark.parametrize(
    ("text", "gold", "route"),
    [
        # what lm-eval marks wrong
        (r"\boxed{073}", "73", "boxed"),
        (r"\boxed{\mathbf{73}}", "73", "boxed"),
        (r"\boxed{73.}", "73", "boxed"),
        (r"\boxed{m+n=73}", "73", "boxed"),
        ("ANSWER: 73", "73", "phrase"),
        ("Therefore, the answer is 73, since all cases are covered.", "73", "phrase"),
        # others
        (r"\boxed{\boxed{73}}", "73", "boxed"),
        (r"\\boxed{73}", "73", "boxed"),
        (r"\fbox{73}", "73", "boxed"),
        (r"\boxed{ \displaystyle 73 }", "73", "boxed"),
        (r"\boxed{73^{\circ}}", "73", "boxed"),
        (r"\boxed{\left(73\right)}", "73", "boxed"),
        (r"The set \{1, 2\} gives $\boxed{73}$, as \boxed{} asks.", "73", None),
        (r"With an open \boxed{ in between: \boxed{73}", "73", "boxed"),
        ("**Final Answer:**\n**73**", "73", "phrase"),
        ("### Answer\n\n$73$\n", "73", "last_line"),
        ("The answer to the question is m+n = 73.", "73", "phrase"),
    ],
)
def test_right(text: str, gold: str, route: str | None) -> None:
    item = aime25.question(0, {"id": "0", "problem": "?", "answer": gold})
    judged = aime25.judge(item, Reply(text=text, finish_reason="stop"), 0)
    if route is None:  # an empty last box: nothing is guessed
        assert judged.outcome == "unparsed"
    else:
        assert (judged.outcome, judged.route) == ("right", route)


@pytest.mark.parametrize(
    ("text", "gold"),
    [(r"\boxed{-11}", 11), (r"\boxed{12} then \boxed{13}", 12)],
)
def test_wrong(text: str, gold: int) -> None:
    item = aime25.question(0, {"id": "0", "problem": "?", "answer": gold})
    assert aime25.judge(item, Reply(text=text, finish_reason="stop"), 0).outcome == "wrong"


@pytest.mark.parametrize(
    "text",
    [
        "I give up after 12 tries.",
        "It is $3$ or so, from $x=7$ to $y=9$",  # never the text between the first and the last dollar
        r"\boxed{12.5}",
        r"\boxed{\frac{1}{2}}",
        r"\boxed{7^2}",
        r"\boxed{7 3}",
        r"\boxed{7*3}",
        r"\boxed{12} and then \boxed{13",
        r"The answer is 12. \boxed{12.5}",
        "the answer is 70 or 71",
        "the answer is not 70",
        "the answer is 7.5",
        f"\\boxed{{{'9' * 5000}}}",
    ],
)
def test_unparsed(text: str) -> None:
    assert aime25.find(text, False) is None


@given(
    NUMBERS,
    st.integers(0, 3),
    st.lists(
        st.sampled_from(WRAPPINGS),
        max_size=4,
    ),
    st.sampled_from(["%s", "m+n=%s", "x = y = %s", "%s.0", r"%s^\circ"]),
)
def test_any_integer_in_any_wrapping(number: int, zeros: int, wrappings: list[str], form: str) -> None:
    text = form % ("0" * zeros + str(number))
    for wrapping in wrappings:
        text = wrapping % text
    found = aime25.find(rf"As $4 < 5$, \boxed{{{text}}} it is.", False)
    assert found is not None
    assert found.given == str(number)


@given(NUMBERS, NUMBERS, st.text(st.characters(exclude_characters="\\{}"), max_size=60))
def test_the_last_box_counts(first: int, last: int, between: str) -> None:
    found = aime25.find(rf"\boxed{{{first}}}{between}\boxed{{{last}}} {between}", False)
    assert found == (str(last), "boxed")


@given(st.text(st.sampled_from("\\boxed{}$=. answeri7\n*"), max_size=80), st.booleans())
def test_any_text_has_a_number_or_none(text: str, cut: bool) -> None:
    found = aime25.find(text, cut)
    assert found is None or str(int(found.given)) == found.given


@pytest.mark.parametrize(
    "part", [r"\boxed{", "{", "answer ", "answer: 7 or 8 ", r"\boxed{\text{", "7 ", "answer =\n", "="]
)
def test_looping_replies_take_linear_time(part: str) -> None:
    assert growth(lambda size: aime25.find(part * size, False)) < 30


@pytest.mark.parametrize(("answer", "gold"), [("073", 73), (" 73 ", 73), (73, 73), (73.0, 73), ("336^\\circ", 336)])
def test_gold_answers(answer: object, gold: int) -> None:
    assert aime25.question(0, {"id": 1, "problem": "?", "answer": answer}).answer == gold


@pytest.mark.parametrize("answer", ["1000", "-1", "73.5", "", "seventy", None])
def test_gold_answers_that_are_refused(answer: object) -> None:
    with pytest.raises(ValueError, match="answer"):
        aime25.question(0, {"id": "0", "problem": "?", "answer": answer})


def test_the_prompt_asks_for_a_box() -> None:
    row = invented.aime25()[3]
    (message,) = aime25.messages(aime25.question(3, row), 0)
    assert message["role"] == "user"
    assert message["content"].startswith(row["problem"])
    assert r"\boxed{}" in message["content"].removeprefix(row["problem"])
