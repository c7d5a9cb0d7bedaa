"""The emulator over HTTP: shapes, counts, times and faults, with its log as the truth."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from replay.emulator import faults, language, process
from replay.emulator.settings import EmulatorSettings
from replay.emulator.speculation import Speculation
from replay.emulator.truth import RequestTruth, read_emissions, read_steps

QUICK = EmulatorSettings(time_scale=20)
PROMPT = list(range(language.FIRST_WORD, language.FIRST_WORD + 300))


@contextlib.contextmanager
def running(settings: EmulatorSettings, folder: Path) -> Iterator[process.Emulator]:
    emulator = process.start(settings, folder)
    try:
        yield emulator
    finally:
        process.stop(emulator)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[process.Emulator]:
    """One emulator for all tests that only look at replies."""
    with running(QUICK, tmp_path_factory.mktemp("emulator")) as emulator:
        yield emulator


def calling(emulator: process.Emulator, work: Callable[[aiohttp.ClientSession], Awaitable[Any]], **session: Any) -> Any:
    async def main() -> Any:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(emulator.url, connector=connector, **session) as client:
            return await work(client)

    return asyncio.run(main())


async def post(client: aiohttp.ClientSession, path: str, body: dict[str, Any], request_id: str = "") -> tuple[int, str]:
    headers = {"X-Request-ID": request_id} if request_id else {}
    async with client.post(path, json=body, headers=headers) as response:
        return response.status, (await response.read()).decode()


def ask(emulator: process.Emulator, path: str, body: dict[str, Any], request_id: str = "") -> tuple[int, str]:
    result: tuple[int, str] = calling(emulator, lambda client: post(client, path, body, request_id))
    return result


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of all events of a finished OpenAI-style stream."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def truth_of(emulator: process.Emulator, request_id: str, within_s: float = 5.0) -> RequestTruth:
    """The log's line of a request, waited for since lines are buffered."""
    deadline = time.monotonic() + within_s
    while True:
        found = [truth for truth in read_emissions(emulator.log_dir) if truth.request_id == request_id]
        if found:
            return found[0]
        assert time.monotonic() < deadline, f"{request_id} is not in the log"
        time.sleep(0.05)


STREAM: dict[str, Any] = {
    "model": "emulated",
    "max_tokens": 6,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_a_completion_stream(quick: process.Emulator) -> None:
    status, text = ask(quick, "/v1/completions", {**STREAM, "prompt": PROMPT, "return_token_ids": True}, "shape-1")
    assert status == 200
    *chunks, last = events(text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices] == [None] * 5 + ["length"]
    assert choices[0]["prompt_token_ids"] == PROMPT
    assert "prompt_token_ids" not in choices[1]
    ids = [token for choice in choices for token in choice["token_ids"]]
    assert language.encode("".join(choice["text"] for choice in choices)) == ids
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5, 6]
    assert last["choices"] == []
    usage = {"prompt_tokens": 300, "completion_tokens": 6, "total_tokens": 306}
    assert last["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 0}}
    assert last["system_fingerprint"].startswith("decodegate-emulator-")
    truth = truth_of(quick, "shape-1")
    assert (truth.prompt_tokens, truth.cached_tokens, truth.finish) == (300, 0, "length")
    assert [tokens for _, tokens in truth.emissions] == [1] * 6
    assert truth.arrived_ns < truth.emissions[0][0] < truth.ended_ns


def test_text_ids_stream_and_whole_reply_say_the_same(quick: process.Emulator) -> None:
    text_prompt = language.decode(PROMPT)
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    replies = []
    for change in ({}, {"prompt": text_prompt}, {"stream": True}):
        status, text = ask(quick, "/v1/completions", {**body, **change})
        assert status == 200
        chunks = events(text) if "stream" in change else [json.loads(text)]
        replies.append("".join(chunk["choices"][0]["text"] for chunk in chunks))
        assert all("usage" in chunk for chunk in chunks) == ("stream" not in change)  # no usage unless asked for
    assert replies[0]
    assert replies == [replies[0]] * 3


def test_seed_and_temperature_decide_what_is_said(quick: process.Emulator) -> None:
    def said(request_id: str, **more: Any) -> str:
        body = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, **more}
        return str(json.loads(ask(quick, "/v1/completions", body, request_id)[1])["choices"][0]["text"])

    assert said("t-1", temperature=0) == said("t-2", temperature=0, seed=3)
    assert said("t-3", seed=3) == said("t-4", seed=3) != said("t-5", seed=4)
    assert said("t-6") != said("t-7")  # without a seed each request has its own luck


