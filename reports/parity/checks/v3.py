"""V3: every arm was asked the same prompts: the cases that were registered."""

from __future__ import annotations

import hashlib

from reports.parity.arms import Arms
from reports.parity.result import Seen

CHECK = "V3"


def judge(arms: Arms) -> Seen:
    """Never harm. Prompts are made from cases, and cases are those of the plan by their hash."""
    missing, files = [], 0
    for planned in arms.records.plan.checks:
        if planned.not_run is not None or not planned.cases_sha256:
            continue
        path = arms.records.folder / "cases" / f"{planned.id}.jsonl"
        files += 1
        if hashlib.sha256(path.read_bytes()).hexdigest() != planned.cases_sha256:
            missing.append(f"{path.name} is not the one that was registered: start a new run.")
    return Seen(said=f"The cases of {files:,} checks are those that were registered.", missing=missing)
