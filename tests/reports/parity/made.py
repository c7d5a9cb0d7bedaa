"""Made-up parity records of known truth: the cases of the real battery, and replies of a toy model that has noise of
its own on every arm, as numerics have. A test changes what an arm would have said, and knows what must be found.

The model's logits at a position are a row of one table, by prompt, position and the path so far: a reply that has left
its first path goes on along another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec.structs import replace

from evals.parity.check import Situation
from evals.parity.checks import CHECKS
from evals.records import (
    ArmName,
    Case,
    CheckRun,
    Floor,
    ParityCheck,
    ParityManifest,
    ParityPlan,
    ParityReply,
)
from tests.reports.signoff.sat import NAMES, backend, facts

ARMS: tuple[ArmName, ...] = ("A1", "A2", "B1", "B2")
NOISE = 0.02
"""Standard deviation of the logits of an arm."""
START = 1_796_083_200.0
HAS: frozenset[Any] = frozenset(
    ("token ids", "logprobs", "seeds", "streaming", "trace replay", "chat", "tools", "cached tokens", "two starts")
)
SITUATION = Situation(
    budget="quick", seed=1, max_context=8192, max_requests=128, specialised_requests=None, block=16, has=HAS
)
_WIDE, _TOP, _TABLE = 24, 20, 4096
_ROWS = np.random.default_rng(7).normal(0, 3.0, (_TABLE, _WIDE)).astype(np.float32)

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class Said(msgspec.Struct):
    """All replies of a check on an arm, a row a position. A test may change everything in place."""

    arm: ArmName
    check: str
    cases: list[Case]
    of: Ints
    """Index of each row's case in ``cases``."""
    position: Ints
    token: Ints
    logprobs: Floats
    """[n, 24]: of tokens 0 to 23."""
    replies: list[ParityReply]
    dice: np.random.Generator

    def shift(self, rows: Any, by: float = 4.0) -> None:
        """The row's own token, forced or said, loses so many nats: the numbers are wrong."""
        at = np.flatnonzero(rows) if np.asarray(rows).dtype == bool else np.asarray(rows)
        self.logprobs[at, self.token[at]] -= by
        self.logprobs[at] -= _log_sum(self.logprobs[at])


Change = Callable[[Said], None]


def nothing(_: Said) -> None:
    """No change."""


