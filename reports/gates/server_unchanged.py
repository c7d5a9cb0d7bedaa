"""Each backend was one deployment all along."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from replay.records import Snapshot
from reports import gpus
from reports.gates.gate import Evidence, Gate, Status

_ALWAYS: dict[str, Callable[[Snapshot], object]] = {
    "version": lambda snapshot: snapshot.version,
    "fingerprint": lambda snapshot: snapshot.fingerprint,
    "max_model_len": lambda snapshot: snapshot.max_model_len,
}
"""What may not change from one start of a server to the next."""

_WITHIN_A_START: dict[str, Callable[[Snapshot], object]] = {
    "settings (/server_info)": lambda snapshot: snapshot.config_digest,
    "GPUs": lambda snapshot: frozenset(gpu.uuid for gpu in snapshot.gpus) if snapshot.gpus else None,
}


def judge(evidence: Evidence) -> Gate:
    """What servers say of themselves before the first request and after the last of every block: the same in all of a
    backend's blocks, or what was measured is not one deployment. Unknown for a block without snapshots."""
    backends = evidence.run.manifest.backends
    if all(backend.emulated and backend.url is None for backend in backends):
        return _gate("pass", "Emulators, started with the same settings for every block.")
    problems: list[str] = []
    blind: list[str] = []
    silent: list[str] = []
    for name in evidence.names:
        edges = gpus.edges(evidence.run, name)
        blind += [edge.block.name for edge in edges if edge.before is None or edge.after is None]
        problems += changes(name, edges)
        snapshots = [snapshot for edge in edges for snapshot in edge.snapshots()]
        if snapshots and not any(tell(snapshot) for snapshot in snapshots for tell in _ALWAYS.values()):
            silent.append(name)
    if problems:
        return _gate("fail", f"{'; '.join(problems)}: not one deployment.")
    if blind:
        return _gate("unknown", f"Not looked at before and after: {', '.join(blind)}.")
    if silent:
        return _gate("unknown", f"{' and '.join(silent)} told neither version nor fingerprint.")
    return _gate("pass", "What the servers say of themselves was the same before and after every block.")


def changes(name: str, edges: list[gpus.Edges]) -> list[str]:
    """What changed of a backend, in words, over its blocks (or windows)."""
    problems: list[str] = []
    snapshots = [(edge, snapshot) for edge in edges for snapshot in edge.snapshots()]
    for what, tell in _ALWAYS.items():
        problems += _changed(name, what, [(edge.block.name, tell(snapshot)) for edge, snapshot in snapshots])
    for start in dict.fromkeys(edge.block.server for edge in edges):
        of_start = [(edge, snapshot) for edge, snapshot in snapshots if edge.block.server == start]
        for what, tell in _WITHIN_A_START.items():
            problems += _changed(name, what, [(edge.block.name, tell(snapshot)) for edge, snapshot in of_start])
    return problems


def _changed(name: str, what: str, told: list[tuple[str, object]]) -> list[str]:
    """The first change of what was told, block by block; what was not told is no change."""
    known = [(block, value) for block, value in told if value is not None]
    for (_, first), (block, value) in itertools.pairwise(known):
        if value != first:
            words = f": {first}, then {value}" if isinstance(value, str | int) and len(str(value)) < 40 else ""
            return [f"{name}: {what} changed by {block}{words}"]
    return []


def _gate(status: Status, explanation: str) -> Gate:
    return Gate(
        id="server_unchanged",
        title="Servers unchanged",
        status=status,
        required=False,
        number=None,
        limit=None,
        unit="",
        explanation=explanation,
    )
