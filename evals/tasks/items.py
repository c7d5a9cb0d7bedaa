"""What every task's items have in common."""

from __future__ import annotations

import msgspec

Messages = list[dict[str, str]]
"""A chat: {role, content} each."""


class Item(msgspec.Struct, kw_only=True):
    """One question. A task adds its own fields."""

    row: int
    """In the data, from 0."""
    id: str
    """Unique in the data."""
    tokens: int | None = None
    """Of prompt and answer in o200k_base, where the task's strata need it."""
