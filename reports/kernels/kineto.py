"""What ran on the GPUs, from a trace of torch's profiler (Kineto, in Chrome's trace-event format), gzip or plain.

Traces run to gigabytes: a file is read in blocks, and of its events only GPU activity is kept, in columns. Events do
not end where blocks do, so a block is split after the last "}" that another object follows, and decoded in one go. Such
a place may lie inside a name ("{lambda(int)#1}, {lambda...") or a nested list; then what comes before it is no whole
list, decoding says so, and the place before is tried. Four times as fast as a general streaming parser (ijson).
"""

from __future__ import annotations

import gzip
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from workloads.errors import UserError

KERNEL, *_COPIES = CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of events that are work of a GPU: kernels, then copies and fills."""

_BLOCK = 8 << 20
_MOST_UNSPLIT = 16 * _BLOCK  # real events take less than a KiB; beyond this the file is damaged
_PLACES = 32  # that are tried as the end of a block's last event
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"}\s*,\s*\Z")
_SPACE = 256  # between two events, at most


class _Gpu(msgspec.Struct):
    name: str = ""


class _Trace(msgspec.Struct):
    """Of a trace's head, closed where its events begin."""

    deviceProperties: list[_Gpu] = []


class _Args(msgspec.Struct):
    device: int | None = None
    stream: int | None = None


class _Event(msgspec.Struct):
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Rest(msgspec.Struct):
    traceEvents: list[_Event]


_decode_head = msgspec.json.Decoder(_Trace).decode
_decode_events = msgspec.json.Decoder(list[_Event]).decode
_decode_rest = msgspec.json.Decoder(_Rest).decode
_decode_args = msgspec.json.Decoder(_Args).decode


class NoKernels(UserError):
    """A whole trace, without GPU kernels."""


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """GPU activity of one trace, one element each, in order of start."""

    path: Path
    gpus: list[str]
    """Names of the GPUs that the trace's process could see."""
    names: list[str]
    """Each name once; ``name`` holds indices into it."""
    name: npt.NDArray[np.int32]
    kernel: npt.NDArray[np.bool_]
    """False: a copy or a fill."""
    device: npt.NDArray[np.int32]
    stream: npt.NDArray[np.int32]
    start_us: npt.NDArray[np.float64]
    """From the first of them."""
    dur_us: npt.NDArray[np.float64]
    other_events: int
    """Events of the trace that are no GPU activity."""

    def on(self, device: int) -> Activity:
        """That of one device only."""
        mine = self.device == device
        columns = ("name", "kernel", "device", "stream", "start_us", "dur_us")
        return msgspec.structs.replace(self, **{column: getattr(self, column)[mine] for column in columns})

    @property
    def busiest_device(self) -> int:
        """The device with the longest sum of durations; the first of equals."""
        devices, index = np.unique(self.device, return_inverse=True)
        return int(devices[np.argmax(np.bincount(index, weights=self.dur_us))])


def read(path: Path) -> Activity:
    """Read one trace. Raises UserError if it is not readable, cut off, damaged, or no trace; NoKernels without any."""
    numbers: dict[tuple[str, str], int] = {}
    which, device, stream = array("i"), array("i"), array("i")
    start, duration = array("d"), array("d")
    others = 0
    try:
        with _opened(path) as file:
            gpus, rest = _head(path, file)
            for events in _events(path, file, rest):
                for event in events:
                    if event.cat not in CATEGORIES:
                        others += 1
                        continue
                    args = _decode_args(event.args)
                    which.append(numbers.setdefault((event.name, event.cat), len(numbers)))
                    device.append(int(event.pid if args.device is None else args.device))
                    stream.append(int(event.tid if args.stream is None else args.stream))
                    start.append(event.ts)
                    duration.append(event.dur)
    except UserError:
        raise
    except EOFError:
        raise _cut_off(path) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged: {error}. Profile again") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise UserError(f"{path} holds GPU activity that is none of Kineto's: {error}. Profile again") from None
    kernels = np.array([category == KERNEL for _, category in numbers], dtype=np.bool_)
    if not others + len(which):
        raise NoKernels(
            f"{path} holds no events: its profiler was stopped before it recorded anything. Profile again, for longer"
        )
    if not kernels.any():
        raise NoKernels(
            f"{path} has no GPU kernels, only {others + len(which):,} other events: it is the trace of a server "
            "without a GPU, of a process that launches none (vLLM's front end), or of a profiler that recorded CPU "
            "activity only. Profile the worker of a server on GPUs, with CUDA among the profiler's activities"
        )
    starts = np.asarray(start)
    order = np.argsort(starts, kind="stable")
    names = np.asarray(which, dtype=np.int32)[order]
    return Activity(
        path=path,
        gpus=gpus,
        names=[name for name, _ in numbers],
        name=names,
        kernel=kernels[names],
        device=np.asarray(device, dtype=np.int32)[order],
        stream=np.asarray(stream, dtype=np.int32)[order],
        start_us=starts[order] - starts.min(),
        dur_us=np.asarray(duration)[order],
        other_events=others,
    )


