"""What is asked of a server, what is read out of its replies, and what is found out about it: against a scripted server
that answers in the shapes of vLLM 0.32 (vllm/entrypoints/openai/completion, scale_out/token_in_token_out)."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from evals.parity.endpoint import TOP, Ask, Chat, ChatReply, Generation
from evals.parity.http import Server, connect
from replay.wire import Limits
from tests.scripted_server import DONE, Request, ScriptedServer, Step, event, reply, serve, stream, usage
from workloads.errors import UserError

LIMITS = Limits(connect_s=2.0, first_byte_s=5.0)
Top = Sequence[tuple[int, float]]
Position = tuple[int, float | None, Top]
"""Token, its logprob, the likeliest as the server lists them: the sampled one first."""

PLAIN: list[Position] = [(7, -0.5, [(7, -0.5), (8, -1.0)]), (9, -2.0, [(9, -2.0), (7, -0.25), (8, -0.5)])]
"""Two positions of a request for two top tokens; at the second the sampled token is not one of them."""


def named(positions: Sequence[Position]) -> dict[str, Any]:
    return {
        "text_offset": [0] * len(positions),
        "tokens": [f"token_id:{token}" for token, _, _ in positions],
        "token_logprobs": [logprob for _, logprob, _ in positions],
        "top_logprobs": [{f"token_id:{token}": each for token, each in top} for _, _, top in positions],
    }


def choice(positions: Sequence[Position], index: int = 0, finish: str | None = "length", **more: Any) -> dict[str, Any]:
    ids = [token for token, _, _ in positions]
    said = {"index": index, "text": " a" * len(ids), "logprobs": named(positions), "finish_reason": finish}
    return said | {"stop_reason": None, "token_ids": ids, **more}


def body(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    tokens = sum(len(each.get("token_ids") or []) for each in choices)
    return {"id": "c", "object": "text_completion", "choices": choices, "usage": usage(3, tokens), **more}


def asked(request: Request) -> dict[str, Any]:
    return json.loads(request.body) if request.body else {}


def generate(
    script: Callable[[Request], list[Step]], *group: Ask, limits: Limits = LIMITS
) -> tuple[list[list[Generation]], ScriptedServer]:
    with serve(script) as server:
        found = asyncio.run(Server(server.url + "/v1", "m", {"X-Team": "a"}, limits).generate(group))
    return found, server


def alone(steps: list[Step], ask: Ask, **more: Any) -> Generation:
    ((found,),), _ = generate(lambda request: steps, ask, **more)
    return found


def ask(**fields: Any) -> Ask:
    return Ask(**{"prompt": [1, 2, 3], "max_tokens": 2, "logprobs": 2} | fields)


def top(found: Generation) -> list[list[tuple[int, float]]]:
    """The filled part of each position's list."""
    rows = zip(found.top_ids.tolist(), found.top_logprobs.tolist(), strict=True)
    return [[pair for pair in zip(*row, strict=True) if pair != (-1, -math.inf)] for row in rows]


# -- asking


def test_every_sampling_field_is_sent() -> None:
    """Else the model's own generation config would fill what is left out."""
    script = lambda request: reply(200, body(choice(PLAIN)))  # noqa: E731
    prompt = np.arange(1, 4, dtype=np.int32)
    _, server = generate(script, ask(prompt=prompt, temperature=0.7, top_p=0.9, seed=5, stop_token_ids=(4,), salt="s"))
    (request,) = server.requests
    assert (request.path, request.header("x-team")) == ("/v1/completions", "a")
    assert asked(request) == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 5,
        "n": 1,
        "ignore_eos": True,
        "stop_token_ids": [4],
        "logprobs": 2,
        "stream": False,
        "cache_salt": "s",
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def test_what_was_not_asked_is_not_sent() -> None:
    script = lambda request: reply(200, body(choice(PLAIN) | {"logprobs": None}))  # noqa: E731
    ((found,),), server = generate(script, ask(logprobs=0))
    assert not asked(server.requests[0]).keys() & {"logprobs", "seed", "cache_salt", "stream_options"}
    assert (found.ids.tolist(), found.logprobs.shape, found.top_ids.shape) == ([7, 9], (0,), (0, TOP))


