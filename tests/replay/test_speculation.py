"""From decode.speculation to what both backends are told, and to the cells."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay import matching
from replay.backends import emulator_settings
from replay.emulator.speculation import Speculation
from replay.experiment import Experiment, experiment_of
from replay.preflight import without_servers
from replay.records import Cell
from replay.speculation import cells, label, recorded, with_speculation
from workloads.errors import UserError

DSPARK = {"method": "dspark", "model": "/m/drafter", "draft_tokens": 7}
SERVED = {"serve": {"command": "vllm serve /m/kimi"}}
EMULATED = {"emulator": {"profile": "toy"}}


def experiment(speculation: list[Any], both: dict[str, Any], **decode: Any) -> Experiment:
    return experiment_of(
        {
            "model": "m",
            "decode": {"speculation": speculation, **decode},
            "backends": {"both": both, "baseline": {}, "candidate": {"decode_backend": "latency_specialized"}},
        }
    )


def told(described: Experiment) -> dict[str, dict[str, Any] | None]:
    """The --speculative-config in each server's command."""
    found = {}
    for backend in matching.declared(described).backends:
        words = backend.command
        assert words.count("--speculative-config") <= 1
        known = "--speculative-config" in words
        found[backend.name] = json.loads(words[words.index("--speculative-config") + 1]) if known else None
    return found


@pytest.mark.parametrize(
    ("entry", "config"),
    [
        (
            DSPARK | {"acceptance_length": 6},
            {
                "method": "dspark",
                "model": "/m/drafter",
                "num_speculative_tokens": 7,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": 6,
            },
        ),
        (
            {"method": "dspark", "draft_tokens": 2, "acceptance_rates": [0.9, 0.5]},
            {
                "method": "dspark",
                "num_speculative_tokens": 2,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": [0.9, 0.5],
            },
        ),
        (
            {"method": "ngram", "draft_tokens": 4, "options": {"prompt_lookup_max": 3}},
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
        ),
    ],
)
def test_both_servers_get_the_same_words(entry: Any, config: dict[str, Any]) -> None:
    described = experiment(["none", entry], SERVED)
    assert told(with_speculation(described, 1)) == {"baseline": config, "candidate": config}
    assert told(with_speculation(described, 0)) == {"baseline": None, "candidate": None}


@pytest.mark.parametrize(
    "serve",
    [
        {"command": "vllm serve /m/kimi", "options": {"speculative-config": {"method": "ngram"}}},
        {"command": "vllm serve /m/kimi --speculative_config.method ngram"},
        {"command": "vllm serve /m/kimi --spec-method ngram"},
        {"command": """vllm serve /m/kimi -sc '{"method": "ngram"}'"""},
    ],
)
def test_a_command_that_speculates_by_itself_is_refused_also_for_none(serve: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"backends\.baseline\.serve says speculative-config\.method: leave it out"):
        with_speculation(experiment(["none"], {"serve": serve}), 0)


def test_options_that_say_it_twice_are_refused() -> None:
    with pytest.raises(UserError, match="options has num_speculative_tokens"):
        with_speculation(experiment([DSPARK | {"options": {"num_speculative_tokens": 3}}], SERVED), 0)


@pytest.mark.parametrize(
    ("entry", "drafts"),
    [
        ("none", None),
        (DSPARK | {"acceptance_length": 6}, Speculation(draft_tokens=7, acceptance_length=6)),
        (
            {"draft_tokens": 2, "acceptance_rates": [0.9, 0.5]},
            Speculation(draft_tokens=2, acceptance_rates=(0.9, 0.5)),
        ),
    ],
)
def test_the_emulator_speculates_so_too(entry: Any, drafts: Speculation | None) -> None:
    described = with_speculation(experiment([entry], EMULATED), 0)
    assert [emulator_settings(described, name).speculation for name in ("baseline", "candidate")] == [drafts] * 2


def test_an_emulator_with_drafts_of_its_own_is_refused() -> None:
    with pytest.raises(UserError, match=r"backends\.baseline\.emulator has draft_tokens"):
        with_speculation(experiment(["none"], {"emulator": {"draft_tokens": 3}}), 0)


def test_a_server_at_a_url_has_the_one_setting_that_it_has() -> None:
    at_url = {"url": "http://localhost:8000"}
    one = experiment([DSPARK], at_url)
    assert with_speculation(one, 0) == one
    with pytest.raises(UserError, match="the one setting that it has"):
        with_speculation(experiment(["none", DSPARK], at_url), 0)


SIZES = st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True)


@given(SIZES, SIZES, SIZES, st.none() | SIZES)
@settings(deadline=None)
def test_every_combination_is_one_cell(
    batch: list[int], inputs: list[int], outputs: list[int], own: list[int] | None
) -> None:
    entry = {"draft_tokens": 1} | ({"batch": own} if own else {})
    decode = experiment(["none", entry], SERVED, batch=batch, input_tokens=inputs, output_tokens=outputs).decode
    assert decode is not None
    found = cells(decode)
    expected = {
        Cell(batch=streams, input_tokens=into, output_tokens=out, setup=setup)
        for setup, batches in enumerate((batch, own or batch))
        for streams in batches
        for into in inputs
        for out in outputs
    }
    assert len(found) == len(expected)
    assert set(found) == expected
    assert [cell.setup for cell in found] == sorted(cell.setup for cell in found)


def test_labels_tell_settings_apart() -> None:
    entries: list[Any] = [
        "none",
        DSPARK,
        DSPARK | {"acceptance_length": 6},
        {"draft_tokens": 1, "acceptance_rates": [1]},
    ]
    decode = experiment(entries, SERVED).decode
    assert decode is not None
    assert [label(each) for each in decode.speculation] == [
        "no speculation",
        "dspark, 7 draft tokens",
        "dspark, 7 draft tokens, synthetic acceptance length 6",
        "1 draft tokens, synthetic acceptance rates",
    ]
    assert recorded(decode.speculation[2]).acceptance_length == 6


def test_the_emulator_takes_only_methods_of_vllm() -> None:
    for method in ("ngram", "eagle3", "kimi_k3_mtp"):
        with_speculation(experiment([{"draft_tokens": 1, "method": method}], EMULATED), 0)
    with pytest.raises(UserError, match="method 'banana' is not known: known are ngram, "):
        with_speculation(experiment([{"draft_tokens": 1, "method": "banana"}], EMULATED), 0)
    with pytest.raises(UserError, match=r"'dsprak' is not known: did you mean dspark\?"):
        with_speculation(experiment([{"draft_tokens": 1, "method": "dsprak"}], EMULATED), 0)


@pytest.mark.parametrize(("method", "warnings"), [("dsprak", 1), ("dspark", 0)])
def test_a_server_may_know_more_methods_than_we(method: str, warnings: int) -> None:
    described = with_speculation(experiment([{"draft_tokens": 1, "method": method}], SERVED), 0)
    told: list[str] = []
    without_servers(described, lambda event: told.append(event.text))
    assert len([text for text in told if "speculative method 'dsprak' is not known" in text]) == warnings


@pytest.mark.parametrize(
    ("speculation", "decode", "words"),
    [
        (["none"], {"batch": [2, 4, 2]}, r"decode\.batch: 2 stands twice"),
        (["none"], {"output_tokens": [50, 50]}, r"decode\.output_tokens: 50 stands twice"),
        ([{"batch": [1, 1]}], {}, "1 stands twice"),
        ([DSPARK, "none", DSPARK | {"batch": [8]}], {}, "speculation has one setting twice"),
    ],
)
def test_nothing_is_named_twice(speculation: list[Any], decode: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        experiment(speculation, EMULATED, **decode)
