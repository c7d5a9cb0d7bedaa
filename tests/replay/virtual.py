"""An event loop whose time jumps: hours of pauses pass in no time, and a deadlock raises instead of hanging."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

from replay.lanes import Clock


class _Selector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("deadlock: every task waits and no timer is set")
        self.now += max(timeout, 0.0)
        return []


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Selector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class VirtualClock(Clock):
    """The loop's time as a lanes clock."""

    def now_ns(self) -> int:
        return round(asyncio.get_running_loop().time() * 1e9)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run ``main`` in virtual time from 0."""
    loop = _Loop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()
