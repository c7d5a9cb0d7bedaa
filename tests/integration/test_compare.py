"""The comparison as a whole, on emulators: the same work everywhere, every turn accounted for, nothing lost."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from replay.compare import resume_run
from replay.emulator import language, process
from replay.emulator.settings import EmulatorSettings
from replay.emulator.truth import read_emissions
from replay.plan import SessionFile, read_plan
from replay.progress import Event
from replay.records import CHUNK
from replay.rundir import held, read_block
from tests.integration.runs import GPUS, blocks, experiment, records, resume, run, start
from workloads.errors import UserError


def digests(block: Path) -> dict[tuple[str, int, int, int], str]:
    return {(r.session, r.play, r.stream, r.turn): r.prompt_digest for r in records(block)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of the demo workload: a block for each backend, one worker."""
    return run(experiment(emulator={"time_scale": 4}), tmp_path_factory.mktemp("plain") / "run")


def test_the_work_is_the_same_in_both_arms_and_with_one_and_four_workers(plain: Path, tmp_path: Path) -> None:
    found = []
    four = run(experiment(replay={"workers": 4}), tmp_path / "run")
    for folder, workers in ((plain, 1), (four, 4)):
        assert all(len(list(path.glob("w*.requests.jsonl"))) == workers for path, _ in blocks(folder))
        found += [digests(path) for path, _ in blocks(folder)]
    assert len(found) == 4
    assert len(found[0]) == 101
    assert all(other == found[0] for other in found[1:])


def test_every_planned_turn_is_sent_once_with_its_planned_length(plain: Path) -> None:
    plan = read_plan(plain)
    sessions = SessionFile(plain / "sessions.jsonl")
    planned = {
        (sessions[play.session].id, play.number, stream, turn)
        for entries in plan.lanes
        for play in entries
        for stream, s in enumerate(sessions[play.session].streams)
        for turn, t in enumerate(s.turns)
        if t.fate == "send"
    }
    for path, block in blocks(plain):
        sent = [(r.session, r.play, r.stream, r.turn) for r in records(path)]
        assert len(sent) == len(set(sent)) == plan.turns["send"]
        assert set(sent) == planned
        assert block.not_reached == 0
        assert {r.status for r in records(path)} == {"ok"}
        assert all(r.input_tokens == r.asked_input and r.output_tokens == r.asked_output for r in records(path))


def test_what_the_client_saw_agrees_with_the_emission_log(plain: Path) -> None:
    """Token counts exactly; decode rates within 0.5 % in the median (ratios only: this machine may be busy)."""
    for path, _ in blocks(plain):
        truth = {emission.request_id: emission for emission in read_emissions(path / "server")}
        chunks = np.fromfile(path / "w0.chunks.bin", CHUNK)
        errors = []
        for record in records(path):
            emitted = truth[record.request_id].emissions
            own = chunks[record.chunk_start : record.chunk_start + record.chunk_count]
            assert own["tokens"].tolist() == [tokens for _, tokens in emitted]
            assert record.cached_tokens == truth[record.request_id].cached_tokens
            assert record.first_token_ns is not None
            assert record.first_token_ns >= emitted[0][0]
            true_ns = emitted[-1][0] - emitted[0][0]
            seen_ns = int(own["t_ns"][-1] - own["t_ns"][0])
            errors.append(abs(seen_ns / true_ns - 1))
        assert np.median(errors) < 0.005


@pytest.mark.parametrize("api", ["chat", "anthropic"])
def test_messages_have_the_planned_length_on_the_server(tmp_path: Path, api: str) -> None:
    folder = run(experiment(api=api), tmp_path / "run")
    for path, _ in blocks(folder):
        found = records(path)
        assert len(found) == 101
        assert all(record.status == "ok" for record in found)
        assert all(record.input_tokens == record.asked_input for record in found)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_br_27_every_block_starts_cold_on_one_server(tmp_path: Path, api: str) -> None:
    """The same server is both backends: first turns find nothing of the other block's, later turns their own prefix."""
    server = process.start(EmulatorSettings(time_scale=20), tmp_path / "log")
    try:
        language.write_tokenizer(tmp_path)
        described = experiment(api=api, tokenizer=str(tmp_path), both={"url": server.url, "gpus": GPUS})
        folder = run(described, tmp_path / "run")
    finally:
        process.stop(server)
    assert len(blocks(folder)) == 2
    for path, _ in blocks(folder):
        for record in records(path):
            assert record.cached_tokens is not None
            # whole blocks of 64 tokens only, and never the last token of a prompt
            reachable = min(record.ideal_cached, record.asked_input - 1) // 64 * 64
            if api == "completions" or record.ideal_cached == 0:
                assert record.cached_tokens == reachable
            else:  # what the template adds in between shifts the blocks' edges
                assert record.cached_tokens >= reachable - 128


