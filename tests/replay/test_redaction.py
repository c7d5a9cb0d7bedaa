"""Keys and passwords are not written down, however they are given."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from replay import redaction
from replay.experiment import experiment_of, frozen_yaml

HUSH = "hush-0a1b2c"
SECRETS = ("api-key", "api_key", "apikey", "API_KEY", "hf-token", "HF_TOKEN", "my.password", "some-passwd", "x-secret")
SECRETS += ("key", "TOKEN", "aws-credentials", "kv-transfer-config.token")
PLAIN = ("max-num-batched-tokens", "tokenizer", "tokenizer-mode", "keep-alive", "num_speculative_tokens", "hotkeys")

secret = st.sampled_from(SECRETS)
plain = st.from_regex(r"[a-z0-9/:.]{1,12}", fullmatch=True)


def spellings(name: str) -> list[list[str]]:
    """The ways to give a secret to a server."""
    inside = json.dumps({"a": {name: HUSH}, "b": [{name: HUSH}]})
    return [
        [f"--{name}", HUSH],
        [f"--{name}", "other", HUSH],
        [f"--{name}={HUSH}"],
        ["-e", f"{name}={HUSH}"],
        ["--env", f"{name}={HUSH}"],
        [f"--env={name}={HUSH}"],
        [f"{name}={HUSH}"],
        ["--kv-transfer-config", inside],
        [f"--kv-transfer-config={inside}"],
        ["--remote", f"https://user:{HUSH}@host/path"],
    ]


@given(st.data(), st.lists(plain), st.lists(plain))
def test_no_spelling_shows_a_secret_and_the_rest_stays(
    data: st.DataObject, before: list[str], after: list[str]
) -> None:
    given = data.draw(secret.flatmap(lambda name: st.sampled_from(spellings(name))))
    command = ["vllm", "serve", *before, *given, "--plain", *after]
    shown = redaction.words(command)
    assert HUSH not in " ".join(shown)
    assert len(shown) == len(command)
    assert shown[: 2 + len(before)] == ["vllm", "serve", *before]
    assert shown[2 + len(before) + len(given) :] == ["--plain", *after]
    assert redaction.words(shown) == shown


@given(st.lists(st.one_of(plain, st.sampled_from([f"--{name}" for name in PLAIN]), st.just('{"a": [1, {"b": 2}]}'))))
def test_commands_without_secrets_are_shown_as_they_are(command: list[str]) -> None:
    assert redaction.words(command) == command


@pytest.mark.parametrize("name", SECRETS)
def test_names_of_secrets(name: str) -> None:
    assert redaction.is_secret(name)
    assert redaction.is_secret(f"--{name}")
    nested = {name: HUSH, "a": {name: {"b": HUSH}, "c": [1, {name: HUSH}]}, "d": 3}
    shown = redaction.values(nested)
    assert HUSH not in str(shown)
    assert shown["d"] == 3
    assert shown["a"]["c"][0] == 1


@pytest.mark.parametrize("name", PLAIN)
def test_names_of_other_things(name: str) -> None:
    assert not redaction.is_secret(name)
    assert redaction.values({name: "v"}) == {name: "v"}


def frozen(serve: dict[str, Any]) -> str:
    return frozen_yaml(
        experiment_of(
            {
                "model": "m",
                "workload": {"demo": True},
                "backends": {"both": {"serve": serve, "headers": {"X": HUSH}}, "baseline": {}, "candidate": {}},
            }
        )
    )


@given(secret.flatmap(lambda name: st.sampled_from(spellings(name))), st.booleans())
def test_the_frozen_experiment_shows_none_and_stays_one(given: list[str], as_text: bool) -> None:
    words = ["vllm", "serve", "m", *given]
    options = {"api-key": HUSH, "kv-transfer-config": {"kv_connector_extra_config": {"token": HUSH}}}
    env = {"HF_TOKEN": HUSH, "A": "b"}
    text = frozen({"command": shlex.join(words) if as_text else words, "options": options, "env": env})
    assert HUSH not in text
    assert frozen_yaml(experiment_of(yaml.safe_load(text))) == text
    assert yaml.safe_load(text)["backends"]["baseline"]["serve"]["env"]["A"] == "b"
