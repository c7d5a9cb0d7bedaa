"""Limits of the host that the client runs on."""

from __future__ import annotations

import resource
from typing import Literal

from replay.progress import Finding
from workloads.errors import UserError

_REQUESTS = {"lanes": 8, "streams": 1}
"""In flight at once, for each of them: subagents add to a lane's."""


def check_client(count: int, of: Literal["lanes", "streams"]) -> list[Finding]:
    """Open files and local ports against what so many lanes or streams may need; the soft limit of open files is raised
    if allowed.

    Raises UserError if not even one connection each can be open.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _REQUESTS[of] * count + 256  # files and pipes take the rest
    what = f"{count} {of}{' with subagents' if of == 'lanes' else ''}"
    if hard != resource.RLIM_INFINITY and hard < count + 128:
        raise UserError(f"{count} {of} need {count + 128} open files; this host allows {hard}: raise ulimit -n")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            return [Finding("warning", f"{allowed} open files may be too few for {what}", "raise ulimit -n")]
    ports = _local_ports()
    if ports is not None and ports < wanted:
        return [
            Finding("warning", f"{ports} local ports may be too few for {what}", "widen net.ipv4.ip_local_port_range")
        ]
    return [Finding("ok", f"client limits suffice for {count} {of}")]


def _local_ports() -> int | None:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = map(int, file.read().split())
    except (OSError, ValueError):
        return None
    return high - low + 1
