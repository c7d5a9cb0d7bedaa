"""Decode tables as a whole, on emulators: every window complete and true to the emission log, nothing lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from replay import decode_bench
from replay.emulator import process
from replay.emulator.settings import EmulatorSettings
from replay.emulator.truth import read_emissions
from replay.experiment import Experiment, experiment_of
from replay.records import CHUNK, DecodeManifest, Manifest, MetricsSample, Setup, Window
from replay.rundir import held, is_finished, read_manifest
from tests.integration.emulated_server import ROOT, program
from tests.integration.runs import GPUS, records, silent
from workloads.errors import UserError

DRAFTS = {"method": "dspark", "draft_tokens": 3, "acceptance_length": 2.5, "batch": [2]}


def experiment(
    *,
    both: dict[str, Any] | None = None,
    backends: dict[str, Any] | None = None,
    whole: dict[str, Any] | None = None,
    **decode: Any,
) -> Experiment:
    """Decode tables of two toy emulators, four times faster than real. ``whole``: other keys of the experiment."""
    emulated = {"emulator": {"profile": "toy", "time_scale": 4}, "gpus": GPUS}
    return experiment_of(
        {
            "name": "test",
            "model": "emulated",
            "replay": {"seed": 3},
            "decode": {"repeats": 1, "warmup_tokens": 4, **decode},
            "backends": backends
            or {"both": both or emulated, "baseline": {}, "candidate": {"decode_backend": "latency_specialized"}},
            **(whole or {}),
        }
    )


def windows(run: Path) -> list[tuple[Path, Window]]:
    """Finished windows in measured order."""
    folders = [path for path in sorted((run / "windows").iterdir()) if is_finished(path / "window.json")]
    return [(path, read_window(path)) for path in folders]


def read_window(folder: Path) -> Window:
    return msgspec.json.decode((folder / "window.json").read_bytes(), type=Window)


def setups(run: Path) -> list[Setup]:
    return [msgspec.json.decode(path.read_bytes(), type=Setup) for path in sorted((run / "setups").glob("*.json"))]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run: without drafts and with, prompts of some blocks."""
    run = tmp_path_factory.mktemp("decode") / "run"
    described = experiment(batch=[3], input_tokens=[200], output_tokens=[40], speculation=["none", DRAFTS])
    decode_bench.measure(described, run, silent)
    return run


def test_every_window_is_there_in_order_and_holds_its_cell(plain: Path) -> None:
    manifest = read_manifest(plain, DecodeManifest)
    found = windows(plain)
    assert [(window.index, window.backend, window.cell) for _, window in found] == [
        (index, place.backend, place.cell) for index, place in enumerate(manifest.order, start=1)
    ]
    assert len(found) == 4 * 2
    for path, window in found:
        cell = manifest.cells[window.cell]
        streams, warmup = records(path), records(path, "warmup")
        ids = sorted(f"{window.index}.0.{stream}" for stream in range(cell.batch))
        assert sorted(record.session for record in streams) == ids
        assert {record.status for record in streams + warmup} == {"ok"}
        assert {(r.input_tokens, r.output_tokens) for r in streams} == {(cell.input_tokens, cell.output_tokens)}
        assert {(r.input_tokens, r.output_tokens) for r in warmup} == {(cell.input_tokens, 4)}
        assert len(warmup) == cell.batch
        assert {record.cached_tokens for record in streams + warmup} == {0}
        # all are sent at once, after the warm-up, over connections that are open
        assert window.ended_ns is not None
        assert len({record.due_ns for record in streams}) == 1
        assert window.started_ns <= streams[0].due_ns <= min(record.sent_ns for record in streams)
        assert max(record.end_ns for record in warmup) < window.started_ns
        assert max(record.end_ns for record in streams) <= window.ended_ns
        assert {record.connect_ns for record in streams} == {None}


def test_what_the_client_saw_agrees_with_the_emission_log(plain: Path) -> None:
    for path, _ in windows(plain):
        truth = {emission.request_id: emission for emission in read_emissions(path / "server")}
        chunks = np.fromfile(path / "w0.chunks.bin", CHUNK)
        found = [*records(path), *records(path, "warmup")]
        assert len(found) == len(truth)
        for record in found:
            emitted = truth[record.request_id].emissions
            own = chunks[record.chunk_start : record.chunk_start + record.chunk_count]
            assert own["tokens"].tolist() == [tokens for _, tokens in emitted]
            assert truth[record.request_id].prompt_tokens == record.asked_input


