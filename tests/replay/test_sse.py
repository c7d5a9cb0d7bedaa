"""Event-stream parsing against a plain reference, at every split of the bytes and of the work."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay import sse
from tests.scripted_server import DONE, FIN, ROLE, USE, C, chunk

Plain = list[tuple[bytes, bytes, int, int]]
"""(data, kind, offset of the first byte, offset past the last byte) of each event."""

RECORDED = {
    "vllm": ROLE + b"".join(C(word) for word in ("Hel", "lo ✅", "é\\", "\u2028")) + FIN("length") + USE(7, 4) + DONE,
    "no space": b"".join(C(text) for text in "abc").replace(b"data: ", b"data:") + DONE,
    "crlf": (C("a") + C("b") + DONE).replace(b"\n", b"\r\n"),
    "cr": (C("a") + C("b") + DONE).replace(b"\n", b"\r"),
    "named": b"event: message\nid: 7\n"
    + C("a")
    + b": keep-alive\n\n"
    + b"event: ping\ndata: {}\n\nretry: 5\n\n"
    + DONE,
    "two data lines": b'data: {"choices":\ndata: []}\n\n' + C("b") + DONE,
    "cut off": C("a") + b'data: {"choices":[]}',
    "marked": b"\xef\xbb\xbf" + C("a") + DONE,
    "mixed ends": b"data: a\r\n\ndata: b\n\rdata: c\r\r\ndata: d\n\r\n",
    "no data": b"event: x\n\n\n\n\r\n:c\n\ndata\n\ndata:\n\ndata: \n\nother: data: x\n\n",
}


def reference(body: bytes) -> Plain:
    """The standard, one byte at a time."""
    events: Plain = []
    at = 3 if body.startswith(b"\xef\xbb\xbf") else 0
    lines: list[bytes] = []
    kind, first = b"", None
    while True:
        start = at
        while at < len(body) and body[at : at + 1] not in (b"\r", b"\n"):
            at += 1
        line = body[start:at]
        ended = at < len(body)
        if ended:
            at += 2 if body[at : at + 2] == b"\r\n" else 1
        if line and not line.startswith(b":"):
            first = start if first is None else first
            name, value = line.split(b":", 1) if b":" in line else (line, b"")
            value = value.removeprefix(b" ")
            if name == b"data":
                lines.append(value)
            elif name == b"event":
                kind = value
        if not line or not ended:
            if lines:
                assert first is not None
                events.append((b"\n".join(lines), kind, first, at))
            lines, kind, first = [], b"", None
        if not ended:
            return events


def parsed(body: bytes, size: int) -> Plain:
    found: Plain = []
    for window in sse.windows(body, size):
        kinds = window.kinds if window.kinds is not None else [b""] * len(window.data)
        found += zip(window.data, kinds, window.starts.tolist(), window.ends.tolist(), strict=True)
    return found


@pytest.mark.parametrize("body", RECORDED.values(), ids=RECORDED.keys())
def test_every_window_size_gives_the_events_of_the_reference(body: bytes) -> None:
    expected = reference(body)
    assert expected
    for size in range(1, len(body) + 2):
        assert parsed(body, size) == expected


PIECES = st.sampled_from(
    [b"\n", b"\r", b"\r\n", b"\n\n", b"data: ", b"data:", b"data", b"event: ", b"x", b" ", b":", b"\xe2\x9c\x85", b"id",
     b"data: {}\n\n", b"\xef\xbb\xbf"]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES, max_size=25).map(b"".join), st.integers(1, 60))
def test_any_bytes_give_the_events_of_the_reference(body: bytes, size: int) -> None:
    assert parsed(body, size) == reference(body)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text("ab{}: ✅", max_size=6), min_size=1, max_size=12),
    st.sampled_from([b"\n", b"\r", b"\r\n"]),
    st.integers(1, 80),
)
def test_line_ends_do_not_matter(texts: list[str], end: bytes, size: int) -> None:
    body = b"".join(b"data: " + text.encode() + end + end for text in texts)
    assert [data for data, *_ in parsed(body, size)] == [text.encode() for text in texts]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(RECORDED)), st.data())
def test_arrival_is_that_of_the_first_and_last_byte_wherever_reads_end(name: str, data: st.DataObject) -> None:
    body = RECORDED[name]
    cuts = data.draw(st.lists(st.integers(1, len(body) - 1), unique=True).map(sorted))
    read_end = np.array([*cuts, len(body)], dtype=np.int64)
    read_ns = 1000 + 10 * np.arange(len(read_end), dtype=np.int64)
    # the truth, byte by byte: which read brought it
    came = [int(read_ns[next(i for i, end in enumerate(read_end) if end > at)]) for at in range(len(body))]
    events = sse.events(body, read_ns, read_end)
    expected = reference(body)
    assert events.data == [event[0] for event in expected]
    assert events.kinds == [event[1] for event in expected]
    assert events.first_ns.tolist() == [came[first] for _, _, first, _ in expected]
    assert events.last_ns.tolist() == [came[past - 1] for _, _, _, past in expected]


def test_every_single_split_point_of_a_recorded_stream() -> None:
    body = RECORDED["vllm"]
    expected = reference(body)
    for cut in range(1, len(body)):
        events = sse.events(body, np.array([5, 9]), np.array([cut, len(body)]))
        assert events.data == [event[0] for event in expected]
        assert events.last_ns.tolist() == [5 if past <= cut else 9 for _, _, _, past in expected]
        assert events.first_ns.tolist() == [5 if first < cut else 9 for _, _, first, _ in expected]


@pytest.mark.parametrize(
    ("body", "unfinished"),
    [
        (b"data: a\n\n", False),
        (b"data: a\n", True),
        (b"data: a", True),
        (b"data: a\r\n\r", False),
        (b"data: a\r\n", True),
        (b"data: a\n\n: note", False),
        (b"data: a\n\ndata: b", True),
        (b"", False),
    ],
)
def test_an_event_without_its_blank_line_is_given_and_marked(body: bytes, unfinished: bool) -> None:
    events = sse.events(body, np.array([1]), np.array([len(body)]))
    assert events.unfinished is unfinished
    assert len(events.data) == len(reference(body))


def test_time_is_linear_in_the_length_of_the_body() -> None:
    def seconds(body: bytes) -> float:
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for _ in sse.windows(body):
                pass
            best = min(best, time.perf_counter() - start)
        return best

    for piece in (C("word"), C("word").replace(b"\n", b"\r\n"), b": keep-alive\n\n", b"data: x\n"):
        once = seconds(piece * 2_000)
        assert seconds(piece * 32_000) < 100 * once  # linear: 16, quadratic: 256


def test_one_event_of_megabytes_is_one_event() -> None:
    body = C("a") + chunk({"content": "x" * 3_000_000}) + DONE
    assert [len(data) for data, *_ in parsed(body, sse.WINDOW_BYTES)] == [
        len(C("a")) - 8,
        3_000_000 + len(C("")) - 8,
        6,
    ]
