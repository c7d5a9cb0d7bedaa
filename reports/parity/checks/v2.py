"""V2: the candidate's decode steps ran on the path that is under test, in each check that takes many of them."""

from __future__ import annotations

from evals.records import ArmName
from reports.coverage import MEASURED, SPECIALISED, Stretch, rule_for, steps_folder, summed, told
from reports.parity.arms import Arms
from reports.parity.load import Sheet
from reports.parity.result import Finding, Measure, Seen

CHECK = "V2"
COVERAGE = 0.90
"""Share of decode tokens, at least."""
CHECKS = ("P1", "P3", "P5", "P7")
"""Others have short replies, and so much prefill, or batches that no specialised path takes."""


def judge(arms: Arms) -> Seen:
    """Never harm. By the server's own log of its steps; without one the path is not known."""
    candidate = arms.records.manifest.backends[1]
    if candidate.decode_backend != SPECIALISED:
        said = f"{candidate.name} is not set to {SPECIALISED}: there is no path to prove."
        return Seen(said=said)
    measures: list[Measure] = []
    missing: list[str] = []
    for arm in arms.candidates:
        for check in CHECKS:
            if (arm, check) in arms.records.sheets:
                share, why = _share(arms, arm, check)
                sheet = arms.records.sheets[arm, check]
                found = Finding(n=sheet.run.positions, unit="positions", statistic=share, limit=COVERAGE, reason=why)
                measures.append(Measure(of=f"specialised decode tokens in {check}", pair=arm, found=found, harm_p=None))
                if why:
                    missing.append(f"{arm}, {check}: {why}")
    if not measures:
        missing.append(f"None of {', '.join(CHECKS)} has ended: which path decode took is not known.")
    shares = [each.found.statistic for each in measures if each.found.statistic is not None]
    said = f"At least {min(shares):.1%} of decode tokens ran specialised." if shares else "No path is known."
    return Seen(said=said, measures=measures, missing=missing)


def _share(arms: Arms, arm: ArmName, check: str) -> tuple[float | None, str]:
    """Of decode tokens that are shown to have run specialised, and why that is not enough."""
    records, sheet = arms.records, arms.records.sheets[arm, check]
    backend = records.manifest.backends[0 if arm == "X" else 1]
    if sheet.run.started_ns is None or sheet.run.ended_ns is None:
        return None, "when its steps were taken is not on record."
    emulator = records.folder / "emulators" / arm
    stretch = Stretch(
        path=emulator if emulator.exists() else sheet.folder,
        steps=steps_folder(records.folder, sheet.run.server, sheet.folder),
        spans=[(sheet.run.started_ns, sheet.run.ended_ns)],
    )
    rule = rule_for(backend, records.manifest.backends)
    source, counts = told([stretch], rule, all)
    seen = summed(backend, rule, [stretch], source, counts, _decoded(sheet))
    if source not in MEASURED or seen.at_least is None:
        return None, "the server does not tell which path its decode steps took: use serve, or name its steps."
    if seen.counted != "specialised":
        return None, f"the steps of the server's log are {seen.counted}, not specialised."
    few = seen.at_least < COVERAGE
    return seen.at_least, f"{seen.at_least:.1%} of decode tokens are shown to have run specialised." if few else ""


def _decoded(sheet: Sheet) -> int:
    """Output tokens, but for each reply's first, which ends its prefill."""
    return sum(max(reply.ids - 1, 0) for reply in sheet.replies)