def test_the_counters_edges_hold_the_measured_batch_alone(plain: Path) -> None:
    manifest = read_manifest(plain, DecodeManifest)
    for path, window in windows(plain):
        cell = manifest.cells[window.cell]
        samples = [msgspec.json.decode(line, type=MetricsSample) for line in (path / "metrics.jsonl").open("rb")]
        assert [samples[0].at, samples[-1].at] == ["start", "end"]
        assert samples[0].t_ns < window.started_ns
        counted = [{name: value for name, _, value in sample.samples} for sample in (samples[0], samples[-1])]
        made = counted[1]["vllm:generation_tokens_total"] - counted[0]["vllm:generation_tokens_total"]
        assert made == cell.batch * cell.output_tokens


def test_setups_are_recorded_as_declared_and_as_seen(plain: Path) -> None:
    manifest = read_manifest(plain, DecodeManifest)
    assert [setup.speculation.draft_tokens for setup in manifest.setups] == [0, 3]
    seen = setups(plain)
    assert [setup.speculation for setup in seen] == [setup.speculation for setup in manifest.setups]
    assert all(backend.settings["version"] for setup in seen for backend in setup.backends)
    assert manifest.emulated
    assert manifest.time_scale == 4


def test_a_finished_run_has_nothing_to_resume_and_is_no_comparison(plain: Path) -> None:
    before = sorted(plain.rglob("*"))
    decode_bench.measure(_as_started(plain), plain, silent, resume=True)
    assert sorted(plain.rglob("*")) == before
    with pytest.raises(UserError, match="is a run of decode, not of compare"):
        read_manifest(plain, Manifest)
    with pytest.raises(UserError, match="differs"):
        decode_bench.measure(experiment(batch=[1]), plain, silent, resume=True)
    with held(plain), pytest.raises(UserError, match="another decodegate measures into"):
        decode_bench.measure(_as_started(plain), plain, silent, resume=True)


def _as_started(run: Path) -> Experiment:
    return experiment_of(yaml.safe_load((run / "experiment.yaml").read_text()))


def test_kill_9_in_mid_window_then_resume(tmp_path: Path) -> None:
    """Finished windows stay byte for byte, the cut one is kept aside and measured again."""
    described = experiment(batch=[2], output_tokens=[400])
    run, file = tmp_path / "run", tmp_path / "experiment.yaml"
    file.write_text(yaml.safe_dump(described.model_dump(mode="json")))
    words = [sys.executable, "-m", "decodegate", "decode", str(file), "--run", str(run)]
    with (tmp_path / "out").open("wb") as out:
        child = subprocess.Popen(words, stdout=out, stderr=out, cwd=ROOT)
        try:
            deadline = time.monotonic() + 120
            while not list(run.glob("windows/0002-*/window.json")):
                assert child.poll() is None, (tmp_path / "out").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
    ((first, _),) = windows(run)
    (second,) = run.glob("windows/0002-*")
    assert read_window(second).cut_short is None
    assert records(second, "warmup"), "a killed run leaves readable records"
    before = {path.name: path.read_bytes() for path in first.iterdir() if path.is_file()}
    told: list[str] = []
    decode_bench.measure(described, run, lambda event: told.append(event.text), resume=True)
    assert {path.name: path.read_bytes() for path in first.iterdir() if path.is_file()} == before
    assert [window.index for _, window in windows(run)] == [1, 2, 3, 4]
    kept = second.with_name(f"{second.name}.interrupted-1")
    assert kept.is_dir()
    assert any(kept.name in text for text in told)
    assert all([record.input_tokens for record in records(path)] == [1, 1] for path, _ in windows(run))


