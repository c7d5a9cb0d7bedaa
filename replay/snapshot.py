"""A server and its GPUs at one moment: before the first request of a block and after the last, so that judging can tell
whether it was one deployment all along, and what energy it took."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
import psutil

from replay import nvml, settings
from replay.pages import page
from replay.records import Command, GpuReading, Snapshot
from replay.wire import Wire
from workloads.errors import UserError

Edge = Literal["before", "after"]
"""Of a block."""


async def take(
    wire: Wire, model: str, edge: Edge, started: Command | None = None, beside: Sequence[Command] = ()
) -> Snapshot:
    """Look at a server through its pages and one reply of one token, and at its GPUs through NVML if we ``started``
    it; ``beside``: what else of ours runs. Whatever it does not tell is null.

    The GPUs are read last before a block and first after it: the energy between is that of the block.
    """
    seen = _gpus(wire.url, started, beside) if edge == "after" else None
    version = await _json(wire, "/version")
    models = await _json(wire, "/v1/models")
    request = {"model": model, "prompt": [1, 2, 3, 4], "max_tokens": 1}
    reply = await _json(wire, "/v1/completions", msgspec.json.encode(request))
    shown = await shown_settings(wire)
    cards = [card for card in _items(models, "data") if _text(card, "id") == model]
    limit = cards[0].get("max_model_len") if cards else None
    t_ns, gpus, unseen = seen or _gpus(wire.url, started, beside)
    return Snapshot(
        t_ns=t_ns,
        version=_text(version, "version"),
        fingerprint=_text(reply, "system_fingerprint"),
        max_model_len=limit if isinstance(limit, int) else None,
        config_digest=hashlib.sha256(msgspec.json.encode(shown)).hexdigest() if shown is not None else None,
        gpus=gpus,
        gpus_unseen=unseen,
    )


def refreshed(taken: Snapshot, url: str, started: Command | None, beside: Sequence[Command] = ()) -> Snapshot:
    """The same with its GPUs as they are now: to be written at the moment when the window opens, so that the energy of
    the warm-up is not the block's."""
    t_ns, gpus, unseen = _gpus(url, started, beside)
    return msgspec.structs.replace(taken, t_ns=t_ns, gpus=gpus, gpus_unseen=unseen)


async def shown_settings(wire: Wire) -> dict[str, str] | None:
    """What a server shows of its settings (vLLM in its development mode does), without what differs from start to
    start; None if it shows none."""
    info = await _json(wire, "/server_info?config_format=json")
    try:
        return settings.from_server_info(info) if isinstance(info, dict) else None
    except UserError:  # it is something else
        return None


def _gpus(url: str, started: Command | None, beside: Sequence[Command]) -> tuple[int, list[GpuReading] | None, str]:
    """When they were read, the GPUs that the server uses, or why there are none."""
    t_ns = time.monotonic_ns()
    if started is None:
        where = (
            "we did not start its server, and which GPUs it uses cannot be told" if _is_here(url) else "another host"
        )
        return t_ns, None, where
    if (hosts := settings.from_command(started.words).get("nnodes", "1")) != "1":
        return t_ns, None, f"its server runs on {hosts} hosts, and only this one's GPUs are seen"
    ours = set().union(*(_tree(command.pid) for command in (started, *beside)))
    try:
        seen = nvml.readings(started.devices, ours, os.environ | started.environment)
    except nvml.Unseen as unseen:
        return t_ns, None, str(unseen)
    # visible GPUs may be more than it uses; NVML shows no processes to a container, say: then all count
    used = [gpu for gpu in seen if any(process.ours for process in gpu.processes or [])]
    return t_ns, used or seen, ""


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _tree(pid: int) -> set[int]:
    try:
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    except psutil.NoSuchProcess:
        return set()


async def _json(wire: Wire, path: str, body: bytes = b"") -> Any:
    """What a page says (with a ``body``: answers); None for a page that is missing or no JSON."""
    exchange = await page(wire, path, body, method="POST" if body else "GET", request_id="snapshot")
    if exchange.failure is not None or exchange.http_status != 200:
        return None
    try:
        return msgspec.json.decode(exchange.body)
    except (msgspec.DecodeError, RecursionError):
        return None


def _text(page: Any, key: str) -> str | None:
    value = page.get(key) if isinstance(page, dict) else None
    return value if isinstance(value, str) else None


def _items(page: Any, key: str) -> list[dict[str, Any]]:
    items = page.get(key) if isinstance(page, dict) else None
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
