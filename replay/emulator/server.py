"""The emulator's HTTP side: vLLM's endpoints over the engine, every output byte stamped in the truth log.

The step loop writes a stream's chunks straight to its connection, so that a chunk costs a system call and not a task
switch; the handler task only opens the response and closes it. Handlers are cancelled when their client leaves.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path

import msgspec
from aiohttp import web

from replay.emulator import exams, faults, metrics, replies, requests
from replay.emulator.engine import Engine
from replay.emulator.faults import picks
from replay.emulator.noise import text_number
from replay.emulator.requests import Api, Ask, Refused
from replay.emulator.scheduler import Sequence
from replay.emulator.settings import EmulatorSettings, fingerprint, resolve
from replay.emulator.truth import Finish, RequestTruth, TruthLog
from workloads.errors import UserError

HOST = "127.0.0.1"
BACKLOG = 4096
FLUSH_S = 0.5
MAX_BODY_BYTES = 1 << 30
BREAKS = ("error-in-stream", "truncate", "stall")
"""Faults that break a stream off half-way."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Ready(msgspec.Struct):
    """The line of JSON that a started emulator prints."""

    url: str
    port: int
    pid: int
    model: str
    profile: str


def _version() -> str:
    try:
        return version("decodegate")
    except PackageNotFoundError:  # running from a checkout
        return "0"


class Service:
    """An engine and what its handlers share."""

    def __init__(self, settings: EmulatorSettings, truth: TruthLog) -> None:
        self.settings = settings
        self.truth = truth
        self.engine = Engine(settings, truth)
        self.profile = self.engine.scheduler.profile
        self.faults = faults.parse(settings.faults)
        self.exams = exams.load(Path(settings.exams)) if settings.exams is not None else []
        self.fingerprint = fingerprint(settings)
        self.version = f"{_version()}+decodegate.emulator"
        self.numbers = count(1)

    def app(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/v1/completions", self._handler("completions")),
                web.post("/v1/chat/completions", self._handler("chat")),
                web.post("/v1/messages", self._handler("messages")),
                web.get("/v1/models", self._models),
                web.get("/version", self._version),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.post("/reset_prefix_cache", self._reset),
            ]
        )
        return app

    def _handler(self, api: Api) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            arrived_ns = time.monotonic_ns()
            truth = RequestTruth(
                request_id=request.headers.get("X-Request-ID") or f"emulated-{next(self.numbers)}",
                arrived_ns=arrived_ns,
                ended_ns=arrived_ns,
                prompt_tokens=None,
                cached_tokens=None,
                emissions=[],
                finish="abort",  # until it ends otherwise
                specialised_tokens=0,
            )
            try:
                return await self._answer(api, request, truth)
            except Refused as refusal:
                truth.finish = "error"
                body = replies.error_body(
                    refusal.status, refusal.message, refusal.kind, refusal.param, anthropic=api == "messages"
                )
                return web.Response(status=refusal.status, body=body, content_type="application/json")
            finally:
                truth.ended_ns = time.monotonic_ns()
                self.truth.request(truth)

        return handle

    async def _answer(self, api: Api, request: web.Request, truth: RequestTruth) -> web.StreamResponse:
        ask = requests.READERS[api](await request.read())
        ask.model = ask.model or self.settings.model
        truth.prompt_tokens = len(ask.prompt)
        limit = requests.check(ask, self.settings.model, self.profile.max_model_len)
        longest = self.faults.get("refuse-long")
        if longest is not None and len(ask.prompt) > longest:
            raise Refused(503, f"The server is overloaded (fault refuse-long:{longest:g})", "ServiceUnavailableError")

        broken = next((name for name in BREAKS if ask.stream and picks(self.faults, name, truth.request_id)), "")
        sequence = self._sequence(ask, limit, truth.request_id, broken)
        reply_id = f"{text_number(truth.request_id):016x}"
        usage = "no-usage" not in self.faults
        reply = replies.begin(ask, sequence, reply_id, int(time.time()), self.fingerprint, usage)
        serve = self._stream if ask.stream else self._whole
        headers = {"X-Request-Id": truth.request_id}
        try:
            return await serve(request, headers, sequence, reply, truth, broken)
        except asyncio.CancelledError:
            self.engine.abort(sequence)
            raise
        finally:
            truth.cached_tokens = sequence.cached
            truth.specialised_tokens = sequence.specialised_tokens

    def _sequence(self, ask: Ask, limit: int, request_id: str, broken: str) -> Sequence:
        limit_finish: Finish = "length"
        min_tokens, may_end = ask.min_tokens, not ask.ignore_eos
        answer_from = limit // 2 if ask.thinking else 0  # half of the budget goes into thought
        seed = requests.sampling_seed(ask, self.settings.seed, request_id)
        script = self._script(ask, limit, seed)
        if script is not None:
            limit, answer_from = min(limit, len(script.tokens)), script.thought
        if (ask.ignore_eos or ask.min_tokens) and "ignore-ignore-eos" in self.faults:
            limit, limit_finish = max(1, limit // 2), "stop"
            min_tokens = 0
        if broken:
            limit, limit_finish = max(1, limit // 2), "error"
        return Sequence(
            ask.prompt,
            limit=limit,
            limit_finish=limit_finish,
            min_tokens=min_tokens,
            may_end=may_end,
            seed=seed,
            stops=() if script else ask.stops,
            answer_from=answer_from,
            script=script.tokens if script else (),
            at_once=script.thought + 1 if script and not ask.stream else 1,
        )

    def _script(self, ask: Ask, limit: int, seed: int) -> exams.Script | None:
        question = None if ask.ignore_eos else exams.find(self.exams, ask.question)
        if question is None:
            return None
        specialised = self.settings.decode_backend == "latency_specialized"
        return exams.reply(question, ask.question, limit, seed, specialised=specialised)

    async def _stream(
        self,
        request: web.Request,
        headers: dict[str, str],
        sequence: Sequence,
        reply: replies.Reply,
        truth: RequestTruth,
        broken: str,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", **headers})
        response.enable_chunked_encoding()
        await response.prepare(request)
        transport = request.transport
        if transport is None:
            raise asyncio.CancelledError
        ended = asyncio.get_running_loop().create_future()

        def deliver(tokens: list[int]) -> None:
            data = reply.chunk(tokens)
            finish = sequence.finish
            # A chosen stream that ends by itself before half-way ends well.
            cut = broken if finish == "error" else ""
            if finish is not None and not cut:
                data += reply.close()
            elif cut == "error-in-stream":
                data += reply.fail("EngineCore encountered an issue (fault error-in-stream)")
            if transport.is_closing():
                return  # the handler's cancellation is on its way
            frame = b"%x\r\n%b\r\n" % (len(data), data)
            truth.emissions.append((time.monotonic_ns(), len(tokens)))
            transport.write(frame)
            if finish is not None and cut != "stall":
                truth.finish = finish
                if not ended.done():
                    ended.set_result(None)

        sequence.deliver = deliver
        self.engine.submit(sequence)
        await ended
        with suppress(ConnectionError):  # the client may leave between the last chunk and this
            await response.write_eof()
        return response

    async def _whole(
        self,
        request: web.Request,
        headers: dict[str, str],
        sequence: Sequence,
        reply: replies.Reply,
        truth: RequestTruth,
        broken: str,
    ) -> web.StreamResponse:
        ended = asyncio.get_running_loop().create_future()
        output: list[int] = []

        def deliver(tokens: list[int]) -> None:
            output.extend(tokens)
            if sequence.finish is not None and not ended.done():
                ended.set_result(None)

        sequence.deliver = deliver
        self.engine.submit(sequence)
        await ended
        response = web.Response(body=reply.whole(output), content_type="application/json", headers=headers)
        await response.prepare(request)
        truth.emissions.append((time.monotonic_ns(), len(output)))
        with suppress(ConnectionError):
            await response.write_eof()
        truth.finish = sequence.finish or "abort"
        return response

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self.settings.model,
            "object": "model",
            "created": 0,
            "owned_by": "decodegate-emulator",
            "root": self.profile.name,
            "parent": None,
            "max_model_len": self.profile.max_model_len,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version, "emulated": True, "time_scale": self.settings.time_scale})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=metrics.page(self.engine.scheduler, self.settings.model))

    async def _reset(self, request: web.Request) -> web.Response:
        done = self.engine.scheduler.reset_cache()
        return web.json_response({"reset": done}, status=200 if done else 409)


