"""Rendering: lengths exact, bytes repeatable, prefixes shared exactly as the blocks are."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.content import Vocabulary, block_tokens, salt_tokens, vocabulary_of_range
from workloads.errors import UserError
from workloads.rendering import SALT_TOKENS, Api, Prompt, Rendering, Template, prompt_for, token_table

BLOCK = 16
WORDS = Vocabulary(ids=list(range(1000, 1600)), words=[f" w{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(600)])
TEMPLATE = Template(first=30, with_system=14, pair=11)


def prompt(api: Api, *, system: int = 0, salt: str = "1", session: str = "s") -> Prompt:
    rendering = Rendering(api=api, model="m", vocabulary=WORDS, template=TEMPLATE)
    return prompt_for(
        rendering,
        token_table(rendering),
        content_key="c",
        block_size=BLOCK,
        seed=7,
        block_salt=salt,
        session=session,
        play=0,
        system_tokens=system,
    )


def turn(p: Prompt, keep: int, new: list[int], tokens: int, output: int = 10) -> tuple[dict[str, Any], str]:
    p.advance(keep, new, tokens, output)
    for _ in p.render():
        pass
    body, digest = p.body(output)
    return json.loads(b"".join(body)), digest


def chat_length(body: dict[str, Any]) -> int:
    """Prompt tokens that a server with TEMPLATE would count."""
    messages = body["messages"]
    if "system" in body:
        messages = [{"role": "system", "content": body["system"]}, *messages]
    words = sum(len(m["content"].split()) for m in messages)
    system = sum(m["role"] == "system" for m in messages)
    users = sum(m["role"] == "user" for m in messages)
    assistants = sum(m["role"] == "assistant" for m in messages)
    assert users == assistants + 1
    return words + (TEMPLATE.with_system if system else TEMPLATE.first) + assistants * TEMPLATE.pair


def test_token_ids_have_the_planned_length_and_start_with_the_salt() -> None:
    body, _ = turn(prompt("completions"), 0, [1, 2, 3], 40)
    ids = body["prompt"]
    assert len(ids) == 40
    assert ids[:SALT_TOKENS] == [1000 + i for i in salt_tokens(7, "1", "s", 0, SALT_TOKENS, 600)]
    expected = [1000 + int(i) for i in block_tokens("c", [1, 2, 3], BLOCK, 600).ravel()]
    assert ids[SALT_TOKENS:] == expected[SALT_TOKENS:40]
    assert body["max_tokens"] == 10
    assert body["ignore_eos"] is True


def test_a_partial_block_shares_its_first_tokens_with_its_fuller_use() -> None:
    p = prompt("completions")
    first, _ = turn(p, 0, [1, 2, 3], 40)
    second, _ = turn(p, 3, [4], 60)
    assert second["prompt"][:40] == first["prompt"]
    assert len(second["prompt"]) == 60


def test_a_rewind_renders_the_same_as_a_fresh_prompt() -> None:
    p = prompt("completions")
    turn(p, 0, [1, 2, 3, 4], 64)
    rewound, digest = turn(p, 2, [9, 8], 60)
    fresh, _ = turn(prompt("completions"), 0, [1, 2, 9, 8], 60)
    assert rewound["prompt"] == fresh["prompt"]
    assert len(digest) == 16


@pytest.mark.parametrize("api", ["chat", "anthropic"])
@pytest.mark.parametrize("system", [0, 30])
def test_the_first_message_starts_with_the_salt_whatever_the_template_adds(api: Api, system: int) -> None:
    first, digest = turn(prompt(api, system=system, salt="1"), 0, list(range(5)), 80)
    other, same = turn(prompt(api, system=system, salt="2"), 0, list(range(5)), 80)

    def opening(body: dict[str, Any]) -> list[str]:
        return str(body.get("system") or body["messages"][0]["content"]).split()

    expected = [WORDS.words[i].strip() for i in salt_tokens(7, "1", "s", 0, SALT_TOKENS, 600)]
    assert opening(first)[:SALT_TOKENS] == expected
    assert opening(other)[:SALT_TOKENS] != expected
    assert opening(other)[SALT_TOKENS:] == opening(first)[SALT_TOKENS:]
    assert digest == same


def test_salt_differs_between_blocks_but_the_digest_does_not() -> None:
    one, digest_one = turn(prompt("completions", salt="1"), 0, [1, 2], 32)
    two, digest_two = turn(prompt("completions", salt="2"), 0, [1, 2], 32)
    assert one["prompt"][:SALT_TOKENS] != two["prompt"][:SALT_TOKENS]
    assert one["prompt"][SALT_TOKENS:] == two["prompt"][SALT_TOKENS:]
    assert digest_one == digest_two
    _, other = turn(prompt("completions"), 0, [1, 3], 32)
    assert other != digest_one


@pytest.mark.parametrize("api", ["chat", "anthropic"])
def test_messages_add_up_to_the_planned_length(api: Api) -> None:
    p = prompt(api, system=30)
    first, _ = turn(p, 0, list(range(5)), 80, output=20)
    assert chat_length(first) == 80
    second, _ = turn(p, 5, list(range(5, 9)), 140, output=20)
    assert chat_length(second) == 140
    roles = [m["role"] for m in second["messages"]]
    assert roles == (["system"] if api == "chat" else []) + ["user", "assistant", "user"]
    assert second["messages"][: len(first["messages"])] == first["messages"]


@st.composite
def streams(draw: st.DrawFn) -> list[tuple[int, list[int], int, int]]:
    """Turns as (keep, new blocks, input, output), with growth, rewinds, shrinks, retries; 33 tokens at the least."""
    turns = []
    blocks: list[int] = []
    fresh = 0
    for _ in range(draw(st.integers(1, 7))):
        kept = draw(st.integers(0, len(blocks))) if draw(st.booleans()) else len(blocks)
        added = draw(st.integers(0 if kept >= 3 else 3 - kept, 6))
        new = list(range(fresh, fresh + added))
        fresh += added
        blocks = blocks[:kept] + new
        tokens = len(blocks) * BLOCK - draw(st.integers(0, BLOCK - 1))
        turns.append((kept, new, tokens, draw(st.integers(1, 80))))
    return turns


@settings(max_examples=200, deadline=None)
@given(streams(), st.sampled_from(["completions", "chat", "anthropic"]), st.integers(0, 40))
def test_every_turn_of_any_stream_has_its_planned_length(
    turns: list[tuple[int, list[int], int, int]], api: Api, system: int
) -> None:
    p = prompt(api, system=system)
    for keep, new, tokens, output in turns:
        body, _ = turn(p, keep, new, tokens, output)
        if api == "completions":
            assert len(body["prompt"]) == tokens
        else:
            assert body["messages"][-1]["role"] == "user"
            assert chat_length(body) == tokens
            assert all(m["content"] and not m["content"].startswith(" ") for m in body["messages"])


@settings(max_examples=100, deadline=None)
@given(streams(), st.data())
def test_prompts_share_a_prefix_exactly_as_long_as_their_blocks_do(
    turns: list[tuple[int, list[int], int, int]], data: st.DataObject
) -> None:
    """Also when turns between were not sent (history, cut)."""
    p = prompt("completions")
    before: list[int] = []
    shared = 0
    sent = False
    previous_input = 0
    for keep, new, tokens, output in turns:
        overlap = min(keep * BLOCK, previous_input, tokens)
        shared = min(shared, overlap) if sent else 0
        previous_input = tokens
        p.advance(keep, new, tokens, output)
        if data.draw(st.booleans()):
            continue
        for _ in p.render():
            pass
        ids = json.loads(b"".join(p.body(output)[0]))["prompt"]
        assert len(ids) == tokens
        assert ids[:shared] == before[:shared]
        before, shared, sent = ids, tokens, True


def test_bytes_are_the_same_in_another_process() -> None:
    code = (
        "from workloads.content import block_tokens, stable_random;"
        "print(block_tokens('k', [1, -2, 3], 5, 1000).tolist(), stable_random('a', 1).random())"
    )
    out = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    ]
    assert out[0] == out[1]


def test_content_is_what_its_definition_says() -> None:
    """SHA-256 and splitmix64 once more, in plain integers: what any platform must give."""

    def expected(seed: int, length: int, size: int) -> list[int]:
        words = []
        for step in range(1, length + 1):
            z = (seed + step * 0x9E3779B97F4A7C15) % 2**64
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
            words.append(((z ^ (z >> 31)) >> 32) % size)
        return words

    prefix = hashlib.sha256(b"5:block1:13:key").digest()
    for block_id in (1, -2, 10**12):
        digest = hashlib.sha256(prefix + str(block_id).encode()).digest()
        seed = int.from_bytes(digest[:8], "little")
        assert block_tokens("key", [block_id], 7, 1000).tolist() == [expected(seed, 7, 1000)]


def test_token_range_is_checked() -> None:
    with pytest.raises(UserError, match="token_ids"):
        vocabulary_of_range(5, 5)