def test_a_group_is_sent_together_on_connections_of_its_own() -> None:
    script = lambda request: reply(200, body(choice(PLAIN)), at_ms=200)  # noqa: E731
    found, server = generate(script, *[ask()] * 70)
    assert len(found) == 70
    assert server.peak_in_flight == 70
    assert server.connections == 70


def test_forced_ids_go_to_trace_replay() -> None:
    content = [
        {"token_id": 7, "logprob": -0.5, "rank": 1, "top_logprobs": [{"token_id": 7, "logprob": -0.5, "rank": 1},
                                                                     {"token_id": 8, "logprob": -1.0, "rank": 2}]},
        # the forced token is not among the likeliest: of these vLLM leaves out the last
        {"token_id": 9, "logprob": -9.0, "rank": 40, "top_logprobs": [{"token_id": 9, "logprob": -9.0, "rank": 40},
                                                                      {"token_id": 7, "logprob": -0.2, "rank": 1}]},
    ]  # fmt: skip
    forced = {"index": 0, "logprobs": {"content": content}, "finish_reason": "length", "token_ids": [7, 9]}
    script = lambda request: reply(200, {"request_id": "g", "choices": [forced], "usage": usage(3, 2)})  # noqa: E731
    ((found,),), server = generate(script, ask(force=np.array([7, 9], np.int32), salt="s"))
    (request,) = server.requests
    assert request.path == "/inference/v1/generate"
    sent = asked(request)
    assert (sent["token_ids"], sent["cache_salt"], sent["model"]) == ([1, 2, 3], "s", "m")
    assert sent["sampling_params"]["trace_decode_token_ids"] == [7, 9]
    assert (sent["sampling_params"]["logprobs"], sent["sampling_params"]["max_tokens"]) == (2, 2)
    assert found.ids.tolist() == [7, 9]
    assert found.logprobs.tolist() == [-0.5, -9.0]
    assert top(found) == [[(7, -0.5), (8, -1.0)], [(7, pytest.approx(-0.2))]]
    assert found.text is None


# -- reading


def test_top_tokens_are_the_likeliest_in_order() -> None:
    found = alone(reply(200, body(choice(PLAIN), system_fingerprint="f")), ask())
    assert found.error is None
    assert found.ids.tolist() == [7, 9]
    assert found.logprobs.tolist() == [-0.5, -2.0]
    assert top(found) == [[(7, -0.5), (8, -1.0)], [(7, -0.25), (8, -0.5)]]
    assert found.top_ids.shape == found.top_logprobs.shape == (2, TOP)
    assert (found.text, found.finish_reason, found.completion_tokens) == (" a a", "length", 2)
    assert (found.cached_tokens, found.fingerprint) == (None, "f")


def test_ties_are_in_the_order_of_ids() -> None:
    """On both arms alike, whichever was sampled."""
    tied: list[Position] = [(9, -1.0, [(9, -1.0), (8, -1.0)]), (8, -1.0, [(8, -1.0), (9, -1.0)])]
    assert top(alone(reply(200, body(choice(tied))), ask())) == [[(8, -1.0), (9, -1.0)]] * 2


def test_what_is_no_number_stays_so() -> None:
    broken: list[Position] = [(0, None, [(0, None), (5, -1.0)])]  # type: ignore[list-item]
    found = alone(reply(200, body(choice(broken))), ask())
    assert np.isnan(found.logprobs).tolist() == [True]
    assert found.top_ids[0, :2].tolist() == [5, 0]
    assert np.isnan(found.top_logprobs[0, 1])


def test_cached_tokens_are_read() -> None:
    said = body(choice(PLAIN)) | {"usage": usage(3, 2, prompt_tokens_details={"cached_tokens": 2})}
    assert alone(reply(200, said), ask()).cached_tokens == 2