def read_first(paths: Sequence[Path]) -> Activity:
    """Of one server's traces, the first that has GPU kernels: rank 0's, if they are named by rank as vLLM names them.
    Raises UserError as ``read`` does, or if there are none."""
    if not paths:
        raise UserError("the profile has no traces: look into its server's log, and profile again")
    refused: NoKernels | None = None
    for path in sorted(paths, key=_rank):
        try:
            return read(path)
        except NoKernels as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _rank(path: Path) -> tuple[float, str]:
    """vLLM's workers write PREFIX_dp0_pp0_tp0_..._rank0.TIME.pt.trace.json.gz, its front end HOST_PID.async_llm..."""
    named = re.search(r"rank[_-]?(\d+)", path.name)
    return (int(named[1]) if named else np.inf, path.name)


def display_name(name: str) -> str:
    """A kernel's name without return type, enclosing names, template arguments and parameters; where little is left
    ("Kernel2"), with the first name among its template arguments."""
    flat = name.replace("(anonymous namespace)", "").replace("->", "")
    while (shorter := _BRACKETS.sub("", flat)) != flat:
        flat = shorter
    words = flat.split()
    if not words or words[0] in ("Memcpy", "Memset"):
        return " ".join(words) or name
    short = words[-1].rsplit("::", 1)[-1]
    if not _ANYTHING.fullmatch(short):
        return short or name
    inner = _FIRST_ARGUMENT.search(name, name.find(f"{short}<"))
    return f"{short}<{inner[1]}>" if inner else short


_BRACKETS = re.compile(r"<[^<>]*>|\([^()]*\)|\{[^{}]*\}|\[[^\[\]]*\]")
_ANYTHING = re.compile(r"(device_|(\w+_)?elementwise_|reduce_)?kernel(_impl)?2?", re.IGNORECASE)
_FIRST_ARGUMENT = re.compile(r"<(?:\s*[\w.]+\s*,)*?\s*(?:\w+::)*([A-Za-z_]\w{3,})")


def _head(path: Path, file: BinaryIO) -> tuple[list[str], bytes]:
    """Names of the GPUs, and what was read of the file beyond the start of its events."""
    head = b""
    while not (found := _EVENTS.search(head)):
        block = file.read(_BLOCK)
        if not block or len(head) >= _MOST_UNSPLIT:
            raise UserError(f'{path} is no trace of torch\'s profiler: it has no list "traceEvents"')
        head += block
    try:
        trace = _decode_head(head[: found.end()] + b"]}")
    except msgspec.MsgspecError as error:
        raise UserError(f"{path} is damaged, or no trace of torch's profiler: {error}") from None
    return [gpu.name for gpu in trace.deviceProperties], head[found.end() :]


def _events(path: Path, file: BinaryIO, rest: bytes) -> Iterator[list[_Event]]:
    """All events, block by block; what follows them in the file is checked and dropped."""
    while block := file.read(_BLOCK):
        rest += block
        for end in _places(rest):
            try:
                events = _decode_events(b"[" + rest[:end] + b"]")
            except msgspec.ValidationError:
                raise
            except msgspec.DecodeError:
                continue
            yield events
            rest = rest[rest.index(b"{", end) :]
            break
        else:
            if len(rest) > _MOST_UNSPLIT:
                raise UserError(f"{path} is damaged: {len(rest):,} bytes of it are no list of events. Profile again")
    try:
        yield _decode_rest(b'{"traceEvents":[' + rest).traceEvents
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        if "truncated" in str(error):
            raise _cut_off(path) from None
        raise UserError(f"{path} is damaged at its end: {error}. Profile again") from None


def _places(text: bytes) -> Iterator[int]:
    """Ends of objects that another follows after a comma, the last first."""
    at = len(text)
    for _ in range(_PLACES):
        while (at := text.rfind(b"{", 0, at)) > 0:
            if between := _BETWEEN.search(text, max(0, at - _SPACE), at):
                yield between.start() + 1
                break
        else:
            return


def _cut_off(path: Path) -> UserError:
    return UserError(
        f"{path} is cut off: its server was stopped while it wrote the trace. Profile again, and wait until "
        "/stop_profile has answered"
    )


def _opened(path: Path) -> BinaryIO:
    """The trace's text, whatever the file is called."""
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        return gzip.open(path) if zipped else path.open("rb")  # type: ignore[return-value]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
