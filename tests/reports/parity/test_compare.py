"""Two arms position by position, on records small enough to count by hand."""

from __future__ import annotations

import numpy as np
import pytest

from reports.parity.compare import Pair, pair
from reports.parity.load import Positions

Rows = list[tuple[int, int, int, float | None]]
"""Case, position, token, logprob; null: not told."""


def positions(rows: Rows, lists: dict[tuple[int, int], dict[int, float]] | None = None) -> Positions:
    """With lists of likely tokens, or without."""
    rows = sorted(rows)
    case, position = (np.array([row[at] for row in rows], np.int64) for at in (0, 1))
    width = max((len(each) for each in (lists or {}).values()), default=0)
    ids, logprobs = np.full((len(rows), width), -1, np.int32), np.full((len(rows), width), -np.inf, np.float32)
    for at, row in enumerate(rows):
        likely = sorted((lists or {}).get(row[:2], {}).items(), key=lambda each: -each[1])
        ids[at, : len(likely)] = [token for token, _ in likely]
        logprobs[at, : len(likely)] = [value for _, value in likely]
    return Positions(
        key=case << 48 | position,
        token=np.array([row[2] for row in rows], np.int32),
        logprob=np.array([np.nan if row[3] is None else row[3] for row in rows], np.float32),
        told=np.array([row[3] is not None for row in rows]),
        top_ids=ids,
        top_logprobs=logprobs,
    )


def compared(mine: Positions, theirs: Positions, *forced: int) -> Pair:
    return pair("A1", "B1", mine, theirs, lambda numbers: np.isin(numbers, forced))


def test_free_replies_are_compared_up_to_their_first_unlike_token() -> None:
    mine = positions([(0, 0, 5, -1.0), (0, 1, 6, -1.0), (0, 2, 7, -1.0), (0, 3, 8, -1.0)])
    theirs = positions([(0, 0, 5, -1.5), (0, 1, 6, -1.0), (0, 2, 9, -1.0), (0, 3, 8, -4.0)])
    found = compared(mine, theirs)
    assert found.name == "B1-A1"
    assert found.position.tolist() == [0, 1, 2]
    assert found.delta[:2].tolist() == [0.5, 0.0]
    assert np.isnan(found.delta[2])  # without lists nothing is known of the first arm's token
    assert (found.ends.steps.tolist(), found.ends.diverged.tolist()) == ([2], [True])


def test_an_unlike_free_token_is_found_in_the_other_arms_list() -> None:
    lists = {(0, 0): {5: -0.5, 6: -0.9}, (0, 1): {5: -0.1, 6: -3.0}}
    mine = positions([(0, 0, 5, -0.5), (1, 0, 5, -0.5)], {(0, 0): lists[0, 0], (1, 0): {5: -0.5, 7: -2.0}})
    theirs = positions([(0, 0, 6, -0.7), (1, 0, 6, -0.4)], {(0, 0): {6: -0.7, 5: -0.8}, (1, 0): {6: -0.4, 8: -3.5}})
    found = compared(mine, theirs)
    assert found.delta.tolist() == pytest.approx([0.3, 3.0])  # listed; not listed: at most as likely as the last
    assert found.differs.tolist() == [True, True]
    assert found.ends.gap.tolist() == pytest.approx([0.4, 1.5])


def test_forced_positions_are_all_compared_and_an_unlike_one_is_infinitely_far() -> None:
    mine = positions([(0, at, at, -1.0) for at in range(4)])
    theirs = positions([(0, 0, 0, -1.0), (0, 1, 9, -1.0), (0, 2, 2, -1.25), (0, 3, 3, -1.0)])
    found = compared(mine, theirs, 0)
    assert found.delta.tolist() == [0.0, np.inf, 0.25, 0.0]
    assert not len(found.ends.case)


def test_what_was_not_told_is_not_compared_and_what_is_no_number_is_infinitely_far() -> None:
    mine = positions([(0, 0, 1, None), (0, 1, 1, -1.0), (0, 2, 1, -1.0)])
    theirs = positions([(0, 0, 1, -1.0), (0, 1, 1, None), (0, 2, 1, float("nan"))])
    found = compared(mine, theirs, 0)
    assert found.told.tolist() == [False, False, True]
    assert found.delta[2] == np.inf


def test_a_reply_that_ends_where_the_other_goes_on_differs_there() -> None:
    mine = positions([(0, 0, 1, -1.0), (0, 1, 2, -1.0), (1, 0, 1, -1.0)])
    theirs = positions([(0, 0, 1, -1.0), (1, 0, 1, -1.0)])
    found = compared(mine, theirs)
    assert found.ends.steps.tolist() == [1, 1]
    assert found.ends.diverged.tolist() == [True, False]


def test_replies_of_one_arm_alone_are_left_out() -> None:
    found = compared(positions([(0, 0, 1, -1.0), (2, 0, 1, -1.0)]), positions([(1, 0, 1, -1.0), (2, 0, 1, -1.0)]))
    assert found.case.tolist() == [2]
    assert found.ends.case.tolist() == [2]


def test_the_same_lists_in_another_order_have_no_divergence() -> None:
    mine = positions([(0, 0, 1, -0.7)], {(0, 0): {1: -0.7, 2: -0.7}})
    theirs = positions([(0, 0, 1, -0.7)], {(0, 0): {2: -0.7, 1: -0.7}})
    assert compared(mine, theirs).kl.tolist() == pytest.approx([0.0], abs=1e-9)


def test_renumbered_positions_keep_their_order() -> None:
    found = positions([(3, 0, 30, -1.0), (3, 1, 31, -1.0), (5, 0, 50, -1.0)]).of({5: 0, 3: 1})
    assert found.case.tolist() == [0, 1, 1]
    assert found.token.tolist() == [50, 30, 31]
