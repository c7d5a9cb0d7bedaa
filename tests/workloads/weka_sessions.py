"""Small made-up sessions in the Weka format, for tests that know the right answer."""

from __future__ import annotations

import json
from typing import Any

from workloads.formats import weka
from workloads.trace import Notes, Trace, prompts


def call(t: float, tokens: int, ids: list[int], out: int = 10, api: float | None = 1.0, **more: Any) -> dict[str, Any]:
    """A model call."""
    return {"t": t, "type": "n", "model": "m", "in": tokens, "out": out, "hash_ids": ids, "stop": "tool_use",
            "api_time": api} | more  # fmt: skip


def agent(t: float, duration_s: float | None, *requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A subagent entry."""
    duration_ms = None if duration_s is None else duration_s * 1000
    return {"t": t, "type": "subagent", "agent_id": f"a{t}", "subagent_type": "Explore", "status": "completed",
            "duration_ms": duration_ms, "requests": list(requests)} | more  # fmt: skip


def session(*requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A session of blocks of 10 tokens, so that 25 input tokens are two whole blocks and half of a third."""
    return {"id": "s", "block_size": 10, "hash_id_scope": "local", "tool_tokens": 0, "system_tokens": 0,
            "requests": list(requests)} | more  # fmt: skip


def read(*requests: dict[str, Any], clock: weka.Clock = "auto", **more: Any) -> tuple[Trace, Notes]:
    """The trace of ``session(*requests, **more)``, and what was noted."""
    notes = Notes()
    trace = weka.trace(json.dumps(session(*requests, **more)).encode(), "s.json", notes, clock=clock)
    check(trace)
    return trace, notes


def check(trace: Trace) -> None:
    """What holds for every trace."""
    assert trace.streams[0].parent is None
    starts = [turn.start_s for stream in trace.streams for turn in stream.turns]
    assert min(starts) == 0
    for place, stream in enumerate(trace.streams):
        assert stream.turns
        if place:
            assert stream.parent is not None
            assert stream.parent < place
            parent = trace.streams[stream.parent]
            assert stream.spawn_turn is None or 0 <= stream.spawn_turn < len(parent.turns)
            if stream.join_turn is not None:
                assert stream.join_turn > (-1 if stream.spawn_turn is None else stream.spawn_turn)
                assert place in parent.turns[stream.join_turn].joins
        before = 0
        for number, (turn, blocks) in enumerate(zip(stream.turns, prompts(stream), strict=True)):
            assert len(blocks) == -(-turn.input_tokens // trace.block_size)
            assert 0 <= turn.keep <= before
            assert turn.pause_s >= 0
            assert turn.service_s >= 0
            assert turn.output_tokens >= 1
            assert all(trace.streams[child].join_turn == number for child in turn.joins)
            before = len(blocks)


def blocks(trace: Trace, stream: int = 0) -> list[list[int]]:
    """The full prompts of one stream, as block ids."""
    return [list(prompt) for prompt in prompts(trace.streams[stream])]
