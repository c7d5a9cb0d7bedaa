"""The verb ``emulate``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import uvloop
from cyclopts import Parameter

from replay.emulator import faults, profiles
from replay.emulator.profiles import DecodeBackend
from replay.emulator.server import Ready, serve
from replay.emulator.settings import EmulatorSettings, Language
from replay.emulator.speculation import Speculation
from workloads.errors import UserError

_PROFILES = "; ".join(f"{profile.name}: {profile.summary}" for profile in profiles.PROFILES.values())
_FAULTS = "; ".join(
    f"{name}{':' + fault.argument if fault.argument else ''}: {fault.summary}" for name, fault in faults.FAULTS.items()
)


def emulate(
    *,
    profile: Annotated[str, Parameter(help=f"The emulated deployment. {_PROFILES}.")] = "toy",
    decode_backend: DecodeBackend = "auto",
    draft_tokens: int = 0,
    acceptance_length: float | None = None,
    time_scale: float = 1.0,
    max_model_len: int | None = None,
    kv_blocks: int | None = None,
    fault: Annotated[list[str] | None, Parameter(help=f"A fault to switch on (may be repeated). {_FAULTS}.")] = None,
    keep_alive_s: float = 5.0,
    seed: int = 0,
    model: str = "emulated",
    exams: Path | None = None,
    language: Language = "words",
    noise_seed: int = 0,
    port: int = 0,
    log_dir: Path | None = None,
) -> None:
    """Run the embedded emulator on its own, until Ctrl-C: an OpenAI-compatible server on 127.0.0.1 with a known truth.

    Its figures come from published rows and stated assumptions. They are never measurements of hardware.

    Parameters
    ----------
    decode_backend
        The decode path of the emulated server.
    draft_tokens
        Draft tokens per step of speculative decoding; 0: none.
    acceptance_length
        Mean tokens that a step yields with drafts, in [1, 1 + draft tokens].
    time_scale
        Emulated hardware time runs this many times faster than the clock.
    max_model_len
        Longest context, tokens; by default the profile's.
    kv_blocks
        Blocks of the KV cache; by default the profile's.
    keep_alive_s
        Idle connections are closed after this many seconds.
    seed
        Seed of the language, of random acceptance and of luck in exams.
    model
        The model name that requests must ask for.
    exams
        JSON file of questions that it answers right with given probabilities (replay/emulator/exams.py).
    language
        What answers requests that want no logprobs: quick words, or the language model that answers those that do.
        Faults of the decode path need the model.
    noise_seed
        Seed of numerical noise, of what faults of the decode path strike, and of luck in exams.
    port
        Port to listen on; 0: any free one.
    log_dir
        New folder for the log of what was emitted when; by default it is not kept.
    """
    if draft_tokens == 0 and acceptance_length is not None:
        raise UserError("--acceptance-length needs --draft-tokens")
    if draft_tokens and acceptance_length is None:
        raise UserError("--draft-tokens needs --acceptance-length")
    drafts = Speculation(draft_tokens=draft_tokens, acceptance_length=acceptance_length) if draft_tokens else None
    settings = EmulatorSettings(
        profile=profile,
        decode_backend=decode_backend,
        speculation=drafts,
        time_scale=time_scale,
        max_model_len=max_model_len,
        kv_blocks=kv_blocks,
        faults=tuple(fault or ()),
        keep_alive_s=keep_alive_s,
        seed=seed,
        model=model,
        exams=str(exams) if exams is not None else None,
        language=language,
        noise_seed=noise_seed,
    )

    def announce(ready: Ready) -> None:
        print(f"emulated {ready.profile}, model {ready.model!r}, at {ready.url}", flush=True)
        print("Ctrl-C ends it", flush=True)

    with tempfile.TemporaryDirectory(prefix="decodegate-emulator-") as scratch:
        uvloop.run(serve(settings, log_dir if log_dir is not None else Path(scratch), port, announce))
