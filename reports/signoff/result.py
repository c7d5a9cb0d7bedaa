"""The sign-off document as data: signoff.json. Shares and scores are of 1; times are UTC. Holds no text of a benchmark,
no path outside the run directory, and nothing of the moment at which it was made: the same run directory gives the same
bytes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from evals.records import EvalPlan
from replay.records import Difference
from reports.accuracy.result import Outcome, TaskVerdict
from reports.coverage import Source
from reports.parity.result import Parity

PartName = Literal["replay", "evals", "parity"]
LimitIs = Literal["at least", "at most", ""]
Unit = Literal["share", "points", "count", ""]

SCHEMA_VERSION = 1


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the run directory."""

    name: PartName
    title: str
    measured: bool
    measured_utc: str | None
    """When it was begun; null if it was not."""
    measured_by: str
    """USER@HOST; empty if it is not known."""
    decodegate_version: str | None
    """That measured it."""
    summary: str
    """What it says, in a sentence; where there is none, what to run."""


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One backend as it was measured. Values that differ between parts are listed in the gate "one deployment"."""

    name: str
    decode_backend: str
    facts: dict[str, str]
    """Model, version of vLLM, fingerprint, GPUs declared and seen, layout, settings as the server tells them, by
    name; and its command, if decodegate started it."""
    files: dict[str, str]
    """SHA-256 of the model's configuration, tokenizer and index of weights, where the model is a folder that could be
    read, by file name."""


class Data(msgspec.Struct, frozen=True, kw_only=True):
    """Where a benchmark's items come from."""

    task: str
    title: str
    name: str
    revision: str | None
    sha256: str
    items: int
    dropped: dict[str, int]
    licence: str
    """In a sentence: whose, and what may be shown of it."""


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of the evals, and when it was fixed."""

    sha256: str
    """Of plan.json, as recorded before the first request."""
    unchanged: bool
    """plan.json still has that hash."""
    first_candidate_request_utc: str | None
    """Null before any."""
    plan: EvalPlan


class ExamPath(msgspec.Struct, frozen=True, kw_only=True):
    """Which path the decode steps of one backend took in one benchmark, or in one stratum of it."""

    task: str
    stratum: str
    """Empty for all of the benchmark; else a bin of context, as in the answers."""
    backend: str
    source: Source
    counted: str
    """What the share is the share of: "specialised", "would have been eligible" and so on, as in reports.coverage."""
    tokens: int | None
    """Decode tokens of the log that were judged."""
    answers: int
    """In whose time they fall."""
    of_answers: int
    share: float | None
    """Of decode tokens; null where no log tells."""
    at_least: float | None
    at_most: float | None
    reasons: dict[str, float]
    """Why the rest was not, shares of all tokens, the most frequent first."""
    note: str


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """A control: something that must be found, or must not."""

    name: str
    expected: str
    seen: str
    n: int | None
    holds: bool | None
    """Null: it was not run."""


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that must hold. ``number`` was held against ``limit``; in "points" both are hundredths of 1."""

    id: str
    title: str
    outcome: Outcome
    said: str
    """What was found, in a sentence."""
    number: float | None = None
    limit: float | None = None
    limit_is: LimitIs = ""
    unit: Unit = ""
    reasons: list[str] = []
    """Why it does not pass, or what is missing, each with what to do; empty if it passes."""


class Fact(msgspec.Struct, frozen=True):
    name: str
    value: str


class Signoff(msgspec.Struct, frozen=True, kw_only=True):
    """The document, in the order of its sections."""

    schema_version: Annotated[int, msgspec.Meta(ge=1)] = SCHEMA_VERSION
    outcome: Outcome
    line: str
    """Verdict, scope, margins, date, who measured, with what version: one line."""
    reasons: list[str]
    """Of the gates that decided."""
    stamps: list[str]
    """To be shown on every page: EMULATED, not matched."""
    name: str
    decodegate_version: str
    """That judged."""
    measured_utc: str | None
    measured_by: str
    scope: list[Fact]
    """What it holds for; anything else is not covered."""
    not_covered: list[str]
    parts: list[Part]
    arms: list[Arm]
    differences: list[Difference]
    """Between the arms; expected: what is under test, and nothing else."""
    unverified: list[str]
    """What could not be checked of GPUs and settings."""
    data: list[Data]
    registered: Registered | None
    """Null without evals."""
    coverage: list[ExamPath]
    controls: list[Control]
    gates: list[Gate]
    tasks: list[TaskVerdict]
    """Per benchmark: N, repeats, means, interval, bound against margin, tests, counts, flips, strata."""
    parity: Parity | None
    """Per check: statistic, floor, bound, n, p, strata, smallest reproducer; survival curves; the fault that was put
    in. Null if it was not measured."""
    speed: list[Fact]
    """Of the replay: P90 interactivity and its ratio, as its report has them."""
    deviations: list[str]
    """Every retry, restart, interruption, excluded sample, and what else was not as planned."""
    reproduction: list[Fact]
    """How to come to the same verdict offline: command, version, seeds."""
    rollout: list[str]
    """Advice: canary share, what to watch, how to go back, when to run again."""
    inputs: dict[str, str]
    """SHA-256 of every file that was judged, by its path in the run directory; private/ left out."""
