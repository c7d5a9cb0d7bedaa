"""Probes: what a careful engineer would ask a server by hand, asked of servers whose answers are known."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from replay.emulator import language, process
from replay.emulator.settings import EmulatorSettings
from replay.estimate import Work
from replay.probes import KvCache, ServerFacts, check_capacity, probe
from replay.probes.tokenizer import TEXT
from replay.progress import Finding
from replay.wire import Limits, Wire
from tests.scripted_server import DONE, Request, ScriptedServer, Step, event, reply, serve, stream, usage
from workloads.content import vocabulary_of_range, vocabulary_of_tokenizer
from workloads.errors import UserError
from workloads.rendering import Api, Rendering, Template

METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{engine="0",enable_prefix_caching="True",block_size="16",num_gpu_blocks="1000"} 1
"""
BLOCK = 16
"""Tokens in a block of the scripted server's prefix cache."""


class Vllm:
    """A completions server as plain as can be; each attribute changes one thing about it."""

    def __init__(self) -> None:
        self.sizes: Callable[[int], Sequence[int]] = lambda asked: [1] * asked
        """Tokens of each chunk of an answer of so many tokens."""
        self.at_once = False
        self.continuous = True
        self.cache: set[tuple[int, ...]] | None = set()
        """None: cached tokens are not reported."""
        self.caching = True
        self.salt_tokens = 0
        """So many tokens at the front do not count for the cache."""
        self.refuses: dict[str, Any] = {}
        """Request fields, and values, that it answers with 400; None: any value."""
        self.pages: dict[str, list[Step]] = {
            "/metrics": reply(200, METRICS.encode()),
            "/server_info?config_format=json": reply(200, {}),
            "/reset_prefix_cache": reply(405, {"detail": "Method Not Allowed"}),
            "/tokenize": reply(200, {"tokens": [5, 6, 7]}),
        }
        self.per_request: dict[str, float] | None = None
        self.keep_alive = ""
        self.closes = False
        """Whether a connection is closed soon after its second answer of one token."""
        self.one_token_answers = 0

    def __call__(self, request: Request) -> list[Step]:
        if request.path == "/v1/models":
            return reply(200, {"data": [{"id": "m", "max_model_len": 10_000}]})
        if request.path != "/v1/completions":
            return self.pages.get(request.path, reply(404, {"detail": "Not Found"}))
        body = json.loads(request.body)
        for field, value in self.refuses.items():
            if field in body and value in (None, body[field]):
                return reply(400, {"error": {"message": f"bad value of {field}", "code": 400}})
        steps = stream(self._events(body), header=f"content-type: text/event-stream\r\n{self.keep_alive}")
        self.one_token_answers += body["max_tokens"] == 1
        if self.closes and self.one_token_answers == 2:
            steps.append(Step(steps[-1].at_ms + 50, end="close"))
        return steps

    def _events(self, body: dict[str, Any]) -> list[tuple[float, bytes]]:
        asked = body["max_tokens"]
        counts: dict[str, Any] = {}
        if self.cache is not None:
            counts["prompt_tokens_details"] = {"cached_tokens": self._cached(body["prompt"])}
        events: list[tuple[float, bytes]] = []
        done = 0
        for number, size in enumerate(sizes := self.sizes(asked)):
            done += size
            choice = {"text": "a" * size, "finish_reason": "length" if number == len(sizes) - 1 else None}
            more = {"usage": usage(len(body["prompt"]), done)} if self.continuous else {}
            events.append((2 * number, event(json.dumps({"choices": [choice], **more}))))
        last = {"choices": [], "usage": usage(len(body["prompt"]), asked, **counts)}
        if self.per_request is not None:
            last["metrics"] = self.per_request
        events += [(2 * len(sizes), event(json.dumps(last))), (2 * len(sizes), DONE)]
        return [(0, b"".join(data for _, data in events))] if self.at_once else events

    def _cached(self, prompt: list[int]) -> int:
        assert self.cache is not None
        prompt = prompt[self.salt_tokens :]
        blocks = [tuple(prompt[:end]) for end in range(BLOCK, len(prompt), BLOCK)]
        hits = [block for block in blocks if block in self.cache]
        self.cache.update(blocks)
        return BLOCK * len(hits) if self.caching else 0


