"""Preflight: what cannot be measured is refused before the first request, in words that say what to change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from replay.emulator import language
from replay.preflight import Prepared
from replay.records import Manifest
from tests.integration.runs import GPUS, experiment, prepared, start
from tests.scripted_server import DONE, Request, Step, event, reply, serve, stream, usage
from workloads.content import vocabulary_of_tokenizer
from workloads.errors import UserError

MODELS = {"object": "list", "data": [{"id": "emulated", "max_model_len": 5000}]}


def server(
    *,
    prompt_tokens: Callable[[int], int] = lambda asked: asked,
    refuse: tuple[str, ...] = (),
    usages: bool = True,
    streamed: bool = True,
    pages: dict[str, object] | None = None,
) -> Callable[[Request], list[Step]]:
    """A completions server; ``refuse``: request fields that it answers with 400; ``prompt_tokens``: how it counts;
    ``pages``: what else it shows."""

    def script(request: Request) -> list[Step]:
        if request.path == "/v1/models":
            return reply(200, MODELS)
        if request.path in (pages or {}):
            return reply(200, (pages or {})[request.path])
        if "completions" not in request.path:
            return reply(404, {"error": {"message": "not found"}})
        body: dict[str, Any] = json.loads(request.body)
        for field in refuse:
            if field in body or field in body.get("stream_options", {}):
                return reply(400, {"error": {"message": f"unknown field {field}", "code": 400}})
        count, asked = prompt_tokens(len(body.get("prompt", []))), body.get("max_tokens", 16)
        if not streamed:
            return reply(200, {"choices": [{"text": "a", "finish_reason": "length"}], "usage": usage(count, asked)})
        events: list[tuple[float, bytes]] = []
        for number in range(asked):
            finish = "length" if number == asked - 1 else None
            events.append(
                (number, event(json.dumps({"choices": [{"index": 0, "text": " a", "finish_reason": finish}]})))
            )
        if usages:
            events.append((asked, event(json.dumps({"choices": [], "usage": usage(count, asked)}))))
        return stream([*events, (asked, DONE)])

    return script


def ask(script: Callable[[Request], list[Step]], folder: Path, **changes: Any) -> tuple[Prepared, list[str]]:
    told: list[str] = []
    with serve(script) as running:
        described = experiment(both={"url": running.url, "gpus": GPUS}, token_ids=[1000, 2000], **changes)
        return prepared(described, folder, lambda e: told.append(e.text)), told


def test_a_plain_server_is_taken_as_it_is(tmp_path: Path) -> None:
    prepared, told = ask(server(), tmp_path)
    assert prepared.rendering.length_control == "ignore_eos"
    assert prepared.max_context == 5000
    warnings = [line for line in told if "WARNING" in line]
    assert len(warnings) == 3
    assert "one server" in warnings[0]
    assert "does not compare the specialised decode backend" in warnings[1]
    assert "order: AB" in warnings[2]


def test_a_server_that_refuses_ignore_eos_is_asked_by_min_tokens(tmp_path: Path) -> None:
    prepared, _ = ask(server(refuse=("ignore_eos",)), tmp_path)
    assert prepared.rendering.length_control == "min_tokens"
    prepared, told = ask(server(refuse=("ignore_eos", "min_tokens", "continuous_usage_stats")), tmp_path)
    assert prepared.rendering.length_control == "none"
    assert not prepared.rendering.server_usage
    assert any("shorter than recorded" in line for line in told)


def test_both_backends_get_the_fields_of_the_weaker_one(tmp_path: Path) -> None:
    with serve(server()) as strong, serve(server(refuse=("ignore_eos",))) as weak:
        described = experiment(token_ids=[1000, 2000], both={"url": strong.url, "gpus": GPUS})
        candidate = described.backends.candidate.model_copy(update={"url": weak.url})
        mixed = described.backends.model_copy(update={"candidate": candidate})
        seen = prepared(described.model_copy(update={"backends": mixed}), tmp_path)
    assert seen.rendering.length_control == "min_tokens"


def test_an_emulator_is_not_compared_with_a_real_server(tmp_path: Path) -> None:
    with serve(server()) as real:
        described = experiment(token_ids=None, candidate={"emulator": None, "url": real.url})
        with pytest.raises(UserError, match="one backend is an emulator"):
            prepared(described, tmp_path)


def test_messages_need_a_server_that_counts(tmp_path: Path) -> None:
    language.write_tokenizer(tmp_path)
    with serve(server(usages=False)) as real:
        described = experiment(api="chat", tokenizer=str(tmp_path), both={"url": real.url, "gpus": GPUS})
        with pytest.raises(UserError, match="no usage"):
            prepared(described, tmp_path / "servers")


def test_no_usage_is_a_warning_and_no_streaming_is_refused(tmp_path: Path) -> None:
    _, told = ask(server(usages=False), tmp_path)
    assert any("WARNING" in line and "no usage" in line for line in told)
    with pytest.raises(UserError, match="one piece"):
        ask(server(streamed=False), tmp_path)


def test_a_wrong_model_name_names_the_served_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it serves emulated: change model"):
        ask(server(), tmp_path, model="other")


def test_a_dead_server_is_named(tmp_path: Path) -> None:
    with serve(server()) as running:
        url = running.url
    described = experiment(both={"url": url, "gpus": GPUS}, token_ids=[1000, 2000])
    with pytest.raises(UserError, match="is the server up"):
        prepared(described, tmp_path)


@pytest.mark.parametrize(
    ("count", "fine"),
    [
        (lambda asked: asked, True),
        (lambda asked: asked + (asked >= 1000) * asked // 250, True),
        (lambda asked: asked + asked // 100, False),
        (lambda asked: 5 * asked, False),
    ],
)
def test_br_37_prompts_off_by_more_than_half_a_percent_are_refused(
    tmp_path: Path, count: Callable[[int], int], fine: bool
) -> None:
    if fine:
        ask(server(prompt_tokens=count), tmp_path)
    else:
        with pytest.raises(UserError, match="by the server's count"):
            ask(server(prompt_tokens=count), tmp_path)


def test_br_37_lone_bytes_are_no_part_of_a_vocabulary() -> None:
    """A byte-level tokenizer: ids that decode to half a character would come back as several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary = vocabulary_of_tokenizer(tokenizer)
    assert vocabulary.characters
    text = "".join(vocabulary.words * 40)[:1000]
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) == 1000
    assert all(word.isascii() for word in vocabulary.words)


