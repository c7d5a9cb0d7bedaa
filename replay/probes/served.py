"""Is the model there, and which server is it?"""

from __future__ import annotations

from typing import Any

import msgspec

from replay.pages import LIMIT_S, page
from replay.progress import Finding
from replay.wire import Wire
from workloads.errors import UserError


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


async def look_for_model(wire: Wire, model: str) -> tuple[int | None, list[Finding]]:
    """Check that the model is served; returns its max_model_len if the server tells. Raises UserError if it is not."""
    reply = await page(wire, "/v1/models")
    if reply.failure is not None:
        what = f"no answer for {LIMIT_S:g} s" if reply.failure == "cut" else f"{reply.failure} ({reply.detail})"
        raise UserError(f"{wire.url}: {what}; is the server up, and the URL right?")
    if reply.http_status != 200:
        what = f"{wire.url}: /v1/models answers HTTP {reply.http_status}"
        return None, [Finding("note", what, why="the model's name and context length are not checked")]
    try:
        entries = msgspec.json.decode(reply.body, type=_Models).data
    except msgspec.MsgspecError as error:
        raise UserError(f"{wire.url}: /v1/models is not a list of models ({error}); is the URL right?") from None
    names = [str(entry.get("id")) for entry in entries]
    if model not in names:
        shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        raise UserError(f"{wire.url}: model {model!r} is not served; it serves {shown or 'nothing'}: change model")
    findings = [Finding("ok", f"{wire.url}: serves {model}")]
    limit = entries[names.index(model)].get("max_model_len")
    if isinstance(limit, int) and limit > 0:
        return limit, findings
    if limit is not None:
        findings.append(
            Finding(
                "warning",
                f"{wire.url}: max_model_len {limit!r} makes no sense and is not used",
                "set workload.max_context",
                why="turns over the real limit would be refused in the middle of a block",
            )
        )
    return None, findings


class Version(msgspec.Struct):
    """What /version says."""

    version: str | None = None
    emulated: bool = False
    time_scale: float = 1.0


async def version(wire: Wire) -> Version:
    """What /version says; nothing, if the server has no such page."""
    reply = await page(wire, "/version")
    if reply.failure is not None or reply.http_status != 200:
        return Version()
    try:
        said = msgspec.json.decode(reply.body, type=Version)
    except msgspec.MsgspecError:
        return Version()
    if not said.emulated:
        said.time_scale = 1.0
    if not 0 < said.time_scale <= 1000:
        raise UserError(f"{wire.url}: says that it emulates {said.time_scale} times as fast, which cannot be")
    return said
