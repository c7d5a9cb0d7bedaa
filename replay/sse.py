"""Server-sent events: from the body of a reply, with the arrival of its bytes, to events with theirs.

The rules are those of the WHATWG HTML standard, section 9.2 ("Server-sent events"): lines end in CR, LF or CRLF, one
byte order mark is skipped, one space after the colon is dropped, several data lines are joined with LF, comments and
unknown fields are ignored, a blank line ends an event, and a block without data is no event. One thing is added: an
event that the end of the body cut off before its blank line is given too, marked as unfinished, for the reader to
accept or not. ``id`` and ``retry`` concern reconnection, which a measurement never does, and are ignored.

Nothing is parsed while bytes arrive. Afterwards the body is walked in windows that end at a blank line, so that a
caller can give way between them. Time is linear in the length of the body.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

WINDOW_BYTES = 48 * 1024
"""About 250 events of vLLM's, a third of a millisecond of splitting and decoding."""

_END_OF_LINE = re.compile(rb"\r\n|\n|\r")
# The groups are atomic: a CRLF must not be taken for a CR and an LF, two line ends.
_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")

Times = npt.NDArray[np.int64]
Offsets = npt.NDArray[np.int64]


class Window(NamedTuple):
    """Events that follow each other. All lists have one item an event; offsets count bytes of the body."""

    data: list[bytes]
    kinds: list[bytes] | None
    """The event types; None: all are b"" (the standard's "message")."""
    starts: Offsets
    """Offset of the first byte of the first line that belongs to the event (comments do not)."""
    ends: Offsets
    """Offset just past the blank line that ends the event."""
    unfinished: bool
    """The last event of this window is not followed by a blank line: the body ended first."""


class Events(NamedTuple):
    """All events of one body."""

    data: list[bytes]
    kinds: list[bytes]
    first_ns: Times
    """Arrival of the first byte of each event, monotonic ns."""
    last_ns: Times
    """Arrival of the last byte of each event (of its blank line), monotonic ns."""
    unfinished: bool


def windows(body: bytes, size: int = WINDOW_BYTES) -> Iterator[Window]:
    """Yield the events of ``body``, some at a time: each window is the shortest one of at least ``size`` bytes that
    ends at a blank line, and the last one is what remains. What is yielded in all does not depend on ``size``."""
    at = 3 if body.startswith(b"\xef\xbb\xbf") else 0
    while at < len(body):
        # A blank line always ends an event, whatever stands before it, so parsing can start afresh behind it. The
        # search may start inside a CRLF: then its LF counts as the end of that line, which it is.
        blank = _BLANK_LINE.search(body, max(at, at + size - 2))
        end = blank.end() if blank else len(body)
        window = body[at:end]
        yield _plain(window, at) or _any(window, at)
        at = end


def _plain(window: bytes, offset: int) -> Window | None:
    """The common form, ``data: X LF LF`` again and again and nothing else, in a few calls; None for any other.

    Equal to `_any` for what it takes: without a CR every LF ends a line, so lines that are by turns empty and
    ``data: X`` are events of one data line each.
    """
    if b"\r" in window or not window.endswith(b"\n\n"):
        return None
    lines = window[:-2].split(b"\n")  # the last X, without its blank line, is the last item
    data = [line[6:] for line in lines[::2] if line.startswith(b"data: ")]
    if 2 * len(data) != len(lines) + 1 or any(lines[1::2]):
        return None
    ends = offset + np.cumsum(np.fromiter(map(len, data), np.int64, len(data)) + 8)
    return Window(data, None, np.concatenate(([offset], ends[:-1])), ends, False)


def _any(window: bytes, offset: int) -> Window:
    """Any form, line by line."""
    data: list[bytes] = []
    kinds: list[bytes] = []
    starts: list[int] = []
    ends: list[int] = []
    lines: list[bytes] = []
    kind, start, at, unfinished = b"", -1, 0, False
    # A line that the end of the body cuts off counts as a line, and the end as a blank one.
    for mark in (*_END_OF_LINE.finditer(window), None, None):
        line = window[at : mark.start()] if mark else window[at:]
        past = mark.end() if mark else len(window)
        if not line:
            if lines:
                data.append(lines[0] if len(lines) == 1 else b"\n".join(lines))
                kinds.append(kind)
                starts.append(offset + start)
                ends.append(offset + past)
                unfinished = mark is None
                lines = []
            kind, start = b"", -1
        elif not line.startswith(b":"):
            if start < 0:
                start = at
            name, _, value = line.partition(b":")
            if name == b"data":
                lines.append(value[1:] if value.startswith(b" ") else value)
            elif name == b"event":
                kind = value[1:] if value.startswith(b" ") else value
        at = past
    return Window(data, kinds, np.array(starts, np.int64), np.array(ends, np.int64), unfinished)


def arrivals(offsets: Offsets, read_ns: Times, read_end: Offsets) -> Times:
    """Arrival of the byte just before each offset, monotonic ns, given for every read the moment and the bytes of the
    body that had come by then. For the byte *at* an offset ask for ``offset + 1``."""
    return read_ns[np.searchsorted(read_end, offsets)]


def events(body: bytes, read_ns: Times, read_end: Offsets, size: int = WINDOW_BYTES) -> Events:
    """All events of a body. ``read_ns`` and ``read_end``: see `arrivals`; shape (reads,), the last end is
    ``len(body)``."""
    parts = list(windows(body, size))
    data = [piece for part in parts for piece in part.data]
    kinds = [kind for part in parts for kind in (part.kinds or [b""] * len(part.data))]
    starts = np.concatenate([part.starts for part in parts] or [np.array([], np.int64)])
    ends = np.concatenate([part.ends for part in parts] or [np.array([], np.int64)])
    unfinished = bool(parts) and parts[-1].unfinished
    return Events(data, kinds, arrivals(starts + 1, read_ns, read_end), arrivals(ends, read_ns, read_end), unfinished)
