"""Keys and passwords: known by their names, kept out of everything that is written down."""

from __future__ import annotations

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
    """The map with its secrets left out."""
    return {name: LEFT_OUT if is_secret(name) else value for name, value in named.items()}


def words(command: Sequence[str]) -> list[str]:
    """The words of a command with the values of secret options (--api-key A B, --api-key=A), and of secret variables
    (HF_TOKEN=A), left out."""
    shown: list[str] = []
    hidden = False
    for word in command:
        name, equals, _ = word.partition("=")
        if word.startswith("--"):
            hidden = is_secret(name[2:])
            shown.append(f"{name}={LEFT_OUT}" if hidden and equals else word)
        elif equals and is_secret(name):
            shown.append(f"{name}={LEFT_OUT}")
        else:
            shown.append(LEFT_OUT if hidden else word)
    return shown
