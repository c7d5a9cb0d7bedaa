"""What the accuracy part of a run directory holds, as schemas. Shared by measuring (evals) and judging (reports).

    RUN/evals/
      plan.json                      EvalPlan, registered after preflight (the servers count how long items are) and
                                     before the first question to either backend
      experiment.yaml                the experiment with every default written out
      manifest.json                  EvalManifest, written right after the plan
      servers/, check/               what servers wrote, in their starts and in preflight
      BACKEND/TASK/rNNN.jsonl        one Answer a line, appended as answers come; NNN counts repeats from 000
      BACKEND/TASK/rNNN.json         Repeat, written when the repeat has ended
      BACKEND/TASK/rNNN/             of the server, as of a block: before.json, after.json, metrics.jsonl, steps/
                                     (rNNN.interrupted-N: until an interruption; died.txt: the server's end was its
                                     cause)
      private/                       raw prompts and answers, for their owner alone: judging never reads it

    RUN/parity/
      plan.json, experiment.yaml, manifest.json, servers/, check/      as above: ParityPlan, ParityManifest
      cases/CHECK.jsonl              one Case a line: what every arm is asked
      ARM/CHECK/replies.jsonl        one ParityReply a line
      ARM/CHECK/tokens.parquet       one row a position: TOKENS
      ARM/CHECK/run.json             CheckRun, written when the check has ended; a folder without it counts for nothing
      ARM/CHECK/                     of the server, as of a repeat (before.json and so on); CHECK.interrupted-N: of an
                                     attempt that did not end
      emulators/ARM/server/          the truth of embedded emulators, by start
      floor.json                     Floor

Nothing here holds text of a benchmark: items are named by their row in the data and by salted hashes.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from replay.records import SCHEMA_VERSION, RunFacts

TOKENS = ("case", "repeat", "position", "token", "logprob", "top_ids", "top_logprobs")
"""Columns of tokens.parquet: int32, int16, int32, int32, float32, list of int32, list of float32 (at most 20 each, the
likeliest first). ``token`` is what was sampled, or forced."""

DIED = "died.txt"

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
    unfit: list[int] = []
    """Rows of those among them that a backend's context does not hold beside the longest reply."""


class TaskPlan(msgspec.Struct, kw_only=True, frozen=True):
    """One benchmark as it will be run, on both backends alike."""

    task: Literal["aime25", "gpqa_diamond", "mrcr"]
    data: DataFacts
    repeats: Annotated[int, msgspec.Meta(ge=1)]
    """Answers to every item on each backend."""
    seed: int
    """Repeat r is sampled with seed + r."""
    sampling: dict[str, str | int | float | bool | None]
    """Every sampling field as sent."""
    concurrency: Annotated[int, msgspec.Meta(ge=1)]
    """Requests in flight at most."""
    margin: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    """Largest drop of the mean score, as a share, that may be called none."""
    looks: Annotated[list[Annotated[float, msgspec.Meta(gt=0, le=1)]], msgspec.Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: [1.0]
    )
    """Shares of the repeats at which the result is looked at."""


class EvalPlan(msgspec.Struct, kw_only=True, frozen=True):
    """What is decided before anything is measured."""

    schema_version: int = SCHEMA_VERSION
    registered_utc: str
    tasks: list[TaskPlan]
    alpha_pass: Annotated[float, msgspec.Meta(gt=0, lt=0.5)] = 0.05
    """One-sided level of each gate's bound."""
    alpha_fail: Annotated[float, msgspec.Meta(gt=0, lt=0.5)] = 0.01
    """Family level of the tests of harm."""
    limit: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Only the first so many items of each task: a smoke test, which can pass nothing."""

    def items(self, task: TaskPlan) -> int:
        """How many items of the task are asked in a repeat."""
        return min(task.data.items, self.limit or task.data.items)


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
    sent_unix_s: Annotated[float, msgspec.Meta(ge=0, lt=1e11)] | None = None
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


ArmName = Literal["A1", "A2", "B1", "B2", "X"]
"""A: the baseline, B: the candidate, each started twice; X: the baseline behind a fault-injecting proxy."""


class ParityCheck(msgspec.Struct, kw_only=True, frozen=True):
    """One check as it will be run, on every arm alike."""

    id: str
    """V1, D3, P4 and so on, as in accuracy.md."""
    cases: int
    tokens: int
    """Output tokens of an arm, at most."""
    cases_sha256: str = ""
    """Of cases/CHECK.jsonl."""
    not_run: str | None = None
    """Why it will not be run, on any arm; null if it will."""


class ParityPlan(msgspec.Struct, kw_only=True):
    """What is decided before anything is measured."""

    schema_version: int = SCHEMA_VERSION
    registered_utc: str
    budget: Literal["quick", "standard", "full"]
    seed: int
    arms: list[ArmName]
    """In measured order: both A before any B."""
    checks: list[ParityCheck]
    fault: str | None = None
    """What X's proxy injects, NAME:NUMBER."""
    max_context: int
    """Longest prompt and reply together."""


class ParityManifest(RunFacts, kw_only=True):
    """Of the parity battery. Written once, before the first request."""

    kind: Literal["parity"] = "parity"
    plan_sha256: str


class Case(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One case of a check: what is asked, equal on all arms. Its prompt is made again from ``prompt_seed``."""

    number: int
    prompt_seed: int
    prompt_tokens: int
    prompt_digest: str
    """16 hex digits over the prompt's ids."""
    output_tokens: int
    batch: int = 1
    """Generations that decode together with it, itself included."""
    seed: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    stratum: dict[str, str] = {}
    """For instance {context: 8k, batch: 17}."""
    variant: str = ""
    """Which way of asking: "stream", "cold", "with neighbours" and so on."""
    trace: int | None = None
    """Case of T0 whose reply is forced, as far as output_tokens; null: none."""
    cut: int | None = None
    """Instead the trace's first so many ids go on in the prompt, and the reply is free."""


class ParityReply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What came back for one case, besides its tokens."""

    case: int
    repeat: int = 0
    ids: int
    """Token ids that came."""
    ids_hash: str
    completion_tokens: int | None = None
    finish_reason: str | None = None
    cached_tokens: int | None = None
    text_agrees: bool | None = None
    """The text is that of the ids; null where one of the two is not told."""
    valid_call: bool | None = None
    """Tool calls: declared name, arguments that fit its schema; null where none was asked for."""
    called: bool | None = None
    problem: str | None = None
    """What is wrong with the reply by itself, in words without its text: "invalid UTF-8", "a marker in the text"."""
    drafts: int | None = None
    """Drafts that the server made while the case ran (S1)."""
    accepted: list[int] = []
    """Of those, how many were accepted up to each draft position, the first first."""
    error: str | None = None
    fingerprint: str | None = None
    sent_unix_s: float | None = None
    ended_unix_s: float | None = None


class CheckRun(msgspec.Struct, kw_only=True):
    """One check on one arm that has ended, or could not be run."""

    arm: ArmName
    check: str
    not_run: str | None = None
    """Why not; null if it was."""
    started_unix_s: float
    ended_unix_s: float
    replies: int = 0
    positions: int = 0
    server: str | None = None
    """As Repeat.server, relative to RUN/parity."""
    started_ns: int | None = None
    """From before the first request to after the last reply, CLOCK_MONOTONIC; null if nothing was asked."""
    ended_ns: int | None = None


class Floor(msgspec.Struct, kw_only=True):
    """Written once both A arms have ended, and before the first request to a B: what the thresholds are made of."""

    fixed_unix_s: float
    sha256: dict[str, str]
    """Of every file of A1 and A2, by its place in RUN/parity."""