def ask(server: Vllm, **more: Any) -> tuple[ServerFacts, ScriptedServer]:
    sampling = more.pop("sampling", {"temperature": 1.0})
    limits = Limits(keep_alive_s=more.pop("keep_alive_s", 4.0))
    rendering = Rendering(api="completions", model="m", vocabulary=vocabulary_of_range(1000, 2000), sampling=sampling)

    async def asked(url: str) -> ServerFacts:
        async with Wire(url, limits, connections=4, headers={}) as wire:
            return await probe(wire, rendering, **more)

    with serve(server) as running:
        return asyncio.run(asked(running.url)), running


def said(facts: ServerFacts, words: str) -> Finding:
    """The one finding that says so."""
    (found,) = [finding for finding in facts.findings if words in str(finding)]
    return found


def test_a_finding_says_what_why_and_what_to_change() -> None:
    assert str(Finding("ok", "it works")) == "ok: it works"
    assert str(Finding("warning", "it breaks", "mend it", why="it matters")) == (
        "WARNING: it breaks\n    why: it matters\n    change: mend it"
    )


def test_a_plain_server_gives_no_cause_for_alarm() -> None:
    server = Vllm()
    server.per_request = {"queue_time_ms": 1.0, "time_to_first_token_ms": 2.0, "mean_itl_ms": 3.0}
    facts, running = ask(server)
    assert [str(finding) for finding in facts.findings if finding.level != "ok"] == []
    assert sorted(facts.offers) == [
        *("cached_tokens", "metrics", "request_metrics", "reset_prefix_cache", "server_info", "tokenize")
    ]
    assert facts.kv_cache == KvCache(tokens=16_000, engines=1, exact=False)
    assert facts.prefix_caching is True
    assert facts.speculative is False
    assert len(running.requests) <= 25


def test_what_is_not_there_is_a_note_with_a_reason_and_a_change() -> None:
    server = Vllm()
    server.pages = {}
    server.cache = None
    server.continuous = False
    facts, _ = ask(server)
    assert facts.offers == []
    assert (facts.kv_cache, facts.prefix_caching, facts.speculative, facts.tokenizer_digest) == (None,) * 4
    missing = [finding for finding in facts.findings if finding.level != "ok"]
    assert {finding.level for finding in missing} == {"note"}
    assert all(finding.why and finding.mend for finding in missing)
    for words in ("/metrics", "/server_info", "/reset_prefix_cache", "/tokenize", "cached tokens", "a chunk carries"):
        assert any(words in finding.what for finding in missing), words


def test_the_prefix_cache_is_looked_for_and_never_emptied() -> None:
    _, running = ask(Vllm())
    (request,) = [request for request in running.requests if request.path == "/reset_prefix_cache"]
    assert request.head.startswith(b"GET ")


def test_the_shapes_of_the_experiment_are_all_sent() -> None:
    _, running = ask(Vllm(), sampling={"temperature": 0.7, "top_k": 3})
    bodies = [json.loads(request.body) for request in running.requests if request.path == "/v1/completions"]
    assert all(body["temperature"] == 0.7 and body["top_k"] == 3 and body["stream"] for body in bodies)
    lengths = {len(body["prompt"]) for body in bodies}
    assert {64, 100, 900, 8000} <= lengths  # 900: a grown conversation
    assert {body["max_tokens"] for body in bodies} == {1, 16}


def test_a_refused_request_field_is_named() -> None:
    server = Vllm()
    server.refuses = {"top_k": 3}
    with pytest.raises(UserError, match=r"refuses sampling\.top_k \(bad value of top_k\)"):
        ask(server, sampling={"temperature": 1.0, "top_k": 3})


def test_one_token_answers_that_fail_are_called_out() -> None:
    server = Vllm()
    server.refuses = {"max_tokens": 1}
    facts, _ = ask(server)
    assert said(facts, "an answer of one token fails: http 400").level == "warning"


