"""RUN/parity, loaded for judging: plan, floor and cases whole, replies as records, positions in slices of cases.

A check without run.json counts for nothing on its arm: a server may have died in the middle of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from evals.records import ArmName, Case, CheckRun, Floor, ParityManifest, ParityPlan, ParityReply
from reports.parity.divergences import Logprobs
from reports.run import read, read_manifest
from workloads.errors import UserError

SLICE = 100_000
"""Positions of an arm in memory, with their lists of likely tokens, about."""
_REPEAT, _POSITION = 16, 32
"""Bits of a key: case, repeat, position."""

T = TypeVar("T")


class Positions(msgspec.Struct, frozen=True):
    """Positions of one arm, in order of ``key``. Lists of likely tokens are filled up as divergences.py says; of width
    0 where none were told."""

    key: npt.NDArray[np.int64]
    token: npt.NDArray[np.int32]
    logprob: npt.NDArray[np.float32]
    told: npt.NDArray[np.bool_]
    """A logprob was told, if only as "not a number"."""
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]

    @property
    def case(self) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = self.key >> (_REPEAT + _POSITION)
        return found

    @property
    def repeat(self) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = (self.key >> _POSITION) & (2**_REPEAT - 1)
        return found

    @property
    def position(self) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = self.key & (2**_POSITION - 1)
        return found

    def of(self, renumbered: dict[int, int]) -> Positions:
        """Those of some cases, with other numbers."""
        found = np.isin(self.case, list(renumbered))
        case = np.array([renumbered[each] for each in self.case[found].tolist()], np.int64)
        shift = (case - self.case[found]) << (_REPEAT + _POSITION)
        order = np.argsort(self.key[found] + shift)
        rest = (getattr(self, name)[found][order] for name in self.__struct_fields__[1:])
        return Positions((self.key[found] + shift)[order], *rest)


class Sheet(msgspec.Struct, frozen=True):
    """One check on one arm that has ended and was run."""

    run: CheckRun
    replies: list[ParityReply]
    folder: Path

    def positions(self, first: int, last: int, *, lists: bool = True) -> Positions:
        """Of cases ``first`` to ``last``, both in."""
        names = ["case", "repeat", "position", "token", "logprob", *(["top_ids", "top_logprobs"] if lists else [])]
        path = self.folder / "tokens.parquet"
        try:
            found = (
                pl.scan_parquet(path)
                .select(names)
                .filter(pl.col("case").is_between(first, last))
                .collect()
                .sort("case", "repeat", "position")
            )
        except (pl.exceptions.PolarsError, OSError) as error:
            raise UserError(f"{path} is damaged: {error}. Run this check again") from None
        ids, logprobs = _lists(found) if lists else (np.empty((len(found), 0), np.int32),) * 2
        return Positions(
            key=(found["case"].cast(pl.Int64).to_numpy() << (_REPEAT + _POSITION))
            | (found["repeat"].cast(pl.Int64).to_numpy() << _POSITION)
            | found["position"].cast(pl.Int64).to_numpy(),
            token=found["token"].to_numpy(),
            logprob=found["logprob"].fill_null(float("nan")).to_numpy(),
            told=found["logprob"].is_not_null().to_numpy(),
            top_ids=ids,
            top_logprobs=logprobs.astype(np.float32, copy=False),
        )

    def slices(self) -> Iterator[tuple[int, int]]:
        """Ranges of cases that together hold all positions, about SLICE in each."""
        sizes: dict[int, int] = {}
        for reply in self.replies:
            sizes[reply.case] = sizes.get(reply.case, 0) + reply.ids
        first, held = 0, 0
        for case in sorted(sizes):
            held += sizes[case]
            if held >= SLICE:
                yield first, case
                first, held = case + 1, 0
        if held:
            yield first, max(sizes)


def _lists(found: pl.DataFrame) -> tuple[npt.NDArray[np.int32], Logprobs]:
    lengths = found["top_ids"].list.len().fill_null(0).to_numpy()
    width = int(lengths.max()) if len(lengths) else 0
    ids = np.full((len(found), width), -1, np.int32)
    logprobs = np.full((len(found), width), -np.inf, np.float32)
    if width:
        there = np.arange(width) < lengths[:, None]
        some = found.filter(pl.col("top_ids").list.len() > 0)
        ids[there] = some["top_ids"].explode().to_numpy()
        logprobs[there] = some["top_logprobs"].explode().fill_null(float("nan")).to_numpy()
    return ids, logprobs


class Records(msgspec.Struct, frozen=True, dict=True):
    """What RUN/parity holds."""

    folder: Path
    manifest: ParityManifest
    plan: ParityPlan
    plan_sha256: str
    """Of plan.json as it is."""
    floor: Floor | None
    cases: dict[str, list[Case]]
    """By check; of those that were planned to be run."""
    sheets: dict[tuple[ArmName, str], Sheet]
    not_run: dict[tuple[ArmName, str], str]
    """Why an arm's check could not be run."""
    notes: list[str]
    """What was not counted."""

    @cached_property
    def case(self) -> dict[str, dict[int, Case]]:
        """By check and number."""
        return {check: {each.number: each for each in cases} for check, cases in self.cases.items()}

    def arms(self, check: str) -> list[ArmName]:
        """On which a check has ended, in measured order."""
        return [arm for arm in self.plan.arms if (arm, check) in self.sheets]


def load(folder: Path) -> Records:
    """Raises UserError for a folder that is none, and for damaged files."""
    manifest, plan = read_manifest(folder, ParityManifest), read(folder / "plan.json", ParityPlan)
    sheets: dict[tuple[ArmName, str], Sheet] = {}
    not_run: dict[tuple[ArmName, str], str] = {}
    notes: list[str] = []
    for arm in plan.arms:
        for planned in plan.checks:
            place = folder / arm / planned.id
            if not (place / "run.json").exists():
                if place.exists():
                    notes.append(f"{arm}/{planned.id}: not counted, the check has not ended")
                continue
            run = read(place / "run.json", CheckRun)
            if run.not_run is not None:
                not_run[arm, planned.id] = run.not_run
            else:
                sheets[arm, planned.id] = _sheet(place, run)
    return Records(
        folder=folder,
        manifest=manifest,
        plan=plan,
        plan_sha256=hashlib.sha256((folder / "plan.json").read_bytes()).hexdigest(),
        floor=read(folder / "floor.json", Floor) if (folder / "floor.json").exists() else None,
        cases={each.id: _cases(folder / "cases" / f"{each.id}.jsonl") for each in plan.checks if each.not_run is None},
        sheets=sheets,
        not_run=not_run,
        notes=notes,
    )


def _sheet(place: Path, run: CheckRun) -> Sheet:
    replies = list(_lines(place / "replies.jsonl", ParityReply))
    path = place / "tokens.parquet"
    try:
        positions = pl.scan_parquet(path).select(pl.len()).collect().item()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}. Run this check again") from None
    for what, there, said in (("replies", len(replies), run.replies), ("positions", positions, run.positions)):
        if there != said:
            raise UserError(f"{place} holds {there:,} {what}, run.json says {said:,}: it was changed since")
    return Sheet(run, replies, place)


def _cases(path: Path) -> list[Case]:
    return list(_lines(path, Case))


def _lines(path: Path, schema: type[T]) -> Iterator[T]:
    decode = msgspec.json.Decoder(schema).decode
    if not path.exists():
        raise UserError(f"{path} is missing: it was there when the check was recorded")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield decode(line)
            except msgspec.MsgspecError as error:
                raise UserError(f"{path}:{number} is damaged: {error}. Run this check again") from None
