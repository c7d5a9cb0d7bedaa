"""Presets: each is a decode table that the deployment in it can run, on the path that it is there to show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from replay import cli, eligibility, matching, presets
from replay.emulator import eligibility as emulated
from replay.emulator.profiles import PROFILES
from replay.experiment import Experiment, load_experiment
from replay.speculation import with_speculation
from tests.replay.test_eligibility import K3
from workloads.errors import UserError

UP_TO_64 = [1, 2, 4, 8, 16, 32, 64]
OF_DECODE_BACKENDS = ["kimi-k3-headline", "kimi-k3-nospec-tp8", "kimi-k3-nospec-tp16", "kimi-k3-amd", "deepseek-v41"]
SERVED = [*OF_DECODE_BACKENDS, "smoke-cpu", "smoke-gpu"]


class Table(NamedTuple):
    """What a preset measures: for each speculative setting (method, draft tokens, acceptance length, batches)."""

    input_tokens: int
    output_tokens: int
    settings: list[tuple[str | None, int, float | None, list[int]]]


TABLES = {
    "kimi-k3-headline": Table(1, 1000, [("dspark", 7, 6, [1])]),
    "kimi-k3-nospec-tp8": Table(1, 1000, [(None, 0, None, UP_TO_64)]),
    "kimi-k3-nospec-tp16": Table(1, 1000, [(None, 0, None, UP_TO_64)]),
    "kimi-k3-amd": Table(1, 1000, [("dspark", 7, 6, [1]), ("dspark", 3, 3, [1, 2])]),
    "deepseek-v41": Table(1, 1000, [("dspark", 5, 4, UP_TO_64)]),
    "smoke-emulator": Table(1, 1000, [(None, 0, None, [1, 64]), ("dspark", 7, 6, [1, 16])]),
    "smoke-cpu": Table(64, 128, [(None, 0, None, [1, 2, 4]), ("ngram", 3, None, [1, 2, 4])]),
    "smoke-gpu": Table(1, 500, [(None, 0, None, UP_TO_64)]),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "/models/kimi-k3": K3,
    "/models/deepseek-v4.1": {"model_type": "deepseek_v41"},
}


def load(name: str, folder: Path, *, models: bool = False) -> Experiment:
    """The preset as a user has it: a file; with folders that describe its models, if they are to be there."""
    text = presets.read(name)
    if models:
        text = text.replace("/models/", f"{folder}/models/")
        for path, config in CONFIGS.items():
            model = Path(f"{folder}{path}")
            model.mkdir(parents=True)
            (model / "config.json").write_text(json.dumps(config))
    file = folder / f"{name}.yaml"
    file.write_text(text)
    return load_experiment(file)


def setups(experiment: Experiment) -> list[tuple[list[int], Experiment]]:
    """(batches, the experiment with both servers speculating so) of each speculative setting."""
    decode = experiment.decode
    assert decode is not None
    return [
        (entry.batch or decode.batch, with_speculation(experiment, index))
        for index, entry in enumerate(decode.speculation)
    ]


def test_each_preset_measures_what_it_says(tmp_path: Path) -> None:
    found = {}
    for name in presets.names():
        decode = load(name, tmp_path).decode
        assert decode is not None
        (isl,), (osl,) = decode.input_tokens, decode.output_tokens
        entries = [
            (entry.method, entry.draft_tokens, entry.acceptance_length, entry.batch or decode.batch)
            for entry in decode.speculation
        ]
        found[name] = Table(isl, osl, entries)
    assert found == TABLES


@pytest.mark.parametrize("models", [False, True], ids=["names", "folders"])
@pytest.mark.parametrize("name", presets.names())
def test_nothing_speaks_against_a_preset(name: str, models: bool, tmp_path: Path) -> None:
    """Whether the models' folders are here or not, for each speculative setting."""
    for _, experiment in setups(load(name, tmp_path, models=models)):
        found = matching.declared(experiment)
        assert (found.impossible, found.unmatched) == ([], [])


