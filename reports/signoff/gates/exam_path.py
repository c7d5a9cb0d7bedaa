"""The candidate sat the exams on the path that is to be signed off."""

from __future__ import annotations

from reports.accuracy.tasks import KINDS
from reports.coverage import MEASURED, SPECIALISED
from reports.signoff.gates.evidence import COVERAGE, Evidence, gate
from reports.signoff.result import ExamPath, Gate


def judge(evidence: Evidence) -> list[Gate]:
    """Share of the candidate's decode tokens that ran specialised, measured, of each benchmark and stratum: an exam
    that was sat on standard decode says nothing of the specialised one."""
    evals = evidence.parts.evals
    if evals is None:
        return []
    title = "Exams ran specialised"
    candidate = evals.manifest.backends[1]
    if candidate.decode_backend != SPECIALISED:
        said = f"{candidate.name} is not set to {SPECIALISED}: there is no path to prove, and none is signed off."
        return [gate("exam_path", title, said, [])]
    missing, lowest = [], None
    for task in evals.plan.tasks:
        found = [each for each in evidence.coverage if (each.backend, each.task) == (candidate.name, task.task)]
        if not found:
            missing.append(f"{KINDS[task.task].title}: no answer, so no path either.")
        for each in found:
            if why := _why_not(each):
                missing.append(why)
            if each.counted == "specialised" and each.at_least is not None:
                lowest = each.at_least if lowest is None else min(lowest, each.at_least)
    said = "By the server's own log of its decode steps, of every benchmark and stratum."
    if missing:
        said = "Not every benchmark and stratum is shown to have run specialised."
    return [gate("exam_path", title, said, missing, number=lowest, limit=COVERAGE, limit_is="at least", unit="share")]


def _why_not(path: ExamPath) -> str | None:
    """Why a benchmark or stratum is not proved to have run specialised; None if it is. Decode tokens of answers that
    the log does not cover count as none in ``at_least``."""
    where = KINDS[path.task].title + (f", {path.stratum}" if path.stratum else "")
    if path.source not in MEASURED or path.at_least is None or path.share is None:
        return (
            f"{where}: the server does not tell which path its decode steps took: let decodegate start it (serve), or "
            f"name the folder of its step log (backends.{path.backend}.steps)."
        )
    if path.counted != "specialised":
        return f"{where}: the steps of the server's log are {path.counted}, not specialised."
    if path.at_least < COVERAGE:
        why = ", ".join(f"{reason} ({share:.0%})" for reason, share in list(path.reasons.items())[:2])
        rest = f"; the rest: {why}" if why else ""
        return f"{where}: {path.at_least:.1%} of decode tokens are shown to have run specialised{rest}."
    return None
