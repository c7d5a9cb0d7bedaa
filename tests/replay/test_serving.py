"""Servers that we start: their command, their start, their end; with a script in the place of vLLM."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay import guard, serve_command, serving
from replay.experiment import Backend, Experiment, experiment_of
from replay.progress import Event
from replay.records import Command
from replay.servers import Servers
from workloads.errors import UserError

ROOT = Path(__file__).parents[2]
FAKE = [sys.executable, str(Path(__file__).with_name("fake_vllm.py")), "serve", "tiny"]


def backend(*play: str, **serve: Any) -> Backend:
    own = {"decode_backend": serve.pop("decode_backend", "auto"), "headers": serve.pop("headers", {})}
    command = serve.pop("command", [*FAKE, *play])
    return Backend.model_validate({"serve": {"command": command, **serve}, **own})


def words(given: Backend, model: str = "tiny") -> list[str]:
    return serve_command.completed(given, model, "candidate")


def served(*play: str, **serve: Any) -> list[str]:
    """What is added to: vllm serve tiny --port 8000 PLAY."""
    serve.setdefault("instrument", False)
    return words(backend(command=["vllm", "serve", "tiny", "--port", "8000", *play], host="h", **serve))[5:]


# the command


def test_the_command_is_completed_and_nothing_said_twice() -> None:
    given = backend(command="vllm serve /m --port 8000 --enable_prompt_tokens_details", decode_backend="auto")
    assert words(given) == [
        *("vllm", "serve", "/m", "--port", "8000", "--enable_prompt_tokens_details"),
        *("--host", "127.0.0.1", "--served-model-name", "tiny", "--cudagraph-metrics"),
        "--enable-per-request-metrics",
    ]
    assert words(backend(command=["vllm", "serve", "--model=tiny", "--host=::"], port=8000, instrument=False)) == [
        *("vllm", "serve", "--model=tiny", "--host=::", "--port", "8000")
    ]


def test_a_free_port_is_chosen() -> None:
    chosen = words(backend())
    port = int(chosen[chosen.index("--port") + 1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


def test_options_become_words() -> None:
    options = {
        "max_model_len": 4096,
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "compilation-config": {"cudagraph_mode": "FULL", "sizes": [1, 2]},
        "served-model-name": ["a", "tiny"],
        "speculative-config.method": "ngram",
        "override-generation-config": {"since": date(2026, 11, 30)},
        "-tp": 8,
    }
    assert served(options=options) == [
        *("--max-model-len", "4096", "--enforce-eager", "--no-enable-prefix-caching", "--compilation-config"),
        *('{"cudagraph_mode": "FULL", "sizes": [1, 2]}', "--served-model-name", "a", "tiny"),
        *("--speculative-config.method", "ngram", "--override-generation-config", '{"since": "2026-11-30"}'),
        *("-tp", "8", "--host", "h"),
    ]


@given(st.lists(st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1), min_size=1))
def test_a_command_as_text_is_the_one_as_list(some: list[str]) -> None:
    command = ["vllm", "serve", "tiny", "--port", "8000", *(f"x{word}" for word in some)]
    assert words(backend(command=shlex.join(command), host="h")) == words(backend(command=command, host="h"))


def test_a_command_may_go_on_in_the_next_line() -> None:
    text = "vllm serve tiny \\\n  --port 8000 \\\n  --host h"
    assert words(backend(command=text, instrument=False)) == ["vllm", "serve", "tiny", "--port", "8000", "--host", "h"]


@pytest.mark.parametrize(
    ("told", "words_of_it"),
    [
        ({"options": {"served-model-name": ["a", "b"]}}, "the model 'tiny', but the command serves it as a and b"),
        ({"options": {"api-key": "hush"}}, "give backends.candidate.headers: {Authorization: Bearer ${NAME}}"),
        ({"env": {"VLLM_API_KEY": "hush"}}, "its server wants an API key"),
    ],
)
def test_a_command_that_would_refuse_our_requests_is_not_started(told: dict[str, Any], words_of_it: str) -> None:
    with pytest.raises(UserError, match=re.escape(words_of_it)):
        served(**told)


SPECIALISED = "latency_specialized"


@pytest.mark.parametrize(
    ("play", "added"),
    [
        ([], ["--additional-config", '{"decode_backend": "latency_specialized"}']),
        (
            ["--additional_config", '{"a": 1}'],
            ["--additional-config", '{"a": 1, "decode_backend": "latency_specialized"}'],
        ),
        (
            ['--additional-config={"a": 1}'],
            ["--additional-config", '{"a": 1, "decode_backend": "latency_specialized"}'],
        ),
        (["--additional_config.a", "1"], ["--additional-config.decode_backend", "latency_specialized"]),
        (["--additional-config.decode_backend", SPECIALISED], []),
        (['--additional-config={"decode_backend": "latency_specialized"}'], []),
    ],
)
def test_decode_backend_joins_what_the_command_says(play: list[str], added: list[str]) -> None:
    assert served(*play, decode_backend=SPECIALISED) == [*play, "--host", "h", *added]


def test_decode_backend_joins_what_the_config_file_says(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: tiny\nport: 8001\nadditional_config: {a: 1}\n")
    given = backend(command=["vllm", "serve", "--config", str(file)], decode_backend=SPECIALISED, instrument=False)
    assert words(given)[4:] == [
        *("--host", "127.0.0.1", "--additional-config", '{"a": 1, "decode_backend": "latency_specialized"}')
    ]


@pytest.mark.parametrize("text", [b"- a", b"port", b"\x80"])
def test_a_config_file_that_is_none_is_left_to_the_server(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(text)
    assert served("--config", str(file)) == ["--config", str(file), "--host", "h"]


@pytest.mark.parametrize(
    ("play", "serve", "told"),
    [
        (["--additional-config", '{"decode_backend": "latency_specialized"}'], {}, "decode_backend is auto, but"),
        (["--additional-config.decode_backend=auto"], {"decode_backend": SPECIALISED}, "additional-config says auto"),
        (["--additional-config", "{a"], {}, "not JSON"),
        (["--additional-config", "{}", "--additional-config.a", "1"], {}, "whole and by dotted"),
        ([], {"port": 8001}, "serve.port is 8001, but the command says --port 8000"),
        ([], {"options": {"enforce-eager": None}}, "serve.options.enforce-eager has no value"),
        ([], {"command": "vllm 'serve"}, "No closing quotation"),
        ([], {"command": []}, "is empty"),
        (["--port", "8000a"], {}, "the command says --port 8000a, which is none"),
        (["--port", "0"], {}, "the command says --port 0, which is none"),
    ],
)
def test_contradictions_are_refused(play: list[str], serve: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=r"backends\.candidate") as refused:
        words(backend(**{"command": ["vllm", "serve", "tiny", "--port", "8000", *play], **serve}))
    assert told in str(refused.value)


# the start


class Started:
    """Starts fake servers, and stops them after the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: list[str] = []
        self.numbers = itertools.count()
        self.servers: list[serving.Server] = []

    def tell(self, event: Event) -> None:
        self.told.append(event.text)

    def __call__(self, given: Backend, name: str = "candidate", model: str = "tiny", **more: Any) -> serving.Server:
        folder = self.folder / f"server-{next(self.numbers)}"
        server = serving.start(given, name=name, model=model, folder=folder, headers={}, tell=self.tell, **more)
        self.servers.append(server)
        return server


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    made = Started(tmp_path)
    yield made
    serving.stop(*made.servers, tell=made.tell)


