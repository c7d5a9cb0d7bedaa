"""Comparisons of servers that we start, with the emulator in the place of vLLM: who is up when, what is refused, and
that nothing is lost or left over."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import yaml

from replay.compare import run_blocks, start_run
from replay.experiment import Experiment, experiment_of
from replay.plan import read_plan
from replay.preflight import prepare
from replay.progress import Event
from replay.records import Command, Manifest, MetricsSample
from replay.rundir import read_block, read_manifest
from replay.servers import Servers
from tests.integration import runs
from tests.integration.emulated_server import ROOT, program
from workloads.errors import UserError

SPECIALISED = "latency_specialized"
LLAMA = {"model_type": "llama"}
KIMI = {"model_type": "kimi_k3", "text_config": {"model_type": "kimi_linear"}}
GONE_S = 10.0
"""By then nothing of a killed run is left."""


def model(folder: Path, config: dict[str, Any]) -> str:
    """A folder that looks like a model's, as far as its config.json goes."""
    path = folder / str(config["model_type"])
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def served(
    folder: Path,
    *both: str,
    config: dict[str, Any] = KIMI,
    baseline: dict[str, Any] | None = None,
    candidate: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    serve: dict[str, Any] | None = None,
    gpus: dict[str, Any] | None = None,
    path: str = SPECIALISED,
    workload: dict[str, Any] | None = None,
    **changes: Any,
) -> Experiment:
    """Both backends served by the emulator, few short sessions. ``both``: what both are told to play. ``baseline``,
    ``candidate``: options of one of them. ``path``: the candidate's decode_backend."""
    command = [program(folder), "serve", model(folder, config), *both]
    one = {"command": command, "instrument": False, "options": options or {}, **(serve or {})}
    described = {
        "both": {"serve": one, "gpus": gpus or runs.GPUS},
        "baseline": {"serve": {"options": baseline or {}}},
        "candidate": {"serve": {"options": candidate or {}}, "decode_backend": path},
    }
    return runs.experiment(
        backends=described,
        token_ids=[500, 4000],
        workload={"demo": True, "sessions": 3, "max_turns": 4, **(workload or {})},
        replay={"lanes": 3, "order": "ABBA", **changes.pop("replay", {})},
        **changes,
    )


def unspecial(folder: Path, *both: str, **changes: Any) -> Experiment:
    """Two servers that differ in a setting of no consequence here, and in no decode backend."""
    serving = {"under_test": ["max-num-seqs"], **changes.pop("serving", {})}
    return served(folder, *both, path="auto", candidate={"max-num-seqs": 8}, serving=serving, **changes)


def commands(run: Path) -> dict[str, Command]:
    """Every start of a server, by its folder's name."""
    found = sorted((run / "servers").glob("*/command.json"))
    return {path.parent.name: msgspec.json.decode(path.read_bytes(), type=Command) for path in found}


def left(run: Path) -> list[int]:
    """Process groups of the run's servers that are still there."""
    found = []
    for command in commands(run).values():
        try:
            os.killpg(command.pid, 0)
            found.append(command.pid)
        except ProcessLookupError:
            pass
    return found


def measured(run: Path) -> list[tuple[int, str, str | None]]:
    return [(block.index, block.backend, block.server) for _, block in runs.blocks(run)]


def compared(described: Experiment, run: Path) -> Path:
    """Measure all blocks, as the command does: what preflight leaves up is measured first."""
    with Servers(described, run, runs.silent) as servers:
        manifest = start_run(described, servers, run, allow_unmatched=False, tell=runs.silent)
        run_blocks(described, servers, run, manifest, runs.silent)
    return run


def starts(run: Path) -> list[str]:
    return [name.partition("-")[2] for name in commands(run)]


# -- who is up when


def test_in_turn_each_block_has_a_start_of_its_own(tmp_path: Path) -> None:
    run = compared(unspecial(tmp_path), tmp_path / "run")
    order = read_manifest(run, Manifest).order
    first, second = order[0], order[1]
    assert order == [first, second, second, first]
    # preflight asks the first to be measured last, and leaves it up
    assert starts(run) == [second, first, second, second, first]
    assert measured(run) == [
        (1, first, f"servers/02-{first}"),
        (2, second, f"servers/03-{second}"),
        (3, second, f"servers/04-{second}"),
        (4, first, f"servers/05-{first}"),
    ]
    for path, block in runs.blocks(run):
        assert block.prefix_cache_reset is True
        assert {record.status for record in runs.records(path)} == {"ok"}
        samples = [msgspec.json.decode(line, type=MetricsSample) for line in (path / "metrics.jsonl").open("rb")]
        assert [samples[0].at, samples[-1].at] == ["start", "end"]
        assert all(sample.error is None and sample.samples for sample in samples)
        assert (path / "before.json").exists()
        assert (path / "after.json").exists()
    assert left(run) == []


