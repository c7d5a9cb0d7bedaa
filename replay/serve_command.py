"""The whole command of a server that we start, from what the experiment says."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import yaml

from replay.experiment import Backend, Serve
from workloads.errors import UserError

BOGUS = "bogus"
"""A decode_backend that does not exist, for the start-up control."""

_INSTRUMENTS = ("cudagraph-metrics", "enable-prompt-tokens-details", "enable-per-request-metrics")


def from_environment(text: str, where: str) -> str:
    """``text`` with each ${NAME} taken from the environment. Raises UserError for a name that is not set."""
    try:
        return Template(text).substitute(os.environ)
    except (KeyError, ValueError) as error:
        raise UserError(f"{where}: {error} is not set in the environment (a plain $ is written $$)") from None


def completed(backend: Backend, model: str, name: str) -> list[str]:
    """The whole command of the backend called ``name``, which serves ``model``: what the experiment gives as
    ``serve``, with host, port (a free one, if none is given), the model's name, decode_backend, and the options of
    ``serve.instrument``, each unless it is there already.

    Raises UserError for a command that says otherwise than the experiment.
    """
    serve, where = backend.serve, f"backends.{name}"
    assert serve is not None
    given = serve.command if isinstance(serve.command, list) else _split(serve.command, where)
    words = [*given, *_option_words(serve.options, f"{where}.serve.options")]
    if not given:
        raise UserError(f"{where}.serve.command is empty: for instance [vllm, serve, /models/kimi-k3]")
    options = _options(words)
    if serve.port is not None and str(options.get("port", serve.port)) != str(serve.port):
        raise UserError(f"{where}.serve.port is {serve.port}, but the command says --port {options['port']}")
    if "port" in options and not _is_port(options["port"]):
        raise UserError(f"{where}.serve: the command says --port {options['port']}, which is none: 1 to 65535")
    names = _served_names(words, options)
    if names and model not in names:
        raise UserError(
            f"{where}: requests ask for the model {model!r}, but the command serves it as {' and '.join(names)}: name "
            f"the same in model (or {where}.model), or leave --served-model-name out"
        )
    key = "api-key" in options or serve.env.get("VLLM_API_KEY", os.environ.get("VLLM_API_KEY"))
    if key and "authorization" not in map(str.lower, backend.headers):
        raise UserError(
            f"{where}: its server wants an API key, and requests would carry none: give "
            f"{where}.headers: {{Authorization: Bearer ${{NAME}}}}"
        )
    if "host" not in options:
        words += ["--host", serve.host]
    if "port" not in options:
        words += ["--port", str(serve.port or _free_port(str(options.get("host", serve.host))))]
    if "served-model-name" not in options and _model(given, options) != model:
        words += ["--served-model-name", model]
    if serve.instrument:
        words += [f"--{option}" for option in _INSTRUMENTS if not {option, f"no-{option}"} & options.keys()]

    told = _additional_config(words, where).get("decode_backend")
    if told is not None and told != backend.decode_backend:
        raise UserError(
            f"{where}.decode_backend is {backend.decode_backend}, but the command's additional-config says {told}: "
            "say it in one place"
        )
    if told is None and backend.decode_backend != "auto":
        words = with_decode_backend(words, backend.decode_backend, where)
    return words


def environment(serve: Serve, where: str) -> dict[str, str]:
    """What the experiment adds to our environment."""
    added = {key: from_environment(value, f"{where}.env.{key}") for key, value in serve.env.items()}
    if serve.devices is not None:
        taken = {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"} & added.keys()
        if taken:
            raise UserError(f"{where}.devices and {where}.env.{min(taken)} both name the GPUs: leave one out")
        indices = ",".join(map(str, serve.devices))
        # CUDA's own order may put the fastest GPU first; NVML's, by which devices are verified, is that of the bus
        added = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **added}
        added |= {"CUDA_VISIBLE_DEVICES": indices, "HIP_VISIBLE_DEVICES": indices}
    return added


_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.DOTALL)


def _split(text: str, where: str) -> list[str]:
    # as a shell takes lines that go on, except in single quotes
    one_line = _QUOTED.sub(lambda found: found[0] if found[0][0] == "'" else found[0].replace("\\\n", " "), text)
    try:
        return shlex.split(one_line)
    except ValueError as error:
        raise UserError(f"{where}.serve.command: {error}") from None


def _option_words(options: Mapping[str, Any], where: str) -> Iterator[str]:
    for key, value in options.items():
        name = key if key.startswith("-") else f"--{key.replace('_', '-') if '.' not in key else key}"
        if isinstance(value, bool):
            yield name if value else f"--no-{name.lstrip('-')}"
        elif value is None:
            raise UserError(f"{where}.{key} has no value: true switches it on, false off")
        elif isinstance(value, list):
            yield name
            yield from (_word(each) for each in value)
        else:
            yield name
            yield _word(value)


def _word(value: Any) -> str:
    # default: YAML takes 2026-11-30 for a date
    return json.dumps(value, default=str) if isinstance(value, dict | list | bool) else str(value)


def _options(words: Sequence[str]) -> dict[str, Any]:
    """Long options by name, as vLLM reads them: - for _ before a dot, the last of several, those of a --config file
    below those of the command. Value: the next word, "" if there is none."""
    options: dict[str, Any] = {}
    for position, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals and position + 1 < len(words) and not words[position + 1].startswith("--"):
                value = words[position + 1]
            options[_name(name)] = value
    if "config" not in options:
        return options
    try:
        file = yaml.safe_load(Path(options["config"]).read_text())
    except (OSError, ValueError, yaml.YAMLError):
        file = None
    if not isinstance(file, dict):
        return options  # the server will say it better
    return {**{_name(str(key)): value for key, value in file.items()}, **options}


def _name(option: str) -> str:
    head, dot, tail = option.partition(".")
    return head.replace("_", "-") + dot + tail


def _model(command: Sequence[str], options: Mapping[str, Any]) -> str | None:
    """The model that a command names: the word after serve, or --model."""
    after = command[command.index("serve") + 1 :] if "serve" in command else []
    return after[0] if after and not after[0].startswith("-") else options.get("model")


def _served_names(command: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """All names under which a command serves its model, the words of --served-model-name; empty if it gives none."""
    value = options.get("served-model-name", [])
    names = [str(each) for each in value] if isinstance(value, list) else [str(value)]
    for position, word in enumerate(command):
        if word.startswith("--") and _name(word[2:]) == "served-model-name":
            names = list(itertools.takewhile(lambda following: not following.startswith("-"), command[position + 1 :]))
    return names


def _additional_config(words: Sequence[str], where: str) -> dict[str, Any]:
    """The command's additional-config; of dotted options only the first level."""
    options = _options(words)
    dotted = {key.partition(".")[2]: value for key, value in options.items() if key.startswith("additional-config.")}
    whole = options.get("additional-config")
    if whole is None or whole == "":
        return dotted
    if dotted:
        raise UserError(f"{where}.serve: additional-config is given whole and by dotted options; vLLM drops the former")
    try:
        config = json.loads(whole) if isinstance(whole, str) else whole
    except json.JSONDecodeError as error:
        raise UserError(f"{where}.serve: additional-config is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{where}.serve: additional-config must be a JSON object")
    return config