def test_a_chat_stream_opens_with_a_role_and_no_token(quick: process.Emulator) -> None:
    content = [{"type": "text", "text": " bado"}, {"type": "text", "text": " fika goto"}]
    messages = [{"role": "system", "content": " bado"}, {"role": "user", "content": content}]
    body = {**STREAM, "max_tokens": None, "max_completion_tokens": 6, "messages": messages}
    status, text = ask(quick, "/v1/chat/completions", body)
    assert status == 200
    role, *chunks, last = events(text)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert role["usage"]["completion_tokens"] == 0
    assert [set(chunk["choices"][0]["delta"]) for chunk in chunks] == [{"content"}] * 6
    prompt = 4 + language.CHAT_OVERHEAD + 2 * language.MESSAGE_OVERHEAD
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (prompt, 6)


def test_a_chat_tells_its_prompts_tokens_beside_its_choices(quick: process.Emulator) -> None:
    """Where vLLM puts them, streamed and whole; /tokenize counts the same ones."""
    asked = {"messages": [{"role": "user", "content": " bado fika"}]}
    body = {**asked, "max_tokens": 6, "return_token_ids": True}
    wanted = list(language.chat_prompt([("user", " bado fika")]))
    whole = json.loads(ask(quick, "/v1/chat/completions", body)[1])
    first, *others = events(ask(quick, "/v1/chat/completions", {**body, "stream": True})[1])
    assert whole["prompt_token_ids"] == first["prompt_token_ids"] == wanted
    assert not any("prompt_token_ids" in each for each in (whole["choices"][0], first["choices"][0], *others))
    status, text = ask(quick, "/tokenize", asked)
    counted = json.loads(text)
    assert (status, counted["count"], counted["tokens"]) == (200, len(wanted), wanted)
    thinking = {**asked, "chat_template_kwargs": {"thinking": True}}
    assert json.loads(ask(quick, "/tokenize", thinking)[1])["count"] == len(wanted) + 1
    assert ask(quick, "/tokenize", {"messages": []})[0] == 400


def test_thinking_comes_as_reasoning_first(quick: process.Emulator) -> None:
    body = {
        **STREAM,
        "messages": [{"role": "user", "content": " bado"}],
        "chat_template_kwargs": {"thinking": True},
    }
    *chunks, last = events(ask(quick, "/v1/chat/completions", body)[1])
    assert [list(chunk["choices"][0]["delta"])[-1] for chunk in chunks[1:]] == ["reasoning"] * 3 + ["content"] * 3
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    message = json.loads(ask(quick, "/v1/chat/completions", {**body, "stream": False, "stream_options": None})[1])
    message = message["choices"][0]["message"]
    streamed = {
        kind: "".join(c["choices"][0]["delta"].get(kind, "") for c in chunks) for kind in ("reasoning", "content")
    }
    assert {kind: message[kind] for kind in streamed} == streamed


