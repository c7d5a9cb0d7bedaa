"""The emulator's language: tokenizer, template, and what comes next."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from replay.emulator import language

Ids = st.lists(st.integers(language.FIRST_WORD, language.VOCAB_SIZE - 1), max_size=60)
Texts = st.text(max_size=60).filter(lambda text: "<|" not in text)
WordyTexts = st.lists(
    st.sampled_from([*language.WORDS[:5], " zzz", "bado", "\n", "é", "badofika", "<0x41>", " ", "  bado"])
).map("".join)


def test_the_words_are_4096_different_lower_case_ascii_ones() -> None:
    assert len(set(language.WORDS)) == 4096
    assert all(word[0] == " " and word[1:].isascii() and word[1:].islower() for word in language.WORDS)
    assert len(set(language.TOKENS)) == language.VOCAB_SIZE == language.tokenizer().get_vocab_size()


@given(Ids, Ids)
def test_word_ids_survive_decode_and_encode_also_across_a_join(left: list[int], right: list[int]) -> None:
    text = language.decode(left) + language.decode(right)
    assert language.tokenizer().encode(text).ids == left + right
    assert language.encode(text) == left + right


@settings(max_examples=300)
@given(st.one_of(Texts, WordyTexts))
def test_any_text_survives_encode_and_decode_and_the_quick_way_is_the_same(text: str) -> None:
    ids = language.tokenizer().encode(text).ids
    assert language.encode(text) == ids
    assert language.decode(ids) == text


def test_a_word_is_one_token_also_without_its_space_at_the_start_of_a_text() -> None:
    ids = language.encode("bado fika")
    assert len(ids) == 2
    assert [language.TOKENS[token] for token in ids] == ["bado", " fika"]


def test_special_tokens_in_a_text_are_taken_as_such() -> None:
    assert language.encode(" bado<|end|>") == [language.IDS[" bado"], language.END]
    assert language.encode("<|not special|>") == language.tokenizer().encode("<|not special|>").ids


def test_the_written_tokenizer_is_the_same_one(tmp_path: Path) -> None:
    language.write_tokenizer(tmp_path)
    text = "bado fika x\n✅"
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids == language.encode(text)


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), Ids), max_size=6), st.booleans())
def test_a_chat_prompt_is_its_contents_plus_a_fixed_overhead(
    messages: list[tuple[str, list[int]]], think: bool
) -> None:
    prompt = language.chat_prompt([(role, language.decode(ids)) for role, ids in messages], thinking=think)
    contents = sum(len(ids) for _, ids in messages)
    overhead = language.CHAT_OVERHEAD + language.MESSAGE_OVERHEAD * len(messages)
    assert len(prompt) == contents + overhead + think


def test_a_chat_prompt_is_a_prefix_of_the_next_turns_up_to_the_generation_prompt() -> None:
    first = language.chat_prompt([("user", " bado")])
    second = language.chat_prompt([("user", " bado"), ("assistant", " fika"), ("user", " goto")])
    assert second[: len(first)] == first
    with pytest.raises(ValueError, match="robot"):
        language.chat_prompt([("robot", "x")])


def test_the_next_token_is_a_known_function_of_all_that_it_says() -> None:
    # Pinned: the same words must come out in every process, Python version and release.
    assert [language.next_token((1, 2, 3), position, 7, False) for position in range(3)] == [5575, 4601, 4742]
    base = language.next_token((1, 2, 3), 4, 5, False)
    others = [((9, 2, 3), 4, 5), ((1, 9, 3), 4, 5), ((1, 2, 9), 4, 5), ((1, 2, 3), 9, 5), ((1, 2, 3), 4, 9)]
    changed = [language.next_token(before, position, seed, False) for before, position, seed in others]
    assert base not in changed


def test_the_words_are_spread_and_ends_come_at_their_rate() -> None:
    tokens = [language.next_token((position, 5, 6), position, 1, True) for position in range(100_000)]
    ends = tokens.count(language.EOS)
    assert ends / len(tokens) == pytest.approx(1 / language.MEAN_REPLY, rel=0.25)
    words = Counter(token for token in tokens if token != language.EOS)
    assert min(words) >= language.FIRST_WORD
    assert len(words) == 4096  # 24 of each on average
    assert max(words.values()) < 60