PIECES = [
    event(json.dumps(body(choice(PLAIN[:1], finish=None, prompt_token_ids=[1, 2, 3])) | {"usage": None})),
    b": comment\n\n",
    event(json.dumps(body(choice(PLAIN, finish=None)))),
    event(json.dumps(body(choice([])))),
    event(json.dumps({"choices": [], "usage": usage(3, 3), "system_fingerprint": "f"})),
    DONE,
]
"""A stream of three tokens: one, then two in an event (speculation), then a finish reason alone."""


@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
@pytest.mark.parametrize("width", [1, 7, 10_000])
def test_a_stream_is_read_however_it_is_cut(width: int, ends: bytes) -> None:
    data = b"".join(PIECES).replace(b"\n", ends)
    cuts = [(index / 100, data[at : at + width]) for index, at in enumerate(range(0, len(data), width))]
    found = alone(stream(cuts), ask(stream=True))
    assert found.error is None
    assert found.ids.tolist() == [7, 7, 9]
    assert top(found) == [[(7, -0.5), (8, -1.0)], [(7, -0.5), (8, -1.0)], [(7, -0.25), (8, -0.5)]]
    assert (found.text, found.finish_reason, found.completion_tokens, found.fingerprint) == (" a a a", "length", 3, "f")


def test_a_stream_asks_for_its_usage() -> None:
    _, server = generate(lambda request: stream([(0, b"".join(PIECES))]), ask(stream=True))
    assert asked(server.requests[0])["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("streamed", [True, False])
def test_choices_are_told_apart(streamed: bool) -> None:
    one, other = choice(PLAIN), choice(PLAIN[:1], 1)
    if streamed:
        pieces = [choice(PLAIN[:1], 1), choice(PLAIN[:1], finish=None), choice(PLAIN[1:])]
        steps = stream([(0, b"".join([*(event(json.dumps(body(each))) for each in pieces), DONE]))])
    else:
        steps = reply(200, body(other, one))
    (found,), _ = generate(lambda request: steps, ask(n=2, stream=streamed))
    assert [each.ids.tolist() for each in found] == [[7, 9], [7]]
    assert [each.completion_tokens for each in found] == [None, None]  # usage counts them together


# -- failing

TEXT_KEYS = body(choice(PLAIN) | {"logprobs": named(PLAIN) | {"tokens": ["a", "b"]}})


@pytest.mark.parametrize(
    ("steps", "streamed", "error"),
    [
        (reply(500, {"error": {"message": "x"}}), False, "HTTP 500"),
        (reply(307, b"", headers="location: http://127.0.0.1:9/\r\n"), False, "HTTP 307"),
        (reply(200, b"<html>"), False, "unreadable reply"),
        (reply(200, b'{"choices": [{"text": "\xff"}]}'), False, "unreadable reply"),
        (reply(200, {}), False, "unreadable reply"),
        (reply(200, body(choice(PLAIN, 1))), False, "unreadable reply"),
        (reply(200, TEXT_KEYS), False, "unreadable reply"),
        (reply(200, body(choice(PLAIN) | {"token_ids": [7, 8]})), False, "unreadable reply"),
        (reply(200, body(choice(PLAIN) | {"token_ids": [7, 2**31]})), False, "unreadable reply"),
        (reply(200, body(choice(PLAIN) | {"logprobs": None})), False, "unreadable reply"),
        (reply(200, body(choice(PLAIN, finish="abort"))), False, "aborted"),
        (reply(200, {"error": {"message": "x"}}), False, "error in reply"),
        (reply(200, body(choice(PLAIN))), True, "no stream"),
        (stream([(0, PIECES[0])]), True, "broke off"),
        (stream([(0, PIECES[0])], end="close"), True, "broke off"),
        (stream([(0, PIECES[0])], end="reset", end_ms=100), True, "broke off"),
        (stream([(0, PIECES[0]), (0, event('{"error": {"message": "x"}}')), (0, DONE)]), True, "error in reply"),
        (stream([(0, PIECES[0]), (1, event('{"choices": '))]), True, "unreadable reply"),
        ([Step(0, end="close")], False, "connection"),
        ([Step(0, end="reset")], True, "connection"),
        ([Step(0, b"HTTP/1.1 200 OK\r\ncontent-length: 90\r\n\r\n{"), Step(50, end="close")], False, "broke off"),
    ],
)
def test_a_failure_is_a_generation_of_its_own(steps: list[Step], streamed: bool, error: str) -> None:
    """It costs neither its neighbours nor the battery."""

    def script(request: Request) -> list[Step]:
        if asked(request)["prompt"] == [1, 2, 3]:
            return steps
        return stream([(0, b"".join(PIECES))]) if streamed else reply(200, body(choice(PLAIN)))

    ((struck,), (other,)), server = generate(script, ask(stream=streamed), ask(prompt=[4], stream=streamed))
    assert struck.error == error
    assert (struck.ids.size, struck.top_ids.shape, struck.text) == (0, (0, TOP), None)
    assert (struck.sent_unix_s or 0) <= (struck.ended_unix_s or 0)
    assert other.error is None
    assert len(server.requests) == 2  # nothing is sent again


def test_each_choice_of_a_failed_request_failed() -> None:
    (found,), _ = generate(lambda request: reply(503, {}), ask(n=3))
    assert [each.error for each in found] == ["HTTP 503"] * 3
    assert found[0] is not found[1]


@pytest.mark.parametrize("streamed", [True, False])
def test_silence_ends(streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evals.parity.http._TOKEN_S", 0.0)
    steps = stream([(0, PIECES[0]), (60_000, DONE)]) if streamed else reply(200, {}, at_ms=60_000)
    limits = Limits(connect_s=2.0, first_byte_s=0.2)
    assert alone(steps, ask(stream=streamed), limits=limits).error == "timeout"


def test_a_whole_reply_is_waited_for_longer_the_longer_it_is() -> None:
    limits = Limits(connect_s=2.0, first_byte_s=0.1)
    assert alone(reply(200, body(choice(PLAIN)), at_ms=500), ask(max_tokens=2), limits=limits).error is None


def test_a_dead_server_is_known() -> None:
    async def look(url: str) -> tuple[bool, str | None]:
        server = Server(url, "m", {}, LIMITS)
        alive = await server.alive()
        ((found,),) = await server.generate([ask()])
        return alive, found.error

    with serve(lambda request: reply(200 if request.path == "/health" else 500, {})) as server:
        assert asyncio.run(look(server.url)) == (True, "HTTP 500")
    assert asyncio.run(look(server.url)) == (False, "connection")
    with serve(lambda request: reply(503 if request.path == "/health" else 200, {})) as server:  # its engine is dead
        assert asyncio.run(look(server.url))[0] is False
    with serve(lambda request: reply(404 if request.path == "/health" else 200, {})) as server:  # not vLLM
        assert asyncio.run(look(server.url))[0] is True


# -- chats


def chat(steps: list[Step], **more: Any) -> tuple[ChatReply, dict[str, Any]]:
    messages = [{"role": "user", "content": "hi"}]
    with serve(lambda request: steps) as server:
        (found,) = asyncio.run(Server(server.url, "m", {}, LIMITS).chat([Chat(body={"messages": messages, **more})]))
    return found, asked(server.requests[0])


def called(name: str | None, arguments: str, index: int | None = None) -> dict[str, Any]:
    where = {} if index is None else {"index": index}
    return {"id": "t", "type": "function", "function": {"name": name, "arguments": arguments}} | where


def test_a_chat_is_read_whole() -> None:
    message = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [called("f", '{"a":1}')]}
    said = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls", "token_ids": [5, 6]}]}
    found, sent = chat(reply(200, said | {"usage": usage(3, 2), "system_fingerprint": "f"}), temperature=0.0)
    assert sent.keys() == {"model", "messages", "return_token_ids", "temperature"}
    assert found == ChatReply(
        text=None,
        reasoning="hm",
        tool_calls=[("f", '{"a":1}')],
        ids=[5, 6],
        finish_reason="tool_calls",
        completion_tokens=2,
        fingerprint="f",
    )


def test_a_chat_is_put_together_from_its_deltas() -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning": "h"},
        {"reasoning": "m"},
        {"content": "so"},
        {"tool_calls": [called("f", "", 0)]},
        {"tool_calls": [called(None, '{"a"', 0)]},
        {"tool_calls": [called(None, ":1}", 0), called("g", "{}", 1)]},
    ]
    pieces = [{"choices": [{"index": 0, "delta": delta, "token_ids": [5]}]} for delta in deltas]
    pieces.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    pieces.append({"choices": [], "usage": usage(3, 7), "system_fingerprint": "f"})
    data = b"".join([*(event(json.dumps(piece)) for piece in pieces), DONE])
    found, sent = chat(stream([(0, data)]), stream=True)
    assert sent["stream_options"] == {"include_usage": True}
    assert (found.text, found.reasoning, found.tool_calls) == ("so", "hm", [("f", '{"a":1}'), ("g", "{}")])
    assert (found.ids, found.finish_reason, found.completion_tokens, found.fingerprint) == (
        [5] * 7,
        "tool_calls",
        7,
        "f",
    )


