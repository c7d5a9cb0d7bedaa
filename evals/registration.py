"""The plan of a run in its file: registered before anything is asked, and held to when the run is taken up again."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from evals.records import EvalPlan, ParityPlan
from replay import rundir
from workloads.errors import UserError

P = TypeVar("P", EvalPlan, ParityPlan)


def now() -> str:
    """The time, as plans say it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def register(folder: Path, plan: EvalPlan | ParityPlan) -> str:
    """Write the plan, with the time: before the first question. Returns the file's SHA-256."""
    rundir.write_json(folder / "plan.json", msgspec.structs.replace(plan, registered_utc=now()))
    return sha256(folder / "plan.json")


def read(folder: Path, schema: type[P]) -> P:
    """The registered plan. Raises UserError for one that cannot be read."""
    try:
        return msgspec.json.decode((folder / "plan.json").read_bytes(), type=schema)
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{folder}/plan.json cannot be read ({error}): start a new run") from None


def refuse_changed(registered: P, now: P, *, asked: bool) -> None:
    """Raises UserError if the plan is no longer what was registered. ``asked``: the candidate has been asked."""
    before, after = (
        msgspec.to_builtins(msgspec.structs.replace(each, registered_utc="")) for each in (registered, now)
    )
    if before != after:
        keys = ", ".join(_differing(before, after))
        when = "after the first candidate request" if asked else "since it was registered"
        raise UserError(f"the plan was changed {when} ({keys}): change it back, or start a new run")


def refuse_edited(folder: Path, plan_sha256: str) -> None:
    """Raises UserError if the file of the plan is not the one that the manifest names."""
    if sha256(folder / "plan.json") != plan_sha256:
        raise UserError(f"{folder}/plan.json is not the one that was registered: start a new run")


def _differing(before: object, after: object, where: str = "") -> Iterator[str]:
    """Names of what differs, as paths of keys."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            yield from _differing(before.get(key), after.get(key), f"{where}.{key}" if where else str(key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _differing(one, other, f"{where}.{index}")
    elif before != after:
        yield where


def sha256(path: Path) -> str:
    """Of a file's bytes, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def gone_unless_asked(folder: Path) -> Iterator[None]:
    """A failure before the manifest is written takes the folder away, which was just made; servers' logs, which say
    why, keep it."""
    try:
        yield
    except BaseException:
        if not (folder / "manifest.json").exists() and not (folder / "servers").exists():
            shutil.rmtree(folder)
            with suppress(OSError):  # a replay may be there
                folder.parent.rmdir()
        raise
