"""Limits of the host that the client runs on."""

from __future__ import annotations

import resource

from replay.progress import Finding
from workloads.errors import UserError


def check_client(lanes: int) -> list[Finding]:
    """Open files and local ports against what the lanes may need; the soft limit of open files is raised if allowed.

    Raises UserError if not even one connection a lane can be open.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8 * lanes + 256  # subagents add requests; files and pipes take the rest
    if hard != resource.RLIM_INFINITY and hard < lanes + 128:
        raise UserError(f"{lanes} lanes need {lanes + 128} open files; this host allows {hard}: raise ulimit -n")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            return [
                Finding(
                    "warning",
                    f"{allowed} open files may be too few for {lanes} lanes with subagents",
                    "raise ulimit -n",
                )
            ]
    ports = _local_ports()
    if ports is not None and ports < wanted:
        return [
            Finding(
                "warning",
                f"{ports} local ports may be too few for {lanes} lanes with subagents",
                "widen net.ipv4.ip_local_port_range",
            )
        ]
    return [Finding("ok", f"client limits suffice for {lanes} lanes")]


def _local_ports() -> int | None:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = map(int, file.read().split())
    except (OSError, ValueError):
        return None
    return high - low + 1
