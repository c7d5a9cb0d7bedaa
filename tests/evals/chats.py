"""A scripted server's chat completions, and what it was asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.scripted_server import Request, ScriptedServer, Step, reply, usage


def asked(request: Request) -> dict[str, Any] | None:
    """The body of a chat request; None for other requests."""
    return json.loads(request.body) if request.path == "/v1/chat/completions" else None


def all_asked(server: ScriptedServer) -> list[dict[str, Any]]:
    return [body for request in server.requests if (body := asked(request)) is not None]


def said(body: dict[str, Any]) -> str:
    """What the last message says."""
    text: str = body["messages"][-1]["content"]
    return text


def completion(
    content: str | None,
    *,
    reasoning: str | None = None,
    finish: str = "stop",
    at_ms: float = 0.0,
    prompt_ids: Sequence[int] | None = (1, 2),
    fingerprint: str = "f1",
) -> list[Step]:
    """A whole reply as vLLM gives it."""
    message = {"role": "assistant", "content": content, "reasoning": reasoning}
    choice = {"index": 0, "message": message, "finish_reason": finish, "stop_reason": None, "token_ids": [5, 6, 7]}
    counted = usage(11, 3, completion_tokens_details={"reasoning_tokens": 2})
    body = {"id": "c1", "object": "chat.completion", "choices": [choice], "usage": counted}
    told = {"system_fingerprint": fingerprint, "prompt_token_ids": prompt_ids}
    return reply(200, body | told, at_ms=at_ms)
