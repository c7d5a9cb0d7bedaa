"""The run directory on disk: made, continued, appended to. Its layout is described in replay/records.py.

Every state change is one atomic rename; every record is one appended line. Whatever the moment of a kill, what is
there can be read, and a block or window counts only once its record says finished.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from replay.records import SCHEMA_VERSION, Block, RunFacts
from workloads.errors import UserError

M = TypeVar("M", bound=RunFacts)
T = TypeVar("T", bound=msgspec.Struct)

BESIDE = frozenset({"evals", "parity", "signoff.html", "signoff.json", "signoff.md"})
"""What may lie in a run directory before a replay is measured into it."""

RUNS = Path("runs")
"""Runs that are not named go here."""


class _Kind(msgspec.Struct):
    """What tells kinds of manifests apart."""

    kind: str = "compare"


class _State(msgspec.Struct):
    """What blocks and windows have in common."""

    finished: bool = False


def write_json(path: Path, value: msgspec.Struct) -> None:
    """Replace ``path`` atomically by the value as indented JSON."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
    os.replace(temporary, path)


def new_folder(name: str) -> Path:
    """Where a run of that name goes that is started now: RUNS/NAME-DATE-TIME."""
    return RUNS / f"{_slug(name)}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"


def latest(name: str, verb: str, part: str = "") -> Path:
    """The latest run of that name in RUNS whose manifest, in its folder ``part``, is that verb's. Raises UserError if
    there is none."""
    found = [path for path in RUNS.glob(f"{_slug(name)}-*") if (path / part / "manifest.json").exists()]
    found = [path for path in found if kind(path / part) == verb]
    if not found:
        raise UserError(f"--resume: no run of {name!r} in {RUNS}/ by decodegate {verb}: name it with --run")
    return max(found, key=lambda path: (path / part / "manifest.json").stat().st_mtime)


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name).strip("-") or "run"


def create(run: Path, parts: str, *, resumable: bool = True) -> None:
    """Make an empty run directory, with a folder for its ``parts``: blocks, windows or profiles. Raises UserError if
    there is something in the way."""
    if run.exists() and not run.is_dir():
        raise UserError(f"{run} is a file: name a folder to be made with --run")
    taken = run.exists() and any(each.name not in BESIDE for each in run.iterdir())
    if taken and not (run / "manifest.json").exists() and (run / parts).is_dir():
        raise UserError(f"{run} is what a run left that ended before it measured anything: delete it, or name another")
    if taken:
        resume = ", or continue it with --resume" if resumable else ""
        raise UserError(f"{run} exists and is not empty: name another with --run{resume}")
    (run / parts).mkdir(parents=True)


@contextmanager
def held(run: Path) -> Iterator[None]:
    """Keep other processes from measuring into ``run`` meanwhile; they would set each other's blocks aside. Raises
    UserError if one measures already."""
    folder = os.open(run, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another decodegate measures into {run}: wait for its end, or use another --run") from None
        yield
    finally:
        os.close(folder)


def kind(run: Path) -> str:
    """What ``run`` measured: compare, decode or profile, as manifests have it. Raises UserError when it is not a run
    directory."""
    return _manifest(run, _Kind).kind


def read_manifest(run: Path, schema: type[M]) -> M:
    """The manifest of a run of that kind. Raises UserError when ``run`` is not one, or one of a newer schema."""
    wanted = {field.name: field.default for field in msgspec.structs.fields(schema)}["kind"]
    if (found := kind(run)) != wanted:
        raise UserError(f"{run} is a run of {found}, not of {wanted}: name another with --run")
    manifest = _manifest(run, schema)
    if manifest.schema_version > SCHEMA_VERSION:
        raise UserError(f"{run} was written by a newer decodegate (schema {manifest.schema_version}): upgrade")
    return manifest


def _manifest(run: Path, schema: type[T]) -> T:
    try:
        return msgspec.json.decode((run / "manifest.json").read_bytes(), type=schema)
    except FileNotFoundError:
        raise UserError(
            f"{run} holds no run: it has no manifest.json (a run that has begun to measure has one)"
        ) from None
    except msgspec.MsgspecError as error:
        raise UserError(f"{run}/manifest.json is damaged: {error}") from None


def check_folder(run: Path) -> Path:
    """Where emulators may write during the next preflight."""
    return run / "check" / f"{len(list((run / 'check').glob('*'))) + 1:02d}"


def block_folder(run: Path, index: int, backend: str) -> Path:
    """blocks/NN-BACKEND; ``index`` counts from 1 in measured order."""
    return run / "blocks" / f"{index:02d}-{backend}"


def window_folder(run: Path, index: int, backend: str) -> Path:
    """windows/NNNN-BACKEND; ``index`` counts from 1 in measured order."""
    return run / "windows" / f"{index:04d}-{backend}"


def read_block(folder: Path) -> Block | None:
    """The block's state, or None if it never started or its state is unreadable."""
    try:
        return msgspec.json.decode((folder / "block.json").read_bytes(), type=Block)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def is_finished(file: Path) -> bool:
    """True if the block or window whose record is ``file`` has ended as planned; it will not be measured again."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=_State).finished
    except (FileNotFoundError, msgspec.MsgspecError):
        return False


def attempts(folder: Path) -> int:
    """How many interrupted attempts at this block or window are kept."""
    return len(list(folder.parent.glob(f"{folder.name}.interrupted-*")))


def set_aside(folder: Path) -> Path | None:
    """Rename what an interrupted block or window left, so that it is kept but never judged; None if there was none."""
    if not folder.exists():
        return None
    for number in range(1, 1000):
        kept = folder.with_name(f"{folder.name}.interrupted-{number}")
        if not kept.exists():
            folder.rename(kept)
            return kept
    raise UserError(f"{folder}: a thousand interrupted attempts; something is wrong with this host or server")
