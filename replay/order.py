"""The order of blocks and of windows: balanced, so that a steady drift cancels."""

from __future__ import annotations

from collections.abc import Sequence

from replay.backends import NAMES
from replay.experiment import Decode, Experiment
from replay.records import Cell, WindowPlace
from workloads.content import stable_random


def block_order(experiment: Experiment) -> list[str]:
    """Backend of each block: in each round A B B A or B A A B, drawn by the seed; or always A B. Each letter stands for
    the blocks of one start of its server, where servers are started in turn."""
    order: list[str] = []
    for number in range(experiment.replay.rounds):
        if experiment.replay.order == "AB":
            order += NAMES
        else:
            order += _balanced("order of blocks", experiment.replay.seed, number)
    return [name for name in order for _ in range(experiment.serving.blocks_per_start)]


def window_order(decode: Decode, cells: Sequence[Cell], seed: int) -> list[WindowPlace]:
    """Backend and cell of each window. For each setup, and in it for each round, four passes over the setup's cells, by
    backends A B B A or B A A B, drawn by ``seed``; in a pass, all windows of a cell follow each other."""
    return [
        WindowPlace(backend=name, cell=number)
        for setup in range(len(decode.speculation))
        for round_number in range(decode.rounds)
        for name in _balanced("order of windows", seed, setup, round_number)
        for number, cell in enumerate(cells)
        if cell.setup == setup
        for _ in range(decode.repeats)
    ]


def _balanced(*drawn_by: object) -> list[str]:
    first, second = NAMES if stable_random(*drawn_by).random() >= 0.5 else NAMES[::-1]
    return [first, second, second, first]


def begins_start(experiment: Experiment, index: int) -> bool:
    """Whether block ``index`` (from 1) is the first of a start of its server, where servers are started in turn."""
    return (index - 1) % experiment.serving.blocks_per_start == 0