async def serve(
    settings: EmulatorSettings, log_dir: Path, port: int, ready: Callable[[Ready], None], parent: int | None = None
) -> None:
    """Serve on loopback until SIGTERM, SIGINT, SIGHUP or, with ``parent``, until that process is no longer our parent.

    ``port`` 0 lets the system choose; ``ready`` is called with the choice. Raises UserError for settings that do not
    fit together, a log folder that is in use, or a port that is taken.
    """
    profile = resolve(settings)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError as error:
            raise UserError(f"port {port} on {HOST} cannot be used ({error.strerror}); choose another, or 0") from None
        truth = TruthLog(log_dir)
        service = Service(settings, truth)
        runner = web.AppRunner(
            service.app(),
            handle_signals=False,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=settings.keep_alive_s,
            shutdown_timeout=0.1,
        )
        await runner.setup()
        await web.SockSite(runner, listener, backlog=BACKLOG).start()

        stop = asyncio.Event()

        def stop_if_orphan() -> None:
            if parent is None or os.getppid() != parent:
                stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        # Sent when our parent dies, but also when only the thread that started us ends: hence the look at the parent.
        loop.add_signal_handler(signal.SIGHUP, stop_if_orphan)
        gc.collect()
        gc.freeze()
        own_port = listener.getsockname()[1]
        ready(Ready(f"http://{HOST}:{own_port}", own_port, os.getpid(), settings.model, profile.name))
        try:
            while not stop.is_set():
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(stop.wait(), FLUSH_S)
                truth.flush()
                if parent is not None:
                    stop_if_orphan()
        finally:
            await runner.cleanup()
            service.engine.close()
            truth.close()
