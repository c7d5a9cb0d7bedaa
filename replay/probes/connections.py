"""Are connections kept open between turns? And: is an answer of one token taken?"""

from __future__ import annotations

import asyncio
import re

from replay.pages import page
from replay.probes.asking import read, send
from replay.progress import Finding
from replay.wire import Exchange, Wire
from workloads.rendering import Rendering


async def check_connections(wire: Wire, rendering: Rendering, idle_s: float) -> list[Finding]:
    """Two answers of one token, one after the other; then, if ``idle_s`` is not 0, a look whether a connection
    outlives that many idle seconds (at most half the client's own limit, keep_alive_s)."""
    first = await send(wire, rendering, "one token", [64], output=1)
    second = await send(wire, rendering, "one token", [64], output=1)
    findings = []
    reply = read(wire, rendering, first, output=1)
    if reply.status != "ok":
        findings.append(
            Finding(
                "warning",
                f"{wire.url}: an answer of one token fails: {reply.error} ({reply.detail})",
                "drop such turns from the workload, or use a server that takes max_tokens: 1",
                why="turns recorded without output are sent so, and would count as failures",
            )
        )
    if not second.reused:
        took = f" ({second.connect_ns / 1e6:.1f} ms)" if second.connect_ns is not None else ""
        findings.append(
            Finding(
                "warning",
                f"{wire.url}: the server closes the connection after each reply",
                "switch keep-alive on in the server or in the proxy before it",
                why=f"every turn pays for a new connection{took}, inside its TTFT",
            )
        )
        return findings
    ours = wire.limits.keep_alive_s
    said = _said_limit(second)
    if said is not None and said <= ours:
        findings.append(_closes(wire, f"within {said:g} s, as it says"))
    elif said is not None:
        findings.append(
            Finding("ok", f"{wire.url}: connections are kept open, {said:g} s by the server, {ours:g} s by us")
        )
    elif not idle_s:
        findings.append(Finding("ok", f"{wire.url}: connections are kept open (for how long is not checked)"))
    else:
        waited = min(idle_s, ours / 2)
        await asyncio.sleep(waited)
        if (await page(wire, "/v1/models")).reused:
            rest = f"of limits.keep_alive_s, {ours:g} s; more is not checked"
            findings.append(Finding("ok", f"{wire.url}: connections stay open for {waited:g} s of silence ({rest})"))
        else:
            findings.append(_closes(wire, f"within {waited:g} s"))
    return findings


def _closes(wire: Wire, when: str) -> Finding:
    return Finding(
        "warning",
        f"{wire.url}: the server closes idle connections {when}; limits.keep_alive_s is {wire.limits.keep_alive_s:g} s",
        "set replay.limits.keep_alive_s below the server's limit (vLLM: VLLM_HTTP_TIMEOUT_KEEP_ALIVE, 5 s)",
        why="a request that meets the closing has to be sent again",
    )


def _said_limit(exchange: Exchange) -> float | None:
    """The idle limit of the header Keep-Alive, seconds."""
    found = re.search(r"timeout=(\d+)", exchange.headers.get("keep-alive", ""))
    return float(found[1]) if found else None
