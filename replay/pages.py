"""A server's pages: small, and answered soon or not at all, unlike a long prompt."""

from __future__ import annotations

import asyncio
from typing import Literal

from replay.wire import Exchange, Wire

LIMIT_S = 30.0
"""A page that has not come by then is missing (the limits of a reply allow minutes)."""


async def page(
    wire: Wire, path: str, body: bytes = b"", *, method: Literal["GET", "POST"] = "GET", request_id: str = "page"
) -> Exchange:
    """Ask for a page. One that does not come in time has the failure "cut". Nothing else may be under way on the
    wire: it would be cut too."""
    timer = asyncio.get_running_loop().call_later(LIMIT_S, wire.cut)
    try:
        return await wire.exchange(path, body, {"X-Request-ID": request_id}, method=method)
    finally:
        timer.cancel()