@pytest.mark.parametrize(
    ("steps", "streamed", "error"),
    [
        (reply(400, {"error": {"message": "no template"}}), False, "HTTP 400"),
        (reply(200, {"choices": []}), False, "unreadable reply"),
        (stream([(0, event('{"choices":[{"delta":{"content":"a"}}]}'))]), True, "broke off"),
    ],
)
def test_a_chat_fails_alone(steps: list[Step], streamed: bool, error: str) -> None:
    assert chat(steps, stream=streamed)[0] == ChatReply(error=error)


# -- what a server offers

METRICS = b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0.0\n"
DRAFTS = b"# TYPE vllm:spec_decode_num_drafts_total counter\nvllm:spec_decode_num_drafts_total 0.0\n"


class Offer:
    """A server that offers everything, apart from what a test takes away: ``without`` answers a request otherwise, or
    not (None)."""

    def __init__(self, without: Callable[[Request, dict[str, Any]], list[Step] | None]) -> None:
        self.without = without

    def __call__(self, request: Request) -> list[Step]:
        sent = asked(request)
        return self.without(request, sent) or self.answer(request, sent)

    def answer(self, request: Request, sent: dict[str, Any]) -> list[Step]:
        if request.path == "/metrics":
            return reply(200, METRICS + DRAFTS)
        if not request.body:
            return reply(404, b"")
        if request.path == "/v1/chat/completions":
            return reply(200, {"choices": [{"message": {"content": "x"}}]})
        if request.path == "/inference/v1/generate":
            forced = sent["sampling_params"]["trace_decode_token_ids"]
            return reply(200, {"choices": [{"index": 0, "token_ids": forced, "finish_reason": "length"}]})
        return self.completion(sent, sent["seed"])

    @staticmethod
    def completion(sent: dict[str, Any], seed: int, **changed: Any) -> list[Step]:
        ids = [(token * 37 + seed) % 97 for token in range(sent["max_tokens"])]
        positions: list[Position] = [(token, -1.0, [(token, -1.0)]) for token in ids]
        said = choice(positions) | ({} if "logprobs" in sent else {"logprobs": None}) | changed
        counted = usage(16, len(ids), prompt_tokens_details={"cached_tokens": 0})
        if sent["stream"]:
            return stream([(0, event(json.dumps(body(said) | {"usage": counted})) + DONE)])
        return reply(200, body(said) | {"usage": counted})