def test_blocks_per_start_saves_restarts(tmp_path: Path) -> None:
    run = compared(unspecial(tmp_path, serving={"blocks_per_start": 2}), tmp_path / "run")
    assert len(starts(run)) == 5
    assert [int(str(server)[8:10]) for _, _, server in measured(run)] == [2, 2, 3, 3, 4, 4, 5, 5]
    assert [name for _, name, _ in measured(run)] == read_manifest(run, Manifest).order
    assert left(run) == []


def test_side_by_side_both_are_started_once(tmp_path: Path) -> None:
    run = compared(unspecial(tmp_path, serving={"arrangement": "side_by_side"}), tmp_path / "run")
    assert starts(run) == ["baseline", "candidate"]
    assert len(measured(run)) == 4
    assert all(server == f"servers/{'01' if name == 'baseline' else '02'}-{name}" for _, name, server in measured(run))
    assert left(run) == []


def test_one_that_dies_in_mid_block_is_quoted_and_its_block_measured_again(tmp_path: Path) -> None:
    die = tmp_path / "die"
    described = unspecial(tmp_path, "--play-speed", "2", "--play-die", str(die), replay={"order": "AB"})
    run = tmp_path / "run"
    runs.start(described, run)
    second = read_manifest(run, Manifest).order[1]

    def tell(event: Event) -> None:
        if event.block == 2 and event.in_flight:
            die.touch()

    with pytest.raises(
        UserError, match=rf"(?s){second}: the server ended with status 1: the GPU has too little memory"
    ):
        runs.resume(described, run, tell)
    assert left(run) == []
    cut = read_block(run / "blocks" / f"02-{second}")
    assert cut is not None
    assert (cut.finished, cut.cut_short) == (False, "server gone")
    die.unlink()
    before = measured(run)
    runs.resume(described, run)
    assert measured(run)[:1] == before
    assert [index for index, _, _ in measured(run)] == [1, 2]
    assert (run / "blocks" / f"02-{second}.interrupted-1").is_dir()


def test_one_that_dies_when_few_turns_are_left_ends_the_block_too(tmp_path: Path) -> None:
    """A client tells by ten connections in a row; fewer turns than that would only have failed."""
    die = tmp_path / "die"
    few = {"workload": {"sessions": 1, "max_turns": 2}, "replay": {"order": "AB", "lanes": 1}}
    described = unspecial(tmp_path, "--play-speed", "2", "--play-die", str(die), **few)
    runs.start(described, tmp_path / "run")
    assert read_plan(tmp_path / "run").turns["send"] < 10

    def tell(event: Event) -> None:
        if event.block == 1 and event.in_flight:
            die.touch()

    with pytest.raises(UserError, match="baseline: the server ended with status 1: the GPU has too little memory"):
        runs.resume(described, tmp_path / "run", tell)
    cut = read_block(tmp_path / "run" / "blocks" / "01-baseline")
    assert cut is not None
    assert (cut.finished, cut.cut_short) == (False, "server gone")


# -- killed and interrupted