def below(server: serving.Server) -> set[int]:
    return {process.pid for process in psutil.Process(server.guard.pid).children(recursive=True)} | {server.guard.pid}


def guards() -> list[psutil.Process]:
    """The guards that we have started and that are there still."""
    return [child for child in psutil.Process().children() if guard.__file__ in child.cmdline()]


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_gone(pids: set[int], within_s: float = 20) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(lives(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_a_server_is_ready_with_its_first_token_and_stopped_without_a_trace(started: Started) -> None:
    server = started(backend("--play-slow", "0.3"))
    assert serving.died(server) is None
    written = msgspec.json.decode((server.folder / "command.json").read_bytes(), type=Command)
    assert written == server.command
    assert written.ready_s is not None
    assert written.ready_s >= 0.3
    assert written.url == server.url
    assert lives(written.pid)
    steps = server.folder / "steps"
    assert steps.is_dir()
    assert written.environment["DECODEGATE_STEPS"] == str(steps.absolute())
    log = (server.folder / "server.log").read_text()
    assert f"steps: {steps.absolute()}\n" in log
    assert log.count("Loading safetensors") >= 2
    pids = below(server)
    serving.stop(server, tell=started.tell)
    assert not any(lives(pid) for pid in pids)
    assert any(text.startswith("candidate: ready after ") for text in started.told)


def test_progress_tells_the_time_and_what_the_log_says(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_TELL_S", 0.0)
    started(backend("--play-slow", "1"))
    progress = re.compile(r"candidate: starting for \d+ s: its log says: Loading safetensors checkpoint shards")
    assert any(progress.fullmatch(text) for text in started.told)


def test_a_server_that_dies_is_told_at_once_with_its_logs_cause(started: Started, tmp_path: Path) -> None:
    log = tmp_path / "played"
    log.write_text("(EngineCore pid=8) ERROR 11-30 12:00:00 [core.py:1] torch.OutOfMemoryError: CUDA out of memory.")
    with pytest.raises(
        UserError, match=r"candidate: the server ended with status 3: the GPU has too little memory: torch"
    ):
        started(backend("--play-log", str(log), "--play-exit", "3"))
    assert not guards()


def test_a_command_that_goes_to_the_background_cannot_be_watched(started: Started, tmp_path: Path) -> None:
    (tmp_path / "played").write_text("")
    with pytest.raises(UserError, match="has to stay in the foreground"):
        started(backend("--play-log", str(tmp_path / "played"), "--play-exit", "0"))


def test_a_server_that_is_too_slow_is_given_up(started: Started) -> None:
    with pytest.raises(UserError, match=r"no token from its server after .* Loading safetensors(.|\n)*serve.ready_s"):
        started(backend("--play-slow", "60", ready_s=0.5))
    assert not guards()


def test_one_that_refuses_a_token_is_given_up(started: Started) -> None:
    with pytest.raises(UserError, match=r"refuses a request for one token: http 401 .*not today"):
        started(backend("--play-refuse", "401"))
    with pytest.raises(UserError, match=r"ask for the model 'large', but the command serves it as small"):
        started(backend("--served-model-name", "small"), model="large")


def test_a_taken_port_and_a_program_that_is_not_there_are_told_before_anything_starts(started: Started) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port} cannot be listened on: Address already in use"):
            started(backend(port=port))
    with pytest.raises(UserError, match=r"there is no program 'A=1' here: set A in serve\.env"):
        started(backend(command="A=1 vllm serve tiny"))
    with pytest.raises(UserError, match="there is no program 'vlmm' here"):
        started(backend(command="vlmm serve tiny"))
    with pytest.raises(UserError, match="HF_TOKEN: 'NOT_SET_ANYWHERE' is not set in the environment"):
        started(backend(env={"HF_TOKEN": "${NOT_SET_ANYWHERE}"}))
    assert list(started.folder.iterdir()) == []


def test_secrets_stay_out_of_the_run_directory(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hush")
    given = backend(
        "--api-key", "hush", "--max-num-seqs", "4", env={"HF_TOKEN": "${MY_TOKEN}", "A": "b"}, devices=[2, 3],
        headers={"authorization": "Bearer hush"},
    )  # fmt: skip
    command = started(given).command
    assert command.environment["HF_TOKEN"] == "(left out)"
    assert command.environment["A"] == "b"
    assert command.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert command.words[4:9] == ["--api-key", "(left out)", "--max-num-seqs", "4", "--host"]
    written = (started.servers[0].folder / "command.json").read_text()
    assert "hush" not in written


def test_gpus_are_named_in_one_place() -> None:
    given = backend(env={"CUDA_VISIBLE_DEVICES": "0"}, devices=[1])
    assert given.serve is not None
    with pytest.raises(UserError, match="both name the GPUs"):
        serving.launch(words(given), given.serve, name="baseline", model="m", folder=Path("never"), headers={})


# the end


def test_what_ignores_sigterm_or_left_its_group_is_killed(started: Started) -> None:
    server = started(backend("--play-stubborn", "--play-orphan", stop_s=0.3))
    pids = below(server)
    assert len(pids) == 3
    serving.stop(server, tell=started.tell)
    assert not any(lives(pid) for pid in pids)


def test_a_server_that_dies_later_says_why(started: Started) -> None:
    server = started(backend("--play-die-serving"))
    assert serving.died(server) is None
    body = json.dumps({"model": "tiny"}).encode()
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"{server.url}/v1/completions", data=body, timeout=10)
    deadline = time.monotonic() + 20
    while (why := serving.died(server)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert why.startswith("the server ended with status 1: the GPU has too little memory")


def test_a_killed_guard_is_told_and_leaves_nothing(started: Started) -> None:
    server = started(backend("--play-stubborn"))
    pids = below(server)
    server.guard.kill()
    assert all_gone(pids)
    assert str(serving.died(server)).startswith("the server was lost together with the process that guards it")
    serving.stop(server, tell=started.tell)


def test_the_end_waits_for_the_gpus_memory(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [False, False, True]
    server = started(backend(), freed=lambda: answers.pop(0))
    serving.stop(server, tell=started.tell)
    assert answers == []
    monkeypatch.setattr(serving, "_FREED_S", 0.0)
    serving.stop(started(backend(), freed=lambda: False), tell=started.tell)
    assert "WARNING: candidate: the memory of its GPUs is not free" in started.told[-1]
    started.servers.clear()


def test_kill_9_of_us_leaves_nothing(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from replay import serving
        from tests.replay.test_serving import backend
        server = serving.start(
            backend("--play-stubborn", "--play-orphan", stop_s=3600),
            name="baseline", model="tiny", folder=Path(sys.argv[1]) / "s", headers={}, tell=lambda _: None,
        )
        print(server.guard.pid, flush=True)
        time.sleep(300)
        """
    )
    us = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with us:
        assert us.stdout is not None
        number = int(us.stdout.readline())
        pids = {process.pid for process in psutil.Process(number).children(recursive=True)} | {number}
        assert len(pids) == 3
        us.kill()
    assert all_gone(pids, within_s=30)


# the start-up control


@pytest.mark.parametrize(
    ("play", "result", "said"),
    [
        (["--play-reads-key"], "refused", "ValueError: Supported decode_backend values are auto/latency_specialized"),
        ([], "ignored", "came up with decode_backend: bogus"),
        (["--play-log", "LOG"], "unclear", "the disk is full"),
    ],
)
def test_the_control_tells_who_reads_the_key(tmp_path: Path, play: list[str], result: str, said: str) -> None:
    (tmp_path / "LOG").write_text("OSError: [Errno 28] No space left on device")
    given = backend(*(str(tmp_path / word) if word == "LOG" else word for word in play), decode_backend=SPECIALISED)
    found = serving.control(
        given, name="candidate", model="tiny", folder=tmp_path / "c", headers={}, tell=lambda _: None
    )
    assert found.result == result
    assert said in found.said
    assert "--load-format" in json.loads((tmp_path / "c" / "command.json").read_bytes())["words"]
    assert not guards()


# the servers of an experiment


def experiment(**changes: Any) -> Experiment:
    serve = {"serve": {"command": FAKE, "instrument": False}}
    data = {
        "model": "tiny",
        "workload": {"synthetic": {"sessions": 1, "seed": 1}},
        "backends": {"baseline": serve, "candidate": serve},
    }
    return experiment_of(data | changes)


def test_in_turn_one_server_stops_before_the_other_starts(tmp_path: Path) -> None:
    with Servers(experiment(), tmp_path, lambda _: None) as servers:
        first = servers.running("baseline")
        assert first.folder == tmp_path / "servers" / "01-baseline"
        assert servers.running("baseline") == first
        assert first.server is not None
        pids = below(first.server)
        second = servers.running("candidate")
        assert not any(lives(pid) for pid in pids)
        assert second.folder == tmp_path / "servers" / "02-candidate"
        again = servers.running("candidate", fresh=True)
        assert again.folder == tmp_path / "servers" / "03-candidate"
        assert again.server is not None
        os.kill(again.server.command.pid, signal.SIGKILL)
        again.server.guard.wait()
        assert str(servers.died("candidate")).startswith("the server was ended by signal 9")
        assert servers.running("candidate").folder == tmp_path / "servers" / "04-candidate"
    assert not guards()
    with Servers(experiment(), tmp_path, lambda _: None) as servers:
        assert servers.control("candidate").result == "ignored"
        assert servers.running("baseline").folder == tmp_path / "servers" / "06-baseline"


def test_side_by_side_both_are_up(tmp_path: Path) -> None:
    with Servers(experiment(serving={"arrangement": "side_by_side"}), tmp_path, lambda _: None) as servers:
        first, second = servers.running("baseline"), servers.running("candidate")
        assert servers.running("baseline") == first
        assert first.url != second.url
        assert servers.running("candidate", fresh=True).server != second.server
        assert servers.running("baseline").server == first.server
    assert sorted(path.name for path in (tmp_path / "servers").iterdir()) == [
        *("01-baseline", "02-candidate", "03-candidate")
    ]


def test_two_on_one_port_are_refused_side_by_side(tmp_path: Path) -> None:
    """vLLM shares ports (SO_REUSEPORT): both would start, and answer for one another."""
    serve = {"serve": {"command": [*FAKE, "--port", "8000"], "instrument": False}}
    both = experiment(serving={"arrangement": "side_by_side"}, backends={"baseline": serve, "candidate": serve})
    with Servers(both, tmp_path, lambda _: None) as servers, pytest.raises(UserError, match="listen on port 8000"):
        servers.running("baseline")
    assert not (tmp_path / "servers").exists()


def test_when_one_of_two_does_not_start_neither_stays(tmp_path: Path) -> None:
    bad = {"serve": {"command": [*FAKE, "--play-log", str(tmp_path / "none")], "instrument": False}}
    good = {"serve": {"command": FAKE, "instrument": False}}
    both = experiment(serving={"arrangement": "side_by_side"}, backends={"baseline": good, "candidate": bad})
    with (
        Servers(both, tmp_path, lambda _: None) as servers,
        pytest.raises(UserError, match="candidate: the server ended"),
    ):
        servers.running("baseline")
    assert not guards()


def test_urls_pass_through_with_one_served(tmp_path: Path) -> None:
    mixed = experiment(backends={"baseline": {"url": "http://127.0.0.1:1/"}, "candidate": {"url": "http://h:2"}})
    with Servers(mixed, tmp_path, lambda _: None) as servers:
        found = servers.running("baseline")
        assert (found.url, found.folder, servers.died("baseline")) == ("http://127.0.0.1:1", None, None)


def test_a_resumed_run_waits_for_what_a_killed_one_left(tmp_path: Path) -> None:
    folder = tmp_path / "servers" / "01-baseline"
    folder.mkdir(parents=True)
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.7)"], process_group=0)
    command = Command(words=[], environment={}, devices=None, url="", pid=left.pid, started_unix_s=time.time())
    (folder / "command.json").write_bytes(msgspec.json.encode(command))
    told: list[str] = []
    waiter = threading.Thread(target=left.wait)
    waiter.start()
    with Servers(experiment(), tmp_path, lambda event: told.append(event.text)):
        assert not lives(left.pid)
    waiter.join()
    assert told == ["waiting for 01-baseline, left by a run that was killed"]
