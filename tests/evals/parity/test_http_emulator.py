"""The endpoint over HTTP against the emulator, whose language model says beforehand what must come."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from evals.parity.endpoint import TOP, Ask, Generation
from evals.parity.http import Server, connect
from evals.parity.prompts import prompt
from replay.emulator import decoding, language, lm, process
from replay.emulator.settings import EmulatorSettings
from replay.emulator.speculation import Speculation
from replay.wire import Limits
from workloads.content import vocabulary_of_tokenizer

MODEL = EmulatorSettings(time_scale=20, language="model")
WORDS = vocabulary_of_tokenizer(language.tokenizer())
PROMPT = prompt(1, 300, WORDS)
REPLY = 40


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[process.Emulator]:
    running = process.start(MODEL, tmp_path_factory.mktemp("emulator"))
    yield running
    process.stop(running)


def connected(url: str) -> Server:
    return asyncio.run(connect(url, MODEL.model, {}, Limits()))


def offered(settings: EmulatorSettings, folder: Path) -> Server:
    running = process.start(settings, folder)
    try:
        return connected(running.url)
    finally:
        process.stop(running)


def generations(emulator: process.Emulator, *group: Ask) -> list[Generation]:
    server = Server(emulator.url, MODEL.model, {}, Limits())
    return [found for (found,) in asyncio.run(server.generate(group))]


def expect(found: Generation, ids: np.ndarray, scores: lm.Scores) -> None:
    assert found.error is None
    assert found.ids.tolist() == ids.tolist()
    np.testing.assert_array_equal(found.logprobs, scores.logprobs)
    np.testing.assert_array_equal(np.sort(found.top_ids), np.sort(scores.top_ids))
    np.testing.assert_array_equal(found.top_logprobs, scores.top_logprobs)
    assert (found.finish_reason, found.completion_tokens) == ("length", len(ids))


def test_an_emulator_offers_all_but_speculation(emulator: process.Emulator) -> None:
    server = connected(emulator.url)
    assert server.why_not.keys() == {"speculation"}


def test_what_is_switched_off_is_named(tmp_path: Path) -> None:
    drafts = Speculation(draft_tokens=3, acceptance_length=2.0)
    closed = offered(EmulatorSettings(language="model", scale_out=False, speculation=drafts), tmp_path / "closed")
    assert closed.why_not.keys() == {"trace replay"}
    assert closed.why_not["trace replay"].startswith("HTTP 403: ")
    assert "--enable-scale-out" in closed.why_not["trace replay"]
    faulty = offered(EmulatorSettings(language="model", trace_replay=False, faults=("shared-seed",)), tmp_path / "open")
    assert faulty.why_not.keys() == {"trace replay", "seeds", "speculation"}
    assert "--enable-trace-replay" in faulty.why_not["trace replay"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_model_says_comes_exactly(emulator: process.Emulator, stream: bool) -> None:
    ask = Ask(prompt=PROMPT, max_tokens=REPLY, temperature=1.0, top_p=0.95, seed=5, stream=stream)
    greedy, sampled = generations(emulator, Ask(prompt=PROMPT, max_tokens=REPLY, stream=stream), ask)
    for found in (greedy, sampled):  # how a request's seed becomes the model's is the emulator's own affair
        scores = decoding.replay([PROMPT], [found.ids], top=TOP)
        expect(found, found.ids, scores)
        assert len(found.ids) == REPLY
    assert (greedy.ids == greedy.top_ids[:, 0]).all()
    assert (sampled.ids != greedy.ids).any()


@pytest.mark.parametrize("stream", [False, True])
def test_forced_tokens_are_scored_exactly(emulator: process.Emulator, stream: bool) -> None:
    """Some of them are so unlikely that they are in no list of the likeliest."""
    forced = np.array(prompt(2, REPLY, WORDS), np.int32)
    (found,) = generations(emulator, Ask(prompt=PROMPT, max_tokens=REPLY, force=forced, stream=stream))
    scores = decoding.replay([PROMPT], [forced], top=TOP)
    outside = scores.ranks > TOP
    assert outside.any()
    scores.top_ids[outside, -1], scores.top_logprobs[outside, -1] = -1, -np.inf
    expect(found, forced, scores)


def test_a_group_decodes_together_and_each_gets_its_own(emulator: process.Emulator) -> None:
    prompts = [prompt(seed, 64, WORDS) for seed in range(30)]
    found = generations(emulator, *(Ask(prompt=each, max_tokens=8) for each in prompts))
    expected = decoding.generate(prompts, 8, lm.Sampling(temperature=0.0), ignore_eos=True)
    assert [each.ids.tolist() for each in found] == expected.ids.tolist()
