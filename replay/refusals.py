"""Why a server did not start, or died: what its log says, in the words of someone who wants to mend it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

_TAIL_BYTES = 400_000
_QUOTE_CHARACTERS = 2000


class Refusal(msgspec.Struct, frozen=True):
    """A known way to fail: what shows it in the log, what it means, what to change."""

    pattern: str
    means: str
    mend: str


REFUSALS = (
    Refusal(
        r"specialized decode|\bdecode_backend\b",
        "the model refuses the specialised decode backend here",
        "change what it names, or set decode_backend: auto",
    ),
    Refusal(
        r"error: (unrecognized arguments|argument |the following arguments)",
        "the server does not know an option, or its value",
        "correct serve.command or serve.options; serve.instrument: false leaves out the options that decodegate adds",
    ),
    Refusal(
        r"Errno 98\b|address already in use",
        "the port is taken",
        "stop what listens there, or leave serve.port out: a free one is then taken",
    ),
    Refusal(
        r"Free memory on device .* is less than",
        "the GPU's memory is in use by others",
        "stop them (nvidia-smi names them), or lower --gpu-memory-utilization",
    ),
    Refusal(
        r"(CUDA|HIP|GPU)\b.* out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
        "the GPU has too little memory",
        "lower --gpu-memory-utilization, --max-model-len or --max-num-seqs, use more GPUs, or stop what else uses them",
    ),
    Refusal(
        r"larger than the (available KV cache|maximum number of tokens)|No available memory for the cache blocks",
        "the KV cache is too small for one context",
        "lower --max-model-len, or raise --gpu-memory-utilization",
    ),
    Refusal(
        r"[Gg]ated ?[Rr]epo|40[13] Client Error|Access to model .* is restricted|Invalid (user )?token",
        "the model hub denies access",
        "put a token that may read the model into serve.env, for instance HF_TOKEN: ${HF_TOKEN}",
    ),
    Refusal(
        r"RepositoryNotFound|RevisionNotFound|HFValidationError|Repo id must|Invalid repository ID|404 Client Error"
        r"|is not a local folder|not a valid model identifier|no file named config\.json|config\.json' not found"
        r"|Can't load the configuration|LocalEntryNotFound|appropriate cached snapshot|OfflineModeIsEnabled",
        "there is no such model",
        "check the model's folder or name in serve.command; offline it has to be on this host already",
    ),
    Refusal(
        r"No space left on device|Errno 28\b",
        "the disk is full",
        "free some, or point HF_HOME, VLLM_CACHE_ROOT elsewhere",
    ),
    Refusal(
        r"libcuda\.so|NVIDIA driver|CUDA driver version is insufficient|no CUDA-capable device|No CUDA GPUs"
        r"|invalid device ordinal|Failed to infer device type|No HIP GPUs",
        "no GPU can be used",
        "check nvidia-smi, the driver's version and serve.devices",
    ),
    Refusal(
        r"Cannot allocate memory|std::bad_alloc|\bMemoryError\b|exit ?code:? -9\b",
        "the host has too little memory",
        "free some, or see with dmesg what the kernel killed",
    ),
    Refusal(
        r"\b[NR]CCL (error|WARN)|nccl\w+Error|DistBackendError",
        "the GPUs cannot talk to each other",
        "NCCL_DEBUG: INFO in serve.env shows more; look at serve.devices, the links (nvidia-smi topo -m) and /dev/shm",
    ),
    Refusal(
        r"architectures? .* not supported|does not recognize this architecture",
        "this version does not know the model",
        "use a newer vLLM",
    ),
    Refusal(
        r"ModuleNotFoundError|PackageNotFoundError|ImportError",
        "the server's Python environment lacks something",
        "install it there, or name another in serve.command",
    ),
    Refusal(r"PermissionError|Errno 13\b", "access is denied", "check the owner of what it names"),
    Refusal(
        r"(does|do) not support|(is|are) not supported|unsupported",
        "the server refuses these settings together",
        "change what it names",
    ),
)
"""In order: an earlier one explains the log better where several match."""

_SYMPTOM = re.compile(
    r"[Ss]ee root cause above|[Ss]ee stack trace|EngineDeadError|EngineCore (failed|encountered)|failed to start"
    r"|Traceback \(most recent call last\)|^During handling|^The above exception|^(asyncio\.)?CancelledError"
    r"|^KeyboardInterrupt|^SystemExit|closed by (remote )?peer|reset by peer|^RuntimeError: cancelled"
    r"|^Dumping |output_handler failed"
)
"""What follows from a cause that another process of the server has told."""

_PREFIX = re.compile(
    r"(?:\((?P<process>[^()]*\bpid=\d+)\)\s?)?(?:\([A-Z]{2}\d[^()]*\)\s?)*"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)(?:\s\d\d-\d\d \d\d:\d\d:\d\d \[[^]]*\]\s?|:\s+))?"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Refused)\b(:|$)")
_COMPLAINT = re.compile(r"(?i)\berrno\b|\berror:|\bfatal\b|NCCL WARN|not found$|cannot open shared|exit ?code:? -9\b")


class _Said(msgspec.Struct):
    """What a process of the server said at once: a line, and the indented ones below it."""

    text: str
    level: str | None


def read_tail(log: Path) -> str:
    """The end of a log, as text; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def cause(text: str, exit_code: int | None = None) -> str:
    """Why the server that wrote this log failed, in one paragraph: what it means, its own words, what to change.

    ``exit_code``: its exit status, negative if a signal ended it; None: unknown, or it still runs.
    """
    complaints = _complaints(text)
    for refusal in REFUSALS:
        for said in complaints:
            if re.search(refusal.pattern, said):
                return f"{refusal.means}: {_quote(said)} ({refusal.mend})"
    if exit_code == -9:
        return "it was killed: the host may have had too little memory (dmesg says what the kernel killed)"
    exceptions = [said for said in complaints if _EXCEPTION.match(said)]
    for found in (exceptions, complaints):
        if found:
            return _quote(found[-1])
    last = last_words(text)
    return f"its last words were: {last}" if last else "it said nothing"


