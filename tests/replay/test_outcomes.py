"""What replies come to: values worked out by hand, and the bug reports' right values with exact times."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.outcomes import Outcome, outcome, outcome_sliced, outcome_steps
from replay.wire import Exchange, Limits
from tests.scripted_server import DONE, FIN, ROLE, USE, C, chunk, event, usage
from workloads.rendering import Api

SENT_NS = 5_000_000_000
MS = 1_000_000
Timed = list[tuple[float, bytes]]


def exchange_of(
    pieces: Sequence[tuple[float, bytes]],
    *,
    status: int | None = 200,
    content_type: str = "text/event-stream; charset=utf-8",
    failure: str | None = None,
    detail: str | None = None,
    headers: dict[str, str] | None = None,
) -> Exchange:
    """What the wire gives for pieces that arrive at these milliseconds after sending."""
    ends = np.cumsum([len(data) for _, data in pieces]).tolist()
    at = [SENT_NS + round(ms * MS) for ms, _ in pieces]
    return Exchange(
        sent_ns=SENT_NS,
        end_ns=at[-1] if at else SENT_NS,
        pool_wait_ns=0,
        connect_ns=None,
        reused=True,
        first_byte_ns=at[0] if at else None,
        http_status=status,
        headers={"content-type": content_type, **(headers or {})},
        body=b"".join(data for _, data in pieces),
        read_ns=array("q", at),
        read_end=array("q", ends),
        failure=failure,
        detail=detail,
    )


def judge(
    pieces: Sequence[tuple[float, bytes]],
    asked: int = 20,
    *,
    api: Api = "chat",
    exact: bool = True,
    limits: Limits | None = None,
    count: Any = None,
    **more: Any,
) -> Outcome:
    return outcome(
        exchange_of(pieces, **more),
        api=api,
        asked_output=asked,
        exact_length=exact,
        limits=limits or Limits(),
        count_tokens=count,
    )


def ms(at_ns: int | None) -> float | None:
    return None if at_ns is None else (at_ns - SENT_NS) / MS


def tokens(result: Outcome) -> list[int]:
    return [int(count) for count in result.chunks["tokens"]]


def times(result: Outcome) -> list[float | None]:
    return [ms(int(at)) for at in result.chunks["t_ns"]]


def completion(text: str, **more: Any) -> bytes:
    finish = more.pop("finish", None)
    ids = {"token_ids": more.pop("ids")} if "ids" in more else {}
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None, **ids}
    return event(json.dumps({"id": "cmpl-1", "object": "text_completion", "choices": [choice], **more}))


# --- bug reports


def speculative(continuous: bool) -> Timed:
    pieces: Timed = [(150, ROLE)]
    for number in range(1, 6):
        more = {"usage": usage(50, 4 * number)} if continuous else {}
        pieces.append((160 + 40 * number, C(f"w{number} x y z ", **more)))
    return [*pieces, (361, FIN("stop") + USE(50, 20) + DONE)]


@pytest.mark.parametrize("continuous", [True, False])
def test_br_01_chunks_are_not_tokens(continuous: bool) -> None:
    result = judge(speculative(continuous))
    assert result.status == "ok"
    assert ms(result.first_token_ns) == 200
    assert ms(result.last_token_ns) == 360
    assert times(result) == [200, 240, 280, 320, 360]
    assert tokens(result) == [4] * 5
    assert result.token_source == ("usage" if continuous else "estimated")
    assert (result.output_tokens, result.first_chunk_tokens) == (20, 4)
    assert result.last_token_ns is not None
    assert result.first_token_ns is not None
    itl_ms = (result.last_token_ns - result.first_token_ns) / MS / (20 - 4)
    assert itl_ms == 10.0


def test_br_03_local_count_is_of_the_joined_text_and_labelled() -> None:
    pieces: Timed = [(100 + 20 * number, C(f" t{number}")) for number in range(10)]
    seen: list[str] = []

    def count(text: str) -> int:
        seen.append(text)
        return len(text.split())

    result = judge([*pieces, (281, FIN("length") + DONE)], 10, count=count)
    assert seen == ["".join(f" t{number}" for number in range(10))]
    assert (result.output_tokens, result.output_tokens_client) == (None, 10)
    assert tokens(result) == [1] * 10
    assert result.token_source == "estimated"
    assert any("client estimate" in note for note in result.notes)
    assert result.last_token_ns is not None
    assert result.first_token_ns is not None
    assert (result.last_token_ns - result.first_token_ns) / MS / 9 == 20


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "both"])
def test_br_05_reasoning_is_output_and_answer_apart(key: str) -> None:
    thought = {"reasoning": "a", "reasoning_content": "a"} if key == "both" else {key: "a"}
    pieces: Timed = [(100 + 10 * number, chunk(thought)) for number in range(10)]
    pieces += [(200 + 10 * number, C("b")) for number in range(5)]
    result = judge([*pieces, (241, FIN("length") + USE(9, 15) + DONE)], 15)
    assert result.status == "ok"
    assert ms(result.first_token_ns) == 100
    assert ms(result.first_answer_ns) == 200
    assert ms(result.last_token_ns) == 240
    assert (result.output_tokens, tokens(result), result.token_source) == (15, [1] * 15, "inferred")
    assert (result.reasoning, result.answer) == ("a" * 10, "b" * 5)  # not twice when under both names


def test_br_05_reasoning_only_is_a_success_without_an_answer() -> None:
    pieces: Timed = [(100 + 10 * number, chunk({"reasoning": "a"})) for number in range(10)]
    result = judge([*pieces, (191, FIN("length") + USE(9, 10) + DONE)], 10)
    assert result.status == "ok"
    assert ms(result.first_token_ns) == 100
    assert result.first_answer_ns is None
    assert "no answer, only reasoning" in result.notes


@pytest.mark.parametrize(
    ("pieces", "source", "expected"),
    [
        ([C("a"), C("b"), C("c", usage=usage(7, 6)), FIN("stop"), DONE], "estimated", [2, 2, 2]),
        (
            [*(C(text, usage=usage(7, 2 * n)) for n, text in enumerate("abc", 1)), FIN("stop"), DONE],
            "usage",
            [2, 2, 2],
        ),
        ([*(C(text, usage=None) for text in "abc"), FIN("stop", usage=None), USE(7, 6), DONE], "estimated", [2, 2, 2]),
        ([*(C(text, usage=usage(7, 6)) for text in "abc"), FIN("stop"), DONE], "estimated", [2, 2, 2]),
        ([C("a"), C("b"), C("c"), FIN("stop", usage=usage(7, 6)), DONE], "estimated", [2, 2, 2]),
    ],
    ids=["a last content chunk", "b cumulative", "c after the end", "the total on all", "with the finish reason"],
)
def test_br_09_usage_anywhere_is_the_last_one_and_never_summed(
    pieces: list[bytes], source: str, expected: list[int]
) -> None:
    result = judge([(100 + 10 * number, data) for number, data in enumerate(pieces)], 6)
    assert result.status == "ok"
    assert (result.input_tokens, result.output_tokens, result.output_tokens_client) == (7, 6, None)
    assert (result.token_source, tokens(result)) == (source, expected)


def test_br_09_usage_nowhere_is_null_and_the_client_count_stands_apart() -> None:
    result = judge([(100, C("a")), (110, C("b")), (120, C("c")), (121, FIN("length") + DONE)], 3)
    assert result.status == "ok"
    assert (result.input_tokens, result.output_tokens, result.output_tokens_client) == (None, None, 3)


THREE = [C("a"), C("b"), C("c")]
TAIL = FIN("length") + USE(5, 3) + DONE


@pytest.mark.parametrize(
    "pieces",
    [
        [piece.replace(b"data: ", b"data:") for piece in (*THREE, TAIL)],
        [b"event: message\nid: 7\n" + piece for piece in THREE] + [TAIL],
        [piece for part in (*THREE, TAIL) for piece in (b": keep-alive\n\n", part)],
        [*(piece.replace(b'"choices"', b'\ndata: "choices"') for piece in THREE), TAIL],
        [*THREE, FIN("length"), USE(5, 3), b"data: [DONE] \n\n"],
        [*THREE, FIN("length"), USE(5, 3), b"data: [DONE]"],
        [*THREE, FIN("length"), USE(5, 3)[:-2]],
        [piece.replace(b"\n", b"\r\n") for piece in (*THREE, TAIL)],
    ],
    ids=["no space", "named", "comments", "two lines", "done with space", "done cut off", "usage cut off", "crlf"],
)
def test_br_11_legal_forms_give_the_same_three_tokens(pieces: list[bytes]) -> None:
    result = judge([(100 + 10 * number, data) for number, data in enumerate(pieces)], 3)
    assert result.status == "ok"
    assert (result.answer, tokens(result), result.input_tokens, result.output_tokens) == ("abc", [1, 1, 1], 5, 3)
    first = next(number for number, data in enumerate(pieces) if b"choices" in data)  # a comment is no token
    assert ms(result.first_token_ns) == 100 + 10 * first


def test_br_13_reads_split_inside_a_character_and_an_escape() -> None:
    whole = C("✅") + C("b").replace(b'"b"', b'"\\u00e9"') + FIN("length") + USE(3, 2) + DONE
    expected = judge([(0, whole)], 2)
    assert expected.answer == "✅é"
    first_end = len(C("✅"))
    for cut in range(1, len(whole)):
        result = judge([(100, whole[:cut]), (250, whole[cut:])], 2)
        assert (result.answer, result.status, tokens(result)) == ("✅é", "ok", [1, 1])
        assert ms(result.first_token_ns) == (100 if first_end <= cut else 250)  # arrival of the event's last byte


def test_br_13_large_events_pass_up_to_the_limit_and_fail_alone_beyond_it() -> None:
    big = C("x" * 700_000) + FIN("length") + USE(3, 2) + DONE
    assert judge([(100, big)], 2).answer == "x" * 700_000
    result = judge([(100, big)], 2, limits=Limits(max_event_bytes=600_000))
    assert (result.status, result.error) == ("failed", "event too large")
    assert "max_event_bytes" in (result.detail or "")


ERROR = '{"error":{"message":"EngineCore died","type":"InternalServerError","code":500}}'


@pytest.mark.parametrize(
    ("pieces", "content_type"),
    [
        ([ROLE, C("a"), event(ERROR), DONE], "text/event-stream"),
        ([event(ERROR), DONE], "text/event-stream"),
        ([ROLE, C("a"), b"event: error\n" + event('{"message":"EngineCore died"}'), DONE], "text/event-stream"),
        ([ERROR.encode()], "application/json"),
        ([ERROR.encode()], "text/event-stream"),
        ([ROLE, C("a"), event('{"object":"error","message":"EngineCore died","code":500}'), DONE], "text/event-stream"),
        ([b"event: error\ndata: EngineCore died\n\n"], "text/event-stream"),
        ([ROLE, C("a"), chunk({"content": ""}, "error", error={"message": "EngineCore died"}), DONE], "text/plain"),
    ],
)
def test_br_15_an_error_under_status_200_is_a_failure(pieces: list[bytes], content_type: str) -> None:
    result = judge([(100 + n, data) for n, data in enumerate(pieces)], 20, content_type=content_type)
    assert (result.status, result.error) == ("failed", "error in stream")
    assert result.detail == "EngineCore died"
    if C("a") in pieces:  # partial tokens are kept
        assert (result.answer, len(result.chunks), ms(result.first_token_ns)) == ("a", 1, 101)


def test_br_17_a_refusal_has_nulls_and_no_numbers() -> None:
    body = b'{"error":{"message":"overloaded"}}'
    result = judge([(3, body)], status=503, content_type="application/json")
    assert (result.status, result.error, result.detail) == ("failed", "http 503", "overloaded")
    unknown = (
        *(result.first_token_ns, result.first_answer_ns, result.last_token_ns, result.first_chunk_tokens),
        *(result.output_tokens, result.output_tokens_client, result.input_tokens, result.cached_tokens),
    )
    for value in (*unknown, result.token_source, result.finish_reason):
        assert value is None
    assert len(result.chunks) == 0


# --- ends


def test_no_terminal_event_and_no_finish_reason_is_truncated() -> None:
    result = judge([(100, ROLE), (110, C("a")), (120, C("b"))])
    assert (result.status, result.error) == ("truncated", "truncated")
    assert len(result.chunks) == 2


def test_a_finish_reason_alone_is_an_end_and_noted() -> None:
    result = judge([(100, C("a")), (110, C("b")), (120, FIN("length") + USE(1, 2))], 2)
    assert result.status == "ok"
    assert "no terminal event" in result.notes


@pytest.mark.parametrize(
    ("failure", "status"),
    [("connection lost", "failed"), ("closed early", "truncated"), ("stalled", "stalled"), ("cut", "cut"),
     ("no first byte", "stalled"), ("too slow", "stalled"), ("cancelled", "cancelled"), ("disconnected", "failed"),
     ("no connection", "failed")],
)  # fmt: skip
def test_failures_of_the_wire_have_their_status_unless_the_end_had_come(failure: str, status: str) -> None:
    result = judge([(100, C("a")), (110, FIN("length"))], failure=failure, detail="why")
    assert (result.status, result.error, result.detail) == (status, failure, "why")
    complete = judge([(100, C("a") + C("b")), (110, FIN("length") + USE(1, 2) + DONE)], 2, failure=failure)
    assert complete.status == "ok"
    assert f"{failure} after the terminal event" in complete.notes


def test_fewer_tokens_than_asked_is_short_only_when_the_length_was_exact() -> None:
    pieces: Timed = [(100, C("a")), (110, C("b")), (111, FIN("stop") + USE(1, 2) + DONE)]
    result = judge(pieces, 20)
    assert (result.status, result.error, result.output_tokens, result.finish_reason) == ("short", "short", 2, "stop")
    assert judge(pieces, 20, exact=False).status == "ok"
    uncounted: Timed = [(100, C("a")), (110, C("b")), (111, FIN("stop") + DONE)]
    assert judge(uncounted, 2).status == "short"  # it stopped by itself, whatever the count


def test_an_abort_and_an_empty_reply_are_failures() -> None:
    assert judge([(100, C("a")), (110, FIN("abort") + USE(1, 20) + DONE)]).error == "aborted by server"
    assert judge([(100, ROLE), (110, FIN("stop") + DONE)], exact=False).error == "empty reply"
    assert judge([(100, DONE)], exact=False).error == "empty reply"
    assert judge([(100, b"<html>oops</html>")], content_type="text/html").error == "unreadable reply"
    assert judge([], content_type="text/plain").status != "ok"


def test_an_event_that_cannot_be_understood_fails_the_reply_with_its_words() -> None:
    result = judge([(100, C("a")), (110, event('{"choices": [}')), (120, FIN("length") + DONE)])
    assert (result.status, result.error) == ("failed", "unreadable reply")
    assert "event 1" in (result.detail or "")
    assert judge([(100, C("a")), (110, b'data: {"choi')]).error == "truncated"  # cut off: not whole, not accepted


def test_bad_text_encoding_is_repaired_and_does_not_fail() -> None:
    bad = C("a").replace(b'"a"', b'"\xe2\x9c"')
    lone = C("b").replace(b'"b"', b'"\\ud83d"')
    result = judge([(100, bad), (110, lone), (120, FIN("length") + USE(1, 2) + DONE)], 2)
    assert result.status == "ok"
    assert result.answer == "\ufffd\ufffd"
    result.answer.encode()


def test_context_overflow_is_recognised_by_code_param_and_words() -> None:
    for said in (
        {"error": {"message": "no", "code": "context_length_exceeded"}},
        {"error": {"message": "no", "param": "input_tokens"}},
        {"message": "This model's maximum context length is 4096 tokens. However, you requested 5000"},
        {"detail": "prompt is too long: 9 > 8"},
    ):
        result = judge([(1, json.dumps(said).encode())], status=400, content_type="application/json")
        assert (result.status, result.error) == ("failed", "context overflow")
    other = judge([(1, b'{"error":{"message":"ignore_eos: unknown field"}}')], status=400)
    assert (other.error, other.detail) == ("http 400", "ignore_eos: unknown field")


def test_a_compressed_reply_is_named() -> None:
    result = judge([(100, b"\x1f\x8b")], headers={"content-encoding": "gzip"})
    assert (result.error, "gzip" in (result.detail or "")) == ("unreadable reply", True)


# --- what is a token, and when


def test_role_and_empty_chunks_are_not_first_tokens() -> None:
    result = judge(
        [(50, ROLE), (60, C("")), (70, b": ping\n\n"), (200, C("a")), (201, FIN("length") + USE(1, 1) + DONE)], 1
    )
    assert ms(result.first_token_ns) == 200
    assert times(result) == [200]


def test_tool_call_pieces_are_output_from_the_first_one_on() -> None:
    def call(index: int, **function: str) -> bytes:
        return chunk({"tool_calls": [{"index": index, "id": "t", "function": function}]})

    pieces: Timed = [
        (90, ROLE),
        (100, call(0, name="ls", arguments="")),
        (110, call(0, arguments='{"a"')),
        (120, call(0, arguments=":1}")),
        (130, call(1, name="cat", arguments="{}")),
        (131, FIN("tool_calls") + USE(4, 4) + DONE),
    ]
    result = judge(pieces, 4)
    assert result.status == "ok"
    assert (ms(result.first_token_ns), ms(result.first_answer_ns), ms(result.last_token_ns)) == (100, 100, 130)
    assert tokens(result) == [1] * 4


def test_token_ids_give_tokens_per_chunk_and_must_agree_with_usage() -> None:
    pieces: Timed = [
        (100, completion("ab", ids=[1, 2])),
        (110, completion("", ids=[3])),  # an unfinished character: a token without text
        (120, completion("c", ids=[4, 5, 6], finish="length")),
        (121, USE(9, 6) + DONE),
    ]
    result = judge(pieces, 6, api="completions")
    assert (tokens(result), result.token_source, result.notes) == ([2, 1, 3], "ids", [])
    assert times(result) == [100, 110, 120]
    uncounted = judge([*pieces[:-1], (121, DONE)], 6, api="completions")
    assert (uncounted.output_tokens, uncounted.output_tokens_client, uncounted.token_source) == (6, None, "ids")
    more = judge([*pieces[:-1], (121, USE(9, 7) + DONE)], 7, api="completions")
    assert (tokens(more), more.status) == ([2, 1, 4], "ok")
    assert any("do not sum" in note for note in more.notes)


def test_continuous_usage_counts_tokens_without_text_too() -> None:
    pieces: Timed = [
        (90, chunk({"role": "assistant", "content": ""}, usage=usage(5, 0))),
        (100, C("a", usage=usage(5, 1))),
        (110, C("", usage=usage(5, 2))),
        (120, C("✅", usage=usage(5, 3))),
        (130, FIN("stop", usage=usage(5, 4))),  # the end-of-text token
        (131, USE(5, 4) + DONE),
    ]
    result = judge(pieces, 4)
    assert (times(result), tokens(result), result.token_source) == ([100, 110, 120, 130], [1, 1, 1, 1], "usage")


def test_output_without_any_text_still_has_its_times() -> None:
    pieces: Timed = [
        (90, ROLE),
        (100, C("")),
        (110, C("")),
        (120, chunk({"content": ""}, "length")),
        (121, USE(5, 3) + DONE),
    ]
    result = judge(pieces, 3)
    assert result.status == "ok"
    assert (times(result), tokens(result)) == ([100, 110, 120], [1, 1, 1])
    assert "output without text" in result.notes


def test_an_end_of_text_token_without_an_event_does_not_spoil_the_inference() -> None:
    result = judge([(100, C("a")), (110, C("b")), (120, FIN("stop") + USE(1, 3) + DONE)], 3)
    assert (tokens(result), result.token_source) == ([1, 2], "inferred")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=30), st.integers(1, 400))
def test_estimated_tokens_sum_to_the_total_in_proportion_to_text(sizes: list[int], total: int) -> None:
    pieces: Timed = [(100 + number, C("x" * size)) for number, size in enumerate(sizes)]
    result = judge([*pieces, (999, FIN("length") + USE(1, total) + DONE)], total)
    found = tokens(result)
    assert sum(found) == total
    assert min(found) >= 0
    if total == len(sizes):
        assert found == [1] * total
    else:
        for number in range(1, len(sizes) + 1):
            assert abs(sum(found[:number]) - total * sum(sizes[:number]) / sum(sizes)) <= 0.5


# --- usage


def test_reasoning_counted_outside_is_added_and_noted() -> None:
    details = {"completion_tokens_details": {"reasoning_tokens": 10}}
    pieces: Timed = [(100 + n, chunk({"reasoning": "a"})) for n in range(10)]
    pieces += [(200 + n, C("b")) for n in range(5)]
    outside = judge([*pieces, (300, FIN("length") + USE(9, 5, **details) + DONE)], 15)
    assert (outside.output_tokens, outside.reasoning_tokens, outside.status) == (15, 10, "ok")
    assert any("outside" in note for note in outside.notes)
    inside = judge([*pieces, (300, FIN("length") + USE(9, 15, **details) + DONE)], 15)
    assert (inside.output_tokens, inside.reasoning_tokens, inside.notes) == (15, 10, [])
    total = event('{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":12,"total_tokens":31,'
                  '"completion_tokens_details":{"reasoning_tokens":10}}}')  # fmt: skip
    assert judge([*pieces, (300, FIN("length") + total + DONE)], 22).output_tokens == 22


@pytest.mark.parametrize(
    ("details", "cached", "noted"),
    [
        ({}, None, False),
        ({"prompt_tokens_details": None}, None, False),
        ({"prompt_tokens_details": {"cached_tokens": None}}, None, False),
        ({"prompt_tokens_details": {"cached_tokens": 0}}, 0, False),
        ({"prompt_tokens_details": {"cached_tokens": 896}}, 896, False),
        ({"prompt_tokens_details": {"cached_tokens": 1100}}, 1024, True),
    ],
)
def test_cached_tokens_null_is_null_and_above_the_prompt_is_clamped(
    details: dict[str, Any], cached: int | None, noted: bool
) -> None:
    result = judge([(100, C("a")), (110, FIN("length") + USE(1024, 1, **details) + DONE)], 1)
    assert result.cached_tokens == cached
    assert bool(result.notes) is noted


# --- other shapes


def test_anthropic_stream() -> None:
    def named(kind: str, **more: Any) -> bytes:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()

    start = {"usage": {"input_tokens": 25, "cache_read_input_tokens": 100, "output_tokens": 1}}
    pieces: Timed = [
        (50, named("message_start", message=start)),
        (51, named("content_block_start", index=0, content_block={"type": "thinking", "thinking": ""})),
        (52, named("ping")),
        (100, named("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": "hm"})),
        (110, named("content_block_delta", index=0, delta={"type": "signature_delta", "signature": "xyz"})),
        (150, named("content_block_delta", index=1, delta={"type": "text_delta", "text": "Hi"})),
        (200, named("content_block_start", index=2, content_block={"type": "tool_use", "id": "t", "name": "ls"})),
        (210, named("content_block_delta", index=2, delta={"type": "input_json_delta", "partial_json": "{}"})),
        (220, named("message_delta", delta={"stop_reason": "tool_use"}, usage={"output_tokens": 4})),
        (221, named("message_stop")),
    ]
    result = judge(pieces, 4, api="anthropic")
    assert (result.status, result.finish_reason) == ("ok", "tool_use")
    assert (ms(result.first_token_ns), ms(result.first_answer_ns), ms(result.last_token_ns)) == (100, 150, 210)
    assert (result.input_tokens, result.cached_tokens, result.output_tokens) == (125, 100, 4)
    assert (tokens(result), result.answer, result.reasoning) == ([1, 1, 1, 1], "Hi", "hm")
    assert judge(pieces[:-2], 4, api="anthropic").status == "truncated"
    failing = [*pieces[:6], (160, named("error", error={"type": "overloaded_error", "message": "Overloaded"}))]
    failed = judge(failing, 4, api="anthropic")
    assert (failed.status, failed.error, failed.detail) == ("failed", "error in stream", "Overloaded")


@pytest.mark.parametrize("api", ["chat", "completions", "anthropic"])
def test_a_whole_json_reply_is_marked_as_not_streamed(api: Api) -> None:
    body: dict[str, Any]
    if api == "anthropic":
        body = {"type": "message", "content": [{"type": "text", "text": "Hi you"}], "stop_reason": "max_tokens",
                "usage": {"input_tokens": 7, "output_tokens": 2}}  # fmt: skip
    elif api == "chat":
        body = {"choices": [{"message": {"content": "Hi you"}, "finish_reason": "length"}], "usage": usage(7, 2)}
    else:
        body = {"choices": [{"text": "Hi you", "finish_reason": "length"}], "usage": usage(7, 2)}
    result = judge([(900, json.dumps(body).encode())], 2, api=api, content_type="application/json")
    assert (result.status, result.streamed, result.answer) == ("ok", False, "Hi you")
    assert (result.input_tokens, result.output_tokens) == (7, 2)
    assert (result.first_token_ns, result.first_answer_ns, result.token_source, len(result.chunks)) == (None,) * 3 + (
        0,
    )


def test_fingerprint_and_unknown_events() -> None:
    pieces: Timed = [
        (100, C("a", system_fingerprint="vllm-0.32.0-8a99caa6")),
        (105, event('{"kind":"progress"}')),
        (110, FIN("length") + USE(1, 1) + DONE),
    ]
    result = judge(pieces, 1)
    assert (result.status, result.server_fingerprint) == ("ok", "vllm-0.32.0-8a99caa6")
    assert result.notes == ["events of unknown kind"]


# --- slices


def long_reply(count: int) -> Exchange:
    pieces: Timed = [
        (10 + number, completion(" w", ids=[number], usage=usage(5, number + 1))) for number in range(count)
    ]
    return exchange_of([*pieces, (10 + count, completion("", finish="length") + USE(5, count) + DONE)])


def same(a: Outcome, b: Outcome) -> bool:
    fields = [name for name in a.__struct_fields__ if name != "chunks"]
    return all(getattr(a, name) == getattr(b, name) for name in fields) and a.chunks.tolist() == b.chunks.tolist()


def test_sliced_decoding_gives_the_same_and_lets_the_loop_run() -> None:
    exchange = long_reply(6000)
    whole = outcome(exchange, api="completions", asked_output=6000, exact_length=True, limits=Limits())
    assert (whole.status, whole.output_tokens, len(whole.chunks)) == ("ok", 6000, 6000)

    async def main() -> tuple[list[Outcome], int]:
        turns = 0
        running = True

        async def others() -> None:
            nonlocal turns
            while running:
                await asyncio.sleep(0)
                turns += 1

        task = asyncio.create_task(others())
        results = await asyncio.gather(
            *(outcome_sliced(exchange, api="completions", asked_output=6000, exact_length=True, limits=Limits())
              for _ in range(3))
        )  # fmt: skip
        running = False
        await task
        return results, turns

    results, turns = asyncio.run(main())
    assert all(same(result, whole) for result in results)
    steps = outcome_steps(exchange, api="completions", asked_output=6000, exact_length=True, limits=Limits())
    pieces = sum(1 for _ in steps)
    assert pieces > 10
    assert turns >= 3 * pieces / 4  # a slice holds one or a few pieces, never a whole reply


def test_an_abandoned_decoding_does_not_stop_the_others() -> None:
    exchange = long_reply(2000)

    async def main() -> Outcome:
        def decode() -> Any:
            return outcome_sliced(exchange, api="completions", asked_output=2000, exact_length=True, limits=Limits())

        first = asyncio.create_task(decode())
        second = asyncio.create_task(decode())
        await asyncio.sleep(0)
        first.cancel()
        result: Outcome = await second
        return result

    assert asyncio.run(main()).status == "ok"


def test_decoding_time_is_linear_in_the_number_of_chunks() -> None:
    def seconds(count: int) -> float:
        exchange = long_reply(count)
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            outcome(exchange, api="completions", asked_output=count, exact_length=True, limits=Limits())
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(16_000) < 100 * seconds(1000)  # linear: 16, quadratic: 256


@pytest.mark.parametrize(
    "odd",
    [
        USE(5, 2**63),
        USE(5, 10**30),
        b"data: " + b"[" * 100_000 + b"\n\n",
        b'data: {"error":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}\n\n",
    ],
    ids=["2^63 tokens", "10^30 tokens", "deep list", "deep error"],
)
def test_an_odd_reply_is_one_failed_or_uncounted_turn_and_never_an_exception(odd: bytes) -> None:
    result = judge([(1, C("a")), (2, odd), (3, FIN("length")), (4, DONE)], 1)
    assert result.status in ("failed", "ok")
    assert result.output_tokens is None or result.output_tokens < 10**8


def test_negative_counts_are_none() -> None:
    result = judge([(1, C("a")), (2, FIN("length")), (3, USE(-5, -12)), (4, DONE)], 1)
    assert result.input_tokens is None
    assert result.output_tokens is None
    assert any("impossible usage" in note for note in result.notes)


def test_many_more_tokens_than_asked_is_other_work() -> None:
    result = judge([(1, C("a")), (2, FIN("length")), (3, USE(5, 36)), (4, DONE)], 12)
    assert (result.status, result.error) == ("failed", "too long")


METRICS = {"time_to_first_token_ms": 31.5, "generation_time_ms": 90.0, "queue_time_ms": 8.5, "mean_itl_ms": 10.0}


def test_the_servers_own_times_are_taken_from_its_last_chunk() -> None:
    """vLLM's time to first token starts when the request is scheduled: its time in the queue comes on top."""
    last = event(json.dumps({"choices": [], "usage": usage(5, 1), "metrics": METRICS}))
    result = judge([(50, C("a")), (51, FIN("length")), (52, last), (53, DONE)], 1)
    assert result.status == "ok"
    assert result.server_first_token_s == pytest.approx(0.040)
    assert result.server_queue_s == pytest.approx(0.0085)
    assert result.server_itl_s == pytest.approx(0.010)


@pytest.mark.parametrize(
    "metrics",
    [
        None,
        {},
        ["ttft", 5],
        {"queue_time_ms": 8.5, "mean_itl_ms": None},  # the rest of the TTFT is not known
        {"time_to_first_token_ms": 31.5, "queue_time_ms": "8.5"},
        {"time_to_first_token_ms": -1.0, "queue_time_ms": 8.5, "mean_itl_ms": 1e12},
    ],
)
def test_times_that_are_none_are_null_and_harm_no_reply(metrics: object) -> None:
    last = event(json.dumps({"choices": [], "usage": usage(5, 1), "metrics": metrics}))
    result = judge([(50, C("a")), (51, FIN("length")), (52, last), (53, DONE)], 1)
    assert result.status == "ok"
    assert result.server_first_token_s is None
    assert result.server_itl_s is None
