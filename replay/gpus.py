"""Matched GPUs: what the experiment declares of both backends, what is seen of them, and whether the comparison
isolates the decode path."""

from __future__ import annotations

import re
from collections.abc import Sequence

from replay.records import GPUS_ALIKE, THROTTLING_FAULTS, Backend, GpuReading, Snapshot


def mismatches(baseline: Backend, candidate: Backend) -> list[str]:
    """Reasons why the two are not matched; empty if they are. Only what is declared is compared here."""
    reasons = [
        f"{backend.name}: GPUs are not declared (gpus: {{count: N, kind: ...}})"
        for backend in (baseline, candidate)
        if backend.gpus is None
    ]
    if baseline.gpus is None or candidate.gpus is None:
        return reasons
    for what in ("count", "kind", "layout"):
        one, other = getattr(baseline.gpus, what), getattr(candidate.gpus, what)
        if one != other:
            reasons.append(f"GPU {what}: baseline {one}, candidate {other}")
    return reasons


def verified(backend: Backend, snapshot: Snapshot) -> tuple[list[str], list[str]]:
    """What is seen of one backend's GPUs against what is declared: problems, and what could not be checked, in
    sentences. The parallel layout is the settings' matter (settings.layout_problems)."""
    declared = backend.gpus
    if declared is None:
        return [], []  # mismatches() says so
    name, problems, unverified = backend.name, [], []
    if snapshot.gpus is None:
        unverified.append(f"{name}: {declared.count} x {declared.kind} is as declared: {snapshot.gpus_unseen}")
    else:
        seen = snapshot.gpus
        if len(seen) != declared.count:
            problems.append(
                f"{name}: gpus.count says {declared.count}, NVML shows {len(seen)}: change it, or name the server's "
                "GPUs in serve.devices"
            )
        if others := sorted({reading.name for reading in seen if not _is_kind(reading.name, declared.kind)}):
            problems.append(f"{name}: gpus.kind says {declared.kind}, NVML shows {', '.join(others)}")
        problems += [f"{name}: {fault}" for fault in _faults(seen)]
        unverified += [f"{name}: {doubt}" for doubt in _doubts(seen)]
    return problems, unverified


def unequal(baseline: Snapshot, candidate: Snapshot) -> list[str]:
    """In what the GPUs of the two differ, by NVML; empty if in nothing, or if one's are not seen."""
    if baseline.gpus is None or candidate.gpus is None:
        return []
    reasons = []
    for what, describe in GPUS_ALIKE.items():
        one, other = (sorted(set(filter(None, map(describe, gpus)))) for gpus in (baseline.gpus, candidate.gpus))
        if one and other and one != other:
            reasons.append(f"{what}: baseline {' and '.join(one)}, candidate {' and '.join(other)}")
    return reasons


def told(baseline: Snapshot, candidate: Snapshot) -> str | None:
    """What both backends run on, in words; None if one's GPUs are not seen."""
    if not baseline.gpus or not candidate.gpus:
        return None
    if {gpu.uuid for gpu in baseline.gpus} == {gpu.uuid for gpu in candidate.gpus}:
        return f"both backends run on the same GPUs: {_listed(baseline.gpus)}"
    return f"baseline runs on {_listed(baseline.gpus)}, candidate on {_listed(candidate.gpus)}"


def _is_kind(name: str, kind: str) -> bool:
    """Whether all words of a kind ("GB300") are words of a GPU's name ("NVIDIA GB300")."""
    words, wanted = (set(re.findall(r"[a-z0-9.]+", text.lower())) for text in (name, kind))
    return wanted <= words


def _faults(gpus: Sequence[GpuReading]) -> list[str]:
    known = any(process.ours for gpu in gpus for process in gpu.processes or [])
    found = []
    for gpu in gpus:
        others = [process.pid for process in gpu.processes or [] if not process.ours]
        if known and others:
            found.append(f"GPU {gpu.index} is used by process {', '.join(map(str, others))} too: end it first")
        if held := THROTTLING_FAULTS.intersection(gpu.throttling):
            found.append(f"GPU {gpu.index} is throttled now: {', '.join(sorted(held))}")
    return found


def _doubts(gpus: Sequence[GpuReading]) -> list[str]:
    found = []
    if not any(process.ours for gpu in gpus for process in gpu.processes or []):
        found.append(
            "NVML shows no process of its server (as from inside a container), so that others on its GPUs cannot be "
            "told from it"
        )
    unknown = [what for what, describe in GPUS_ALIKE.items() if any(describe(gpu) is None for gpu in gpus)]
    if unknown:
        found.append(f"NVML does not tell of its GPUs: {', '.join(unknown)}")
    return found


def _listed(gpus: Sequence[GpuReading]) -> str:
    kinds = " and ".join(sorted({gpu.name for gpu in gpus}))
    return f"{len(gpus)} x {kinds} (index {', '.join(str(gpu.index) for gpu in gpus)})"
