"""One speculative setting judged: whether what differs between both backends can be the decode path."""

from __future__ import annotations

import shlex

import msgspec

from replay.records import Difference, Speculation
from reports import gpus
from reports.decode.run import Run
from reports.gates import matched_gpus, server_unchanged
from reports.speculation import label


class BackendFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One backend of a setup, in words."""

    name: str
    role: str
    decode_backend: str
    emulated: bool
    command: str | None
    url: str | None
    gpus: str | None
    gpus_seen: str | None
    """By NVML."""
    settings: dict[str, str | int | float | bool | None]
    rule: str | None
    """Whose rule says which steps run specialised."""


class SetupResult(msgspec.Struct, frozen=True, kw_only=True):
    """Both backends with one speculative setting, as they were seen."""

    label: str
    speculation: Speculation
    problems: list[str]
    """Why what differs may not be the decode path, or the servers were not one deployment; no effect is called then."""
    unverified: list[str]
    differences: list[Difference]
    backends: list[BackendFacts]


def setup_of(run: Run, number: int) -> SetupResult:
    """Judge a setup by its index."""
    setup = run.setups[number]
    seen: dict[str, list[gpus.Edges]] = {backend.name: [] for backend in setup.backends}
    for loaded in run.windows:
        if run.manifest.cells[loaded.window.cell].setup == number:
            seen[loaded.window.backend].append(gpus.edges_of(loaded))
    problems = list(setup.unmatched_reasons) or ([] if setup.matched_gpus else ["the GPUs are not the same"])
    problems += matched_gpus.unequal(setup.backends, seen)
    for backend in setup.backends:
        if not (backend.emulated and backend.url is None):
            problems += server_unchanged.changes(backend.name, seen[backend.name])
    return SetupResult(
        label=label(setup.speculation),
        speculation=setup.speculation,
        problems=problems,
        unverified=setup.unverified,
        differences=setup.differences,
        backends=[
            BackendFacts(
                name=backend.name,
                role=role,
                decode_backend=backend.decode_backend,
                emulated=backend.emulated,
                command=shlex.join(backend.command) or None,
                url=backend.url,
                gpus=gpus.declared(backend),
                gpus_seen=gpus.told(seen[backend.name]),
                settings=dict(sorted(backend.settings.items())),
                rule=f"{backend.path.model} ({backend.path.source})" if backend.path else None,
            )
            for role, backend in zip(("baseline", "candidate"), setup.backends, strict=True)
        ],
    )
