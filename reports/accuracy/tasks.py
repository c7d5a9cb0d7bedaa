"""The benchmarks, as far as judging needs to know them. To add one, list it here."""

from __future__ import annotations

import msgspec


class Kind(msgspec.Struct, frozen=True):
    title: str
    binary: bool
    """Scores are 0 or 1. Others lie between, in strata of context that the mean score weighs alike."""
    items: int
    """Of the whole benchmark."""
    licence: str
    """Whose it is, and what may be shown of it."""


KINDS = {
    "aime25": Kind(
        "AIME25", True, 30, "Problem texts belong to the contest's organiser (MAA): brought by the user, none is shown."
    ),
    "gpqa_diamond": Kind(
        "GPQA-Diamond",
        True,
        198,
        "CC BY 4.0, behind a gate whose users agree not to reveal examples: brought by the user, none is shown.",
    ),
    "mrcr": Kind("MRCR", False, 2400, "MIT licence: brought by the user, none is shown."),
}
