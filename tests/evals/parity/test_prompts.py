"""Prompts are the same everywhere, and their digests too."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.parity.prompts import cut, digest, prompt
from replay.emulator import language
from workloads.content import Vocabulary, vocabulary_of_range, vocabulary_of_tokenizer

WORDS = vocabulary_of_range(100, 1000)


@given(seed=st.integers(0, 2**63), tokens=st.integers(0, 1500), fewer=st.integers(0, 1500))
def test_a_shorter_prompt_is_the_start_of_a_longer_one(seed: int, tokens: int, fewer: int) -> None:
    long = prompt(seed, tokens, WORDS)
    assert len(long) == tokens
    assert set(long) <= set(WORDS.ids)
    assert prompt(seed, min(fewer, tokens), WORDS) == long[:fewer]


def test_a_prompt_is_its_seed_s() -> None:
    """By hand: splitmix64 from SHA-256, as workloads/content.py says; the numbers may never change."""
    parts = b"".join(b"%d:%s" % (len(part), part) for part in (b"block", b"1", b"parity/7"))
    state = int.from_bytes(hashlib.sha256(hashlib.sha256(parts).digest() + b"0").digest()[:8], "little")
    expected = []
    for _ in range(5):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        expected.append(100 + ((z ^ z >> 31) >> 32) % 900)
    assert prompt(7, 5, WORDS) == expected
    assert prompt(8, 5, WORDS) != expected


def test_words_of_the_emulator_are_text_that_encodes_to_them_again() -> None:
    ids = prompt(1, 200, vocabulary_of_tokenizer(language.tokenizer()))
    assert language.encode(language.decode(ids)) == ids


def test_a_cut_is_the_prompt_and_the_start_of_its_reply() -> None:
    trace = np.array([5, 6, 7], np.int32)
    assert cut([1, 2], trace, 2) == [1, 2, 5, 6]
    assert cut([1, 2], trace, 0) == [1, 2]
    assert all(type(token) is int for token in cut([1, 2], trace, 3))


@pytest.mark.parametrize("ids", [[1, 258], np.array([1, 258], np.int64), (1, 258)])
def test_a_digest_is_of_the_ids_and_not_of_their_kind(ids: list[int]) -> None:
    assert digest(ids) == hashlib.sha256(b"\x01\0\0\0\x02\x01\0\0").hexdigest()[:16]
    assert digest([*ids, 0]) != digest(ids)


def test_a_vocabulary_of_one_word_is_enough() -> None:
    assert prompt(3, 4, Vocabulary(ids=[9])) == [9] * 4