def with_decode_backend(words: list[str], value: str, where: str) -> list[str]:
    """The command with that decode_backend, whatever it said before."""
    config = _additional_config(words, where)
    if any(_name(word[2:]).startswith("additional-config.") for word in words if word.startswith("--")):
        return [*words, "--additional-config.decode_backend", value]  # the last one counts
    return [*words, "--additional-config", json.dumps(config | {"decode_backend": value})]


def address(words: Sequence[str]) -> tuple[str, int]:
    """Host and port at which the server can be reached."""
    options = _options(words)
    host = str(options["host"])
    return ("127.0.0.1" if host in ("0.0.0.0", "::", "") else host), int(options["port"])


def _is_port(value: Any) -> bool:
    return str(value).isdecimal() and 1 <= int(value) <= 65535


def listening(host: str, port: int) -> socket.socket:
    """A socket bound there, to be closed by the caller; port 0: any free one. Raises OSError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError:  # an empty or very long part of a name
        raise OSError(errno.EINVAL, "not the name of a host") from None
    probe = socket.socket(family, socket.SOCK_STREAM)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
    except OSError:
        probe.close()
        raise
    return probe


def _free_port(host: str) -> int:
    try:
        with listening(host, 0) as probe:
            return int(probe.getsockname()[1])
    except OSError:
        return 8000  # vLLM's own; _check_port says what is wrong with the host
