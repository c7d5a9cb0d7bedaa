"""What an emulator is started with."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import msgspec

from replay.emulator import exams, faults, profiles, speculation
from replay.emulator.profiles import DecodeBackend, Profile
from replay.emulator.speculation import Speculation
from workloads.errors import UserError

MAX_SPECIALISED_DRAFTS = 7

Language = Literal["words", "model"]
"""What answers requests. The model (replay/emulator/lm.py) has a distribution at each position and costs about 1 ms a
step; words have none (language.next_token) and cost 2 us each, which benchmarks of the client need. With "words" the
model still answers what only it can: requests for logprobs, and /inference/v1/generate. It says other things than the
words do, so that logprobs on and off are comparable with "model" only."""


class EmulatorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None stands for the profile's own value."""

    profile: str = "toy"
    decode_backend: DecodeBackend = "auto"
    speculation: Speculation | None = None
    time_scale: float = 1.0
    """Emulated hardware time runs this many times faster than the clock."""
    max_model_len: int | None = None
    kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    faults: tuple[str, ...] = ()
    keep_alive_s: float = 5.0
    """Idle connections are closed after this long, as vLLM's are."""
    seed: int = 0
    model: str = "emulated"
    """Name that requests must ask for."""
    exams: str | None = None
    """File of questions that it knows (replay/emulator/exams.py)."""
    language: Language = "words"
    noise_seed: int = 0
    """Of numerical noise, of what faults of the decode path strike, and of luck in exams: with another one it is
    another run of the same server."""
    scale_out: bool = True
    """Offer /inference/v1/generate, as vLLM does with --enable-scale-out."""
    trace_replay: bool = True
    """Take trace_decode_token_ids there, as vLLM does with --enable-trace-replay."""


def resolve(settings: EmulatorSettings) -> Profile:
    """Return the profile with the settings' own values in place. Raises UserError if they cannot work together."""
    profile = profiles.find(settings.profile)
    own = {
        name: value
        for name in ("max_model_len", "kv_blocks", "max_num_seqs", "max_num_batched_tokens")
        if (value := getattr(settings, name)) is not None
    }
    for name, value in own.items():
        if value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1")
    if not 0 < settings.time_scale <= 1000:
        raise UserError(f"time_scale is {settings.time_scale:g}; it must lie above 0, up to 1000")
    if settings.keep_alive_s <= 0:
        raise UserError(f"keep_alive_s is {settings.keep_alive_s:g}; it must be above 0")
    unheard = faults.parse(settings.faults).keys() & faults.DECODE_FAULTS
    if unheard and settings.language != "model":
        raise UserError(f"fault {min(unheard)} acts on the language model; set language to model")
    if settings.exams is not None:
        exams.load(Path(settings.exams))
    drafts = settings.speculation
    if drafts is not None:
        speculation.check(drafts)
        if settings.decode_backend == "latency_specialized" and drafts.draft_tokens > MAX_SPECIALISED_DRAFTS:
            raise UserError(
                f"the specialised decode backend takes at most {MAX_SPECIALISED_DRAFTS} draft tokens, "
                f"not {drafts.draft_tokens}"
            )
    resolved = msgspec.structs.replace(profile, **own)
    room = resolved.kv_blocks * resolved.block_size
    if room < resolved.max_model_len:
        raise UserError(
            f"max_model_len {resolved.max_model_len} does not fit the KV cache of {resolved.kv_blocks} blocks of "
            f"{resolved.block_size} tokens ({room} tokens); lower max_model_len or raise kv_blocks"
        )
    return resolved


def fingerprint(settings: EmulatorSettings) -> str:
    """Return the ``system_fingerprint``: it says that this is emulated, and changes with the settings and with what a
    file of exams holds, wherever that lies. How fast time passes is nothing that is served, nor is which run of it this
    is."""
    settings = msgspec.structs.replace(settings, time_scale=1.0, noise_seed=0)
    if settings.exams is not None:
        content = hashlib.sha256(Path(settings.exams).read_bytes()).hexdigest()
        settings = msgspec.structs.replace(settings, exams=content)
    return f"decodegate-emulator-{hashlib.sha256(msgspec.json.encode(settings)).hexdigest()[:8]}"
