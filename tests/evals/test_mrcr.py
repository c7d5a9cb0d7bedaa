"""The published score and the secondary ones, bins, and true multi-turn chats."""

from __future__ import annotations

import difflib
import hashlib
import json
import statistics
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals import invented
from evals.tasks import mrcr
from evals.tasks.lengths import add_tokens
from evals.tasks.replies import Judged, Reply
from tests.evals import fixtures
from workloads.errors import UserError

ROWS = invented.mrcr(6, characters=1800)
ITEMS = [mrcr.question(row, record) for row, record in enumerate(ROWS)]


def _judge(item: mrcr.Question, text: str, finish_reason: str = "stop") -> Judged:
    return mrcr.judge(item, Reply(text=text, finish_reason=finish_reason), 0)


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: f"row {item.row}")
def test_an_exact_answer(item: mrcr.Question) -> None:
    judged = _judge(item, item.answer)
    assert (judged.outcome, judged.score) == ("right", 1.0)
    assert judged.scores == dict.fromkeys(
        ("after_newlines", "exact", "common_prefix", "right_needle", "without_autojunk"), 1.0
    )
    assert mrcr.needles(item)[int(judged.given or 0) - 1] == item.answer.removeprefix(item.prefix)


def test_the_random_string_comes_first_or_the_score_is_0() -> None:
    item = ITEMS[0]
    for text in ("Here it is: " + item.answer, item.answer.removeprefix(item.prefix), "no"):
        judged = _judge(item, text)
        assert (judged.outcome, judged.score, judged.scores) == ("unparsed", 0.0, {"after_newlines": 0.0})
    judged = _judge(item, "\n\n" + item.answer)  # evalscope's rule departs from the published one
    assert (judged.outcome, judged.score, judged.scores) == ("unparsed", 0.0, {"after_newlines": 1.0})