class Compare:
    """``decodegate compare`` as a process of its own; killed after the test."""

    def __init__(self, described: Experiment, folder: Path) -> None:
        self.run, self._out = folder / "run", folder / "out"
        file = folder / "experiment.yaml"
        file.write_text(yaml.safe_dump(described.model_dump(mode="json")))
        words = [sys.executable, "-m", "decodegate", "compare", str(file), "--run", str(self.run)]
        with self._out.open("wb") as out:
            self.process = subprocess.Popen(words, stdout=out, stderr=out, cwd=ROOT)

    def until_block_2(self) -> None:
        """Return in the middle of the second block."""
        deadline = time.monotonic() + 120
        while not any(path.stat().st_size for path in self.run.glob("blocks/02-*/w0.requests.jsonl")):
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)

    @property
    def said(self) -> str:
        return self._out.read_text()

    def __enter__(self) -> Compare:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def test_kill_9_leaves_no_server_and_the_run_goes_on(tmp_path: Path) -> None:
    described = unspecial(tmp_path, "--play-speed", "6", replay={"order": "AB"})
    with Compare(described, tmp_path) as compare:
        compare.until_block_2()
        assert left(compare.run)
        below = psutil.Process(compare.process.pid).children(recursive=True)
        compare.process.kill()
    _, alive = psutil.wait_procs(below, timeout=GONE_S)
    assert [process for process in alive if process.is_running()] == []
    assert left(compare.run) == []
    finished = measured(compare.run)
    assert len(finished) == 1
    runs.resume(described, compare.run)
    assert measured(compare.run)[:1] == finished
    assert [index for index, _, _ in measured(compare.run)] == [1, 2]
    assert left(compare.run) == []


def test_ctrl_c_stops_the_servers_and_says_how_to_go_on(tmp_path: Path) -> None:
    described = unspecial(tmp_path, "--play-speed", "6", replay={"order": "AB"})
    with Compare(described, tmp_path) as compare:
        compare.until_block_2()
        compare.process.send_signal(signal.SIGINT)  # to it alone
        assert compare.process.wait(60) == 3
    assert f"continue with --resume --run {compare.run}" in compare.said
    assert "Traceback" not in compare.said
    assert left(compare.run) == []
    cut = [read_block(path) for path in compare.run.glob("blocks/02-*")]
    assert [block and block.cut_short for block in cut] == ["interrupted"]
    runs.resume(described, compare.run)
    assert [index for index, _, _ in measured(compare.run)] == [1, 2]


# -- what is refused


def refused(described: Experiment, folder: Path, **options: bool) -> str:
    """What a user is told instead of a comparison."""
    with pytest.raises(UserError) as told:
        runs.start(described, folder / "run", **options)
    assert left(folder / "run") == []
    return str(told.value)


def test_unequal_tp_is_refused_by_what_is_declared_and_by_the_commands(tmp_path: Path) -> None:
    eight = {"count": 8, "kind": "GB300", "layout": {"tp": 8}}
    described = unspecial(tmp_path, baseline={"tensor-parallel-size": 4}, options={"-tp": 8}, gpus=eight)
    told = refused(described, tmp_path)
    assert "cannot be compared" in told
    assert "baseline: gpus.layout says tp 8, but tensor-parallel-size is 4" in told
    assert "baseline: gpus.count says 8, but tensor-parallel-size 4 x data-parallel-size 1 uses 4" in told
    assert "cannot be compared" in refused(described, tmp_path, allow_unmatched=True)
    assert not (tmp_path / "run").exists()


def declared_otherwise(folder: Path) -> Experiment:
    """One on one GPU, the other on two, each as its command says."""
    described = unspecial(folder, baseline={"tensor-parallel-size": 2})
    two = {"gpus": {"count": 2, "kind": "emulated", "layout": {"tp": 2}}}
    changed = described.model_dump(mode="json", exclude={"backends": {"both"}})
    changed["backends"]["baseline"] |= two
    return Experiment.model_validate(changed)


def test_unmatched_ones_run_when_forced_and_are_stamped(tmp_path: Path) -> None:
    described = declared_otherwise(tmp_path)
    told = refused(described, tmp_path)
    for words in (
        "the backends are not matched",
        "GPU count: baseline 2, candidate 1",
        "GPU layout: baseline {'tp': 2}, candidate {'tp': 1}",
        "tensor-parallel-size: 2 against not set: another split of the weights",
        "measure anyway with --allow-unmatched",
    ):
        assert words in told
    manifest = runs.start(described, tmp_path / "run", allow_unmatched=True)
    assert not manifest.matched_gpus
    assert len(manifest.unmatched_reasons) == 3
    assert {difference.key: difference.under_test for difference in manifest.differences} == {
        "max-num-seqs": True,
        "tensor-parallel-size": False,
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv-cache-dtype": "fp8"}, "kv-cache-dtype: fp8 against not set: other attention kernels"),
        ({"stream-interval": 4}, "stream-interval: 4 against not set: tokens are sent in other chunks"),
    ],
)
def test_a_setting_that_is_not_under_test_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    told = refused(served(tmp_path, baseline=options, config={"model_type": "own"}, path="auto"), tmp_path)
    assert words in told
    assert "name what is meant to differ in serving.under_test" in told
    assert "additional-config" not in told


