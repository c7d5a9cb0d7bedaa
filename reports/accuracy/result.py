"""What the judging of accuracy results in, as data. Shares and scores are of 1; a drop is positive where the candidate
is worse."""

from __future__ import annotations

from typing import Literal

import msgspec

from reports.accuracy.drop import Drop

Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE"]
TestOf = Literal["mean score", "strata", "trend", "strata with a drop"]


class Counts(msgspec.Struct, frozen=True):
    """Answers of one backend by outcome. ``retried`` ones took several attempts, whatever their outcome."""

    right: int
    wrong: int
    unparsed: int
    truncated: int
    error: int
    retried: int


class Test(msgspec.Struct, frozen=True):
    """A test of harm. ``p`` is of this look alone, ``overall_p`` takes all looks into account, ``holm_p`` the tests of
    all planned tasks too."""

    __test__ = False  # none of pytest's

    of: TestOf
    share: float
    """Of its task's share of the level."""
    p: float
    overall_p: float
    holm_p: float = 1.0


class Stratum(msgspec.Struct, frozen=True):
    """Items of one kind. ``p`` of harm; ``holm_p`` over the strata of its list (and looks)."""

    name: str
    items: int
    drop: Drop
    p: float
    holm_p: float


class Table(msgspec.Struct, frozen=True):
    """Pairs of answers to the same item with the same seed, by who was right."""

    both: int
    baseline_only: int
    candidate_only: int
    neither: int


class Flips(msgspec.Struct, frozen=True):
    """Items that more than half of the repeats answered right on one backend and not on the other, with McNemar's exact
    two-sided p."""

    lost: int
    gained: int
    p: float


class Measured(msgspec.Struct, frozen=True):
    """What an exam says."""

    items: int
    repeats: int
    """That were judged: as planned up to the last look that both backends reached."""
    level: float
    """One-sided, of the bound: the plan's, or what a look may spend of it."""
    drop: Drop
    tests: list[Test]
    bins: list[Stratum]
    """By context; empty for tasks without."""
    cells: list[Stratum]
    """By all that strata are told apart by, where that is more than context."""
    table: Table | None
    """This and ``flips`` are null for scores that are not binary."""
    flips: Flips | None
    within: float | None
    """Variance of a score around its item's mean; null for one repeat."""
    correlation: float | None
    """Of both backends' scores at equal seeds."""
    repeats_needed: int | None
    """With which the last look's bound stays within the margin nine times of ten if the backends are equal and vary as
    these."""
    smallest_drop: float | None
    """That is found nine times of ten at the bound's level."""


class TaskVerdict(msgspec.Struct, frozen=True):
    """``measured`` is null where nothing can be compared; ``reasons`` say why."""

    task: str
    title: str
    outcome: Outcome
    reasons: list[str]
    margin: float
    planned_repeats: int
    ended_repeats: dict[str, int]
    """By backend, as ``counts``, which are of all answers of ended repeats."""
    counts: dict[str, Counts]
    measured: Measured | None


class Accuracy(msgspec.Struct, frozen=True):
    """``reasons`` are those of the tasks that decided."""

    outcome: Outcome
    reasons: list[str]
    tasks: list[TaskVerdict]
