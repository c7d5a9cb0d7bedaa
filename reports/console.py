"""What the report verbs print, and the files that they write: for every kind of run alike."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from workloads.errors import UserError


class _Patient(Console):
    """Goes on without output when its reader has left (`decodegate report RUN | head`), so that files get written."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console() -> Console:
    """The console of a report verb."""
    return _Patient(highlight=False, soft_wrap=True)


def write(run: Path, output: Path | None, renders: Mapping[str, Callable[[], str]], to: Console) -> None:
    """Render and write each file, by name, into ``output`` or the run directory; the last one named is told of. Raises
    UserError if one cannot be written. What may fail belongs last: it costs none of the others."""
    folder = output or run
    for name, render in renders.items():
        text = render()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _replace(folder / name, text)
        except OSError as error:
            raise UserError(
                f"{folder / name} cannot be written: {error.strerror or error}. The conclusion is printed; "
                "--output names another folder"
            ) from error
    to.print(f"report: {folder / list(renders)[-1]}", markup=False)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
