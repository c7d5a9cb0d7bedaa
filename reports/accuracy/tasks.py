"""The benchmarks, as far as judging needs to know them. To add one, list it here."""

from __future__ import annotations

import msgspec


class Kind(msgspec.Struct, frozen=True):
    title: str
    binary: bool
    """Scores are 0 or 1. Others lie between, in strata of context that the mean score weighs alike."""


KINDS = {
    "aime25": Kind("AIME25", True),
    "gpqa_diamond": Kind("GPQA-Diamond", True),
    "mrcr": Kind("MRCR", False),
}
