"""The verbs: what they refuse before anything starts, and how Ctrl-C ends them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replay import cli, decode_bench
from replay.experiment import Experiment, experiment_of
from replay.preflight import without_servers
from workloads.errors import UserError

EMULATED = {"emulator": {}, "gpus": {"count": 1, "kind": "emulated"}}
SPECIALISED = {"decode_backend": "latency_specialized"}


def experiment(both: dict[str, Any] = EMULATED, candidate: dict[str, Any] | None = None, **parts: Any) -> Experiment:
    backends = {"both": both, "baseline": {}, "candidate": SPECIALISED if candidate is None else candidate}
    return experiment_of({"model": "m", "backends": backends, **parts})


@pytest.mark.parametrize("dry_run", [True, False])
def test_each_verb_wants_its_own_part_before_anything_starts(dry_run: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(UserError, match=r"no workload to replay.*decodegate decode$"):
        cli.compare(experiment(decode={}), run=run, dry_run=dry_run)
    with pytest.raises(UserError, match="has no decode"):
        cli.decode(experiment(workload={"demo": True}), run=run, dry_run=dry_run)
    assert not run.exists()


@pytest.mark.parametrize("verb", ["compare", "decode"])
@pytest.mark.parametrize(("measured", "words"), [(False, "before anything was measured"), (True, "--resume --run")])
def test_ctrl_c_says_how_to_go_on(
    verb: str, measured: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def interrupted(*_: object, **__: object) -> None:
        if measured:
            run.mkdir()
            (run / "manifest.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "start_run", interrupted)
    monkeypatch.setattr(decode_bench, "measure", interrupted)
    with pytest.raises(UserError, match=words):
        getattr(cli, verb)(experiment(workload={"demo": True}, decode={}), run=run)


def test_a_dead_server_leaves_no_run_directory_and_names_none(tmp_path: Path) -> None:
    told: list[str] = []
    described = experiment({"url": "http://127.0.0.1:1", "gpus": EMULATED["gpus"]}, {}, decode={"batch": [1]})
    with pytest.raises(UserError):
        decode_bench.measure(described, tmp_path / "run", lambda event: told.append(event.text))
    assert not (tmp_path / "run").exists()
    assert not [text for text in told if "run directory" in text]


@pytest.mark.parametrize(
    ("other", "candidate", "under_test", "impossible"),
    [
        ("http://h:80/v1/", SPECIALISED, None, ["decode_backend is to differ"]),
        ("http://H", {}, ["max-num-seqs"], ["max-num-seqs is to differ"]),
        ("http://h", {}, None, []),
        ("http://h:81", SPECIALISED, None, []),
    ],
)
def test_one_server_cannot_differ_from_itself(
    other: str, candidate: dict[str, Any], under_test: list[str] | None, impossible: list[str]
) -> None:
    serving = {} if under_test is None else {"serving": {"under_test": under_test}}
    described = experiment({"url": "http://h"}, candidate | {"url": other}, decode={}, **serving)
    found = without_servers(described, lambda event: None).impossible
    assert len(found) == len(impossible)
    assert all(words in reason for words, reason in zip(impossible, found, strict=True))