def test_a_third_key_is_refused_beside_the_two_under_test(tmp_path: Path) -> None:
    named = {"under_test": ["max-num-seqs", "additional-config.decode_backend"]}
    described = unspecial(tmp_path, baseline={"enable-prefix-caching": False}, serving=named)
    told = refused(described, tmp_path)
    assert "enable-prefix-caching: false against not set: prompts are computed anew on one side" in told
    assert "max-num-seqs" not in told


def test_gpus_that_the_command_does_not_use_are_refused(tmp_path: Path) -> None:
    described = unspecial(tmp_path, gpus={"count": 4, "kind": "emulated"})
    assert "gpus.count says 4, but tensor-parallel-size 1 x data-parallel-size 1 uses 1" in refused(described, tmp_path)


def test_the_eligibility_table_refuses_kimi_k3_on_4_gpus(tmp_path: Path) -> None:
    four = {"count": 4, "kind": "GB300", "layout": {"tp": 4}}
    told = refused(served(tmp_path, options={"-tp": 4}, gpus=four), tmp_path)
    assert "candidate: tensor-parallel-size 4 is not supported: 8 or 16" in told
    assert "baseline" not in told


def test_a_model_without_the_specialised_path_is_refused(tmp_path: Path) -> None:
    told = refused(served(tmp_path, config=LLAMA), tmp_path)
    assert "candidate: model type llama" in told
    assert "does not read decode_backend: the candidate would be running standard decode" in told
    assert not (tmp_path / "run").exists()


def eligible(folder: Path, *both: str) -> Experiment:
    """What the table has nothing against."""
    eight = {"count": 8, "kind": "GB300", "layout": {"tp": 8}}
    options = {"-tp": 8, "mamba-cache-dtype": "bfloat16"}
    return served(folder, *both, options=options, gpus=eight)


def test_a_server_that_ignores_the_key_is_refused_by_the_control(tmp_path: Path) -> None:
    for force in (False, True):
        told = refused(eligible(tmp_path), tmp_path, allow_unmatched=force)
        assert "also starts with a decode_backend that does not exist" in told
        assert "the candidate would be running standard decode" in told
        assert starts(tmp_path / "run") == ["candidate-control"]
        (tmp_path / "run").rename(tmp_path / f"kept-{force}")


def test_a_server_that_reads_the_key_passes_the_control(tmp_path: Path) -> None:
    said: list[str] = []
    with Servers(eligible(tmp_path, "--play-reads-key"), tmp_path / "run", runs.silent) as servers:
        prepared = prepare(
            eligible(tmp_path, "--play-reads-key"), servers, tmp_path / "run", lambda event: said.append(event.text)
        )
    assert any(re.match(r"ok: start-up control: a bogus decode_backend is refused: .*Supported", text) for text in said)
    assert "ok: under test: additional-config.decode_backend: not set against latency_specialized" in said
    assert starts(tmp_path / "run")[0] == "candidate-control"
    candidate = prepared.matching.backends[1]
    assert candidate.path is not None
    assert candidate.path.problems == []
    assert prepared.matching.impossible == prepared.matching.unmatched == []
    assert any("of what the specialised path needs" in doubt for doubt in prepared.matching.doubts)


def test_a_program_that_is_not_there_and_a_taken_port_are_named(tmp_path: Path) -> None:
    told = refused(unspecial(tmp_path, serve={"command": "vlmm serve x"}), tmp_path)
    assert re.search(r"backends\.\w+\.serve\.command: there is no program 'vlmm' here: give its path", told)
    with Servers(unspecial(tmp_path), tmp_path / "other", runs.silent) as servers:
        port = int(servers.running("baseline").url.rsplit(":", 1)[1])
        told = refused(unspecial(tmp_path, serve={"port": port}), tmp_path)
    assert f"127.0.0.1:{port} cannot be listened on: Address already in use" in told
    assert "leave serve.port out for a free one" in told


