"""Backends: from the experiment's description to a URL that answers, and back to facts for the manifest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from replay import experiment, records
from replay.emulator import language, process
from replay.emulator.settings import EmulatorSettings
from replay.emulator.speculation import Speculation
from workloads.content import Vocabulary, load_tokenizer, vocabulary_of_range, vocabulary_of_tokenizer
from workloads.errors import UserError

NAMES = ("baseline", "candidate")

_DEFAULT_TOKEN_IDS = (1000, 30000)


@contextmanager
def running(
    described: experiment.Experiment, name: str, log_folder: Path, *, with_faults: bool = True
) -> Iterator[str]:
    """Yield the backend's URL. An emulator is started before, with its truth written to ``log_folder``, and stopped
    after; a server at a URL is left alone. ``with_faults``: switch the emulator's named faults on."""
    backend = getattr(described.backends, name)
    if backend.url is not None:
        yield backend.url.rstrip("/")
        return
    log_folder.mkdir(parents=True, exist_ok=True)
    settings = emulator_settings(described, name)
    if not with_faults:
        settings = msgspec.structs.replace(settings, faults=())
    emulator = process.start(settings, log_folder)
    try:
        yield emulator.url
    finally:
        process.stop(emulator)


def emulator_settings(described: experiment.Experiment, name: str) -> EmulatorSettings:
    """The emulator's own settings for a backend that is one. Raises UserError for values it does not know."""
    backend: experiment.Backend = getattr(described.backends, name)
    emulator = backend.emulator
    assert emulator is not None
    drafts = None
    if emulator.draft_tokens:
        length = emulator.acceptance_length if emulator.acceptance_length is not None else 1 + emulator.draft_tokens / 2
        drafts = Speculation(draft_tokens=emulator.draft_tokens, acceptance_length=length)
    elif emulator.acceptance_length is not None:
        raise UserError(f"backends.{name}.emulator.acceptance_length needs draft_tokens")
    return EmulatorSettings(
        profile=emulator.profile,
        decode_backend=backend.decode_backend,
        speculation=drafts,
        time_scale=emulator.time_scale,
        max_model_len=emulator.max_model_len,
        faults=tuple(emulator.faults),
        seed=described.replay.seed,
        model=backend.model or described.model,
    )


def described(whole: experiment.Experiment, name: str) -> records.Backend:
    """The backend as declared, for the manifest. Header values are left out."""
    backend: experiment.Backend = getattr(whole.backends, name)
    settings: dict[str, str | int | float | bool | None] = {"model": backend.model or whole.model}
    if backend.emulator is not None:
        emulator = backend.emulator
        settings |= {
            "profile": emulator.profile,
            "draft_tokens": emulator.draft_tokens,
            "acceptance_length": emulator.acceptance_length,
            "time_scale": emulator.time_scale,
            "faults": ", ".join(emulator.faults),
        }
    gpus = backend.gpus
    return records.Backend(
        name=name,
        decode_backend=backend.decode_backend,
        url=backend.url,
        gpus=records.Gpus(count=gpus.count, kind=gpus.kind, layout=gpus.layout) if gpus else None,
        emulated=backend.emulator is not None,
        settings=settings,
    )


def vocabulary(whole: experiment.Experiment, *, emulated: bool) -> Vocabulary:
    """What prompts are made of: the tokenizer's words, a range of token ids, or the emulator's words."""
    if whole.tokenizer is not None:
        return vocabulary_of_tokenizer(load_tokenizer(whole.tokenizer))
    if emulated and whole.token_ids is None:
        return vocabulary_of_tokenizer(language.tokenizer())
    return vocabulary_of_range(*(whole.token_ids or _DEFAULT_TOKEN_IDS))