@pytest.mark.parametrize("name", OF_DECODE_BACKENDS)
def test_both_commands_differ_in_the_decode_backend_alone(name: str, tmp_path: Path) -> None:
    for _, experiment in setups(load(name, tmp_path)):
        found = matching.declared(experiment)
        assert [(each.key, each.candidate) for each in found.differences] == [
            ("additional-config.decode_backend", "latency_specialized")
        ]


@pytest.mark.parametrize("name", OF_DECODE_BACKENDS)
def test_every_cell_runs_specialised_without_padding(name: str, tmp_path: Path) -> None:
    """Its tokens are a captured size that the path has kernels for; and all it needs that can be known is known."""
    for batches, experiment in setups(load(name, tmp_path, models=True)):
        found = matching.declared(experiment)
        rule = found.backends[1].path
        assert rule is not None
        assert rule.problems == []
        captured = eligibility.captured_sizes(eligibility.Deployment(settings=dict(found.told["candidate"])))
        for batch in batches:
            tokens = batch * rule.tokens_per_request
            assert batch <= rule.max_requests
            assert tokens in rule.sizes
            assert tokens in captured
        needs = [need for need in found.unchecked["candidate"] if need != "version of vLLM"]
        model = next(model for model in eligibility.MODELS if model.name == rule.model)
        assert needs == list(model.unseen)


@pytest.mark.parametrize("name", SERVED)
def test_the_largest_batch_fits_the_server(name: str, tmp_path: Path) -> None:
    for batches, experiment in setups(load(name, tmp_path)):
        for told in matching.declared(experiment).told.values():
            assert int(told["max-num-seqs"]) >= max(batches)


@pytest.mark.parametrize("name", OF_DECODE_BACKENDS)
def test_settings_that_the_published_figures_were_measured_with(name: str, tmp_path: Path) -> None:
    """FP8 KV cache, FULL decode graphs, and for Kimi K3 an FP32 recurrent state."""
    for _, experiment in setups(load(name, tmp_path)):
        told = matching.declared(experiment).told["baseline"]
        assert told["kv-cache-dtype"] == "fp8"
        assert told["compilation-config.cudagraph_mode"] == "FULL_AND_PIECEWISE"
        assert told.get("mamba-ssm-cache-dtype", "none") == ("none" if name == "deepseek-v41" else "float32")


def test_the_smoke_test_without_a_gpu_holds_one_cell_that_is_not_specialised(tmp_path: Path) -> None:
    sizes = PROFILES["kimi-k3-tp16"].captured_sizes
    routes = {
        (entry.draft_tokens, batch): emulated.route(
            "latency_specialized", [1 + entry.draft_tokens] * batch, 0, sizes
        ).specialised
        for entry in load("smoke-emulator", tmp_path).decode.speculation
        for batch in entry.batch
    }
    assert routes == {(0, 1): True, (0, 64): True, (7, 1): True, (7, 16): False}


@pytest.mark.parametrize("name", presets.names())
def test_check_offline_is_content(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(name, tmp_path)
    cli.check(tmp_path / f"{name}.yaml", offline=True)
    assert "nothing here speaks against comparing" in capsys.readouterr().out


def test_the_verb_lists_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    cli.preset()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == presets.names()
    for name, line in zip(presets.names(), lines, strict=True):
        assert line.endswith(presets.summary(name))
        assert len(presets.summary(name)) > 40
        cli.preset(name)
        assert capsys.readouterr().out == presets.read(name)
    with pytest.raises(UserError, match="'kimi-k3': there are deepseek-v41, "):
        cli.preset("kimi-k3")


def test_a_missing_file_with_the_name_of_a_preset_tells_the_way(tmp_path: Path) -> None:
    for name in ("kimi-k3-amd.yaml", "kimi-k3-amd"):
        with pytest.raises(UserError, match=r"decodegate preset kimi-k3-amd > .*/kimi-k3-amd\.yaml"):
            load_experiment(tmp_path / name)
    with pytest.raises(UserError, match=r"no such experiment file$"):
        load_experiment(tmp_path / "mine.yaml")
