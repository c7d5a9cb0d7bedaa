"""The order of blocks: balanced, so that a steady drift cancels."""

from __future__ import annotations

from replay.backends import NAMES
from replay.experiment import Experiment
from workloads.content import stable_random


def block_order(experiment: Experiment) -> list[str]:
    """Backend of each block: in each round A B B A or B A A B, drawn by the seed; or always A B. Each letter stands for
    the blocks of one start of its server, where servers are started in turn."""
    order: list[str] = []
    for number in range(experiment.replay.rounds):
        first, second = NAMES
        if experiment.replay.order == "AB":
            order += [first, second]
            continue
        if stable_random("order of blocks", experiment.replay.seed, number).random() < 0.5:
            first, second = second, first
        order += [first, second, second, first]
    return [name for name in order for _ in range(experiment.serving.blocks_per_start)]


def begins_start(experiment: Experiment, index: int) -> bool:
    """Whether block ``index`` (from 1) is the first of a start of its server, where servers are started in turn."""
    return (index - 1) % experiment.serving.blocks_per_start == 0
