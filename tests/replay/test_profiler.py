"""A server's profiler runs while all streams decode, and only then; with a script in the place of the server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence

import pytest

from replay import profiler
from replay.profiler import Batch
from replay.wire import Limits
from tests.scripted_server import DONE, Request, ScriptedServer, Step, event, reply, serve, stream, usage
from workloads.errors import UserError

STEP_MS = 4.0
WARMUP, OUTPUT = 3, 300
STAGGER_MS = 60.0
"""Between the first tokens of two streams: in the time, a stream that is ahead decodes 15 steps."""


def tokens(
    request: Request, *, each: int = 1, usages: bool = True, first_ms: float = 0.0, step_ms: float = STEP_MS
) -> list[Step]:
    """As many as asked for, ``each`` an event, an event a step."""
    asked: int = json.loads(request.body)["max_tokens"]
    events: list[tuple[float, bytes]] = []
    for number, sent in enumerate(range(each, asked + each, each)):
        counted = {"usage": usage(1, min(sent, asked))} if usages else {}
        events.append((first_ms + number * step_ms, event(json.dumps({"choices": [{"index": 0}], **counted}))))
    return stream([*events, (events[-1][0], DONE)])


def server(
    completion: Callable[[Request], Sequence[Step]] = tokens, *, start: int = 200, stop_ms: float = 0.0
) -> Callable[[Request], Sequence[Step]]:
    """Measured streams begin one after another."""
    begun: list[int] = []

    def script(request: Request) -> Sequence[Step]:
        if request.path == "/start_profile":
            return reply(start, b"")
        if request.path == "/stop_profile":
            return reply(200, b"", at_ms=stop_ms)
        steps = completion(request)
        if json.loads(request.body)["max_tokens"] == WARMUP:
            return steps
        begun.append(request.number)
        late_ms = STAGGER_MS * (len(begun) - 1)
        return [Step(step.at_ms + late_ms, step.data, step.end) for step in steps]

    return script


def profiled(
    url: str, *, steps: int = 10, streams: int = 3, output: int = OUTPUT, tokens_per_step: int = 1
) -> profiler.Profiled:
    def body(output: int) -> bytes:
        return json.dumps({"prompt": [1], "max_tokens": output, "stream": True}).encode()

    batch = Batch(
        warmup=[body(WARMUP)] * streams, measured=[body(output)] * streams, tokens_per_step=tokens_per_step, steps=steps
    )
    return asyncio.run(profiler.profile(url, {}, Limits(), batch))


def sorted_out(played: ScriptedServer) -> tuple[list[Request], list[Request], Request, Request]:
    """Requests of the warm-up and of the measured batch, and those that started and stopped the profiler."""
    by_path: dict[str, list[Request]] = {}
    for request in played.requests:
        by_path.setdefault(request.path, []).append(request)
    (start,), (stop,) = by_path["/start_profile"], by_path["/stop_profile"]
    asked = [(json.loads(request.body)["max_tokens"], request) for request in by_path["/v1/completions"]]
    return (
        [request for output, request in asked if output == WARMUP],
        [request for output, request in asked if output != WARMUP],
        start,
        stop,
    )


def test_the_profiler_runs_while_all_streams_decode() -> None:
    with serve(server()) as played:
        seen = profiled(played.url)
    warmup, measured, start, stop = sorted_out(played)
    assert len(warmup) == len(measured) == 3
    assert max(at for request in warmup for at, _ in request.sent) < min(request.came_ns for request in measured)
    for request in measured:
        sent = [at for at, _ in request.sent]
        assert sum(at < start.came_ns for at in sent) > 5, "its first token, and a few steps"
        assert sum(start.came_ns < at < stop.came_ns for at in sent) >= 10
        assert len(sent) < OUTPUT, "cut, since nothing is wanted of it any more"
    assert start.came_ns < seen.opened_ns < seen.closed_ns < stop.came_ns
    last = measured[-1].sent
    assert sum(start.came_ns < at < stop.came_ns for at, _ in last) < 50, "and no longer than asked for"


@pytest.mark.parametrize(
    ("each", "usages", "per_step", "events"),
    [(1, False, 1, 20), (4, True, 1, 5), (4, True, 8, 20), (20, True, 8, 7)],
    ids=["no usage", "four steps an event", "speculation", "speculation, several steps an event"],
)
def test_steps_are_counted_from_tokens(each: int, usages: bool, per_step: int, events: int) -> None:
    def completion(request: Request) -> list[Step]:
        return tokens(request, each=each, usages=usages)

    with serve(server(completion)) as played:
        profiled(played.url, steps=20, streams=1, output=OUTPUT * each, tokens_per_step=per_step)
    _, (only,), start, stop = sorted_out(played)
    assert events - 2 <= sum(start.came_ns < at < stop.came_ns for at, _ in only.sent) <= events + 10


@pytest.mark.parametrize("each", [1, 4], ids=["a step an event", "four"])
def test_the_step_before_the_profile_is_timed(each: int) -> None:
    """As the server's own log has it: the time between its events."""
    with serve(server(lambda request: tokens(request, each=each))) as played:
        seen = profiled(played.url, streams=1)
    _, (only,), start, _ = sorted_out(played)
    sent = [at for at, _ in only.sent if at < start.came_ns]
    took_s = (sent[-1] - sent[0]) * 1e-9 / (each * (len(sent) - 1))
    assert seen.step_s == pytest.approx(took_s, rel=0.3)


def test_a_profiler_may_take_long_to_stop() -> None:
    """The streams end meanwhile; what was profiled is complete all the same."""
    with serve(server(stop_ms=OUTPUT * STEP_MS + 500)) as played:
        seen = profiled(played.url, streams=1)
        ended_ns = time.monotonic_ns()
    _, (only,), _, stop = sorted_out(played)
    assert stop.came_ns < only.sent[-1][0] < stop.sent[-1][0] < ended_ns
    assert seen.closed_ns < stop.came_ns


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (server(start=404), 'no profiler .* 404.*--profiler-config \'{"profiler": "torch", "torch_profiler_dir": '),
        (server(start=500), "POST /start_profile answers http 500"),
        (server(lambda _: reply(400, {"error": "too long"})), 'answered http 400: {"error":"too long"}'),
        (server(lambda _: stream([(0, event('{"error":{"message":"died"}}'))])), "the server says .*died"),
    ],
    ids=["no profiler", "broken", "refused", "error in the stream"],
)
def test_what_goes_wrong_is_told(script: Callable[[Request], Sequence[Step]], told: str) -> None:
    with serve(script) as played, pytest.raises(UserError, match=told):
        profiled(played.url)


def test_a_profiler_is_stopped_when_a_stream_ends_too_early() -> None:
    with (
        serve(server()) as played,
        pytest.raises(UserError, match=r"ended before the profile did: raise decode\.output"),
    ):
        profiled(played.url, steps=OUTPUT)
    _, measured, _, stop = sorted_out(played)
    assert stop.came_ns > measured[0].sent[-1][0]


def test_the_fewest_tokens_last_for_the_steps() -> None:
    """A stream alone, of four tokens a step and no more of them than needed."""
    fewest = profiler.fewest_tokens(10, 4)
    with serve(server(lambda request: tokens(request, each=4, step_ms=5 * STEP_MS))) as played:
        profiled(played.url, streams=1, output=fewest, tokens_per_step=4)