def test_unmatched_gpus_are_refused_and_stamped_when_forced(tmp_path: Path) -> None:
    unmatched = experiment(candidate={"gpus": {"count": 2, "kind": "emulated", "layout": {"tp": 2}}})
    with pytest.raises(UserError, match="GPU count: baseline 1, candidate 2"):
        start(unmatched, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    manifest = start(unmatched, tmp_path / "forced", allow_unmatched=True)
    assert not manifest.matched_gpus
    assert len(manifest.unmatched_reasons) == 2


def test_a_window_of_fixed_duration_ends_and_counts_by_arrival(tmp_path: Path) -> None:
    timed = experiment(replay={"end": "duration", "duration_s": 30, "drain_s": 20, "order": "AB"})
    folder = run(timed, tmp_path / "run")
    for path, block in blocks(folder):
        assert block.ended_ns is not None
        assert block.ended_ns - block.started_ns == 1_500_000_000
        found = records(path)
        assert found
        assert all(record.sent_ns <= block.ended_ns + 50_000_000 for record in found)
        names = collections.Counter((r.session, r.play, r.stream, r.turn) for r in found)
        assert max(names.values()) == 1


def test_sessions_that_start_in_the_middle_find_their_own_prefix(tmp_path: Path) -> None:
    folder = run(experiment(replay={"start": [0.5, 0.9], "lanes": 12}), tmp_path / "run")
    plan = read_plan(folder)
    assert plan.turns["history"] > 0
    for path, block in blocks(folder):
        firsts = [r for r in records(path) if r.ideal_cached > 1000]
        assert np.mean([(r.cached_tokens or 0) / r.ideal_cached for r in firsts]) > 0.9
        assert block.warmup_requests is not None
        assert block.warmup_requests > 2


def test_failures_are_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    folder = run(experiment(emulator={"faults": ["error-in-stream:0.3"]}), tmp_path / "run")
    for path, _ in blocks(folder):
        statuses = collections.Counter(record.status for record in records(path))
        assert statuses["failed"] > 5
        assert statuses["ok"] > 5
        assert sum(statuses.values()) == 101
        assert {r.error for r in records(path) if r.status == "failed"} == {"error in stream"}


def test_end_session_on_failure_leaves_turns_not_reached(tmp_path: Path) -> None:
    folder = run(
        experiment(emulator={"faults": ["error-in-stream:0.3"]}, replay={"on_failure": "end_session"}), tmp_path / "run"
    )
    for path, block in blocks(folder):
        assert block.not_reached is not None
        assert block.not_reached > 0
        assert len(records(path)) + block.not_reached == 101


def test_a_server_that_dies_ends_the_block_and_resume_measures_it_again(tmp_path: Path) -> None:
    """Pauses of the remaining turns are not waited out; nothing finished is lost."""
    server = process.start(EmulatorSettings(), tmp_path / "log")
    port = int(server.url.rsplit(":", 1)[1])
    described = experiment(
        both={"url": server.url, "gpus": GPUS}, token_ids=[500, 4000], replay={"lanes": 12, "pause_cap_s": 1.0}
    )
    folder = tmp_path / "run"
    start(described, folder)

    def tell(event: Event) -> None:
        if event.block == 2 and event.counts and event.counts.ended > 5:
            process.stop(server)

    with pytest.raises(UserError, match="the server is gone"):
        resume(described, folder, tell)
    assert [block.index for _, block in blocks(folder)] == [1]
    again = subprocess.Popen(
        [sys.executable, "-m", "decodegate", "emulate", "--port", str(port)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert again.stdout is not None
        again.stdout.readline()
        resume(described, folder)
    finally:
        again.terminate()
        again.wait(20)
    assert [block.index for _, block in blocks(folder)] == [1, 2]
    assert all(len(records(path)) == 101 for path, _ in blocks(folder))


def test_a_resumed_block_starts_cold_on_a_server_that_lived_on(tmp_path: Path) -> None:
    """The interrupted attempt's prompts are still in its cache; the new attempt's must not find them."""
    server = process.start(EmulatorSettings(time_scale=5), tmp_path / "log")
    try:
        described = experiment(both={"url": server.url, "gpus": GPUS}, token_ids=[500, 4000])
        folder = tmp_path / "run"
        manifest = start(described, folder)
        assert manifest.emulated, "an emulator behind a URL is an emulator"
        assert manifest.time_scale == 5

        def interrupt(event: Event) -> None:
            if event.counts and event.counts.ended > 20:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            resume(described, folder, interrupt)
        cut = next((folder / "blocks").iterdir())
        left = read_block(cut)
        assert left is not None
        assert left.cut_short == "interrupted"
        assert len(records(cut)) > 20
        resume(described, folder)
    finally:
        process.stop(server)
    assert cut.with_name(cut.name + ".interrupted-1").is_dir()
    for path, _ in blocks(folder):
        assert [r.cached_tokens for r in records(path) if r.ideal_cached == 0] == [0] * 18
    renamed = cut.with_name(cut.name + ".interrupted-1")
    assert {r.prompt_digest for r in records(renamed)} <= {r.prompt_digest for r in records(cut)}


def test_nobody_else_may_measure_into_a_run_meanwhile(tmp_path: Path) -> None:
    described = experiment()
    start(described, tmp_path / "run")
    with held(tmp_path / "run"), pytest.raises(UserError, match="another decodegate measures into"):
        resume(described, tmp_path / "run")
    assert list((tmp_path / "run" / "blocks").iterdir()) == []


def test_kill_9_in_mid_block_then_resume(tmp_path: Path) -> None:
    """Finished blocks stay byte for byte, the cut one is kept aside and measured again, nothing is counted twice."""
    described = experiment(emulator={"time_scale": 1}, replay={"order": "ABBA", "pause_cap_s": 0.01, "lanes": 12})
    folder = tmp_path / "run"
    file = tmp_path / "experiment.yaml"
    file.write_text(yaml.safe_dump(described.model_dump(mode="json")))
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "decodegate", "compare", str(file), "--run", str(folder)],
            stdout=out,
            stderr=out,
        )
        try:
            deadline = time.monotonic() + 120
            second: Path | None = None
            while second is None and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
                partial = [p for p in folder.glob("blocks/02-*/w0.requests.jsonl") if p.stat().st_size > 20_000]
                second = partial[0].parent if partial else None
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert second is not None, (tmp_path / "out").read_text()
    cut = records(second)
    assert cut, "a killed run leaves readable records"
    first = blocks(folder)[0][0]
    before = {path.name: path.read_bytes() for path in first.iterdir() if path.is_file()}
    _wait_until_quiet(folder)
    resume(described, folder)
    assert {path.name: path.read_bytes() for path in first.iterdir() if path.is_file()} == before
    assert [block.index for _, block in blocks(folder)] == [1, 2, 3, 4]
    assert second.with_name(second.name + ".interrupted-1").is_dir()
    for path, _ in blocks(folder):
        names = [(r.session, r.play, r.stream, r.turn) for r in records(path)]
        assert len(names) == len(set(names)) == 101
    changed = experiment(emulator={"time_scale": 1}, replay={"lanes": 13})
    with pytest.raises(UserError, match="differs"):
        resume_run(changed, folder)


def _wait_until_quiet(folder: Path) -> None:
    """The workers and the emulator must end by themselves once their parent is gone."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        alive = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    children = (entry / "task" / entry.name / "children").read_text()
                except OSError:
                    continue
                if str(folder) in command or (str(folder) in children):
                    alive.append(command)
        if not alive:
            return
        time.sleep(0.1)
    raise AssertionError(f"processes outlived their parent: {alive}")
