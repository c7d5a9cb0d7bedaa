"""The whole battery, judged where there is nothing to find: four arms of the same server, of which two are called the
candidate. Sixteen arms of a noisy toy server are made once, and four of them are drawn again and again."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from evals.records import ArmName
from reports.parity.load import Positions, Records, Sheet, load
from reports.parity.verdict import judge
from tests.reports.parity import made

CHECKS = ("D3", "D4", "D5", "P1", "P3", "P4", "P5", "P6", "P7", "L1", "L2")
"""Those in which noise has a part; what is exact is equal here."""


class Held(Sheet, frozen=True):
    """A sheet that is read once."""

    held: dict[tuple[int, int, bool], Positions]

    def positions(self, first: int, last: int, *, lists: bool = True) -> Positions:
        if (first, last, lists) not in self.held:
            self.held[first, last, lists] = super().positions(first, last, lists=lists)
        return self.held[first, last, lists]


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> tuple[Records, list[dict[str, Sheet]]]:
    """Records of one run, and the sheets by check of the arms of all runs."""
    situation = replace(made.SITUATION, max_requests=9)
    runs = [
        load(made.write(tmp_path_factory.mktemp("run"), checks=CHECKS, seed=seed, situation=situation))
        for seed in range(4)
    ]
    found: list[dict[str, Sheet]] = []
    for run in runs:
        for arm in made.ARMS:
            sheets = [run.sheets[arm, check] for check in CHECKS]
            found.append({each.run.check: Held(each.run, each.replies, each.folder, {}) for each in sheets})
    return runs[0], found


def drawn(arms: tuple[Records, list[dict[str, Sheet]]], seed: int) -> Records:
    """Four different arms, in some order."""
    records, sheets = arms
    places = np.random.default_rng(seed).permutation(len(sheets))[: len(made.ARMS)]
    chosen: dict[tuple[ArmName, str], Sheet] = {
        (arm, check): sheets[place][check] for arm, place in zip(made.ARMS, places, strict=True) for check in CHECKS
    }
    return Records(**(msgspec.structs.asdict(records) | {"sheets": chosen}))


@pytest.mark.parametrize("seeds", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_false_alarms_of_the_battery_stay_under_five_percent(
    seeds: int, arms: tuple[Records, list[dict[str, Sheet]]]
) -> None:
    alarms = []
    for seed in range(seeds):
        found = judge(drawn(arms, seed))
        assert {each.id for each in found.checks if each.p is not None} >= set(CHECKS)
        alarms += [seed] if any(each.outcome == "FAIL" for each in found.checks) else []
    assert len(alarms) < 0.05 * seeds, alarms