@pytest.mark.parametrize("api", ["completions", "chat", "anthropic"])
def test_every_protocol_of_a_server_that_is_as_it_should_be(tmp_path: Path, api: Api) -> None:
    """The emulator; messages get a system message and a grown conversation of exact length too."""
    vocabulary = vocabulary_of_tokenizer(language.tokenizer())
    settings = EmulatorSettings(profile="toy", time_scale=5.0)
    rendering = Rendering(api=api, model=settings.model, vocabulary=vocabulary)

    async def asked(url: str) -> ServerFacts:
        async with Wire(url, Limits(), connections=4, headers={}) as wire:
            return await probe(wire, rendering)

    emulator = process.start(settings, tmp_path)
    try:
        facts = asyncio.run(asked(emulator.url))
    finally:
        process.stop(emulator)
    alarms = [finding.what.removeprefix(f"{emulator.url}: ") for finding in facts.findings if finding.level != "ok"]
    assert alarms == (["does not say how many tokens a chunk carries"] if api == "anthropic" else [])
    assert said(facts, "a conversation of 3 turns planned as 900 tokens has 900").level == "ok"
    assert facts.emulated
    assert facts.kv_cache is not None
    assert {"metrics", "reset_prefix_cache", "cached_tokens"} <= set(facts.offers)


# -- chunks


