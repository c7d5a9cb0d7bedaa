"""The experiment file: slips are refused in words that say what to change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from replay.experiment import Experiment, experiment_of, frozen_yaml, load_experiment
from workloads.errors import UserError

PLAIN = """\
model: m
workload: {demo: true}
backends:
  baseline: {url: "http://a"}
  candidate: {url: "http://b", decode_backend: latency_specialized}
"""


def load(folder: Path, text: str) -> None:
    file = folder / "experiment.yaml"
    file.write_text(text)
    load_experiment(file)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("replay: {lane: 3}", "replay.lane: unknown key: did you mean lanes?"),
        ("replay: {lanes: yes}", "lanes: True is not a number"),
        ("replay: {lanes: '3'}", "lanes: '3' is not a number"),
        ("replay: {lanes: 3, lanes: 5}", "'lanes' stands twice"),
        ("replay: {start: 0.5}", "replay.start: must be two numbers, [low, high]"),
        ("replay: {lanes: 0}", "greater than or equal to 1"),
        ("replay: {end: duration}", "end: duration needs duration_s"),
        ("replay: {mode: open, pause_cap_s: 3}", "in open mode use idle_cap_s"),
        ("replay: 3", "replay: must be a map of keys"),
        ("api: chat", "needs tokenizer"),
        ("token_ids: 5", "token_ids: must be two numbers"),
        ("limits: {}", "limits: unknown key"),
        ("name: 5", "name: must be a text: put it in quotes"),
    ],
)
def test_slips_are_named(tmp_path: Path, line: str, words: str) -> None:
    load(tmp_path, PLAIN)
    with pytest.raises(UserError) as told:
        load(tmp_path, PLAIN + line)
    assert words in str(told.value)
    assert "pydantic" not in str(told.value)


def test_two_sources_or_none_are_refused(tmp_path: Path) -> None:
    for workload in ("{}", "{demo: true, path: x}"):
        with pytest.raises(UserError, match="exactly one of path, synthetic, demo"):
            load(tmp_path, PLAIN.replace("{demo: true}", workload))


def test_paths_start_at_the_file(tmp_path: Path) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(PLAIN.replace("{demo: true}", "{path: traces}"))
    assert load_experiment(file).workload.path == (tmp_path / "traces").resolve()


def test_frozen_is_the_same_experiment_without_header_values() -> None:
    data = yaml.safe_load(PLAIN)
    data["backends"]["baseline"]["headers"] = {"Authorization": "Bearer secret"}
    frozen = frozen_yaml(experiment_of(data))
    assert "secret" not in frozen
    assert frozen_yaml(experiment_of(yaml.safe_load(frozen))) == frozen


def test_a_quote_that_is_not_closed_is_told() -> None:
    """As for a command that was edited before --resume, which compares texts before it starts anything."""
    serve = {"serve": {"command": "vllm serve 'x"}}
    data = {"model": "m", "workload": {"demo": True}, "backends": {"baseline": serve, "candidate": serve}}
    with pytest.raises(UserError, match=r"backends\.baseline\.serve\.command: No closing quotation"):
        frozen_yaml(experiment_of(data))


def test_missing_file_folder_and_broken_yaml(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such experiment file"):
        load_experiment(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="is a folder"):
        load_experiment(tmp_path)
    with pytest.raises(UserError, match="not YAML"):
        load(tmp_path, "a: [")


# -- a deployment that is described once


def pair(baseline: Any, candidate: Any, both: Any = None) -> Experiment:
    backends = {"baseline": baseline, "candidate": candidate} | ({} if both is None else {"both": both})
    return experiment_of({"model": "m", "workload": {"demo": True}, "backends": backends})


options = st.recursive(
    st.integers() | st.booleans() | st.text(max_size=3) | st.none() | st.lists(st.integers(), max_size=2),
    lambda inside: st.dictionaries(st.sampled_from("abc"), inside, max_size=3),
    max_leaves=8,
)
maps = st.dictionaries(st.sampled_from("abcd"), options, max_size=4)


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """What stands at the ends of a tree of maps; empty maps too."""
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from leaves(value, (*path, name))
    else:
        yield path, tree


def at(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def reaches(tree: Any, path: tuple[str, ...]) -> bool:
    """Whether ``tree`` says anything at the path, or above it something that is not a map."""
    for name in path:
        if not isinstance(tree, dict):
            return True
        if name not in tree:
            return False
        tree = tree[name]
    return True


@given(maps, maps, maps)
def test_own_keys_go_over_those_of_both_and_nothing_is_lost(
    both: dict[str, Any], baseline: dict[str, Any], candidate: dict[str, Any]
) -> None:
    found = pair(
        {"serve": {"options": baseline}},
        {"serve": {"options": candidate}},
        {"serve": {"command": "vllm serve m", "options": both}},
    )
    for own, backend in ((baseline, found.backends.baseline), (candidate, found.backends.candidate)):
        assert backend.serve is not None
        assert backend.serve.command == "vllm serve m"
        merged = backend.serve.options
        for path, value in leaves(own):
            if value != {}:
                assert at(merged, path) == value
        for path, value in leaves(both):
            if value != {} and not reaches(own, path):
                assert at(merged, path) == value
        said = {path for tree in (own, both) for path, _ in leaves(tree)}
        assert {path for path, value in leaves(merged) if value != {}} <= said


def test_both_is_the_same_as_saying_it_twice() -> None:
    serve = {"command": ["vllm", "serve", "m"], "options": {"-tp": 8}, "env": {"A": "b"}}
    gpus = {"count": 8, "kind": "GB300"}
    own = {"decode_backend": "latency_specialized", "serve": {**serve, "env": {"A": "c"}}, "gpus": gpus}
    twice = pair({"serve": serve, "gpus": gpus}, own)
    once = pair(
        None,
        {"decode_backend": "latency_specialized", "serve": {"env": {"A": "c"}}},
        {"serve": serve, "gpus": gpus},
    )
    assert frozen_yaml(once) == frozen_yaml(twice)


def test_a_key_of_both_can_be_taken_back() -> None:
    found = pair({"emulator": None, "url": "http://a"}, {}, {"emulator": {}})
    assert found.backends.baseline.emulator is None
    assert found.backends.candidate.emulator is not None


@pytest.mark.parametrize(
    ("baseline", "both", "words"),
    [
        ({}, {"url": "http://a", "serve": {"command": "x"}}, "backends.baseline: give exactly one of url, serve"),
        ({"url": "http://a"}, {"gpu": {}}, "backends.baseline.gpu: unknown key: did you mean gpus?"),
        (3, {"url": "http://a"}, "backends.baseline: must be a map of keys"),
        ({"url": "http://a"}, 3, "backends.both: must be a map"),
    ],
)
def test_slips_in_both_are_named(baseline: Any, both: Any, words: str) -> None:
    with pytest.raises(UserError) as told:
        pair(baseline, {"url": "http://b"}, both)
    assert words in str(told.value)


def test_blocks_per_start_needs_two_served_in_turn() -> None:
    serve = {"serve": {"command": "vllm serve m"}}
    for serving, baseline in (({"arrangement": "side_by_side"}, serve), ({}, {"url": "http://a"})):
        with pytest.raises(UserError, match="blocks_per_start is for backends that are both served, in turn"):
            experiment_of(
                {
                    "model": "m",
                    "workload": {"demo": True},
                    "serving": {"blocks_per_start": 2, **serving},
                    "backends": {"baseline": baseline, "candidate": serve},
                }
            )


SERVE = {"command": "vllm serve m"}


@pytest.mark.parametrize(
    ("both", "serving", "words"),
    [
        (
            {"serve": SERVE | {"devices": [0, 1]}, "gpus": {"count": 4, "kind": "H200"}},
            {},
            "2 GPUs, but gpus.count is 4",
        ),
        ({"serve": SERVE | {"devices": [0, 0]}}, {}, "serve.devices names a GPU twice"),
        ({"serve": SERVE | {"devices": ["GPU-1"]}}, {}, "devices.0: Input should be a valid integer"),
        (
            {"serve": SERVE | {"env": {"OMP_NUM_THREADS": 1}}},
            {},
            "env.OMP_NUM_THREADS: must be a text: put it in quotes",
        ),
        ({"serve": SERVE, "price_per_gpu_hour": 3.0}, {}, "price_per_gpu_hour needs gpus"),
        ({"url": "http://a"}, {"arrangement": "side_by_side"}, "arrangement is for servers that decodegate starts"),
    ],
)
def test_what_does_not_go_together_is_refused(both: Any, serving: Any, words: str) -> None:
    backends = {"both": both, "baseline": {}, "candidate": {}}
    with pytest.raises(UserError) as told:
        experiment_of({"model": "m", "workload": {"demo": True}, "serving": serving, "backends": backends})
    assert words in str(told.value)
