"""Both backends had the same GPUs."""

from __future__ import annotations

from collections import Counter

from replay.records import THROTTLING_FAULTS, Backend, GpuReading
from reports import gpus
from reports.gates.gate import Evidence, Gate, passing


def judge(evidence: Evidence) -> Gate:
    """Count, kind and layout as the experiment declares them; backends without a declaration are not matched. Where
    snapshots show the GPUs: equal name, count, memory, power limit and MIG mode in every block, none used by somebody
    else, and none throttled by its host's fault in one backend's blocks only. What is not verified is said."""
    manifest = evidence.run.manifest
    seen = {name: gpus.edges(evidence.run, name) for name in evidence.names}
    problems = list(manifest.unmatched_reasons)
    if not manifest.matched_gpus and not problems:
        problems = ["Not the same"]
    problems += unequal(manifest.backends, seen)
    throttled = {name: _throttled(edges) for name, edges in seen.items()}
    told = f"{'; '.join(problems)}. Not matched: does not isolate the decode path." if problems else ""
    held = "; ".join(
        f"{name} {', '.join(f'{why} ({count} x)' for why, count in found.items())}"
        for name, found in throttled.items()
        if found
    )
    return Gate(
        id="matched_gpus",
        title="Matched GPUs",
        status=passing(not problems),
        number=None,
        limit=None,
        unit="",
        explanation=" ".join(
            [
                told or "Same count, kind and layout, as declared.",
                *_verified(evidence, seen),
                *([f"Clocks were held down: {held}."] if held else []),
                *([f"Not verified: {'; '.join(manifest.unverified)}."] if manifest.unverified else []),
            ]
        ),
    )


def unequal(backends: list[Backend], seen: dict[str, list[gpus.Edges]]) -> list[str]:
    """How the GPUs of both backends (baseline first) differ by the snapshots around their blocks or windows, in
    words."""
    baseline, candidate = backends
    problems = []
    common = {name: gpus.in_common(edges) for name, edges in seen.items()}
    for what, one in common[baseline.name].items():
        other = common[candidate.name][what]
        if one and other and one != other:
            problems.append(f"{what}: {baseline.name} {' and '.join(one)}, {candidate.name} {' and '.join(other)}")
    for backend in (baseline, candidate):
        counts = common[backend.name]["GPU count"]
        if backend.gpus and counts and counts != [str(backend.gpus.count)]:
            problems.append(f"{backend.name}: {backend.gpus.count} GPUs declared, {' or '.join(counts)} seen")
        limits: dict[str, set[float]] = {}
        for each in gpus.readings(seen[backend.name]):
            for gpu in each:
                if gpu.power_limit_w is not None:
                    limits.setdefault(gpu.uuid, set()).add(gpu.power_limit_w)
        if any(len(values) > 1 for values in limits.values()):
            problems.append(f"{backend.name}: the power limit of its GPUs changed while it was measured")
        problems += _shared(backend.name, _readings(seen[backend.name]))
    faults = {name: THROTTLING_FAULTS.intersection(_throttled(edges)) for name, edges in seen.items()}
    names = (baseline.name, candidate.name)
    for mine, theirs in (names, names[::-1]):
        if faults[mine] and not faults[theirs]:
            problems.append(
                f"GPUs of {mine} were throttled, those of {theirs} were not: {', '.join(sorted(faults[mine]))}"
            )
    return problems


def _readings(edges: list[gpus.Edges]) -> list[GpuReading]:
    return [gpu for each in gpus.readings(edges) for gpu in each]


def _shared(name: str, readings: list[GpuReading]) -> list[str]:
    """GPUs that somebody else used; it can be told only where the server's own processes are seen."""
    processes = [(gpu.index, process) for gpu in readings for process in gpu.processes or []]
    others = sorted({(index, process.pid) for index, process in processes if not process.ours})
    if not others or not any(process.ours for _, process in processes):
        return []
    listed = ", ".join(f"GPU {index} by process {pid}" for index, pid in others[:4])
    return [f"{name}: somebody else used its GPUs: {listed}" + (" and more" if len(others) > 4 else "")]


def _throttled(edges: list[gpus.Edges]) -> Counter[str]:
    """Readings of a GPU whose clocks were held down, by reason."""
    return Counter(reason for gpu in _readings(edges) for reason in gpu.throttling)


def _verified(evidence: Evidence, seen: dict[str, list[gpus.Edges]]) -> list[str]:
    """What NVML showed, in sentences; nothing if it showed nothing."""
    baseline, candidate = evidence.names
    used = {name: {gpu.uuid for each in gpus.readings(edges) for gpu in each} for name, edges in seen.items()}
    if used[baseline] and used[baseline] == used[candidate]:
        return [f"NVML showed the same GPUs for both, {gpus.told(seen[baseline])}."]
    return [f"NVML showed {told} for {name}." for name, edges in seen.items() if (told := gpus.told(edges))]
