"""The battery can fail, and does not for what is harmless: over few seeds, and with some faults by other sizes than
docs/faults.md, which `python -m tests.benchmarks --runs 1 faults` makes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from evals.faults import FAULTS
from reports.parity.faults import CAUGHT_BY
from tests.reports.parity.injected import (
    A2_FOR_A1,
    NOISE,
    controls,
    emulator,
    harmless,
    judged,
    number,
    saw,
    trials,
    verdict,
)

SEEDS = (1, 2, 3)
"""Of which the second has a floor of exactly 0."""
PAGE = Path(__file__).parents[3] / "docs" / "faults.md"

TRIALS = {f"{each.fault} {each.size} {each.expected}": at for at, each in enumerate(trials("", full=False))}
CONTROLS = {each.name: at for at, each in enumerate(controls(""))}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with emulator() as found:
        yield found


@pytest.mark.parametrize("name", TRIALS)
def test_a_fault_is_seen_by_the_check_that_is_expected_to(name: str, url: str) -> None:
    trial = trials(url, full=False)[TRIALS[name]]
    for seed in SEEDS:
        parity = judged(trial, seed, NOISE if seed % 2 else 0.0)
        found = verdict(parity, trial.expected)
        assert saw(parity, trial.expected), found
        assert found.reasons
        if found.outcome == "FAIL" and trial.expected not in ("V4", "P2"):
            assert found.reproducer is not None
        assert parity.outcome == ("FAIL" if found.outcome == "FAIL" else "INCONCLUSIVE")


@pytest.mark.parametrize("name", CONTROLS)
def test_what_is_harmless_is_no_fault(name: str, url: str) -> None:
    for seed in SEEDS[:2] if name == A2_FOR_A1 else SEEDS[:1]:
        parity = harmless(controls(url)[CONTROLS[name]], seed)
        assert not [each for each in parity.checks if each.outcome not in ("PASS", "not run")]


def test_every_fault_is_tried() -> None:
    assert {number(each.fault) for each in trials("", full=True)} == set(range(1, 21))
    assert {each.fault.partition(":")[0] for each in trials("", full=True)} == CAUGHT_BY.keys()


def test_no_fault_is_given_more_than_the_specification_names() -> None:
    """Nor another check than it names."""
    for trial in trials("", full=True):
        fault = FAULTS[trial.fault.partition(":")[0]]
        assert trial.expected in fault.caught_by
        if trial.expected == fault.caught_by[0]:
            assert fault.n is not None
            assert trial.n <= fault.n


def test_the_page_lists_the_faults_of_the_registry() -> None:
    listed = re.findall(r"^\| (\d+) \| ([a-z-]+)", PAGE.read_text(), re.MULTILINE)
    expected = {(str(each.number), name) for name, each in FAULTS.items() if each.number is not None}
    assert set(listed) == expected


def test_every_control_of_the_registry_is_tried() -> None:
    """But for the proxy that changes nothing."""
    harmless_ones = {name for name, each in FAULTS.items() if each.number is None} - {"identity"}
    assert harmless_ones <= {each.name.partition(":")[0] for each in controls("")}
