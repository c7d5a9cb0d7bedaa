"""Wakes an event loop at a moment given in nanoseconds.

The timers of asyncio and of libuv count in whole milliseconds, too coarse for steps of a few milliseconds or, with a
time scale, of a few hundred microseconds. On Linux this asks the kernel for a timer descriptor, good to some tens of
microseconds and free of cost while it waits; elsewhere it falls back to the loop's own timer.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

CLOCK_MONOTONIC = 1  # the clock behind time.monotonic_ns
TFD_NONBLOCK_CLOEXEC = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)
TFD_TIMER_ABSTIME = 1


class _Spec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Alarm:
    """One pending wake-up: ``set`` replaces the last one, ``close`` ends it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._fd = -1
        self._timer: asyncio.TimerHandle | None = None
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK_CLOEXEC)
        if self._fd >= 0:
            loop.add_reader(self._fd, self._fired)

    def set(self, when_ns: int) -> None:
        """Ring once at ``when_ns`` (time.monotonic_ns), or in the next turn of the loop if that has passed."""
        if self._fd >= 0:
            spec = _Spec(0, 0, *divmod(max(when_ns, 1), 1_000_000_000))  # zero would disarm it
            self._libc.timerfd_settime(self._fd, TFD_TIMER_ABSTIME, ctypes.byref(spec), None)
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(0, when_ns - time.monotonic_ns()) / 1e9, self._ring)

    def close(self) -> None:
        """Forget the pending wake-up and free the timer."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        if self._timer is not None:
            self._timer.cancel()

    def _fired(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._fd, 8)
            self._ring()
