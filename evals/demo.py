"""The demo's exams: invented questions for the two emulators of its replay, which know the answers equally well.

Small, so that they take half a minute: margins are wider than those of a sign-off.
"""

from __future__ import annotations

from pathlib import Path

from evals import invented
from evals.answer_key import exams_for, write_exams
from evals.data import load
from replay.backends import NAMES
from replay.experiment import Evals, Experiment, load_experiment

_DEMO = Path(__file__).parents[1] / "replay" / "demo.yaml"

_RIGHT = {"aime25": 0.99, "gpqa_diamond": 0.98, "mrcr": 0.98}
"""Chance of a right answer, on both emulators."""
_MARGIN = 0.05
_CHATS, _CHARACTERS = 102, 700
"""So many of each number of needles, and so long, that each number falls into one bin: cells count alike, and an item
of a small one would weigh much."""
_CONCURRENCY = 4
"""Few, so that replies are rarely held up by a prompt that is read in: such steps are no specialised ones."""
_TIME_SCALE = 50
_CHARACTERS_PER_TOKEN = 4
"""Of English, about: lengths are counted in an encoding that would have to be downloaded."""


def experiment(folder: Path) -> Experiment:
    """The demo's experiment, both emulators in the know of exams that are written into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    chats = invented.mrcr(_CHATS, characters=_CHARACTERS)
    lengths = [chat["n_chars"] // _CHARACTERS_PER_TOKEN for chat in chats]
    data = {
        "aime25": invented.write(invented.aime25(), folder / "aime25.jsonl"),
        "gpqa_diamond": invented.write(invented.gpqa_diamond(), folder / "gpqa_diamond.jsonl"),
        "mrcr": invented.write(chats, folder / "mrcr.jsonl", lengths),
    }
    key = [
        question
        for task, path in data.items()
        for question in exams_for(load(task, str(path), subset=True).items, p=_RIGHT[task])
    ]
    exams = write_exams(key, folder / "key.json").resolve()
    given = {
        task: {"data": str(path.resolve()), "margin": _MARGIN, "concurrency": _CONCURRENCY}
        for task, path in data.items()
    }
    evals = Evals.model_validate(
        {
            "aime25": given["aime25"] | {"repeats": 12},
            "gpqa_diamond": given["gpqa_diamond"] | {"repeats": 4},
            "mrcr": given["mrcr"] | {"repeats": 2, "subset": True},
            "sampling": {"max_tokens": 4096},
        }
    )
    return _emulators(load_experiment(_DEMO), exams=exams).model_copy(update={"evals": evals})


def hurried(described: Experiment) -> Experiment:
    """The experiment with time that passes faster, as nothing is measured of it when exams are sat."""
    return _emulators(described, time_scale=_TIME_SCALE)


def _emulators(described: Experiment, **changes: object) -> Experiment:
    changed = {}
    for name in NAMES:
        backend = described.backend(name)
        assert backend.emulator is not None
        changed[name] = backend.model_copy(update={"emulator": backend.emulator.model_copy(update=changes)})
    return described.model_copy(update={"backends": described.backends.model_copy(update=changed)})
