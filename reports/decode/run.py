"""A run of decode tables, loaded for judging."""

from __future__ import annotations

from pathlib import Path

import msgspec

from replay.records import DecodeManifest, Setup, Window
from reports.run import (
    Measurement,
    SetAside,
    backend_of,
    measured_order,
    read,
    read_manifest,
    read_measurement,
)
from workloads.errors import UserError


class LoadedWindow(Measurement, frozen=True):
    """One finished window."""

    window: Window


class Run(msgspec.Struct, frozen=True):
    """A run directory with at least one finished window."""

    path: Path
    manifest: DecodeManifest
    setups: list[Setup]
    """As they were seen; as declared where none of their windows was reached."""
    windows: list[LoadedWindow]
    """Finished ones, in measured order."""
    set_aside: list[SetAside]
    notes: list[str]
    """What was dropped while reading."""


def load(path: Path) -> Run:
    """Load a run directory of decode tables. Raises UserError if it is none, is of a newer schema, is damaged in the
    middle, or holds no finished window."""
    manifest = read_manifest(path, DecodeManifest)
    setups = [
        read(file, Setup) if (file := path / "setups" / f"{number:02d}.json").exists() else declared
        for number, declared in enumerate(manifest.setups, 1)
    ]
    notes: list[str] = []
    windows: list[LoadedWindow] = []
    set_aside: list[SetAside] = []
    for folder in sorted((path / "windows").glob("*"), key=measured_order):
        if not folder.is_dir():
            continue
        try:
            window = msgspec.json.decode((folder / "window.json").read_bytes(), type=Window)
        except FileNotFoundError:
            set_aside.append(SetAside(folder.name, backend_of(folder), "never started: no window.json"))
            continue
        except msgspec.MsgspecError:
            set_aside.append(SetAside(folder.name, backend_of(folder), "its window.json is damaged"))
            continue
        if ".interrupted-" in folder.name or not window.finished or window.ended_ns is None:
            why = window.cut_short or "not finished"
            set_aside.append(SetAside(folder.name, window.backend, why, window.cut_short))
            continue
        if window.backend not in [backend.name for backend in manifest.backends]:
            raise UserError(f"{folder}/window.json names backend {window.backend!r}, which manifest.json does not know")
        if not 0 <= window.cell < len(manifest.cells):
            raise UserError(f"{folder}/window.json names cell {window.cell}; manifest.json has {len(manifest.cells)}")
        left = read_measurement(folder, window.server, notes)
        windows.append(LoadedWindow(**msgspec.structs.asdict(left), window=window))
    if not windows:
        what = f"{len(set_aside)} unfinished" if set_aside else "no"
        raise UserError(f"{path} holds {what} window(s) and nothing to judge: finish it with decode --resume")
    return Run(path, manifest, setups, windows, set_aside, notes)
