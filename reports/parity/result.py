"""What every check of output parity says, in one shape."""

from __future__ import annotations

from typing import Literal

import msgspec

LEVEL = 0.95
"""One-sided, of every bound."""

Unit = Literal["positions", "steps", "prompts", "pairs", "requests", "drafts"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Candidate against baseline, beside baseline against itself (the floor). Null where nothing can be said;
    ``reason`` says why."""

    n: int
    """Of the candidate, in ``unit``."""
    unit: Unit
    statistic: float | None = None
    """The candidate's."""
    floor: float | None = None
    """The same statistic of the floor."""
    bound: float | None = None
    """Upper, of what ``limit`` is held against."""
    limit: float | None = None
    """That the bound has to stay within; null where the check has no margin."""
    p: float | None = None
    """Of as much or more, if the candidate were like the baseline."""
    p_limit: float | None = None
    """Of as much or more, if the candidate were at the limit."""
    reason: str = ""


Family = Literal["validity", "replies", "tokens", "speculation", "lengths"]
Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was tested, between one pair of arms."""

    of: str
    """"mean KL", "outliers" and so on."""
    pair: str
    """"B1-A1": the candidate's first run against the baseline's first; several in one where they are taken together."""
    found: Finding
    harm_p: float | None
    """That the candidate is worse: than the limit where there is one, else than the baseline. Null: cannot be told."""
    held: bool = False
    """The bound has to lie within the limit for PASS."""


class Stratum(msgspec.Struct, frozen=True, kw_only=True):
    """Positions of one kind, of the pair of arms with the smallest p."""

    by: str
    """"batch", "context" and so on."""
    name: str
    n: int
    """Positions, of one pair."""
    kl: float | None
    """Mean, nats; null without lists of likely tokens."""
    floor_kl: float | None
    outliers: int
    floor_outliers: int
    holm_p: float
    """Of the outliers, over the check's strata and pairs."""


class NamedCurve(msgspec.Struct, frozen=True, kw_only=True):
    """A survival curve of first divergence: the share of pairs of replies that are still equal after so many tokens,
    with its 95 % interval."""

    pair: str
    variant: str
    pairs: int
    diverged: int
    steps: list[int]
    survival: list[float]
    low: list[float | None]
    high: list[float | None]


class Reproducer(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest case that shows it. `decodegate parity reproduce RUN CHECK CASE` asks it again."""

    check: str
    case: int
    prompt_digest: str
    prompt_tokens: int
    seed: int | None
    temperature: float
    batch: int
    arm: str
    repeat: int = 0
    position: int | None = None
    """In the reply; null where the whole reply shows it."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What one check shows of one candidate, before all checks are judged together."""

    said: str
    measures: list[Measure] = []
    strata: list[Stratum] = []
    curves: list[NamedCurve] = []
    broken: list[str] = []
    """What must never happen, and did on the candidate alone, in sentences."""
    missing: list[str] = []
    """What else stands against PASS, in sentences."""
    reproducer: Reproducer | None = None


class CheckVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One check, judged. ``reasons``: why it does not pass; empty if it does."""

    id: str
    title: str
    family: Family
    outcome: Literal["PASS", "FAIL", "INCONCLUSIVE", "not run"]
    said: str
    reasons: list[str]
    of: str
    """What ``finding`` is of; empty without one."""
    finding: Finding | None
    """Of the measure with the smallest p of harm."""
    p: float | None
    """Of harm, over the check's measures (Bonferroni)."""
    holm_p: float | None
    """Over the checks of the battery."""
    measures: list[Measure]
    strata: list[Stratum]
    reproducer: Reproducer | None


class FaultSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that was put between the baseline and arm X, and who saw it."""

    fault: str
    number: int | None
    """In accuracy.md, section (f); null for a control that nobody may see."""
    expected: list[str]
    """Checks that are to see it; empty for a control."""
    seen: list[str]
    """Checks that failed, in their order."""
    n: int | None
    """With which the first expected check that saw it did; null if none did."""
    unit: str
    holds: bool


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What was fixed when, UTC; null where it was not."""

    registered_utc: str
    floor_fixed_utc: str | None
    first_candidate_request_utc: str | None
    plan_sha256: str


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """From baseline against itself alone."""

    positions: int
    """Of A1-A2 that they are made of; 0 without a floor."""
    tau: float
    """A position whose logprob differs by more is an outlier, nats."""
    by: str
    reason: str = ""
    """Why the floor tells no threshold, and ``tau`` is only what counts as harmless anyway."""


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """Output parity, judged."""

    outcome: Verdict
    reasons: list[str]
    budget: Literal["quick", "standard", "full"]
    arms: list[str]
    """That were measured."""
    positions: int
    """Recorded of all arms together."""
    order: Order
    unordered: list[str]
    """Why the records do not prove that plan and floor were fixed before the candidate was asked; empty if they do."""
    thresholds: Thresholds
    checks: list[CheckVerdict]
    itself: list[Measure]
    """B1 against B2: does the candidate repeat itself? Decides nothing."""
    curves: list[NamedCurve]
    fault: FaultSeen | None
    """Null if none was put in."""
    not_covered: list[str]
    notes: list[str]
    """What was not counted."""