def refused_decode_backend(text: str) -> str | None:
    """The server's own words if it died because it knows no such value of decode_backend; None if not."""
    for said in _complaints(text):
        if "decode_backend" in said and re.search(r"(?i)support|unknown|invalid|expected|must be|one of", said):
            return _quote(said)
    return None


def last_words(text: str) -> str:
    """The last line that tells something, without vLLM's prefix."""
    for line in reversed(re.split(r"[\r\n]+", text)):
        rest = _COLOUR.sub("", line)
        rest = rest[_prefix(rest).end() :].strip()
        if re.search(r"\w{3}", rest):
            return rest[:160]
    return ""


def _complaints(text: str) -> list[str]:
    """Errors in a log, in order, without those that only follow from others."""
    blocks: list[_Said] = []
    latest: dict[str | None, _Said] = {}
    for line in _COLOUR.sub("", text).splitlines():
        prefix = _prefix(line)
        rest = line[prefix.end() :].rstrip()
        process = prefix["process"]  # processes write into one another's tracebacks
        if rest.startswith((" ", "\t", "- ", "* ")) and process in latest:
            latest[process].text += "\n" + rest
        elif rest:
            latest[process] = _Said(rest, prefix["level"])
            blocks.append(latest[process])
    return [
        said.text
        for said in blocks
        if not _SYMPTOM.search(said.text)
        and (said.level in ("ERROR", "CRITICAL") or (said.level is None and _complains(said.text)))
    ]


def _complains(text: str) -> bool:
    head = text.split("\n", 1)[0]
    return bool(_EXCEPTION.match(head) or _COMPLAINT.search(head))


def _prefix(line: str) -> re.Match[str]:
    found = _PREFIX.match(line)
    assert found is not None  # it matches nothing, too
    return found


def _quote(text: str) -> str:
    lines = [" ".join(line.split()) for line in text.splitlines()]
    quoted = "\n  ".join(line for line in lines if not line.startswith("For further information"))
    return quoted if len(quoted) <= _QUOTE_CHARACTERS else quoted[:_QUOTE_CHARACTERS] + " ..."