@pytest.mark.parametrize("interval", [2, 4])
def test_a_stream_interval_is_recognised(interval: int) -> None:
    server = Vllm()
    server.sizes = lambda asked: (
        [1] + [interval] * ((asked - 1) // interval) + ([rest] if (rest := (asked - 1) % interval) else [])
    )
    facts, _ = ask(server)
    found = said(facts, f", {interval} in each: the server's --stream-interval")
    assert found.level == "warning"
    assert "--stream-interval 1" in found.mend


def test_chunks_of_uneven_size_are_laid_to_no_stream_interval() -> None:
    server = Vllm()
    server.sizes = lambda asked: [1, 2, 3, 4, 3, 3] if asked == 16 else [asked]
    facts, _ = ask(server)
    found = said(facts, "16 tokens came in 6 chunks")
    assert found.level == "warning"
    assert "the server's --stream-interval" not in found.what


def test_several_tokens_a_chunk_are_expected_of_speculation() -> None:
    server = Vllm()
    server.sizes = lambda asked: [1, 5, 5, 5] if asked == 16 else [asked]
    server.pages["/metrics"] = reply(200, METRICS.encode() + b'vllm:spec_decode_num_drafts_total{engine="0"} 3\n')
    facts, _ = ask(server)
    assert facts.speculative is True
    assert said(facts, "with speculation").level == "note"


def test_a_stream_that_is_held_back_is_called_out() -> None:
    server = Vllm()
    server.at_once = True
    facts, _ = ask(server)
    assert said(facts, "16 tokens came in 16 chunks, all at one moment").level == "warning"


# -- prefix cache


def test_cached_tokens_of_a_prompt_sent_twice() -> None:
    facts, _ = ask(Vllm())
    said(facts, "7984 of 8000 tokens are cached when a prompt is sent twice, and not after another salt")


def test_a_server_without_prefix_cache_is_called_out_whether_it_counts_or_not() -> None:
    server = Vllm()
    server.caching = False
    facts, _ = ask(server)
    assert said(facts, "sent twice, is not cached").level == "warning"
    assert facts.prefix_caching is False
    server.cache = None
    server.pages["/metrics"] = reply(200, METRICS.replace('"True"', '"False"').encode())
    facts, _ = ask(server)
    assert said(facts, "prefix caching is off").level == "warning"
    assert facts.prefix_caching is False


def test_a_cache_that_ignores_the_salt_is_called_out() -> None:
    server = Vllm()
    server.salt_tokens = 8
    facts, _ = ask(server)
    assert said(facts, "but also 7984 when its first tokens differ").level == "warning"


def test_a_second_check_of_one_server_finds_the_same() -> None:
    """Its first left prompts in the server's cache."""
    server = Vllm()
    first, second = [
        [f"{finding.level} {finding.what.split(': ', 1)[1]}" for finding in ask(server)[0].findings] for _ in range(2)
    ]
    assert first == second


# -- connections


def test_a_server_that_closes_after_each_reply() -> None:
    server = Vllm()
    server.keep_alive = "connection: close\r\n"
    facts, _ = ask(server)
    found = said(facts, "closes the connection after each reply")
    assert found.level == "warning"
    assert "TTFT" in found.why


@pytest.mark.parametrize(("seconds", "level"), [(3, "warning"), (4, "warning"), (5, "ok")])
def test_the_idle_limit_that_a_server_states(seconds: int, level: str) -> None:
    server = Vllm()
    server.keep_alive = f"keep-alive: timeout={seconds}\r\n"
    facts, _ = ask(server)
    assert said(facts, f"{seconds} s").level == level


def test_the_idle_limit_that_a_server_does_not_state() -> None:
    server = Vllm()
    facts, _ = ask(server)
    said(facts, "for how long is not checked")
    facts, _ = ask(server, idle_s=0.2)
    said(facts, "stay open for 0.2 s of silence (of limits.keep_alive_s, 4 s; more is not checked)")
    facts, _ = ask(server, idle_s=5, keep_alive_s=1)
    said(facts, "stay open for 0.5 s of silence")
    closing = Vllm()
    closing.closes = True
    facts, _ = ask(closing, idle_s=1)
    assert said(facts, "closes idle connections within 1 s").level == "warning"


# -- tokenizer


def test_the_tokenizer_is_known_by_the_ids_it_gives() -> None:
    server = Vllm()
    facts, _ = ask(server)
    assert facts.tokenizer_digest == hashlib.sha256(b"[5,6,7]").hexdigest()
    server.pages["/tokenize"] = reply(200, {"tokens": [5, 6, 8]})
    assert ask(server)[0].tokenizer_digest != facts.tokenizer_digest
    server.pages["/tokenize"] = reply(200, {"count": 3})
    assert ask(server)[0].tokenizer_digest is None


def test_the_experiments_tokenizer_must_be_the_servers() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    server = Vllm()
    server.pages["/tokenize"] = reply(200, {"tokens": own.encode(TEXT).ids})
    ask(server, tokenizer=own)
    server.pages["/tokenize"] = reply(200, {"tokens": own.encode(TEXT + "!").ids})
    with pytest.raises(UserError, match="give tokenizer of the served model"):
        ask(server, tokenizer=own)


# -- room for contexts


def test_the_servers_own_count_of_the_kv_cache_goes_before_blocks() -> None:
    server = Vllm()
    line = METRICS.splitlines()[-1].replace("block_size", 'kv_cache_size_tokens="12345",block_size')
    both = "\n".join([line, line.replace('engine="0"', 'engine="1"'), ""])
    server.pages["/metrics"] = reply(200, b"# TYPE vllm:cache_config_info gauge\n" + both.encode())
    assert ask(server)[0].kv_cache == KvCache(tokens=12_345, engines=2, exact=True)
    unset = line.replace('"12345"', '"None"').replace('"1000"', '"None"')
    server.pages["/metrics"] = reply(200, unset.encode() + b"\n")
    assert ask(server)[0].kv_cache is None


def room(cache: KvCache | None) -> Finding:
    """What is said of a plan whose longest context is 900 tokens and whose median is 100, on 10 lanes."""
    facts = ServerFacts(
        url="url",
        control=0,
        template=Template(),
        max_model_len=None,
        emulated=False,
        time_scale=1.0,
        server={},
        findings=[],
        kv_cache=cache,
    )
    work = Work(requests=1, input_tokens=1, cached_tokens=0, output_tokens=1, rated=0, longest=900, median=100)
    (found,) = check_capacity(facts, work, lanes=10)
    return found


def test_contexts_must_fit_into_the_kv_cache() -> None:
    assert room(KvCache(tokens=1000, engines=1, exact=True)).level == "ok"
    short = room(KvCache(tokens=999, engines=1, exact=True))
    assert short.level == "note"
    assert "at most 9 contexts of the plan's median length (100) at once, for 10 lanes" in short.what
    assert room(KvCache(tokens=900, engines=2, exact=True)).level == "ok"
    with pytest.raises(UserError, match=r"longest turn takes 900: set workload\.max_context to 899"):
        room(KvCache(tokens=899, engines=2, exact=True))
    # blocks times their size is not exact enough to refuse
    assert room(KvCache(tokens=899, engines=2, exact=False)).level == "warning"
    assert room(None).level == "note"