def test_br_37_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    """The client believes in words; the emulator's own words differ, so it counts other lengths."""
    words = [f"{a}{b}{c}{d}" for a in "bcdfg" for b in "aeiou" for c in "klmnprst" for d in "aeiou"]
    pieces = {"[UNK]": 0}
    for word in words:
        pieces[f" {word}"] = len(pieces)
        pieces[word] = len(pieces)
    other = Tokenizer(models.WordLevel(pieces, unk_token="[UNK]"))
    other.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[a-z]+"), "isolated")
    other.save(str(tmp_path / "tokenizer.json"))
    described = experiment(api="chat", tokenizer=str(tmp_path))
    with pytest.raises(UserError, match=r"tokenizer"):
        prepared(described, tmp_path / "servers")


# -- two servers at URLs

SHOWN = "/server_info?config_format=json"


def shows(**parallel: int) -> dict[str, object]:
    return {SHOWN: {"vllm_config": {"parallel_config": {"tensor_parallel_size": 1, **parallel}}}}


def pair(folder: Path, baseline: dict[str, object], candidate: dict[str, object], **options: bool) -> Manifest:
    """Prepare a comparison of two that show these pages."""
    with serve(server(pages=baseline)) as one, serve(server(pages=candidate)) as other:
        backends = {
            "baseline": {"url": one.url, "gpus": GPUS},
            "candidate": {"url": other.url, "gpus": GPUS},
        }
        return start(experiment(backends=backends, token_ids=[1000, 2000]), folder / "run", **options)


def test_servers_with_other_tokenizers_are_refused_in_any_case(tmp_path: Path) -> None:
    for force in (False, True):
        with pytest.raises(UserError, match=r"the backends' tokenizers differ: .* serve both with one tokenizer"):
            pair(tmp_path, {"/tokenize": {"tokens": [1, 2]}}, {"/tokenize": {"tokens": [1, 3]}}, allow_unmatched=force)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("baseline", "candidate", "reason"),
    [
        (
            {"/version": {"version": "0.33.0"}},
            {"/version": {"version": "0.33.1"}},
            "version of the server: baseline 0.33.0, candidate 0.33.1",
        ),
        (shows(), shows(max_parallel_loading_workers=3), "max-parallel-loading-workers: not set against 3"),
    ],
)
def test_servers_that_differ_are_measured_only_when_forced(
    tmp_path: Path, baseline: dict[str, object], candidate: dict[str, object], reason: str
) -> None:
    with pytest.raises(UserError, match="--allow-unmatched") as told:
        pair(tmp_path, baseline, candidate)
    assert reason in str(told.value)
    manifest = pair(tmp_path, baseline, candidate, allow_unmatched=True)
    assert not manifest.matched_gpus
    assert reason in "".join(manifest.unmatched_reasons)


def test_a_layout_that_a_server_shows_otherwise_is_refused_in_any_case(tmp_path: Path) -> None:
    for force in (False, True):
        with pytest.raises(UserError, match=r"candidate: gpus\.count says 1, but tensor-parallel-size 2"):
            pair(tmp_path, shows(), shows(tensor_parallel_size=2), allow_unmatched=force)


def test_what_urls_do_not_show_is_said_to_be_unverified(tmp_path: Path) -> None:
    unverified = "\n".join(pair(tmp_path, {}, {}).unverified)
    assert "baseline: its settings, its layout too, are as declared" in unverified
    assert "baseline and candidate does not tell (/version)" in unverified