def test_an_anthropic_stream(quick: process.Emulator) -> None:
    body = {
        "model": "emulated",
        "system": " bado",
        "messages": [{"role": "user", "content": language.decode(PROMPT)}],
        "max_tokens": 4,
        "ignore_eos": True,
        "stream": True,
    }
    for cached in (0, 256):  # the second time the prompt's four full blocks are there
        status, text = ask(quick, "/v1/messages", body)
        assert status == 200
        named = [event.split("\n") for event in text.strip().split("\n\n")]
        found = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in named]
        assert all(name == data["type"] for name, data in found)
        assert [name for name, _ in found] == [
            "message_start",
            "content_block_start",
            "ping",
            *["content_block_delta"] * 4,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        prompt = 301 + language.CHAT_OVERHEAD + 2 * language.MESSAGE_OVERHEAD
        assert found[0][1]["message"]["usage"]["cache_read_input_tokens"] == cached
        assert found[0][1]["message"]["usage"]["input_tokens"] == prompt - cached
        assert found[-2][1]["usage"]["output_tokens"] == 4
        assert found[-2][1]["delta"]["stop_reason"] == "max_tokens"


def test_stop_strings_end_a_reply_and_are_not_shown(quick: process.Emulator) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    full = json.loads(ask(quick, "/v1/completions", body)[1])["choices"][0]["text"]
    words = full.split(" ")[1:]
    stop = words[7][2:] + " " + words[8][:2]  # across a border between tokens
    shown = full[: full.index(stop)]
    for stream in (False, True):
        text = ask(quick, "/v1/completions", {**body, "stop": [stop], "stream": stream})[1]
        chunks = events(text) if stream else [json.loads(text)]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == shown
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["choices"][0]["stop_reason"] == stop


def test_a_stop_token_ends_a_reply(quick: process.Emulator) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    ids = json.loads(ask(quick, "/v1/completions", body)[1])["choices"][0]["token_ids"]
    stop = ids[7]
    until = ids[: ids.index(stop) + 1]
    for stream in (False, True):
        text = ask(quick, "/v1/completions", {**body, "stop_token_ids": [stop], "stream": stream})[1]
        chunks = events(text) if stream else [json.loads(text)]
        assert [each for chunk in chunks for each in chunk["choices"][0]["token_ids"]] == until
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_natural_end_is_counted_and_its_token_not_shown(quick: process.Emulator) -> None:
    body = {**STREAM, "prompt": PROMPT, "max_tokens": 3000, "ignore_eos": False, "return_token_ids": True}
    *chunks, last = events(ask(quick, "/v1/completions", body)[1])
    end = chunks[-1]["choices"][0]
    assert (end["finish_reason"], end["token_ids"], end["text"]) == ("stop", [language.EOS], "")
    assert last["usage"]["completion_tokens"] == len(chunks) < 3000


@pytest.mark.parametrize(
    ("path", "change", "status", "words"),
    [
        ("completions", {"model": "other"}, 404, "The model `other` does not exist."),
        ("completions", {"prompt": [99999999]}, 400, "Token id 99999999 is out of vocabulary"),
        ("completions", {"prompt": [1 << 40]}, 400, f"Token id {1 << 40} is out of vocabulary"),
        ("completions", {"prompt": [-1]}, 400, "Token id -1 is out of vocabulary"),
        ("completions", {"prompt": []}, 400, "prompt is empty"),
        ("completions", {"prompt": ["a"]}, 400, "Expected `int`"),
        ("completions", {"max_tokens": 0}, 400, "max_tokens must be at least 1, got 0."),
        ("completions", {"min_tokens": 9}, 400, "min_tokens"),
        ("completions", {"n": 0}, 400, "n must lie in 1..128, got 0."),
        ("completions", {"max_tokens": 131_000}, 400, "context length is only 131072 tokens"),
        ("completions", {"stream": False}, 400, "stream=True"),
        ("chat/completions", {"messages": []}, 400, "messages is empty"),
        ("chat/completions", {"messages": [{"role": "robot", "content": ""}]}, 400, "robot"),
        ("messages", {"messages": []}, 400, "messages is empty"),
    ],
)
def test_refusals(quick: process.Emulator, path: str, change: dict[str, Any], status: int, words: str) -> None:
    got, text = ask(quick, f"/v1/{path}", {**STREAM, "prompt": PROMPT, **change})
    assert got == status
    assert words in json.loads(text)["error"]["message"]
    if path != "messages":
        assert json.loads(text)["error"]["code"] == status


def test_an_overflow_names_its_parameter(quick: process.Emulator) -> None:
    error = json.loads(ask(quick, "/v1/completions", {"prompt": PROMPT * 500})[1])["error"]
    assert (error["type"], error["param"]) == ("BadRequestError", "input_tokens")
    assert "You passed 150000 input tokens and requested 16 output tokens" in error["message"]


def test_the_other_pages(tmp_path: Path) -> None:
    drafts = Speculation(draft_tokens=3, acceptance_length=3.0)
    with running(
        EmulatorSettings(time_scale=20, speculation=drafts, model="k3", max_model_len=9000), tmp_path
    ) as emulator:

        async def work(client: aiohttp.ClientSession) -> dict[str, str]:
            for _ in range(2):
                await post(client, "/v1/completions", {"prompt": PROMPT, "max_tokens": 7, "ignore_eos": True})
            pages = {}
            for path in ("/v1/models", "/version", "/health", "/metrics"):
                async with client.get(path) as response:
                    assert response.status == 200
                    pages[path] = await response.text()
            pages["reset"] = (await post(client, "/reset_prefix_cache", {}))[1]
            body = {"prompt": PROMPT, "max_tokens": 1}
            pages["after"] = (await post(client, "/v1/completions", body))[1]
            return pages

        pages = calling(emulator, work)
    model = json.loads(pages["/v1/models"])["data"][0]
    assert (model["id"], model["max_model_len"]) == ("k3", 9000)
    assert "emulator" in json.loads(pages["/version"])["version"]
    values = {}
    for line in pages["/metrics"].splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name.replace('engine="0",model_name="k3"', "")] = float(value)
    # each request: 1 token from its prompt, then 3 + 3 from two verifies; the second finds 4 of 4 full blocks
    assert values["vllm:generation_tokens_total{}"] == 14
    assert values["vllm:prompt_tokens_total{}"] == 600
    assert values["vllm:prefix_cache_queries_total{}"] == 600
    assert values["vllm:prefix_cache_hits_total{}"] == 256
    assert values["vllm:spec_decode_num_drafts_total{}"] == 4
    assert values["vllm:spec_decode_num_draft_tokens_total{}"] == 12
    assert values["vllm:spec_decode_num_accepted_tokens_total{}"] == 8
    assert values['vllm:spec_decode_num_accepted_tokens_per_pos_total{,position="1"}'] == 4
    assert values['vllm:request_success_total{,finished_reason="length"}'] == 2
    assert values["vllm:num_requests_running{}"] == values["vllm:kv_cache_usage_perc{}"] == 0
    assert json.loads(pages["reset"]) == {"reset": True}
    assert json.loads(pages["after"])["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


# --- times ------------------------------------------------------------------------------------------------------------


def test_streams_run_at_the_published_rates_in_real_time(tmp_path: Path) -> None:
    """Sixteen rows at three times the speed of the hardware, by the log's own stamps."""
    rows = 16  # a captured size, so that nothing is padded
    for backend in ("auto", "latency_specialized"):
        folder = tmp_path / backend
        settings = EmulatorSettings(profile="kimi-k3-tp16", decode_backend=backend, time_scale=3)  # type: ignore[arg-type]
        with running(settings, folder) as emulator:

            async def work(client: aiohttp.ClientSession) -> None:
                bodies = [{**STREAM, "prompt": [1000 + row], "max_tokens": 300} for row in range(rows)]
                await asyncio.gather(*[post(client, "/v1/completions", body) for body in bodies])

            calling(emulator, work)
        one, many = {"auto": (136.4, 2226.0), "latency_specialized": (256.4, 3606.1)}[backend]
        step_s = 1 / one + (64 / many - 1 / one) * (rows - 1) / 63
        runs = [run for run in read_steps(folder) if run.rows == rows and not run.prompt_tokens]
        steps = sum(run.steps for run in runs)
        assert steps > 250
        assert sum(run.end_ns - run.t_ns for run in runs) / 1e9 / steps == pytest.approx(step_s / 3, rel=0.001)
        assert all(run.specialised == (backend == "latency_specialized") for run in runs)
        rates = []
        for truth in read_emissions(folder):
            times = [t for t, _ in truth.emissions if runs[0].t_ns <= t <= runs[-1].end_ns]  # while all rows run
            rates.append(1e9 / np.polyfit(range(len(times)), times, 1)[0])  # a line bears a late stamp at its ends
            # all but the first token and the few of steps in which other rows still prefilled
            assert (truth.specialised_tokens > 280) == (backend == "latency_specialized")
        assert np.median(rates) * step_s / 3 == pytest.approx(1, rel=0.01)


def test_drafts_put_several_tokens_into_a_chunk(tmp_path: Path) -> None:
    settings = EmulatorSettings(
        decode_backend="latency_specialized",
        time_scale=10,
        speculation=Speculation(draft_tokens=7, acceptance_length=2.5),
    )
    with running(settings, tmp_path) as emulator:
        *chunks, last = events(
            ask(emulator, "/v1/completions", {**STREAM, "prompt": PROMPT, "max_tokens": 51}, "d-1")[1]
        )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert np.diff([0, *counts]).tolist() == [1, *[2, 3] * 10]
    assert last["usage"]["completion_tokens"] == 51
    truth = truth_of(emulator, "d-1")
    assert [tokens for _, tokens in truth.emissions] == [1, *[2, 3] * 10]
    assert truth.specialised_tokens == 50
    steps = read_steps(tmp_path)
    assert sum(step.decode_tokens for step in steps) == 50
    assert sum(step.prompt_tokens for step in steps) == 300
    assert {step.reason for step in steps} == {"prompt rows", ""}


def test_a_client_sees_tokens_only_after_their_stamp_and_soon(quick: process.Emulator) -> None:
    async def work(client: aiohttp.ClientSession) -> list[int]:
        body = {**STREAM, "prompt": PROMPT, "max_tokens": 40}
        async with client.post("/v1/completions", json=body, headers={"X-Request-ID": "seen"}) as response:
            return [time.monotonic_ns() async for _ in response.content.iter_any()]

    seen = calling(quick, work)
    stamps = [t for t, _ in truth_of(quick, "seen").emissions]
    assert len(stamps) == 40
    assert seen[0] > stamps[0]
    assert seen[-1] > stamps[-1]
    assert seen[0] - stamps[0] < 1e9


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_frees_its_row(tmp_path: Path) -> None:
    with running(EmulatorSettings(), tmp_path) as emulator:

        async def work(client: aiohttp.ClientSession) -> None:
            body = {**STREAM, "prompt": PROMPT, "max_tokens": 50_000}
            response = await client.post("/v1/completions", json=body, headers={"X-Request-ID": "leaver"})
            await response.content.readany()
            response.close()
            task = asyncio.create_task(
                post(client, "/v1/completions", {**body, "stream": False, "stream_options": None}, "whole")
            )
            await asyncio.sleep(0.1)
            task.cancel()

        calling(emulator, work)
        for request_id, emitted in (("leaver", True), ("whole", False)):
            truth = truth_of(emulator, request_id)
            assert truth.finish == "abort"
            assert bool(truth.emissions) == emitted
            assert truth.prompt_tokens == 300

        async def metrics(client: aiohttp.ClientSession) -> str:
            async with client.get("/metrics") as response:
                return await response.text()

        page = calling(emulator, metrics)
    assert 'vllm:num_requests_running{engine="0",model_name="emulated"} 0' in page
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="emulated"} 0.0' in page


