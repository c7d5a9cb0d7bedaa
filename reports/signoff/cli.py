"""The verb `signoff`: the verdict, and its document."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.markup import escape

from reports.console import console, write

EXIT = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 2}


def signoff(run: Path, /, *, output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None) -> int:
    """May the candidate be switched on? Judge a run directory: replay, evals, output parity. Writes the document.

    Prints the verdict, what decided, and every gate; writes signoff.json, signoff.md and signoff.html. The same run
    directory gives the same bytes. Exit code 0 for PASS, 1 for FAIL, 2 for INCONCLUSIVE, 3 for a usage or data error.

    Parameters
    ----------
    run
        The run directory, into which decodegate compare, eval and parity (--run) have measured.
    output
        Folder to write to, instead of the run directory.
    """
    # seconds of imports that the command's other verbs do without
    from reports.render.json import strict
    from reports.signoff import document, page

    found = document.signoff(run)
    to = console()
    for stamp in found.stamps:
        to.print(f"[black on yellow] {escape(stamp)} [/]")
    to.print(f"[bold {_COLOUR[found.outcome]}]{found.outcome}[/]{escape(found.line.removeprefix(found.outcome))}")
    for reason in found.reasons if found.outcome != "PASS" else []:
        to.print(f"  {reason}", markup=False)
    to.print()
    for gate in found.gates:
        to.print(f"[{_COLOUR[gate.outcome]}]{gate.outcome:<12}[/] {escape(gate.title)}: {escape(gate.said)}")
    to.print()
    files = {
        "signoff.json": partial(strict, found),
        "signoff.md": partial(page.markdown, found),
        "signoff.html": partial(page.html, found),
    }
    write(run, output, files, to)
    return EXIT[found.outcome]


def json_schema() -> str:
    """The JSON Schema of signoff.json (2020-12), indented."""
    from reports.signoff.result import Signoff

    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | msgspec.json.schema(Signoff)
    return msgspec.json.format(msgspec.json.encode(schema), indent=1).decode()


_COLOUR = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow"}
