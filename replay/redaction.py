"""Keys and passwords: known by their names, kept out of everything that is written down."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

LEFT_OUT = "(left out)"
"""In the place of a secret."""

_SECRET = re.compile(r"(^|[-_.])(api-?key|key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether an option, header or variable of this name holds a secret: API_KEY, --hf-token, my.password."""
    return _SECRET.search(name) is not None


def values(named: Mapping[str, Any]) -> dict[str, Any]:
    """The map with its secrets left out, at any depth."""
    return {name: LEFT_OUT if is_secret(name) else _within(value) for name, value in named.items()}


def words(command: Sequence[str]) -> list[str]:
    """The words of a command with the values of secret options (--api-key A B, --api-key=A), and of secret variables
    (HF_TOKEN=A) and keys of JSON, left out."""
    shown: list[str] = []
    hidden = False
    for word in command:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            hidden = is_secret(name)
            shown.append(f"{name}={LEFT_OUT if hidden else _within(value)}" if equals else word)
        else:
            shown.append(LEFT_OUT if hidden else _within(word))
    return shown


def _within(value: Any) -> Any:
    """A value whose name is no secret, with the secrets inside it left out."""
    if isinstance(value, dict):
        return values(value)
    if isinstance(value, list):
        return [_within(each) for each in value]
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        try:
            data = json.loads(value)
        except json.JSONDecodeError:
            return value
        shown = values(data)
        return value if shown == data else json.dumps(shown)
    name, equals, _ = value.partition("=")
    if equals and is_secret(name):
        return f"{name}={LEFT_OUT}"
    return without_password(value)


def without_password(text: str) -> str:
    """The text with user and password of URLs like https://user:password@host left out."""
    return re.sub(r"//[^/\s]+@", f"//{LEFT_OUT}@", text)