def test_a_server_that_dies_ends_the_window_and_resume_measures_it_again(tmp_path: Path) -> None:
    """Also one with fewer streams than a client needs to tell by refused connections."""
    server = process.start(EmulatorSettings(), tmp_path / "log")
    at_url = {"url": server.url, "gpus": GPUS}
    described = experiment(backends={"both": at_url, "baseline": {}, "candidate": {}}, batch=[2], output_tokens=[300])
    run = tmp_path / "run"

    def end_it() -> None:
        while not list(run.glob("windows/0002-*/window.json")):
            time.sleep(0.01)
        process.stop(server)

    ending = threading.Thread(target=end_it, daemon=True)
    ending.start()
    with pytest.raises(UserError, match="the server is gone"):
        decode_bench.measure(described, run, silent)
    ending.join()
    assert [window.index for _, window in windows(run)] == [1]
    (second,) = run.glob("windows/0002-*")
    assert (read_window(second).finished, read_window(second).cut_short) == (False, "server gone")
    assert "ok" not in {record.status for record in records(second)}
    port = server.url.rsplit(":", 1)[1]
    words = [sys.executable, "-m", "decodegate", "emulate", "--port", port]
    again = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert again.stdout is not None
        again.stdout.readline()
        decode_bench.measure(described, run, silent, resume=True)
    finally:
        again.terminate()
        again.wait(20)
    assert [window.index for _, window in windows(run)] == [1, 2, 3, 4]
    # the same server lives on through all windows: no stream found another's prompt in its cache
    assert {record.cached_tokens for path, _ in windows(run) for record in records(path)} == {0}


def test_ctrl_c_keeps_what_has_come(tmp_path: Path) -> None:
    described = experiment(batch=[2], output_tokens=[4000])
    run = tmp_path / "run"

    def interrupt() -> None:
        while not list(run.glob("windows/0001-*/window.json")):
            time.sleep(0.01)
        time.sleep(1)  # streams run by now, and for ten times as long
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        decode_bench.measure(described, run, silent)
    (first,) = (run / "windows").iterdir()
    assert read_window(first).cut_short == "interrupted"
    assert {record.status for record in records(first)} == {"cancelled"}


def test_each_setup_has_starts_of_its_own_and_passes_share_them(tmp_path: Path) -> None:
    """Servers that we start, in turn: A, B B, A for each setup, after preflight, which leaves the first one up."""
    command = [program(tmp_path), "serve", "emulated"]
    described = experiment(
        backends={
            "both": {"serve": {"command": command, "instrument": False}, "gpus": GPUS},
            "baseline": {},
            "candidate": {"serve": {"options": {"max-num-seqs": 8}}},
        },
        batch=[1, 2],
        output_tokens=[30],
        speculation=["none", DRAFTS],
        whole={"token_ids": [500, 4000], "serving": {"under_test": ["max-num-seqs"]}},
    )
    run = tmp_path / "run"
    decode_bench.measure(described, run, silent)
    found = windows(run)
    first, second = found[0][1].backend, found[2][1].backend
    third, fourth = found[8][1].backend, found[9][1].backend
    assert [window.server for _, window in found] == [
        *[f"servers/02-{first}"] * 2,
        *[f"servers/03-{second}"] * 4,
        *[f"servers/04-{first}"] * 2,
        f"servers/06-{third}",
        *[f"servers/07-{fourth}"] * 2,
        f"servers/08-{third}",
    ]
    assert len(list((run / "servers").iterdir())) == 8
    told = decode_bench.lines(decode_bench.planned(described, silent, allow_unmatched=False))
    assert told["starts"] == "8 starts of servers, preflight included"
    chunks = [record.chunk_count for path, window in found for record in records(path) if window.index > 8]
    assert max(chunks) < 20, "the second setup's servers speculate"


def test_a_url_that_is_labelled_wrong_is_refused(tmp_path: Path) -> None:
    server = process.start(EmulatorSettings(time_scale=50), tmp_path / "log")
    try:
        one = {"both": {"url": server.url, "gpus": GPUS}, "baseline": {}, "candidate": {}}
        described = experiment(backends=one, batch=[1], speculation=[DRAFTS])
        with pytest.raises(UserError, match=r"says dspark, 3 draft tokens, .*its server does not speculate"):
            decode_bench.measure(described, tmp_path / "run", silent)
    finally:
        process.stop(server)
    assert not (tmp_path / "run").exists()
