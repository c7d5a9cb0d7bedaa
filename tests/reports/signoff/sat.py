"""Evals that were sat, made up and written as a run directory: with known chances, and with whatever else a test
changes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from evals.records import Answer, EvalManifest, EvalPlan, Outcome, Repeat
from replay.records import Backend, Gpus, RunFacts
from reports.accuracy.drop import Floats
from tests.reports.accuracy.exams import RIGHT_PIECE, WRONG_PIECE, Exam, TaskName, plan

NAMES = ("baseline", "candidate")
REGISTERED = 1_796_083_200  # 2026-12-01T00:00:00Z
CONTEXT = {"4k-8k": 6_000, "8k-16k": 12_000, "16k-32k": 24_000, "32k-64k": 48_000, "64k-128k": 96_000}

Change = Callable[[str, Answer], Answer]
"""From a backend's name and its answer to the answer that is written."""


def unchanged(_: str, answer: Answer) -> Answer:
    return answer


def exam(task: TaskName, items: int, repeats: int, rate: float, margin: float = 0.05) -> Exam:
    """``items`` of one chance; MRCR's in two bins."""
    bins = ["4k-8k" if item % 2 else "8k-16k" for item in range(items)] if task == "mrcr" else None
    return Exam(task, repeats, margin, np.full(items, rate), bins)


def backend(name: str, **changes: Any) -> Backend:
    decode = "latency_specialized" if name == "candidate" else "auto"
    settings: dict[str, str | int | float | bool | None] = {
        "model": "kimi-k3",
        "version": "0.33.0",
        "fingerprint": f"vllm-{name}",
    }
    made = Backend(
        name=name,
        decode_backend=decode,
        url=None,
        gpus=Gpus(count=8, kind="GB300", layout={"tp": 8}),
        emulated=False,
        settings=settings,
    )
    return msgspec.structs.replace(made, **changes)


def facts(**changes: Any) -> dict[str, Any]:
    """Fields of RunFacts."""
    made = RunFacts(
        name="specialised decode",
        created_utc="2026-12-01T00:00:01+00:00",
        decodegate_version="0.1",
        versions={"python": "3.11"},
        host={"system": "Linux"},
        measured_by="ada@lab",
        backends=[backend(name) for name in NAMES],
        matched_gpus=True,
        unmatched_reasons=[],
        emulated=False,
    )
    return msgspec.structs.asdict(msgspec.structs.replace(made, **changes))


def write(
    run: Path,
    exams: list[Exam],
    candidate: dict[str, Floats] | None = None,
    *,
    change: Change = unchanged,
    planned: EvalPlan | None = None,
    seed: int = 1,
    **of_facts: Any,
) -> Path:
    """Write RUN/evals. ``candidate``: its chances by task, where they are not the baseline's."""
    folder, dice = run / "evals", np.random.default_rng(seed)
    folder.mkdir(parents=True)
    planned = planned or plan(*exams)
    (folder / "plan.json").write_bytes(msgspec.json.encode(planned))
    digest = hashlib.sha256((folder / "plan.json").read_bytes()).hexdigest()
    manifest = EvalManifest(**facts(**of_facts), plan_sha256=digest)
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    for name in NAMES:
        for each in exams:
            rates = (candidate or {}).get(each.task, each.rates) if name == "candidate" else each.rates
            _sit(folder / name / each.task, name, each, rates, dice, change)
    return run


def _sit(folder: Path, name: str, exam: Exam, rates: Floats, dice: np.random.Generator, change: Change) -> None:
    folder.mkdir(parents=True)
    for repeat in range(exam.repeats):
        right = dice.random(len(rates)) < rates
        answers = [change(name, _answer(name, exam, item, repeat, bool(right[item]))) for item in range(len(rates))]
        path = folder / f"r{repeat:03d}.jsonl"
        path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in answers))
        ended = Repeat(
            backend=name,
            task=exam.task,
            repeat=repeat,
            seed=1000 + repeat,
            started_unix_s=REGISTERED + 10.0,
            ended_unix_s=REGISTERED + 20.0,
            answers=len(answers),
            versions={"lm-eval": "0.4.13"},
        )
        path.with_suffix(".json").write_bytes(msgspec.json.encode(ended))
        path.with_suffix("").mkdir()


def _answer(name: str, exam: Exam, item: int, repeat: int, right: bool) -> Answer:
    outcome: Outcome = "right" if right else "wrong"
    score = (RIGHT_PIECE if right else WRONG_PIECE) if exam.task == "mrcr" else float(right)
    bin = exam.bins[item] if exam.bins is not None else None
    return Answer(
        item=item,
        item_hash=f"{exam.task}{item}",
        prompt_hash=f"{exam.task}{item}",
        prompt_ids_hash=f"ids{exam.task}{item}",
        repeat=repeat,
        seed=1000 + repeat,
        outcome=outcome,
        score=score,
        stratum={"bin": bin, "needles": "4"} if bin is not None else {},
        finish_reason="stop",
        prompt_tokens=CONTEXT[bin] if bin is not None else 100,
        completion_tokens=1000,
        fingerprint=f"vllm-{name}",
        sent_unix_s=REGISTERED + 11.0,
        latency_s=5.0,
    )