def test_no_reply_and_cut_replies() -> None:
    item = ITEMS[1]
    assert _judge(item, "", "length").outcome == "truncated"
    assert mrcr.judge(item, Reply(reasoning="the second", finish_reason="length"), 0).outcome == "truncated"
    assert mrcr.judge(item, Reply(error="HTTP 500"), 0).outcome == "error"
    half = item.answer[: len(item.prefix) + (len(item.answer) - len(item.prefix)) // 2]
    judged = _judge(item, half, "length")  # the string was found: scored as published
    assert judged.outcome == "wrong"
    assert judged.score == pytest.approx(2 / 3, abs=0.01)
    assert judged.scores["common_prefix"] == pytest.approx(0.5, abs=0.01)
    assert judged.scores["right_needle"] == 1.0


def test_small_damage_is_told_from_the_wrong_piece() -> None:
    official = []
    for item in ITEMS:
        pieces = mrcr.needles(item)
        assert len(pieces) == item.needles
        wanted = pieces.index(item.answer.removeprefix(item.prefix))
        words = pieces[wanted].split(" ")
        words[len(words) // 2] = "lantern"
        damaged = _judge(item, item.prefix + " ".join(words))
        assert (damaged.outcome, damaged.given) == ("wrong", str(wanted + 1))
        official.append(damaged.score)
        assert damaged.scores["without_autojunk"] > 0.98
        assert damaged.scores["right_needle"] == 1.0
        assert damaged.scores["exact"] == 0.0
        other = (wanted + 1) % len(pieces)
        mistaken = _judge(item, item.prefix + pieces[other])
        assert (mistaken.outcome, mistaken.given) == ("wrong", str(other + 1))
        assert mistaken.scores["right_needle"] == 0.0
        assert mistaken.score < damaged.score
    assert statistics.median(official) > 0.95  # autojunk can cost much on one text: hence the second score
    assert _judge(ITEMS[0], ITEMS[0].prefix + "I do not remember what was asked for.").given is None


@given(st.lists(st.sampled_from(ITEMS[0].answer.split(" ")[1:]), max_size=120))
def test_the_score_is_the_published_one(words: list[str]) -> None:
    item = ITEMS[0]
    text = item.prefix + " ".join(words)
    # as published: this order of arguments, autojunk at its default
    expected = difflib.SequenceMatcher(None, text[len(item.prefix) :], item.answer[len(item.prefix) :]).ratio()
    assert mrcr.official(text, item) == expected


def test_a_very_long_reply_is_judged_without_the_slow_score() -> None:
    item = ITEMS[0]
    judged = _judge(item, item.prefix + item.answer * 5)
    assert judged.outcome == "wrong"
    assert "without_autojunk" not in judged.scores


def test_the_chat_is_sent_turn_by_turn() -> None:
    for row, item in zip(ROWS, ITEMS, strict=True):
        chat = mrcr.messages(item, 0)
        assert chat == json.loads(row["prompt"])
        assert [message["role"] for message in chat] == ["user", "assistant"] * (len(chat) // 2) + ["user"]


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        (10, "<4k"), (4095, "<4k"), (4096, "4k-8k"), (8192, "4k-8k"), (8193, "8k-16k"), (131_072, "64k-128k"),
        (131_073, "128k-256k"), (1_048_576, "512k-1M"), (1_048_577, ">1M"),
    ],
)  # fmt: skip
def test_a_bin_holds_its_right_edge(tokens: int, name: str) -> None:
    assert mrcr.length_bin(tokens) == name


def test_lengths_come_from_the_table_of_the_same_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    items = [mrcr.question(row, record) for row, record in enumerate(ROWS)]
    data = tmp_path / "mrcr.jsonl"
    table = tmp_path / "mrcr.jsonl.o200k_base.json"
    fixtures.write_lengths(data, "a" * 64, [9000 + row for row in range(len(items))])
    add_tokens(items, mrcr.texts, table, "a" * 64)
    assert [item.tokens for item in items] == [9000, 9001, 9002, 9003, 9004, 9005]
    assert mrcr.strata(items[1]) == {"needles": "4", "bin": "8k-16k"}
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR"):
        add_tokens(items, mrcr.texts, table, "b" * 64)  # other data
    table.write_text("{")
    with pytest.raises(UserError, match="remove it"):
        add_tokens(items, mrcr.texts, table, "a" * 64)


def test_lengths_are_counted_where_the_encoding_is_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Words:
        def encode_ordinary(self, text: str) -> list[int]:
            return [len(word) for word in text.split()]

    stub = types.ModuleType("tiktoken")
    stub.get_encoding = lambda name: {"o200k_base": Words()}[name]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tiktoken", stub)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    items = [mrcr.question(row, record) for row, record in enumerate(ROWS[:2])]
    table = tmp_path / "table.json"
    with pytest.raises(UserError, match="neither"):
        add_tokens(items, mrcr.texts, table, "a" * 64)  # the folder holds no copy: tiktoken would download one
    address = b"https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"
    (tmp_path / hashlib.sha1(address).hexdigest()).touch()
    add_tokens(items, mrcr.texts, table, "a" * 64)
    chat = json.loads(ROWS[1]["prompt"])
    words = sum(len(message["content"].split()) for message in chat) + len(ROWS[1]["answer"].split())
    assert items[1].tokens == words
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR")
    again = [mrcr.question(row, record) for row, record in enumerate(ROWS[:2])]
    add_tokens(again, mrcr.texts, table, "a" * 64)  # from the table that was written
    assert [item.tokens for item in again] == [item.tokens for item in items]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"prompt": "hello"}, "prompt is not the JSON of a chat"),
        ({"prompt": '[{"role": "user"}]'}, "missing required field `content`"),
        ({"prompt": '[{"role": "assistant", "content": "x"}]'}, "does not end in a message of the user"),
        ({"prompt": '[{"role": "secret words", "content": "x"}]'}, "a role other than"),
        ({"random_string_to_prepend": "other"}, "does not start with random_string_to_prepend"),
        ({"random_string_to_prepend": ""}, "does not start with random_string_to_prepend"),
        ({"n_needles": 3}, "n_needles is none of"),
        ({"n_needles": "secret words"}, "n_needles"),
    ],
)
def test_rows_that_are_refused(change: dict[str, object], fault: str) -> None:
    with pytest.raises(ValueError, match=fault) as caught:
        mrcr.question(0, ROWS[0] | change)
    assert "secret" not in str(caught.value)