def test_idle_connections_are_closed_after_the_keep_alive_time(tmp_path: Path) -> None:
    with running(EmulatorSettings(time_scale=20, keep_alive_s=0.3), tmp_path) as emulator:

        async def work() -> float:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(emulator.url.rsplit(":", 1)[1]))
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            start = time.monotonic()
            assert await reader.read() == b""
            writer.close()
            return time.monotonic() - start

        assert 0.2 < asyncio.run(asyncio.wait_for(work(), 10)) < 4.5


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_rate_picks_requests_by_their_id_alone() -> None:
    active = faults.parse(["stall:0.3"])
    ids = [f"request-{number}" for number in range(5000)]
    picked = [faults.picks(active, "stall", request_id) for request_id in ids]
    assert np.mean(picked) == pytest.approx(0.3, abs=0.03)
    assert picked == [faults.picks(active, "stall", request_id) for request_id in ids]
    assert not any(faults.picks(active, "truncate", request_id) for request_id in ids)
    assert all(faults.picks(faults.parse(["stall:1"]), "stall", request_id) for request_id in ids)


def picked_ids(rates: list[str], count: int = 2) -> dict[str, list[str]]:
    """Ids that each of the faults strikes first, and some that none does (named "")."""
    active = faults.parse(rates)
    found: dict[str, list[str]] = {name: [] for name in (*active, "")}
    for number in range(10_000):
        request_id = f"id-{number}"
        name = next((n for n in ("error-in-stream", "truncate", "stall") if faults.picks(active, n, request_id)), "")
        if len(found[name]) < count:
            found[name].append(request_id)
    return found


