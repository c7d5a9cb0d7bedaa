"""Papers of invented questions, and two emulators that sit them: each with luck of its own, up over all repeats, so
that a repeat takes a fraction of a second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from evals import invented
from evals.answer_key import Figure, exams_for, write_exams
from evals.data import load
from evals.tasks import mrcr
from replay.emulator import process
from replay.emulator.settings import EmulatorSettings
from replay.experiment import Experiment
from tests.integration import runs

NAMES = ("baseline", "candidate")


class Paper(NamedTuple):
    """One task's questions, how well they are answered, and how often."""

    task: str
    rows: Sequence[invented.Row]
    repeats: int
    p: float
    harm: Figure = 0.0
    """To the candidate."""
    tokens: Sequence[int] | None = None
    """Lengths of items, for MRCR."""


def aime(repeats: int, p: float, harm: float = 0.0) -> Paper:
    return Paper("aime25", invented.aime25(), repeats, p, harm)


def gpqa(repeats: int, p: float, harm: float = 0.0, items: int = 198) -> Paper:
    return Paper("gpqa_diamond", invented.gpqa_diamond(items), repeats, p, harm)


def chats(repeats: int, p: float, per_bin: int, harm: Figure = 0.0) -> Paper:
    """As many short chats in each bin, said to be as long as its middle."""
    bins = len(mrcr.BINS) - 2
    tokens = [mrcr.EDGES[number % bins] * 3 // 2 for number in range(bins * per_bin)]
    rows = invented.mrcr(len(tokens), needles=(2,), characters=300)
    return Paper("mrcr", rows, repeats, p, harm, tokens)


def written(papers: Sequence[Paper], folder: Path) -> dict[str, Path]:
    """The papers' data files, by task."""
    return {
        paper.task: invented.write(paper.rows, folder / f"{paper.task}.jsonl", tokens=paper.tokens) for paper in papers
    }


@contextmanager
def sitting(
    papers: Sequence[Paper],
    folder: Path,
    *,
    candidate: Mapping[str, float] | None = None,
    concurrency: int = 32,
    time_scale: float = 100,
) -> Iterator[Experiment]:
    """Two emulators that know the papers, and the experiment in which they sit them. ``candidate``: shares of its
    replies that are none (``exams_for``). Their logs are NAME.log in ``folder``."""
    data = written(papers, folder)
    servers: dict[str, process.Emulator] = {}
    try:
        for seed, name in enumerate(NAMES, 1):
            shares = (candidate or {}) if name == "candidate" else {}
            key = [
                question
                for paper in papers
                for question in exams_for(
                    load(paper.task, str(data[paper.task]), subset=True).items, p=paper.p, harm=paper.harm, **shares
                )
            ]
            settings = EmulatorSettings(
                decode_backend="latency_specialized" if name == "candidate" else "auto",
                time_scale=time_scale,
                max_model_len=2**20,
                exams=str(write_exams(key, folder / f"{name}.json")),
                seed=seed,
            )
            servers[name] = process.start(settings, folder / f"{name}.log")
        evals: dict[str, Any] = {"sampling": {"max_tokens": 2000}, "retries": 0}
        for paper in papers:
            exam = {"data": str(data[paper.task]), "subset": True, "concurrency": concurrency}
            evals[paper.task] = exam | {"repeats": paper.repeats}
        urls: dict[str, Any] = {name: {"url": server.url, "gpus": runs.GPUS} for name, server in servers.items()}
        urls["candidate"]["decode_backend"] = "latency_specialized"
        whole = runs.experiment(evals=evals)
        yield whole.model_copy(update={"backends": whole.backends.model_validate(urls)})
    finally:
        for server in servers.values():
            process.stop(server)
