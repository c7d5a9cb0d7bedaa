"""The order of blocks, for every setting of it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from replay.experiment import Experiment, experiment_of
from replay.order import begins_start, block_order


def experiment(blocks_per_start: int = 1, **replay: Any) -> Experiment:
    served = {"serve": {"command": ["vllm", "serve", "m"]}}
    return experiment_of(
        {
            "model": "m",
            "workload": {"demo": True},
            "replay": replay,
            "serving": {"blocks_per_start": blocks_per_start},
            "backends": {"baseline": served, "candidate": served},
        }
    )


@given(st.integers(0, 50), st.integers(1, 6), st.integers(1, 4))
def test_a_steady_drift_cancels_in_every_round(seed: int, rounds: int, blocks_per_start: int) -> None:
    order = block_order(experiment(blocks_per_start, seed=seed, rounds=rounds))
    size = 4 * blocks_per_start
    assert len(order) == rounds * size
    for start in range(0, len(order), size):
        places = {name: [n for n, each in enumerate(order[start : start + size]) if each == name] for name in order}
        assert len(places["baseline"]) == len(places["candidate"])
        assert sum(places["baseline"]) == sum(places["candidate"])


def test_the_seed_draws_who_is_first() -> None:
    firsts = [block_order(experiment(seed=seed))[0] for seed in range(40)]
    assert set(firsts) == {"baseline", "candidate"}
    assert block_order(experiment(seed=3)) == block_order(experiment(seed=3))


def test_ab_is_always_the_baseline_first() -> None:
    for seed in range(10):
        assert block_order(experiment(seed=seed, rounds=2, order="AB")) == ["baseline", "candidate"] * 2


def test_each_letter_stands_for_the_blocks_of_one_start() -> None:
    described = experiment(3, order="AB")
    assert block_order(described) == ["baseline"] * 3 + ["candidate"] * 3
    assert [index for index in range(1, 7) if begins_start(described, index)] == [1, 4]
    assert all(begins_start(experiment(), index) for index in range(1, 5))