def write(
    run: Path,
    change: Change = nothing,
    *,
    seed: int = 0,
    checks: Iterable[str] | None = None,
    arms: tuple[ArmName, ...] = ARMS,
    situation: Situation = SITUATION,
    fault: str | None = None,
    noise: dict[str, float] | None = None,
    **of_facts: Any,
) -> Path:
    """Write RUN/parity, and return it. ``checks``: by default all that this situation can run."""
    folder = run / "parity"
    (folder / "cases").mkdir(parents=True)
    planned, asked = [], {}
    for id, check in CHECKS.items():
        if checks is not None and id not in checks:
            continue
        lacking = sorted(check.needs - situation.has)
        cases = (
            []
            if lacking
            else [replace(each, prompt_digest=f"{each.prompt_seed:016x}") for each in check.cases(situation)]
        )
        asked[id] = cases
        data = b"".join(msgspec.json.encode(each) + b"\n" for each in cases)
        if not lacking:
            (folder / "cases" / f"{id}.jsonl").write_bytes(data)
        planned.append(
            ParityCheck(
                id=id,
                cases=len(cases),
                tokens=sum(each.output_tokens for each in cases),
                cases_sha256=hashlib.sha256(data).hexdigest(),
                not_run=f"needs {', '.join(lacking)}" if lacking else None,
            )
        )
    plan = ParityPlan(
        registered_utc="2026-12-01T00:00:00+00:00",
        budget=situation.budget,
        seed=situation.seed,
        arms=list(arms),
        checks=planned,
        fault=fault,
        max_context=situation.max_context,
    )
    (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
    digest = hashlib.sha256((folder / "plan.json").read_bytes()).hexdigest()
    of_facts = {"backends": [backend(name, decode_backend="auto") for name in NAMES], **of_facts}
    manifest = ParityManifest(**facts(**of_facts), plan_sha256=digest)
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    for number, arm in enumerate(arms):
        if arm == "B1":
            fix_floor(folder)
        for each in planned:
            if each.id == "T0" and arm != "A1":
                continue
            sent = START + 100 * (number + 1) + (50 if number > 1 else 0)
            if each.not_run is not None:
                _end(folder / arm / each.id, CheckRun(arm=arm, check=each.id, not_run=each.not_run, **_at(sent)))
                continue
            dice = np.random.default_rng([seed, number, sum(map(ord, each.id))])
            said = speak(arm, each.id, asked[each.id], dice, (noise or {}).get(arm, NOISE))
            change(said)
            _record(folder / arm / each.id, said, sent)
    return folder


def fix_floor(folder: Path, at: float = START + 240) -> None:
    """Write floor.json."""
    files = [path for arm in ("A1", "A2") for path in (folder / arm).rglob("*") if path.is_file()]
    found = {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    (folder / "floor.json").write_bytes(msgspec.json.encode(Floor(fixed_unix_s=at, sha256=found)))


def speak(arm: ArmName, check: str, cases: list[Case], dice: np.random.Generator, noise: float = NOISE) -> Said:
    """What a sound arm says."""
    lengths = np.array([each.output_tokens for each in cases])
    of = np.repeat(np.arange(len(cases)), lengths)
    position = np.arange(len(of)) - np.repeat(lengths.cumsum() - lengths, lengths)
    prompt = np.array([each.prompt_seed + 7919 * (each.cut or 0) for each in cases])[of]
    seeded = np.array([-1 if each.seed is None else each.seed for each in cases])[of]
    temperature = np.array([each.temperature for each in cases], np.float32)[of]
    forced = np.array([each.trace is not None and each.cut is None for each in cases])[of]
    own = dice.normal(0, noise, (len(of), _WIDE)).astype(np.float32)
    unseeded = np.where(forced, prompt, dice.integers(0, 2**31, len(cases))[of])
    gumbel = _gumbel(np.where(seeded >= 0, seeded, unseeded), position)
    path = np.zeros(len(of), np.int64)
    sound = _token(_logprobs(prompt, position, path, 0.0), np.where(forced, 1.0, temperature), gumbel)
    token = np.where(forced, sound, _token(_logprobs(prompt, position, path, own), temperature, gumbel))
    starts = lengths.cumsum() - lengths
    for reply in np.unique(of[token != sound]):  # it has left its path: whither, the token says
        first = starts[reply] + int((token != sound)[starts[reply] : starts[reply] + lengths[reply]].argmax())
        path[first + 1 : starts[reply] + lengths[reply]] = 1 + 31 * position[first] + token[first]
    found = _logprobs(prompt, position, path, own)
    token = np.where(forced, sound, _token(found, temperature, gumbel))
    kept = np.ones(len(of), np.bool_)
    if check == "L1":  # some end by themselves, after as many tokens as their seed says, but for noise
        ends = np.array([8 + each.prompt_seed % 300 + int(dice.integers(-3, 4)) for each in cases])[of]
        kept = position < ends
    of, position, token, found = of[kept], position[kept], token[kept], found[kept]
    said = Said(arm, check, cases, of, position, token, found, [], dice)
    said.replies = _replies(said, lengths)
    return said


def _replies(said: Said, lengths: Ints) -> list[ParityReply]:
    counts = np.bincount(said.of, minlength=len(said.cases))
    fingerprint = "vllm-candidate" if said.arm.startswith("B") else "vllm-baseline"
    tools = said.check == "D6"
    return [
        ParityReply(
            case=case.number,
            ids=int(count),
            ids_hash="",
            completion_tokens=int(count),
            finish_reason="length" if count == length else "stop",
            text_agrees=True if case.variant == "stream" else None,
            cached_tokens=16 if case.variant == "warm" else 0,
            called=True if tools else None,
            valid_call=True if tools else None,
            fingerprint=fingerprint,
        )
        for case, count, length in zip(said.cases, counts, lengths, strict=True)
    ]


def _logprobs(prompt: Ints, position: Ints, path: Ints, own: Any) -> Floats:
    mixed = (prompt * 2_654_435_761 + position * 40_503 + path * 97) % 1_000_003 % _TABLE
    logits = _ROWS[mixed] + own
    found: Floats = logits - _log_sum(logits)
    return found


def _log_sum(logits: Floats) -> Floats:
    top = logits.max(axis=1, keepdims=True)
    found: Floats = top + np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    return found


def _gumbel(seed: Ints, position: Ints) -> Floats:
    """By seed, position and token alone."""
    with np.errstate(over="ignore"):
        state = (seed[:, None].astype(np.uint64) << np.uint64(32)) + (position[:, None] * 64 + np.arange(_WIDE)).astype(
            np.uint64
        )
        for shift, times in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ (state >> np.uint64(shift))) * np.uint64(times)
        uniform = ((state ^ (state >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / 2**53
    found: Floats = -np.log(-np.log(np.clip(uniform, 1e-12, 1 - 1e-12))).astype(np.float32)
    return found


def _token(logprobs: Floats, temperature: Any, gumbel: Floats) -> Ints:
    """Greedy at 0, else drawn from the nucleus of .95."""
    order = np.argsort(-logprobs, axis=1)
    sorted_p = np.exp(np.take_along_axis(logprobs, order, axis=1))
    inside = sorted_p.cumsum(axis=1) - sorted_p < 0.95
    allowed = np.zeros(logprobs.shape, np.bool_)
    np.put_along_axis(allowed, order, inside, axis=1)
    hot = np.asarray(temperature)[:, None] > 0
    score = logprobs + np.where(hot, gumbel, 0)
    found: Ints = np.where(hot, np.where(allowed, score, -np.inf), score).argmax(axis=1)
    return found


def _record(place: Path, said: Said, sent: float) -> None:
    place.mkdir(parents=True)
    width = 1 if said.check == "P7" else _TOP
    order = np.argsort(-said.logprobs, axis=1)[:, :width].astype(np.int32)
    tops = np.take_along_axis(said.logprobs, order, axis=1)
    none = said.check in ("D2", "D6", "D7", "L1", "L2", "T0")
    rows = np.arange(len(said.of))
    number = np.array([each.number for each in said.cases], np.int32)
    frame = pl.DataFrame(
        {
            "case": number[said.of],
            "repeat": np.zeros(len(rows), np.int16),
            "position": said.position.astype(np.int32),
            "token": said.token.astype(np.int32),
            "logprob": None if none else said.logprobs[rows, np.minimum(said.token, _WIDE - 1)],
            "top_ids": None if none else order,
            "top_logprobs": None if none else tops,
        },
        schema_overrides={"logprob": pl.Float32},
    ).with_columns(pl.col("top_ids").cast(pl.List(pl.Int32)), pl.col("top_logprobs").cast(pl.List(pl.Float32)))
    frame.write_parquet(place / "tokens.parquet", compression="uncompressed")
    starts = np.searchsorted(said.of, np.arange(len(said.cases) + 1))
    for index, reply in enumerate(said.replies):
        tokens = said.token[starts[index] : starts[index + 1]]
        reply.ids = len(tokens)
        reply.ids_hash = hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest()[:16]
        reply.sent_unix_s, reply.ended_unix_s = sent + 1, sent + 2
    (place / "replies.jsonl").write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in said.replies))
    _end(place, CheckRun(arm=said.arm, check=said.check, replies=len(said.replies), positions=len(rows), **_at(sent)))


def _at(sent: float) -> dict[str, Any]:
    return {"started_unix_s": sent, "ended_unix_s": sent + 10}


def _end(place: Path, run: CheckRun) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "run.json").write_bytes(msgspec.json.encode(run))
