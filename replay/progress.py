"""What the command shows while a comparison is prepared and runs."""

from __future__ import annotations

from collections.abc import Callable

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


Tell = Callable[[Event], None]