def test_streams_break_off_as_told(tmp_path: Path) -> None:
    rates = ["error-in-stream:0.3", "truncate:0.3", "stall:0.3"]
    ids = picked_ids(rates)
    body = {**STREAM, "prompt": PROMPT, "max_tokens": 10}
    with running(EmulatorSettings(time_scale=20, faults=tuple(rates)), tmp_path) as emulator:

        async def read(client: aiohttp.ClientSession, request_id: str, patience: float) -> tuple[str, bool]:
            text, ended = b"", True
            async with client.post("/v1/completions", json=body, headers={"X-Request-ID": request_id}) as response:
                assert response.status == 200
                try:
                    async with asyncio.timeout(patience):
                        async for data in response.content.iter_any():
                            text += data
                except TimeoutError:
                    ended = False
            return text.decode(), ended

        async def work(client: aiohttp.ClientSession) -> dict[str, list[tuple[str, bool]]]:
            return {
                name: [await read(client, request_id, 0.6 if name == "stall" else 20) for request_id in of_name]
                for name, of_name in ids.items()
            }

        results = calling(emulator, work)
        truths = {name: [truth_of(emulator, request_id) for request_id in ids[name]] for name in ids}

    def tokens(text: str) -> int:
        return text.count('"text":')

    for text, ended in results[""]:
        assert (ended, tokens(text), text.endswith("data: [DONE]\n\n")) == (True, 10, True)
    for text, ended in results["error-in-stream"]:
        assert (ended, tokens(text)) == (True, 5)
        assert '"finish_reason":"' not in text
        assert json.loads(text.strip().split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == 500
    for text, ended in results["truncate"]:
        assert (ended, tokens(text)) == (True, 5)
        assert '"finish_reason":"' not in text
        assert "[DONE]" not in text
    for text, ended in results["stall"]:
        assert (ended, tokens(text)) == (False, 5)
    finishes = {"": "length", "error-in-stream": "error", "truncate": "error", "stall": "abort"}
    for name, finish in finishes.items():
        assert len(truths[name]) == 2
        for truth in truths[name]:
            assert truth.finish == finish
            assert sum(count for _, count in truth.emissions) == (5 if name else 10)


def test_faults_of_length_refusal_and_usage(tmp_path: Path) -> None:
    active = ("refuse-long:250", "ignore-ignore-eos", "no-usage", "no-cache")
    with running(EmulatorSettings(time_scale=20, faults=active), tmp_path) as emulator:
        status, text = ask(emulator, "/v1/completions", {**STREAM, "prompt": PROMPT}, "long")
        assert status == 503
        assert json.loads(text)["error"]["code"] == 503
        assert truth_of(emulator, "long").finish == "error"
        for path, more in (
            ("completions", {"prompt": PROMPT[:250]}),
            ("chat/completions", {"messages": [{"role": "user"}]}),
        ):
            status, text = ask(emulator, f"/v1/{path}", {**STREAM, **more}, path)
            assert status == 200
            assert "usage" not in text
            assert events(text)[-1]["choices"][0]["finish_reason"] == "stop"
            truth = truth_of(emulator, path)
            assert (sum(count for _, count in truth.emissions), truth.finish) == (3, "stop")
        ask(emulator, "/v1/completions", {**STREAM, "prompt": PROMPT[:250]}, "again")
        assert truth_of(emulator, "again").cached_tokens == 0
