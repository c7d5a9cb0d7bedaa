"""The analysis as JSON, strict: no NaN, no Infinity; a null has its reason beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from reports.analysis import Analysis


def render(analyses: Sequence[Analysis]) -> str:
    """The first analysis."""
    return strict(analyses[0])


def strict(analysis: msgspec.Struct) -> str:
    """Any kind of analysis, indented; keys in the order of its definition."""
    plain = msgspec.to_builtins(analysis)
    _refuse_infinite(plain, "analysis")
    return msgspec.json.format(msgspec.json.encode(plain), indent=1).decode() + "\n"


def _refuse_infinite(value: Any, place: str) -> None:
    """msgspec would write a NaN as null, silently; here it is a fault of ours and must not pass."""
    if isinstance(value, float) and not math.isfinite(value):
        raise AssertionError(f"{place} is {value}")
    if isinstance(value, dict):
        for key, each in value.items():
            _refuse_infinite(each, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            _refuse_infinite(each, f"{place}[{index}]")
