"""Backends as the experiment describes them, in the forms that others need."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from replay import experiment, records, serve_command
from replay.emulator import language
from replay.emulator.settings import EmulatorSettings
from replay.emulator.speculation import Speculation
from replay.wire import Limits
from workloads.content import Vocabulary, load_tokenizer, vocabulary_of_range, vocabulary_of_tokenizer
from workloads.errors import UserError

NAMES = ("baseline", "candidate")

DEFAULT_TOKEN_IDS = (1000, 30000)

_FILES = (
    *("config.json", "generation_config.json", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "tiktoken.model"),
)
"""Small files of a model's folder that say which model it is."""


def model_name(whole: experiment.Experiment, name: str) -> str:
    """The model's name as this backend serves it."""
    return whole.backend(name).model or whole.model


def request_headers(whole: experiment.Experiment, name: str) -> dict[str, str]:
    """The backend's extra headers, with ${NAME} taken from the environment. Raises UserError for a name not set."""
    return {
        header: serve_command.from_environment(value, f"backends.{name}.headers.{header}")
        for header, value in whole.backend(name).headers.items()
    }


def wire_limits(whole: experiment.Experiment) -> Limits:
    """The experiment's limits as the wire takes them."""
    return Limits(**whole.replay.limits.model_dump())


def emulator_settings(whole: experiment.Experiment, name: str) -> EmulatorSettings:
    """The emulator's own settings for a backend that is one. Raises UserError for values it does not know."""
    backend = whole.backend(name)
    emulator = backend.emulator
    assert emulator is not None
    drafts = None
    length, rates = emulator.acceptance_length, tuple(emulator.acceptance_rates or ())
    if emulator.draft_tokens:
        if length is None and not rates:
            length = 1 + emulator.draft_tokens / 2
        drafts = Speculation(draft_tokens=emulator.draft_tokens, acceptance_length=length, acceptance_rates=rates)
    elif length is not None or rates:
        raise UserError(f"backends.{name}.emulator: acceptance_length and acceptance_rates need draft_tokens")
    return EmulatorSettings(
        profile=emulator.profile,
        decode_backend=backend.decode_backend,
        speculation=drafts,
        time_scale=emulator.time_scale,
        max_model_len=emulator.max_model_len,
        faults=tuple(emulator.faults),
        seed=whole.replay.seed if emulator.seed is None else emulator.seed,
        model=model_name(whole, name),
        exams=str(emulator.exams) if emulator.exams is not None else None,
        language=emulator.language,
        noise_seed=emulator.noise_seed,
        scale_out=emulator.scale_out,
        trace_replay=emulator.trace_replay,
    )


def described(whole: experiment.Experiment, name: str) -> records.Backend:
    """The backend as declared, for the manifest. Header values are left out."""
    backend = whole.backend(name)
    settings: dict[str, str | int | float | bool | None] = {"model": model_name(whole, name)}
    if backend.emulator is not None:
        emulator = backend.emulator
        settings |= {
            "profile": emulator.profile,
            "draft_tokens": emulator.draft_tokens,
            "acceptance_length": emulator.acceptance_length,
            "time_scale": emulator.time_scale,
            "faults": ", ".join(emulator.faults),
            "exams": emulator.exams.name if emulator.exams is not None else None,
            "seed": emulator.seed,
            "language": emulator.language,
        }
    gpus = backend.gpus
    return records.Backend(
        name=name,
        decode_backend=backend.decode_backend,
        url=backend.url,
        gpus=records.Gpus(count=gpus.count, kind=gpus.kind, layout=gpus.layout) if gpus else None,
        emulated=backend.emulator is not None,
        served=backend.serve is not None,
        price_per_gpu_hour=backend.price_per_gpu_hour,
        settings=settings,
    )


def files(settings: Mapping[str, str]) -> dict[str, str]:
    """SHA-256 (hex) of the small files of a served model, and of its draft model, by name: see records.Backend. Of a
    model that is no folder of this host, or is served in a container, which has folders of its own, there are none."""
    found = {}
    for key, prefix in (("model", ""), ("speculative-config.model", "draft/")):
        if key not in settings or "image" in settings:
            continue
        for name in _FILES:
            with suppress(OSError), Path(settings[key], name).open("rb") as file:
                found[prefix + name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def vocabulary(whole: experiment.Experiment, *, emulated: bool) -> Vocabulary:
    """What prompts are made of: the tokenizer's words, a range of token ids, or the emulator's words."""
    if whole.tokenizer is not None:
        return vocabulary_of_tokenizer(load_tokenizer(whole.tokenizer))
    if emulated and whole.token_ids is None:
        return vocabulary_of_tokenizer(language.tokenizer())
    return vocabulary_of_range(*(whole.token_ids or DEFAULT_TOKEN_IDS))
