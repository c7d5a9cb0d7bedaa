"""The backends differ in what is under test, and in nothing else."""

from __future__ import annotations

from replay.records import RunFacts
from reports.signoff.gates.evidence import Evidence, gate
from reports.signoff.result import Gate

_LIKE = ("model", "version", "fingerprint")
"""Of Backend.settings: what says that it is the same deployment."""


def judge(evidence: Evidence) -> list[Gate]:
    """In each part: matched GPUs, and no difference that is not under test. Over the parts: the same two
    deployments."""
    measured: dict[str, RunFacts] = {
        name: part.manifest
        for name, part in (("replay", evidence.parts.replay), ("evals", evidence.parts.evals))
        if part is not None
    }
    missing = []
    for name, facts in measured.items():
        missing += [f"{name}: not matched: {why}." for why in facts.unmatched_reasons]
        missing += [
            f"{name}: {each.key} differs and is not under test ({each.values})."
            for each in facts.differences
            if not each.under_test
        ]
        if not facts.matched_gpus and not facts.unmatched_reasons:
            missing.append(f"{name}: the GPUs are not matched.")
    if len(measured) > 1:
        missing += _unlike(*measured.values())
    said = "The parts are not of one pair of deployments that differ in what is under test alone."
    return [gate("one_difference", "One difference", said if missing else _said(measured), missing)]


def _said(measured: dict[str, RunFacts]) -> str:
    keys = {f"{each.key} ({each.values})" for facts in measured.values() for each in facts.differences}
    if not keys:
        pairs = {tuple(backend.decode_backend for backend in facts.backends) for facts in measured.values()}
        keys = {f"decode_backend ({' against '.join(pair)})" for pair in pairs}
    return f"What differs: {', '.join(sorted(keys))}; and nothing else that could be seen."


def _unlike(replay: RunFacts, evals: RunFacts) -> list[str]:
    """In what the two parts' deployments differ, in sentences."""
    found = []
    for one, other in zip(replay.backends, evals.backends, strict=True):
        values: dict[str, tuple[object, object]] = {
            "decode_backend": (one.decode_backend, other.decode_backend),
            "GPUs": (one.gpus, other.gpus),
        }
        told = ("model",) if one.emulated else _LIKE  # an emulator's fingerprint changes with the speed of its clock
        values.update({key: (one.settings.get(key), other.settings.get(key)) for key in told})
        found += [
            f"{one.name}: {what} was {first} in the replay and {second} in the evals: measure both on one deployment."
            for what, (first, second) in values.items()
            if first != second and None not in (first, second)
        ]
    return found
