"""Speculative settings of decode tables: both backends as they are with one of them, and the cells that it gives."""

from __future__ import annotations

import difflib
import itertools
from typing import Any

from replay import records, serve_command, settings
from replay.backends import NAMES, model_name
from replay.experiment import Backend, Decode, Emulator, Experiment, Serve, Speculating
from workloads.errors import UserError

_DECIDED = "leave it out: decode.speculation decides that for both backends"

METHODS = (
    *("ngram", "ngram_gpu", "suffix", "draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark", "medusa"),
    *("mlp_speculator", "extract_hidden_states", "custom_class"),
)
"""vLLM's (vllm/config/speculative.py, SpeculativeMethod, 0.32); besides, MODEL_mtp for many models, read as mtp."""


def with_speculation(experiment: Experiment, index: int) -> Experiment:
    """The experiment with both backends speculating as decode.speculation[index] says. Servers at a url stay as they
    are: there it only names what they do.

    Raises UserError for backends that say it themselves, and for several settings of servers at a url.
    """
    assert experiment.decode is not None
    chosen = experiment.decode.speculation
    changed = {}
    for name in NAMES:
        backend = experiment.backend(name)
        if backend.url is not None and len(chosen) > 1:
            raise UserError(
                f"backends.{name} is a server at a url, which stays as it is: name in decode.speculation the one "
                "setting that it has, or let decodegate start it (serve)"
            )
        if backend.serve is not None:
            _refuse_own(backend, model_name(experiment, name), name)
            changed[name] = backend.model_copy(update={"serve": _serving(backend.serve, chosen[index])})
        if backend.emulator is not None:
            changed[name] = backend.model_copy(update={"emulator": _emulating(backend.emulator, chosen[index], name)})
    return experiment.model_copy(update={"backends": experiment.backends.model_copy(update=changed)})


def unknown(method: str) -> str:
    """What to say of a method that vLLM, as we know it, does not have; empty for one that it has."""
    if method in METHODS or method.endswith("_mtp"):
        return ""
    close = difflib.get_close_matches(method, METHODS, 1)
    meant = f"did you mean {close[0]}?" if close else f"known are {', '.join(METHODS)}"
    return f"speculative method {method!r} is not known: {meant}"


def _refuse_own(backend: Backend, model: str, name: str) -> None:
    assert backend.serve is not None
    told = settings.from_command(
        serve_command.completed(backend, model, name),
        serve_command.environment(backend.serve, f"backends.{name}.serve"),
    )
    if own := [key for key in told if settings.covers("speculative-config", key)]:
        raise UserError(f"backends.{name}.serve says {own[0]}: {_DECIDED}")


def _serving(serve: Serve, chosen: Speculating) -> Serve:
    if not chosen.draft_tokens:
        return serve
    return serve.model_copy(update={"options": serve.options | {"speculative-config": config(chosen)}})


def config(chosen: Speculating) -> dict[str, Any]:
    """vLLM's --speculative-config for it. Raises UserError for options that say a thing twice."""
    said = {
        "method": chosen.method,
        "model": chosen.model,
        "num_speculative_tokens": chosen.draft_tokens,
        "synthetic_acceptance_length": chosen.acceptance_length,
        "synthetic_acceptance_rates": chosen.acceptance_rates,
    }
    said = {key: value for key, value in said.items() if value is not None}
    if chosen.acceptance_length is not None or chosen.acceptance_rates is not None:
        said["rejection_sample_method"] = "synthetic"
    if twice := sorted(said.keys() & chosen.options.keys()):
        raise UserError(f"decode.speculation: options has {twice[0]}, which another key of that entry says already")
    return said | chosen.options


def _emulating(emulator: Emulator, chosen: Speculating, name: str) -> Emulator:
    if emulator.draft_tokens or emulator.acceptance_length is not None:
        raise UserError(f"backends.{name}.emulator has draft_tokens or acceptance_length: {_DECIDED}")
    if chosen.method is not None and (words := unknown(chosen.method)):
        raise UserError(f"decode.speculation: {words}")
    names = ("draft_tokens", "acceptance_length", "acceptance_rates")
    return emulator.model_copy(update={key: getattr(chosen, key) for key in names})


def recorded(chosen: Speculating) -> records.Speculation:
    """As manifests have it."""
    return records.Speculation(
        draft_tokens=chosen.draft_tokens,
        method=chosen.method,
        acceptance_length=chosen.acceptance_length,
        acceptance_rates=chosen.acceptance_rates,
    )


def label(chosen: Speculating) -> str:
    """It in a few words."""
    if not chosen.draft_tokens:
        return "no speculation"
    words = f"{f'{chosen.method}, ' if chosen.method else ''}{chosen.draft_tokens} draft tokens"
    if chosen.acceptance_length is not None:
        return f"{words}, synthetic acceptance length {chosen.acceptance_length:g}"
    return f"{words}, synthetic acceptance rates" if chosen.acceptance_rates is not None else words


def step_tokens(chosen: Speculating) -> float:
    """Tokens that a step commits on average, or at most where that is not said."""
    if chosen.acceptance_rates is not None:
        return 1 + sum(chosen.acceptance_rates)
    return chosen.acceptance_length or 1 + chosen.draft_tokens


def cells(decode: Decode) -> list[records.Cell]:
    """Every cell of the tables, setup by setup."""
    return [
        records.Cell(batch=batch, input_tokens=input_tokens, output_tokens=output_tokens, setup=setup)
        for setup, chosen in enumerate(decode.speculation)
        for input_tokens, output_tokens, batch in itertools.product(
            decode.input_tokens, decode.output_tokens, chosen.batch or decode.batch
        )
    ]
