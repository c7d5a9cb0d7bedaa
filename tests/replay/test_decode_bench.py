"""What decode tables measure, before any server runs: the order of windows, the prompts, what is refused."""

from __future__ import annotations

import asyncio
import collections
import gc
import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay import batch
from replay.decode_bench import lines, planned
from replay.experiment import Experiment, experiment_of
from replay.order import window_order
from replay.records import Cell
from replay.speculation import cells
from workloads.content import vocabulary_of_range
from workloads.errors import UserError
from workloads.rendering import Rendering

GPUS = {"count": 1, "kind": "emulated"}
EMULATED = {"emulator": {"profile": "toy", "time_scale": 4}, "gpus": GPUS}
SERVED = {"serve": {"command": "vllm serve m --max-num-seqs 4 --max-model-len 2048"}, "gpus": GPUS}


def experiment(decode: dict[str, Any] | None, both: dict[str, Any] = EMULATED, **changes: Any) -> Experiment:
    described = {
        "model": "m",
        "decode": decode,
        "backends": {"both": both, "baseline": {}, "candidate": {"decode_backend": "latency_specialized"}},
    }
    return experiment_of(described | changes)


# -- order


@given(st.integers(0, 50), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
@settings(deadline=None)
def test_the_order_is_balanced_and_complete(seed: int, rounds: int, repeats: int, sizes: int, setups: int) -> None:
    speculation = ["none", {"draft_tokens": 1}][:setups]
    described = experiment(
        {"batch": list(range(1, sizes + 1)), "rounds": rounds, "repeats": repeats, "speculation": speculation}
    )
    assert described.decode is not None
    found = cells(described.decode)
    order = window_order(described.decode, found, seed)
    assert order == window_order(described.decode, found, seed)
    assert collections.Counter((place.backend, place.cell) for place in order) == dict.fromkeys(
        itertools.product(("baseline", "candidate"), range(len(found))), 2 * rounds * repeats
    )
    # a steady drift cancels, in every setup and round, cell by cell
    size = 4 * sizes * repeats
    for start in range(0, len(order), size):
        places = order[start : start + size]
        assert len({found[place.cell].setup for place in places}) == 1
        sums = collections.Counter()
        for number, place in enumerate(places):
            sums[place.cell] += number if place.backend == "baseline" else -number
        assert set(sums.values()) <= {0}
        passes = [name for name, _ in itertools.groupby(place.backend for place in places)]
        assert len(passes) == 3, "adjacent passes of one backend share a start of its server"


def test_the_seed_draws_who_is_first() -> None:
    decode = experiment({"batch": [1]}).decode
    assert decode is not None
    assert {window_order(decode, cells(decode), seed)[0].backend for seed in range(40)} == {"baseline", "candidate"}


# -- prompts


RENDERING = Rendering(api="completions", model="m", vocabulary=vocabulary_of_range(100, 400), sampling={"top_p": 0.5})


def bodies(streams: int, input_tokens: int, key: str) -> list[dict[str, Any]]:
    cell = Cell(batch=streams, input_tokens=input_tokens, output_tokens=9, setup=0)
    return [json.loads(b"".join(each.body)) for each in batch.fresh(RENDERING, cell, key)]


@given(st.integers(1, 40), st.integers(1, 300))
@settings(deadline=None)
def test_every_stream_gets_a_prompt_of_its_own_of_exactly_the_length(streams: int, input_tokens: int) -> None:
    sent = bodies(streams, input_tokens, "key")
    assert [len(body["prompt"]) for body in sent] == [input_tokens] * streams
    assert len({body["prompt"][0] for body in sent}) == streams, "distinct from the first token on"
    assert all(100 <= token < 400 for body in sent for token in body["prompt"])
    assert {(body["max_tokens"], body["ignore_eos"], body["top_p"]) for body in sent} == {(9, True, 0.5)}


def test_more_streams_than_the_vocabulary_has_tokens_are_served_too() -> None:
    assert [len(body["prompt"]) for body in bodies(301, 1, "key")] == [1] * 301


def test_prompts_are_the_same_for_a_key_and_share_nothing_between_keys() -> None:
    assert bodies(8, 50, "salt/1.0") == bodies(8, 50, "salt/1.0")
    one, other = ({tuple(body["prompt"][1:]) for body in bodies(8, 50, key)} for key in ("salt/1.0", "salt/1.1"))
    assert len(one | other) == 16


def test_streams_are_sessions_of_one_turn() -> None:
    cell = Cell(batch=3, input_tokens=5, output_tokens=7, setup=0)
    found = batch.fresh(RENDERING, cell, "key", "7.1")
    assert [(each.session.id, each.lane, each.number, each.play.number) for each in found] == [
        (f"7.1.{stream}", stream, 0, 0) for stream in range(3)
    ]
    assert {(each.turn.input_tokens, each.turn.output_tokens, each.turn.ideal_cached) for each in found} == {(5, 7, 0)}
    assert len({each.digest for each in found}) == 3


# -- what is refused, and what is told before


@pytest.mark.parametrize(
    ("decode", "both", "words"),
    [
        (None, EMULATED, "the experiment has no decode"),
        ({"batch": [4, 8]}, SERVED, "batch 8, ISL 1, OSL 1000 would not decode together: the baseline runs at most 4 "),
        (
            {"batch": [4], "input_tokens": [1, 2000], "output_tokens": [48, 49]},
            SERVED,
            "batch 4, ISL 2000, OSL 49 takes 2,049 tokens of context, but the baseline allows 2,048",
        ),
        (
            {"input_tokens": [1001]},
            EMULATED | {"emulator": {"max_model_len": 2000}},
            "takes 2,001 tokens of context, but the baseline allows 2,000",
        ),
        ({"output_tokens": [3]}, EMULATED, "fewer than 10 steps, .*output_tokens to at least 11"),
        ({"output_tokens": [80], "speculation": [{"draft_tokens": 7}]}, EMULATED, "to at least 81"),
        (
            {"output_tokens": [60], "speculation": [{"draft_tokens": 7, "acceptance_length": 6}]},
            EMULATED,
            "to at least 61",
        ),
        ({"batch": [300]}, EMULATED, "batch 300, ISL 1, OSL 1000 would not decode together"),
        ({"speculation": [{"draft_tokens": 8}]}, EMULATED, "at most 7 draft tokens, not 8"),
        ({}, EMULATED | {"gpus": None}, "not matched"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    decode: dict[str, Any] | None, both: dict[str, Any], words: str
) -> None:
    changes = {} if decode is not None else {"workload": {"demo": True}}
    with pytest.raises(UserError, match=words):
        planned(experiment(decode, both, **changes), lambda event: None, allow_unmatched=False)


@pytest.mark.parametrize(
    ("output_tokens", "entry"),
    [(11, "none"), (81, {"draft_tokens": 7}), (31, {"draft_tokens": 3, "acceptance_rates": [1, 0.5, 0.5]})],
)
def test_ten_steps_are_enough(output_tokens: int, entry: Any) -> None:
    described = experiment({"output_tokens": [output_tokens], "speculation": [entry]})
    planned(described, lambda event: None, allow_unmatched=False)


def test_no_stream_keeps_its_error_for_itself() -> None:
    """A full disk fails the record of every stream."""

    async def unwritable(outgoing: object, phase: str) -> None:
        raise OSError(28, "No space left on device")

    async def connect_ahead(count: int) -> None:
        pass

    unheard: list[dict[str, Any]] = []

    async def decode() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unheard.append(context))
        cell = Cell(batch=9, input_tokens=5, output_tokens=7, setup=0)
        wire: Any = SimpleNamespace(connect_ahead=connect_ahead)
        sender: Any = SimpleNamespace(record=unwritable)
        await batch.decode(wire, sender, batch.fresh(RENDERING, cell, "key"), "measured")

    with pytest.raises(OSError, match="No space left"):
        asyncio.run(decode())
    gc.collect()
    assert unheard == []


def test_data_parallel_ranks_run_requests_each() -> None:
    eight = {"serve": {"command": "vllm serve m --max-num-seqs 4 -dp 2"}, "gpus": {"count": 2, "kind": "emulated"}}
    planned(experiment({"batch": [8]}, eight), lambda event: None, allow_unmatched=False)
    with pytest.raises(UserError, match="at most 8 requests"):
        planned(experiment({"batch": [9]}, eight), lambda event: None, allow_unmatched=False)


def test_what_it_takes_is_told() -> None:
    decode = {
        "batch": [1],
        "output_tokens": [6000],
        "repeats": 2,
        "speculation": ["none", {"draft_tokens": 7, "acceptance_length": 6}],
    }
    told = lines(planned(experiment(decode), lambda event: None, allow_unmatched=False))
    assert told["windows"].startswith("16: 2 cells, 4 passes")
    # toy: 250 and 450 tokens/s, 900 and 1550 with drafts; four windows of 6000 tokens each, four times as fast
    minutes = 4 * 6000 * (1 / 250 + 1 / 450 + 1 / 900 + 1 / 1550) / 4 / 60
    assert told["time"] == f"about {minutes:.1f} minutes for the windows alone; starts and preflight come on top"
    assert "starts" not in told
