"""A run of layer profiles, with a script in the place of both servers: what is kept, and what is refused."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from replay import profile
from replay.experiment import Experiment, experiment_of
from replay.profile import Wanted
from replay.records import Command, Profile, ProfileManifest
from replay.rundir import read_manifest
from tests.integration.emulated_server import program
from tests.scripted_server import DONE, Request, Step, event, reply, serve, stream, usage
from workloads.errors import UserError

GPUS = {"count": 1, "kind": "played"}
TRACE = json.dumps({"traceEvents": []}).encode()
STEPS = 10
OUTPUT = 200


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces here are small and come at once."""
    monkeypatch.setattr(profile, "_UNCHANGED_S", 0.1)


def silent(_: object) -> None:
    """Tells nobody."""


def server(stopped: Callable[[], None], *, max_model_len: int = 4096) -> Callable[[Request], Sequence[Step]]:
    """One that has what preflight asks for, decodes at 2 ms a step, and calls ``stopped`` when its profiler stops."""

    def script(request: Request) -> Sequence[Step]:
        if request.path == "/v1/models":
            return reply(200, {"data": [{"id": "played", "max_model_len": max_model_len}]})
        if request.path == "/start_profile":
            return reply(200, b"")
        if request.path == "/stop_profile":
            stopped()
            return reply(200, b"")
        if request.path != "/v1/completions":
            return reply(404, {"error": "no such page"})
        body: dict[str, Any] = json.loads(request.body)
        prompt, asked = len(body["prompt"]), body.get("max_tokens", 16)
        if not body.get("stream"):
            return reply(200, {"choices": [{"index": 0, "text": " a"}], "usage": usage(prompt, asked)})
        events: list[tuple[float, bytes]] = []
        for number in range(1, asked + 1):
            choice = {"index": 0, "text": " a", "finish_reason": "length" if number == asked else None}
            events.append((2.0 * number, event(json.dumps({"choices": [choice], "usage": usage(prompt, number)}))))
        events.append((events[-1][0], event(json.dumps({"choices": [], "usage": usage(prompt, asked)}))))
        return stream([*events, (events[-1][0], DONE)])

    return script


def described(url: str = "http://127.0.0.1:1", *, both: dict[str, Any] | None = None, **decode: Any) -> Experiment:
    return experiment_of(
        {
            "name": "played",
            "model": "played",
            "token_ids": None if both and "emulator" in both else [10, 250],
            "decode": {"batch": [2, 4], "output_tokens": [OUTPUT], **decode},
            "backends": {"both": both or {"url": url, "gpus": GPUS}, "baseline": {}, "candidate": {}},
        }
    )


