"""What a run directory of any kind says of its run, and how one is taken up again."""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import secrets
from datetime import UTC, datetime
from pathlib import Path

import psutil

from replay.experiment import Experiment, Speculating, frozen_yaml
from replay.matching import Matching
from replay.records import RunFacts, Setup
from replay.speculation import recorded
from workloads.errors import UserError


def run_facts(experiment: Experiment, matched: Matching, *, time_scale: float) -> RunFacts:
    """The facts of a new run. ``time_scale``: of the emulators, 1 for real servers."""
    return RunFacts(
        name=experiment.name,
        created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        decodegate_version=importlib.metadata.version("decodegate"),
        versions=_versions(),
        host=_host(),
        measured_by=_who(),
        backends=matched.backends,
        matched_gpus=not matched.unmatched,
        unmatched_reasons=matched.unmatched,
        under_test=experiment.serving.under_test,
        differences=matched.differences,
        unverified=matched.doubts,
        start_up_control=matched.start_up_control,
        emulated=any(backend.emulated for backend in matched.backends),
        salt=experiment.replay.salt if experiment.replay.salt is not None else secrets.token_hex(4),
        time_scale=time_scale,
    )


def setup_facts(chosen: Speculating, matched: Matching) -> Setup:
    """Both backends with one speculative setting, as declared or as seen."""
    return Setup(
        speculation=recorded(chosen),
        backends=matched.backends,
        matched_gpus=not matched.unmatched,
        unmatched_reasons=matched.unmatched,
        differences=matched.differences,
        unverified=matched.doubts,
    )


def refuse_changed(experiment: Experiment, run: Path) -> None:
    """Raises UserError if the experiment file has changed since ``run`` was started."""
    if (run / "experiment.yaml").read_text() != frozen_yaml(experiment):
        raise UserError(
            f"the experiment differs from {run}/experiment.yaml, with which this run was started: "
            "change it back, or start a new run"
        )


def _versions() -> dict[str, str]:
    names = ("aiohttp", "uvloop", "msgspec", "numpy", "tokenizers")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        user = str(os.getuid())
    return f"{user}@{platform.node()}"


def _host() -> dict[str, str]:
    return {
        "system": platform.platform(),
        "cpus": str(os.cpu_count()),
        "memory_bytes": str(psutil.virtual_memory().total),
    }
