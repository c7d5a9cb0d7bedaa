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
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path

import msgspec
from aiohttp import web

from replay.emulator import exams, faults, language, metrics, replies, requests, speech, tools
from replay.emulator.engine import Engine
from replay.emulator.faults import picks
from replay.emulator.noise import mix, text_number
from replay.emulator.requests import Api, Ask, Refused
from replay.emulator.scheduler import Sequence
from replay.emulator.settings import EmulatorSettings, fingerprint, resolve
from replay.emulator.speech import Voice
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
        self.spoken = count(1)  # numbers of the requests that the language model answers

    def app(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/v1/completions", self._handler("completions")),
                web.post("/v1/chat/completions", self._handler("chat")),
                web.post("/v1/messages", self._handler("messages")),
                web.post("/inference/v1/generate", self._handler("generate")),
                web.post("/tokenize", self._tokenize),
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
                return _refusal(refusal, anthropic=api == "messages")
            finally:
                truth.ended_ns = time.monotonic_ns()
                self.truth.request(truth)

        return handle

    async def _answer(self, api: Api, request: web.Request, truth: RequestTruth) -> web.StreamResponse:
        if api == "generate" and not self.settings.scale_out:
            words = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            raise Refused(403, words, "PermissionDeniedError")
        ask = requests.READERS[api](await request.read())
        ask.model = ask.model or self.settings.model
        truth.prompt_tokens = len(ask.prompt)
        limit = requests.check(ask, self.settings.model, self.profile.max_model_len)
        longest = self.faults.get("refuse-long")
        if longest is not None and len(ask.prompt) > longest:
            raise Refused(503, f"The server is overloaded (fault refuse-long:{longest:g})", "ServiceUnavailableError")

        broken = next((name for name in BREAKS if ask.stream and picks(self.faults, name, truth.request_id)), "")
        call = self._call(ask, truth.request_id)
        sequences = self._sequences(ask, limit, truth.request_id, broken, call)
        reply_id = f"{text_number(truth.request_id):016x}"
        usage = "no-usage" not in self.faults
        reply = replies.begin(ask, sequences, reply_id, int(time.time()), self.fingerprint, usage, call)
        serve = self._stream if ask.stream else self._whole
        headers = {"X-Request-Id": truth.request_id}
        try:
            return await serve(request, headers, sequences, reply, truth, broken)
        finally:
            for sequence in sequences:
                if sequence.finish is None:
                    self.engine.abort(sequence)
            truth.cached_tokens = sequences[0].cached
            truth.specialised_tokens = sum(sequence.specialised_tokens for sequence in sequences)

    def _sequences(self, ask: Ask, limit: int, request_id: str, broken: str, call: tools.Call | None) -> list[Sequence]:
        spoken = ask.api == "generate" or ask.logprobs is not None or self.settings.language == "model"
        if ask.trace and not self.settings.trace_replay:
            words = "trace_decode_token_ids is set but trace replay is not enabled. Start the engine with "
            raise Refused(400, words + "--enable-trace-replay to use it.")
        if ask.trace and self.settings.speculation is not None:
            raise Refused(400, "trace_decode_token_ids is not supported with speculative decoding.")
        context = speech.context_of(ask.prompt) if spoken else None
        return [self._sequence(ask, limit, request_id, index, broken, call, context) for index in range(ask.n)]

    def _sequence(
        self,
        ask: Ask,
        limit: int,
        request_id: str,
        index: int,
        broken: str,
        call: tools.Call | None,
        context: speech.Spot | None,
    ) -> Sequence:
        limit_finish: Finish = "length"
        min_tokens, may_end = ask.min_tokens, not ask.ignore_eos
        answer_from = limit // 2 if ask.thinking else 0  # half of the budget goes into thought
        seed = requests.sampling_seed(ask, self.settings.seed, request_id, index)
        script = self._script(ask, limit, seed)
        if script is None and call is not None:
            script = exams.Script([*language.encode(call.arguments), language.EOS], 0)
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
            stop_ids=frozenset() if script else ask.stop_ids,
            answer_from=answer_from,
            script=script.tokens if script else (),
            at_once=script.thought + 1 if script and not ask.stream else 1,
            voice=self._voice(ask, request_id, index, min_tokens, context) if context and not script else None,
            salt=ask.cache_salt.encode(),
        )

    def _voice(self, ask: Ask, request_id: str, index: int, min_tokens: int, context: speech.Spot) -> Voice:
        last, position, state = context
        return Voice(
            last=last,
            position=position,
            state=state,
            request=next(self.spoken),
            temperature=ask.temperature,
            top_p=ask.top_p,
            top_k=ask.top_k,
            seed=requests.own_seed(ask, request_id, index),
            min_tokens=min_tokens,
            trace=ask.trace,
            scored=ask.logprobs,
            scored_ids=ask.logprob_ids,
        )

    def _call(self, ask: Ask, request_id: str) -> tools.Call | None:
        """The tool call that answers a chat. "auto" leads to one with the language model only: words are what
        recorded sessions, whose requests all have tools, are replayed against."""
        if ask.ignore_eos or ask.tool_choice == "none":
            return None
        if ask.tool_choice == "auto" and self.settings.language != "model":
            return None
        seed = requests.sampling_seed(ask, self.settings.seed, request_id)
        return tools.call(ask.tools, ask.tool_choice, mix(seed, speech.context_of(ask.prompt)[2]))

    def _script(self, ask: Ask, limit: int, seed: int) -> exams.Script | None:
        question = None if ask.ignore_eos else exams.find(self.exams, ask.question)
        if question is None:
            return None
        specialised = self.settings.decode_backend == "latency_specialized"
        noise = self.settings.noise_seed
        luck = mix(seed, noise) if noise else seed
        return exams.reply(question, ask.question, limit, luck, specialised=specialised)

    async def _stream(
        self,
        request: web.Request,
        headers: dict[str, str],
        sequences: list[Sequence],
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

        going = len(sequences)

        def deliver(index: int, tokens: list[int]) -> None:
            nonlocal going
            data = reply.chunk(tokens, index)
            finish = sequences[index].finish
            # A chosen stream that ends by itself before half-way ends well.
            cut = broken if finish == "error" else ""
            if finish is not None and not cut:
                going -= 1
                if going:
                    finish = None  # of this choice only
                else:
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

        self._submit(sequences, deliver)
        await ended
        with suppress(ConnectionError):  # the client may leave between the last chunk and this
            await response.write_eof()
        return response

    async def _whole(
        self,
        request: web.Request,
        headers: dict[str, str],
        sequences: list[Sequence],
        reply: replies.Reply,
        truth: RequestTruth,
        broken: str,
    ) -> web.StreamResponse:
        ended = asyncio.get_running_loop().create_future()
        outputs: list[list[int]] = [[] for _ in sequences]

        def deliver(index: int, tokens: list[int]) -> None:
            outputs[index].extend(tokens)
            if all(sequence.finish is not None for sequence in sequences) and not ended.done():
                ended.set_result(None)

        self._submit(sequences, deliver)
        await ended
        response = web.Response(body=reply.whole(outputs), content_type="application/json", headers=headers)
        await response.prepare(request)
        truth.emissions.append((time.monotonic_ns(), sum(map(len, outputs))))
        with suppress(ConnectionError):
            await response.write_eof()
        truth.finish = sequences[0].finish or "abort"
        return response

    def _submit(self, sequences: list[Sequence], deliver: Callable[[int, list[int]], None]) -> None:
        for index, sequence in enumerate(sequences):
            sequence.deliver = partial(deliver, index)
            self.engine.submit(sequence)

    async def _tokenize(self, request: web.Request) -> web.Response:
        try:
            tokens = requests.tokenized(await request.read()).tolist()
        except Refused as refusal:
            return _refusal(refusal, anthropic=False)
        return web.json_response(
            {"count": len(tokens), "max_model_len": self.profile.max_model_len, "tokens": tokens, "token_strs": None}
        )

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


def _refusal(refusal: Refused, *, anthropic: bool) -> web.Response:
    body = replies.error_body(refusal.status, refusal.message, refusal.kind, refusal.param, anthropic)
    return web.Response(status=refusal.status, body=body, content_type="application/json")


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
