"""Letters from every form of answer; option order as a pure function."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals import invented
from evals.tasks import gpqa_diamond
from evals.tasks.replies import Reply
from tests.evals.growth import growth

LETTERS = st.sampled_from("ABCD")


@pytest.mark.parametrize(
    ("text", "letter", "route"),
    [
        ("The answer is (C)", "C", "phrase"),
        ("the answer is C", "C", "phrase"),
        (r"\boxed{C}", "C", "boxed"),
        ("**Answer: C**", "C", "answer_line"),
        ("(B) is wrong; final: C", "C", "conclusion"),
        ("(D) looked likely … the answer is (C), which wins over (D).", "C", "phrase"),
        ("Using step 4 we get C", "C", "conclusion"),
        ("I cannot decide", None, None),
    ],
)
def test_br_43_the_letter_that_was_meant(text: str, letter: str | None, route: str | None) -> None:
    """Whatever the options say: the text "4" of option B makes no B of the step 4."""
    assert gpqa_diamond.find(text, False) == (None if letter is None else (letter, route))


@pytest.mark.parametrize(
    ("text", "letter", "route"),
    [
        # what others miss or misread
        ("**B**", "B", "last_line"),
        ("Answer: B", "B", "answer_line"),
        (r"\boxed{B}", "B", "boxed"),
        ("so (B). Note (C) is a distractor", "B", "conclusion"),
        ("Answer: B, because it is **a** racemic mixture", "B", "answer_line"),
        ("Answer: B\n\nIt was measured at 25 °**C**", "B", "answer_line"),
        # others
        ("Answer: A\nWait. That is the wrong sign.\nAnswer: D", "D", "answer_line"),
        ("**Answer:** (D)", "D", "answer_line"),
        (r"Answer: $\boxed{\text{D}}$", "D", "answer_line"),
        ("## Final answer: D) 25 K", "D", "answer_line"),
        ("Answer: A because it is acidic", "A", "answer_line"),
        (r"The final answer is $\boxed{\text{(D)}}$.", "D", "boxed"),
        ("Option D is the correct answer.", "D", "phrase"),
        ("The correct option is therefore **D**.", "D", "phrase"),
        ("The answer is A.\nAnswer: B", "B", "answer_line"),
        ("Answer:\n\nBoth metals are solid, so the answer is (D) alone.", "D", "phrase"),
        ("All in all:\n\n(D).", "D", "last_line"),
        ("Thus (B) is wrong. Hence D.", "D", "conclusion"),
    ],
)
def test_letters(text: str, letter: str, route: str) -> None:
    assert gpqa_diamond.find(text, False) == (letter, route)


@pytest.mark.parametrize(
    "text",
    [
        "answer: b",  # case-sensitive
        "Answer: A racemic mixture forms",
        "Answer: C or D",
        "Answer: Both",
        "Answer: B\nOn second thoughts:\nAnswer: the second and the third",  # an answer taken back does not count
        "The answer is not (B)",
        "So at 25 °C it boils, so C, D and A are left",
        "Thus B = 3 T",
        "It boils at 25 °**C**",
        "(C) is a distractor",
        "Note (C)",
        "",
    ],
)
def test_unparsed(text: str) -> None:
    assert gpqa_diamond.find(text, False) is None


@given(
    LETTERS,
    LETTERS,
    st.sampled_from(["%s", "(%s)", "**%s**", r"\text{%s}", r"\boxed{%s}", "$%s$", "%s.", "[%s]", "%s) 25 K", "*%s*"]),
    st.sampled_from(["Answer: ", "**Answer:** ", "Final answer: ", "answer: ", "The answer is: ", "ANSWER : "]),
)
def test_any_letter_in_any_wrapping(letter: str, other: str, wrapping: str, line: str) -> None:
    text = f"Option {other} looked likely, so ({other}).\nAnswer: {other}\nNo:\n{line}{wrapping % letter}\n"
    assert gpqa_diamond.find(text, False) == (letter, "answer_line")


@given(st.text(st.sampled_from("ABCDabc answer:().*\n\\{}°"), max_size=80), st.booleans())
def test_any_text_has_a_letter_or_none(text: str, cut: bool) -> None:
    found = gpqa_diamond.find(text, cut)
    assert found is None or found.given in gpqa_diamond.LETTERS


@pytest.mark.parametrize(
    "part", ["\n", "answer: ", "so it is ", "Answer:\n", "(A ", "answer is (", "The correct ", "A\n"]
)
def test_looping_replies_take_linear_time(part: str) -> None:
    assert growth(lambda size: gpqa_diamond.find(part * size, False)) < 30


def test_br_43_option_order_is_the_same_in_every_process_whatever_ran_before() -> None:
    here = []
    for repeat in range(20):
        random.seed(repeat)  # lm-eval's task shuffles with the global generator
        random.random()
        here.append(gpqa_diamond.order("rec00001", repeat))
    asked = "print([gpqa_diamond.order('rec00001', r) for r in range(20)])"
    code = f"import random; random.seed(9); from evals.tasks import gpqa_diamond; {asked}"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there.strip() == repr(here)
    assert here[:4] == [(0, 2, 1, 3), (0, 2, 3, 1), (3, 2, 0, 1), (3, 2, 1, 0)]  # and in every version


def test_option_orders_are_uniform_over_records_and_repeats() -> None:
    for orders in (
        Counter(gpqa_diamond.order("rec00001", repeat) for repeat in range(24_000)),
        Counter(gpqa_diamond.order(f"rec{number:05d}", 3) for number in range(24_000)),
    ):
        chi_squared = sum((orders[order] - 1000) ** 2 / 1000 for order in orders)
        assert len(orders) == 24
        assert chi_squared < 49.7  # 23 degrees of freedom, p = .001; the draws are fixed, so that this holds or not


def test_the_key_is_where_the_correct_option_stands() -> None:
    for number, row in enumerate(invented.gpqa_diamond(20)):
        item = gpqa_diamond.question(number, row)
        for repeat in range(8):
            (message,) = gpqa_diamond.messages(item, repeat)
            key = gpqa_diamond.key(item, repeat)
            assert f"\n{key}) {row['Correct Answer'].strip()}\n" in message["content"]
            assert message["content"].rstrip().splitlines()[-1].count("Answer: LETTER") == 1
            for letter in gpqa_diamond.LETTERS:
                judged = gpqa_diamond.judge(item, Reply(text=f"Answer: {letter}", finish_reason="stop"), repeat)
                assert judged.outcome == ("right" if letter == key else "wrong")


def test_options_that_are_the_same_are_refused() -> None:
    row = invented.gpqa_diamond(1)[0]
    with pytest.raises(ValueError, match="two options are the same"):
        gpqa_diamond.question(0, row | {"Incorrect Answer 2": row["Correct Answer"].strip()})