def writes(folder: Path, *, data: bytes = gzip.compress(TRACE), twice: bool = False) -> Callable[[], None]:
    """Traces of one rank, or two, into a folder, each with a name of its own."""
    stops = iter(range(100))

    def stopped() -> None:
        number = next(stops)
        for rank in range(2 if twice else 1):
            (folder / f"rank{rank}.{number}.pt.trace.json.gz").write_bytes(data)

    return stopped


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Where the server writes its traces; an earlier one is there already."""
    folder = tmp_path / "traces" / "inner"
    folder.mkdir(parents=True)
    (folder / "rank0.earlier.pt.trace.json.gz").write_bytes(gzip.compress(TRACE))
    return folder


def test_a_run_holds_a_profile_of_each_backend_with_its_own_traces(traces: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    wanted = Wanted(steps=STEPS, traces=traces.parent)
    with serve(server(writes(traces, twice=True))) as played:
        profile.measure(described(played.url), run, wanted, silent)
    manifest = read_manifest(run, ProfileManifest)
    assert (manifest.cell.batch, manifest.cell.input_tokens, manifest.cell.output_tokens) == (2, 1, OUTPUT)
    assert (manifest.layers, manifest.setup.speculation.draft_tokens) == (None, 0)
    assert [backend.name for backend in manifest.setup.backends] == ["baseline", "candidate"]
    assert (run / "experiment.yaml").exists()
    found = {}
    for name in ("baseline", "candidate"):
        folder = run / "profiles" / name
        kept = msgspec.json.decode((folder / "profile.json").read_bytes(), type=Profile)
        assert (kept.backend, kept.server) == (name, None)
        assert 0 < kept.opened_ns < kept.closed_ns
        assert kept.step_s is not None
        assert kept.step_s > 0.001, "a step takes 2 ms, or longer on a busy machine"
        assert sorted(path.name for path in folder.glob("*.gz")) == kept.traces
        found[name] = kept.traces
    assert found["baseline"] == ["rank0.0.pt.trace.json.gz", "rank1.0.pt.trace.json.gz"]
    assert found["candidate"] == ["rank0.1.pt.trace.json.gz", "rank1.1.pt.trace.json.gz"]
    bodies = [json.loads(request.body) for request in played.requests if request.path == "/v1/completions"]
    measured = [tuple(body["prompt"]) for body in bodies if body["max_tokens"] == OUTPUT and len(body["prompt"]) == 1]
    assert len(measured) == 4
    assert measured[:2] == measured[2:], "both backends get the same prompts"


def test_batch_and_prompts_are_as_asked(traces: Path, tmp_path: Path) -> None:
    with serve(server(writes(traces))) as played:
        wanted = Wanted(steps=STEPS, batch=3, traces=traces)
        profile.measure(described(played.url, input_tokens=[77]), tmp_path / "run", wanted, silent)
    bodies = [json.loads(request.body) for request in played.requests if request.path == "/v1/completions"]
    prompts = [tuple(body["prompt"]) for body in bodies if body["max_tokens"] == OUTPUT and len(body["prompt"]) == 77]
    assert len(prompts) == 2 * 3
    assert len(set(prompts)) == 3
    assert {body.get("ignore_eos") for body in bodies if body["max_tokens"] == OUTPUT} == {True}


def test_traces_that_come_late_are_waited_for(tmp_path: Path) -> None:
    """First nothing, then a part of a file, then all of it."""
    whole = gzip.compress(bytes(range(256)) * 5000)
    late = tmp_path / "late.json.gz"
    timers = [
        threading.Timer(0.3, lambda: late.write_bytes(whole[:1000])),
        threading.Timer(1.0, lambda: late.write_bytes(whole)),
    ]
    for timer in timers:
        timer.start()
    assert profile.await_traces(tmp_path, set()) == [late]
    assert late.read_bytes() == whole


@pytest.mark.parametrize(
    ("data", "told"),
    [(None, "no trace .* has come into .*traces"), (gzip.compress(TRACE)[:-9], r"trace .*rank0.* is not complete")],
    ids=["none", "truncated"],
)
def test_traces_that_do_not_come_are_missed(
    data: bytes | None, told: str, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "_WRITTEN_S", 1.5)
    stopped = (lambda: None) if data is None else writes(traces, data=data)
    with serve(server(stopped)) as played, pytest.raises(UserError, match=f"^baseline: .*{told}"):
        profile.measure(described(played.url), tmp_path / "run", Wanted(steps=STEPS, traces=traces), silent)


def test_what_the_servers_cannot_hold_is_refused_before_anything_is_profiled(traces: Path, tmp_path: Path) -> None:
    with (
        serve(server(writes(traces), max_model_len=128)) as played,
        pytest.raises(UserError, match="the baseline allows 128"),
    ):
        profile.measure(described(played.url), tmp_path / "run", Wanted(steps=STEPS, traces=traces), silent)
    assert "/start_profile" not in [request.path for request in played.requests]
    assert not (tmp_path / "run").exists()


SERVE = {"command": ["vllm", "serve", "played"], "port": 8000}


@pytest.mark.parametrize(
    ("experiment", "wanted", "told"),
    [
        (described(both={"emulator": {}, "gpus": GPUS}), Wanted(), "the embedded emulator has no kernels"),
        (described(), Wanted(), "--traces must name the folder"),
        (described(), Wanted(traces=Path("/no/such")), "--traces must name the folder"),
        (described(), Wanted(speculation=1), "--speculation 1: decode.speculation has 1"),
        (described(output_tokens=[50]), Wanted(steps=50), "must last for 91 tokens"),
        (
            described(speculation=[{"draft_tokens": 7}]),
            Wanted(steps=50),
            r"output_tokens is 200: streams must last for 721 tokens",
        ),
        (
            described(both={"serve": {**SERVE, "options": {"profiler_config.profiler": "torch"}}}),
            Wanted(),
            "backends.baseline.serve has a profiler-config: leave it out",
        ),
    ],
    ids=["emulator", "no traces", "traces elsewhere", "no such setting", "too short", "too short drafted", "profiler"],
)
def test_what_cannot_be_profiled_is_refused(experiment: Experiment, wanted: Wanted, told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=told):
        profile.measure(experiment, tmp_path / "run", wanted, silent)
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_there_is_not_to_be_resumed(traces: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").touch()
    with pytest.raises(UserError, match=r"is not empty: name another with --run$"):
        profile.measure(described(), tmp_path / "run", Wanted(steps=STEPS, traces=traces), silent)


def test_an_experiment_without_decode_is_refused(tmp_path: Path) -> None:
    data = described().model_dump(mode="json") | {"decode": None, "workload": {"demo": True}}
    data["backends"].pop("both")
    with pytest.raises(UserError, match="has no decode"):
        profile.measure(experiment_of(data), tmp_path / "run", Wanted(), silent)


def test_servers_that_we_start_get_a_profiler_each() -> None:
    given = described(both={"serve": SERVE})
    changed = profile.with_profilers(given, Path("some/run"), None)
    for name in ("baseline", "candidate"):
        serving = changed.backend(name).serve
        assert serving is not None
        config = serving.options["profiler-config"]
        assert config["profiler"] == "torch"
        assert config["torch_profiler_dir"] == str(Path.cwd() / "some" / "run" / "profiles" / name)
    assert given.backends.baseline.serve is not None
    assert given.backends.baseline.serve.options == {}


def test_layers_are_those_of_the_language_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 93}}))
    assert profile.layers_of([str(tmp_path / "elsewhere"), str(tmp_path)]) == 93
    assert profile.layers_of([]) is None


def test_a_server_of_ours_that_cannot_be_profiled_is_stopped_and_its_log_named(tmp_path: Path) -> None:
    """An emulator in the place of vLLM: it takes the option, and has no profiler."""
    both = {"serve": {"command": [program(tmp_path), "serve", "played"], "instrument": False}, "gpus": GPUS}
    given = described(both=both).model_copy(update={"token_ids": (500, 4000)})
    run = tmp_path / "run"
    log = run / "servers" / "02-baseline" / "server.log"
    told = (
        rf"^baseline: it has no profiler \(POST /start_profile answers 404\).*\nIts whole log: {re.escape(str(log))}$"
    )
    with pytest.raises(UserError, match=told):
        profile.measure(given, run, Wanted(steps=STEPS), silent)
    commands = [msgspec.json.decode(path.read_bytes(), type=Command) for path in run.glob("servers/*/command.json")]
    assert len(commands) == 2
    assert [command.pid for command in commands if psutil.pid_exists(command.pid)] == []
