"""The experiment file: slips are refused in words that say what to change."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from replay.experiment import experiment_of, frozen_yaml, load_experiment
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


def test_missing_file_folder_and_broken_yaml(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such experiment file"):
        load_experiment(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="is a folder"):
        load_experiment(tmp_path)
    with pytest.raises(UserError, match="not YAML"):
        load(tmp_path, "a: [")
