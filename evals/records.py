"""What the accuracy part of a run directory holds, as schemas. Shared by measuring (evals) and judging (reports).

    RUN/evals/
      plan.json                      EvalPlan, registered before the first request to the candidate
      experiment.yaml                the experiment with every default written out
      manifest.json                  EvalManifest, written after preflight
      servers/, check/               what servers wrote, in their starts and in preflight
      BACKEND/TASK/rNNN.jsonl        one Answer a line, appended as answers come; NNN counts repeats from 000
      BACKEND/TASK/rNNN.json         Repeat, written when the repeat has ended
      BACKEND/TASK/rNNN/             of the server, as of a block: before.json, after.json, metrics.jsonl, steps/
                                     (rNNN.interrupted-N: until an interruption)
      private/                       raw prompts and answers, for their owner alone: judging never reads it

Nothing here holds text of a benchmark: items are named by their row in the data and by salted hashes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from replay.records import SCHEMA_VERSION, RunFacts

Outcome = Literal["right", "wrong", "unparsed", "truncated", "error"]
"""right, wrong: an answer was found and compared. unparsed: a whole reply in which none was found. truncated: the reply
ended at its length limit before one was found. error: no reply."""


class DataFacts(msgspec.Struct, kw_only=True, frozen=True):
    """Where a task's items come from."""

    name: str
    """The hub's id, or the last part of the file's path."""
    revision: str | None = None
    """Of the hub's repository; null for a file."""
    sha256: str
    """Of the data file's bytes."""
    items: int
    """That are asked."""
    dropped: dict[str, int] = {}
    """Items left out on both backends, by reason."""


class TaskPlan(msgspec.Struct, kw_only=True, frozen=True):
    """One benchmark as it will be run, on both backends alike."""

    task: Literal["aime25", "gpqa_diamond", "mrcr"]
    data: DataFacts
    repeats: int
    """Answers to every item on each backend."""
    seed: int
    """Repeat r is sampled with seed + r."""
    sampling: dict[str, str | int | float | bool | None]
    """Every sampling field as sent."""
    concurrency: int
    """Requests in flight at most."""
    margin: float
    """Largest drop of the mean score, as a share, that may be called none."""
    looks: list[float] = msgspec.field(default_factory=lambda: [1.0])
    """Shares of the repeats at which the result is looked at."""


class EvalPlan(msgspec.Struct, kw_only=True, frozen=True):
    """What is decided before anything is measured."""

    schema_version: int = SCHEMA_VERSION
    registered_utc: str
    tasks: list[TaskPlan]
    alpha_pass: float = 0.05
    """One-sided level of each gate's bound."""
    alpha_fail: float = 0.01
    """Family level of the tests of harm."""
    limit: int | None = None
    """Only the first so many items of each task: a smoke test, which can pass nothing."""


class EvalManifest(RunFacts, kw_only=True):
    """Of the accuracy evals. Written once, before the first question."""

    kind: Literal["eval"] = "eval"
    plan_sha256: str
    """Of plan.json."""


class Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One reply to one item."""

    item: int
    """Row of the item in the data, from 0."""
    item_hash: str
    """16 hex digits, salted by the plan: equal for the same item on both backends."""
    prompt_hash: str
    """16 hex digits of what was sent besides the seed."""
    repeat: int
    seed: int
    outcome: Outcome
    score: float
    """0 to 1; 0 for unparsed, truncated and error."""
    given: str | None = None
    """The answer as compared, where it is short and no text: an integer, a letter."""
    route: str | None = None
    """By which rule it was found: see each task."""
    scores: dict[str, float] = {}
    """Secondary scores, by name."""
    stratum: dict[str, str] = {}
    """For instance {bin: 8k-16k, needles: 4}."""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    attempts: int = 1
    error: str | None = None
    fingerprint: str | None = None
    reply_hash: str | None = None
    """16 hex digits of reasoning and answer together."""
    prompt_ids_hash: str | None = None
    """16 hex digits of the prompt's token ids, where the server tells them: equal for the same prompt."""
    sent_unix_s: float | None = None
    latency_s: float | None = None
    sent_ns: int | None = None
    """Of the last attempt, CLOCK_MONOTONIC; ``ended_ns``: when its reply was whole, or was given up."""
    ended_ns: int | None = None


class Repeat(msgspec.Struct, kw_only=True):
    """One repeat of one task on one backend that has ended."""

    backend: str
    task: str
    repeat: int
    seed: int
    started_unix_s: float
    ended_unix_s: float
    answers: int
    server: str | None = None
    """Folder of the server's start, relative to RUN/evals; null if we did not start one."""
    started_ns: int | None = None
    """From before its first request to after its last reply, CLOCK_MONOTONIC; of a repeat that was interrupted the part
    after the last interruption, from which rNNN/ is. Null if nothing was left to ask."""
    ended_ns: int | None = None
    versions: dict[str, str] = {}
    """Of lm-eval and what it needs."""