def connected(without: Callable[[Request, dict[str, Any]], list[Step] | None]) -> Server:
    with serve(Offer(without)) as server:
        return asyncio.run(connect(server.url, "m", {}, LIMITS))


def test_all_that_is_offered_is_found() -> None:
    server = connected(lambda request, sent: None)
    assert server.why_not == {}
    assert server.has == {
        "token ids",
        "logprobs",
        "seeds",
        "streaming",
        "trace replay",
        "chat",
        "tools",
        "cached tokens",
        "metrics",
        "speculation",
    }


def refused(status: int, words: str) -> list[Step]:
    return reply(status, {"error": {"message": words, "type": "BadRequestError", "param": None, "code": status}})


SCALE_OUT = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
REPLAY = "trace_decode_token_ids is set but trace replay is not enabled. Start the engine with --enable-trace-replay"


@pytest.mark.parametrize(
    ("without", "missing"),
    [
        (lambda request, sent: refused(403, SCALE_OUT) if "generate" in request.path else None,
         {"trace replay": "HTTP 403: Scale-out endpoints are disabled"}),
        (lambda request, sent: refused(400, REPLAY) if "generate" in request.path else None,
         {"trace replay": "--enable-trace-replay"}),
        (lambda request, sent: Offer.completion({"max_tokens": 3, "stream": False}, 1)
         if "generate" in request.path else None,
         {"trace replay": "forced tokens were not decoded"}),
        (lambda request, sent: refused(400, "greater than max allowed: 5") if "logprobs" in sent else None,
         {"logprobs": "max allowed: 5; vLLM needs --max-logprobs 20"}),
        (lambda request, sent: refused(400, "tool choice requires") if "tools" in sent else None,
         {"tools": "--tool-call-parser NAME"}),
        (lambda request, sent: refused(400, "no template") if "messages" in sent else None,
         {"chat": "--chat-template FILE", "tools": "no template"}),
        (lambda request, sent: reply(404, b"") if request.path == "/metrics" else None,
         {"metrics": "no metrics of vLLM's", "speculation": "--speculative-config"}),
        (lambda request, sent: reply(200, METRICS) if request.path == "/metrics" else None,
         {"speculation": "--speculative-config"}),
        (lambda request, sent: Offer.completion(sent, 1) if "seed" in sent else None,
         {"seeds": "two seeds gave one reply"}),
        (lambda request, sent: Offer.completion(sent, request.number) if "seed" in sent else None,
         {"seeds": "the same seed gave two replies"}),
        (lambda request, sent: Offer.completion(sent | {"stream": False}, 1) if sent.get("stream") else None,
         {"streaming": "no stream"}),
        (lambda request, sent: Offer.completion(sent, sent["seed"], token_ids=None) if "seed" in sent else None,
         {"token ids": "return_token_ids", "logprobs": "8 tokens that are not the same",
          "seeds": "two seeds gave one reply"}),
        (lambda request, sent: reply(200, body(choice([(sent["seed"], -1.0, [])] * 8) | {"logprobs": None}))
         if "seed" in sent and not sent["stream"] and "logprobs" not in sent else None,
         {"cached tokens": "--enable-prompt-tokens-details"}),
    ],
)  # fmt: skip
def test_what_is_missing_is_named_with_the_option_that_gives_it(
    without: Callable[[Request, dict[str, Any]], list[Step] | None], missing: dict[str, str]
) -> None:
    server = connected(without)
    assert server.why_not.keys() == missing.keys()
    for need, words in missing.items():
        assert words in server.why_not[need]  # type: ignore[index]
    assert not server.has & missing.keys()


def test_speculation_is_also_seen_in_the_settings() -> None:
    shown = {"vllm_config": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}}

    def without(request: Request, sent: dict[str, Any]) -> list[Step] | None:
        if request.path == "/metrics":
            return reply(200, METRICS)
        return reply(200, shown) if request.path.startswith("/server_info") else None

    assert connected(without).why_not == {}


def test_logprobs_are_left_out_where_there_are_none() -> None:
    def without(request: Request, sent: dict[str, Any]) -> list[Step] | None:
        return refused(400, "no logprobs") if "logprobs" in sent else None

    async def look(url: str) -> Generation:
        server = await connect(url, "m", {}, LIMITS)
        ((found,),) = await server.generate([ask(seed=3, logprobs=TOP)])
        return found

    with serve(Offer(without)) as server:
        found = asyncio.run(look(server.url))
    assert (found.error, found.ids.size, found.logprobs.size) == (None, 2, 0)


@pytest.mark.parametrize("steps", [refused(404, "The model `m` does not exist."), [Step(0, end="close")]])
def test_a_server_that_cannot_be_asked_ends_it_in_words(steps: list[Step]) -> None:
    with pytest.raises(UserError, match="for a prompt of token ids failed"):
        connected(lambda request, sent: steps)
