"""Experiments that come with decodegate, each a YAML file with comments that say what to change. The first line of a
file says in a sentence what it is."""

from __future__ import annotations

from pathlib import Path

from workloads.errors import UserError

_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """All presets, in order of names."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def summary(name: str) -> str:
    """What the preset is, in a sentence."""
    return read(name).partition("\n")[0].removeprefix("# ")


def read(name: str) -> str:
    """The text of a preset. Raises UserError for a name that is none."""
    if name not in names():
        raise UserError(f"no preset is called {name!r}: there are {', '.join(names())}")
    return (_FOLDER / f"{name}.yaml").read_text()