# -- check


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """The folder for temporary files of a check."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def check(described: Experiment, folder: Path, *options: str) -> tuple[int, str]:
    """Exit code and output of ``decodegate check``."""
    file = folder / "experiment.yaml"
    file.write_text(yaml.safe_dump(described.model_dump(mode="json")))
    words = [sys.executable, "-m", "decodegate", "check", str(file), *options]
    environment = {**os.environ, "TMPDIR": str(folder / "scratch")}
    ended = subprocess.run(words, cwd=ROOT, env=environment, stdout=-1, stderr=-2, text=True, timeout=300, check=False)
    assert "Traceback" not in ended.stdout, ended.stdout
    return ended.returncode, ended.stdout


def test_check_names_what_is_under_test_and_leaves_nothing(tmp_path: Path, scratch: Path) -> None:
    code, said = check(unspecial(tmp_path), tmp_path)
    assert code == 0, said
    for words in (
        "ok: under test: max-num-seqs: not set against 8",
        "baseline: ready after",
        "candidate: ready after",
        "ok: plan ",
        "ready to compare",
    ):
        assert words in said
    assert list(scratch.iterdir()) == []


def test_check_offline_starts_nothing(tmp_path: Path, scratch: Path) -> None:
    code, said = check(unspecial(tmp_path, serve={"command": "vllm-of-another-host serve x"}), tmp_path, "--offline")
    assert code == 0, said
    assert "ok: under test: max-num-seqs: not set against 8" in said
    assert "decode_backend" not in said, "it is not what is under test"
    assert "check again with servers" in said
    assert list(scratch.iterdir()) == []


def test_check_offline_lists_all_that_speaks_against(tmp_path: Path, scratch: Path) -> None:
    four = {"count": 4, "kind": "GB300", "layout": {"tp": 4}}
    described = served(tmp_path, options={"-tp": 4}, baseline={"kv-cache-dtype": "fp8"}, gpus=four)
    code, said = check(described, tmp_path, "--offline")
    assert code == 3
    assert "cannot be compared: candidate: tensor-parallel-size 4 is not supported: 8 or 16" in said
    assert "kv-cache-dtype: fp8 against not set" in said
    assert "compare will refuse them" in said
    assert "--allow-unmatched" not in said


def test_check_speaks_of_what_the_file_is_for(tmp_path: Path, scratch: Path) -> None:
    decode = {"batch": [1], "output_tokens": [20]}
    both = declared_otherwise(tmp_path).model_dump(mode="json") | {"decode": decode}
    both["backends"].pop("both", None)
    code, said = check(experiment_of(both), tmp_path, "--offline")
    assert code == 3
    assert "compare and decode will refuse without --allow-unmatched" in said
    code, said = check(experiment_of(both | {"workload": None}), tmp_path, "--offline")
    assert code == 3
    assert ": decode will refuse without --allow-unmatched" in said


def test_check_of_unmatched_backends_goes_on_to_the_servers(tmp_path: Path, scratch: Path) -> None:
    code, said = check(declared_otherwise(tmp_path), tmp_path)
    assert code == 3
    assert "ok: plan " in said
    assert "not matched: GPU count: baseline 2, candidate 1" in said
    assert "compare will refuse without --allow-unmatched" in said
    assert list(scratch.iterdir()) == []


def test_a_failed_check_keeps_the_log_that_it_names(tmp_path: Path, scratch: Path) -> None:
    die = tmp_path / "die"
    die.touch()
    code, said = check(unspecial(tmp_path, "--play-die", str(die)), tmp_path)
    assert code == 3
    assert "the GPU has too little memory" in said
    named = re.search(r"Its whole log: (\S+)", said)
    assert named is not None
    assert "OutOfMemoryError" in Path(named[1]).read_text()
    assert Path(named[1]).is_relative_to(scratch)


def test_a_check_that_is_interrupted_leaves_nothing(tmp_path: Path, scratch: Path) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(yaml.safe_dump(unspecial(tmp_path).model_dump(mode="json")))
    words = [sys.executable, "-m", "decodegate", "check", str(file)]
    with subprocess.Popen(words, cwd=ROOT, env={**os.environ, "TMPDIR": str(scratch)}, stdout=-1, stderr=-2) as process:
        deadline = time.monotonic() + 60
        while not (found := list(scratch.glob("*/servers/*/command.json"))):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        command = msgspec.json.decode(found[0].read_bytes(), type=Command)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) != 0
    assert not psutil.pid_exists(command.pid)
    assert list(scratch.iterdir()) == []
