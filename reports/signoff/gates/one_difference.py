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
    measured: dict[str, RunFacts] = {name: part.manifest for name, part in evidence.parts.measured.items()}
    missing = []
    for name, facts in measured.items():
        missing += [f"{name}: not matched: {why}." for why in facts.unmatched_reasons]
        missing += [
            f"{name}: {each.key} differs and is not under test ({each.values})."
            for each in facts.differences
            if not each.under_test
        ]
        if not _under_test(facts):
            missing.append(
                f"{name}: nothing under test differs: a backend was compared with itself. Give the candidate its "
                "decode_backend, or name what differs in serving.under_test."
            )
        if not facts.matched_gpus and not facts.unmatched_reasons:
            missing.append(f"{name}: the GPUs are not matched.")
    (first, facts), *others = measured.items()
    missing += [each for name, other in others for each in _unlike((first, facts), (name, other))]
    said = "The parts are not of one pair of deployments that differ in what is under test alone."
    return [gate("one_difference", "One difference", said if missing else _said(measured), missing)]


def _under_test(facts: RunFacts) -> bool:
    baseline, candidate = facts.backends
    return baseline.decode_backend != candidate.decode_backend or any(each.under_test for each in facts.differences)


def _said(measured: dict[str, RunFacts]) -> str:
    keys = {f"{each.key} ({each.values})" for facts in measured.values() for each in facts.differences}
    if not keys:
        pairs = {tuple(backend.decode_backend for backend in facts.backends) for facts in measured.values()}
        keys = {f"decode_backend ({' against '.join(pair)})" for pair in pairs}
    return f"What differs: {', '.join(sorted(keys))}; and nothing else that could be seen."


def _unlike(first: tuple[str, RunFacts], second: tuple[str, RunFacts]) -> list[str]:
    """In what the two parts' deployments differ, in sentences."""
    found = []
    for one, other in zip(first[1].backends, second[1].backends, strict=True):
        values: dict[str, tuple[object, object]] = {
            "decode_backend": (one.decode_backend, other.decode_backend),
            "GPUs": (one.gpus, other.gpus),
        }
        told = ("model",) if one.emulated else _LIKE  # an emulator's fingerprint changes with the speed of its clock
        values.update({key: (one.settings.get(key), other.settings.get(key)) for key in told})
        found += [
            f"{one.name}: {what} was {here} in the {first[0]} and {there} in the {second[0]}: measure both on one "
            "deployment."
            for what, (here, there) in values.items()
            if here != there and None not in (here, there)
        ]
    return found
