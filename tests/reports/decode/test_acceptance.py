"""Tokens per step, three ways."""

from __future__ import annotations

import pytest

from reports.counters import Delta
from reports.decode.acceptance import from_counters, weighed


def grown(**counts: float) -> list[Delta]:
    return [Delta(name, {}, value, False) for name, value in counts.items()]


def test_counters_by_hand() -> None:
    """Two streams of 13 tokens in 4 steps of 3 drafts accepted: 24 later tokens over 8 steps, 16 accepted."""
    counts = grown(
        generation_tokens=26,
        time_to_first_token_seconds_count=2,
        spec_decode_num_drafts=8,
        spec_decode_num_accepted_tokens=16,
    )
    assert from_counters(counts, 2) == pytest.approx(3.0)


def test_steps_without_drafts_and_drafts_beyond_the_end() -> None:
    """ngram: 10 tokens in 8 steps, of which 1 had a draft, 2 accepted. And: 4 steps with 5 accepted in each, whose last
    was cut: 21 tokens, G − A would be 1."""
    some = grown(generation_tokens=11, spec_decode_num_drafts=1, spec_decode_num_accepted_tokens=2)
    assert from_counters(some, 1) == pytest.approx(10 / 8)
    cut = grown(generation_tokens=22, spec_decode_num_drafts=4, spec_decode_num_accepted_tokens=20)
    assert from_counters(cut, 1) == pytest.approx(21 / 4)


def test_without_drafts_it_is_one_and_without_counters_unknown() -> None:
    assert from_counters(grown(generation_tokens=40, time_to_first_token_seconds_count=4), 4) == 1.0
    assert from_counters([], 4) is None


@pytest.mark.parametrize(
    ("three", "trusted", "value", "agree"),
    [
        ((5.98, 5.99, 5.98), "chunks", 5.98, True),
        ((10.0, 10.0, 1.0), "counters", 1.0, False),
        ((1.0, 1.0, 6.0), "counters", 6.0, False),
        ((4.0, 5.0, 5.0), "chunks", 4.0, False),
        ((3.0, 3.0, None), "chunks", 3.0, True),
        ((None, 3.0, None), "usage", 3.0, None),
        ((None, None, 2.0), "counters", 2.0, None),
        ((None, None, None), None, None, None),
    ],
)
def test_which_to_trust(
    three: tuple[float | None, float | None, float | None], trusted: str | None, value: float | None, agree: bool | None
) -> None:
    found = weighed(*three)
    assert (found.trusted, found.value, found.agree) == (trusted, value, agree)
    assert found.why or (agree and three[2])
