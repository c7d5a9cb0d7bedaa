"""What the command shows while a comparison is prepared and runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from replay.lanes import Counts


class Event(msgspec.Struct, kw_only=True):
    """What the command shows while a comparison runs. ``block`` is 0 before the first block."""

    text: str = ""
    block: int = 0
    blocks: int = 0
    backend: str = ""
    counts: Counts | None = None
    in_flight: int = 0
    planned: int = 0
    elapsed_s: float = 0.0


class Finding(msgspec.Struct, frozen=True):
    """What the user should know. ``why`` says why it matters, ``mend`` what to change, if anything."""

    level: Literal["ok", "note", "warning"]
    what: str
    mend: str = ""
    why: str = ""

    def __str__(self) -> str:
        lines = [f"{'WARNING' if self.level == 'warning' else self.level}: {self.what}"]
        lines += [f"    {name}: {text}" for name, text in (("why", self.why), ("change", self.mend)) if text]
        return "\n".join(lines)


Tell = Callable[[Event], None]
