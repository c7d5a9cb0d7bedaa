"""Readings of /metrics: what is kept of a page, when it is read, and what the emulator's server says of its own
times."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from replay.emulator import language, process
from replay.emulator.settings import EmulatorSettings
from replay.emulator.speculation import Speculation
from replay.emulator.truth import RequestTruth, read_emissions
from replay.metrics import Scraper, parse
from replay.outcomes import Outcome, outcome
from replay.records import MetricsSample
from replay.wire import Exchange, Limits, Wire
from tests.scripted_server import Request, Step, reply, serve
from workloads.rendering import PATHS, Api

PAGE = """\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 11843.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_running{engine="1",model_name="tiny"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} NaN
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 64.0
# TYPE vllm:prompt_tokens_created gauge
vllm:prompt_tokens_created{engine="0",model_name="tiny"} 1.7960428e+09
# TYPE vllm:generation_tokens counter
vllm:generation_tokens{engine="0",model_name="a \\"b\\", c"} 5
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",engine="0",num_gpu_blocks="512"} 1.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="tiny"} 0.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="tiny"} 3.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 3.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="tiny"} 0.0625
"""
TINY = {"engine": "0", "model_name": "tiny"}


def test_a_page_is_cut_to_what_can_be_judged() -> None:
    assert parse(PAGE) == [
        ("vllm:num_requests_running", TINY, 2.0),
        ("vllm:num_requests_running", {"engine": "1", "model_name": "tiny"}, 0.0),
        ("vllm:prompt_tokens_total", TINY, 64.0),
        ("vllm:generation_tokens_total", {"engine": "0", "model_name": 'a "b", c'}, 5.0),
        ("vllm:cache_config_info", {"block_size": "128", "engine": "0", "num_gpu_blocks": "512"}, 1.0),
        ("vllm:time_to_first_token_seconds_count", TINY, 3.0),
        ("vllm:time_to_first_token_seconds_sum", TINY, 0.0625),
    ]


def test_between_the_edges_only_gauges_that_change_are_kept() -> None:
    assert {name for name, _, _ in parse(PAGE, gauges=True)} == {"vllm:num_requests_running"}


@pytest.mark.parametrize("text", ["<html>login</html>", "vllm:x{engine=0} 5", "vllm:x five"])
def test_what_is_no_page_of_metrics_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse(text)


@pytest.mark.parametrize("text", ["", "# HELP sglang:x\n# TYPE sglang:x gauge\nsglang:x 1\n"])
def test_another_servers_page_holds_nothing(text: str) -> None:
    assert parse(text) == []


# --- reading ----------------------------------------------------------------------------------------------------------


def read(file: Path) -> list[MetricsSample]:
    return [msgspec.json.decode(line, type=MetricsSample) for line in file.read_bytes().splitlines()]


def wait_for(file: Path, lines: int) -> None:
    deadline = time.monotonic() + 10
    while not file.exists() or file.read_bytes().count(b"\n") < lines:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_full_readings_at_the_edges_and_gauges_in_between(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"

    def script(_: Request) -> Sequence[Step]:
        return reply(200, PAGE.encode())

    with serve(script) as server, Scraper(f"{server.url}/v1", {"X-Key": "k"}, file, 0.01) as scraper:
        before = time.monotonic_ns()
        scraper.start_edge()
        assert len(read(file)) >= 1  # it is there when the window opens
        wait_for(file, 4)
        scraper.end_edge()
        asked = len(server.requests)
        time.sleep(0.05)
        assert len(server.requests) == asked  # no more after the end
    found = read(file)
    assert [found[0].at, found[-1].at] == ["start", "end"]
    assert {each.at for each in found[1:-1]} == {"between"}
    assert found[0].samples == found[-1].samples == parse(PAGE)
    assert found[1].samples == parse(PAGE, gauges=True)
    times = [each.t_ns for each in found]
    assert times == sorted(times)
    assert before <= times[0]
    head = server.requests[0].head.decode()
    assert head.startswith("GET /metrics HTTP/1.1\r\n")
    assert "x-key: k" in head.lower()


def readings_of(tmp_path: Path, script_of: bytes | int) -> list[MetricsSample]:
    """Readings of a server that gives this body, or this status; edges and several intervals."""
    file = tmp_path / "metrics.jsonl"

    def script(_: Request) -> Sequence[Step]:
        if isinstance(script_of, int):
            return reply(script_of, b"", headers="location: /elsewhere\r\n")
        return reply(200, script_of)

    with serve(script) as server, Scraper(server.url, {}, file, 0.005) as scraper:
        scraper.start_edge()
        time.sleep(0.05)
        scraper.end_edge()
    return read(file)


def test_a_missing_page_is_said_once_and_not_asked_for_again(tmp_path: Path) -> None:
    (found,) = readings_of(tmp_path, 404)
    assert (found.at, found.error, found.samples) == ("start", "http 404", [])


@pytest.mark.parametrize(
    ("answer", "error"),
    [(503, "http 503"), (302, "http 302"), (b"<html>", "ValueError: not a page of metrics: '<html>'")],
)
def test_errors_are_recorded_and_never_raised(tmp_path: Path, answer: bytes | int, error: str) -> None:
    found = readings_of(tmp_path, answer)
    assert len(found) > 2
    assert {each.error for each in found} == {error}


def test_a_server_that_is_gone_is_recorded(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with Scraper("http://127.0.0.1:1", {}, file, 60) as scraper:
        scraper.start_edge()
        scraper.end_edge()
    start, end = read(file)
    assert (start.at, end.at) == ("start", "end")
    assert start.error is not None
    assert "refused" in start.error


def test_a_proxy_of_the_environment_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    assert {each.error for each in readings_of(tmp_path, PAGE.encode())} == {None}


def test_a_block_that_is_given_up_ends_the_thread(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with Scraper("http://127.0.0.1:1", {}, file, 0.001) as scraper:
        scraper.start_edge()
        wait_for(file, 3)
    lines = file.read_bytes().count(b"\n")
    time.sleep(0.03)
    assert file.read_bytes().count(b"\n") == lines
    assert "end" not in {each.at for each in read(file)}


# --- against the emulator's own log -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[process.Emulator]:
    settings = EmulatorSettings(time_scale=4, model="m", speculation=Speculation(draft_tokens=3, acceptance_length=2.5))
    started = process.start(settings, tmp_path_factory.mktemp("emulator"))
    yield started
    process.stop(started)


def ask(emulator: process.Emulator, api: Api, names: list[str], output: int) -> list[tuple[Exchange, Outcome]]:
    """Requests side by side, through the client's own wire."""
    prompt = list(range(language.FIRST_WORD, language.FIRST_WORD + 400))
    content = {"prompt": prompt} if api == "completions" else {"messages": [{"role": "user", "content": "hello"}]}
    asked = {"model": "m", "max_tokens": output, "ignore_eos": True, "stream": True, **content}
    body = json.dumps(asked | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}).encode()

    async def main() -> list[Exchange]:
        async with Wire(emulator.url, Limits(), connections=len(names), headers={}) as wire:
            return await asyncio.gather(*[wire.exchange(PATHS[api], body, {"X-Request-ID": name}) for name in names])

    return [
        (each, outcome(each, api=api, asked_output=output, exact_length=True, limits=Limits()))
        for each in asyncio.run(main())
    ]


def truth_of(emulator: process.Emulator, name: str) -> RequestTruth:
    deadline = time.monotonic() + 5
    while True:
        if found := [each for each in read_emissions(emulator.log_dir) if each.request_id == name]:
            return found[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_the_servers_own_times_are_those_of_its_log(emulator: process.Emulator, api: Api) -> None:
    ((exchange, found),) = ask(emulator, api, [f"times-{api}"], 60)
    truth = truth_of(emulator, f"times-{api}")
    (first_ns, _), *_, (last_ns, _) = truth.emissions
    assert found.status == "ok"
    assert found.server_itl_s == pytest.approx((last_ns - first_ns) * 1e-9 / 59, rel=0.02)
    assert found.server_first_token_s is not None
    assert found.server_queue_s is not None
    assert 0 <= found.server_queue_s <= found.server_first_token_s
    # from the log's arrival (headers read) to the first write, less what lies before the queue
    assert found.server_first_token_s <= (first_ns - truth.arrived_ns) * 1e-9
    assert found.first_token_ns is not None
    assert found.server_first_token_s <= (found.first_token_ns - exchange.sent_ns) * 1e-9


def test_the_edges_count_what_the_log_emitted(emulator: process.Emulator, tmp_path: Path) -> None:
    names = [f"counted-{number}" for number in range(4)]
    with Scraper(emulator.url, {}, tmp_path / "metrics.jsonl", 0.02) as scraper:
        scraper.start_edge()
        replies = ask(emulator, "completions", names, 50)
        scraper.end_edge()
    start, *between, end = read(tmp_path / "metrics.jsonl")

    def grown(name: str) -> float:
        before, after = ({n: value for n, _, value in sample.samples} for sample in (start, end))
        return after[name] - before[name]

    assert grown("vllm:generation_tokens_total") == sum(found.output_tokens or 0 for _, found in replies) == 200
    assert grown("vllm:prompt_tokens_total") == 1600
    accepted, drafts = (grown(f"vllm:spec_decode_num_{name}_total") for name in ("accepted_tokens", "drafts"))
    emissions = [truth_of(emulator, name).emissions for name in names]
    assert drafts <= sum(len(each) - 1 for each in emissions)
    assert accepted / drafts + 1 == pytest.approx(2.5, abs=0.15)
    assert max(value for sample in between for name, _, value in sample.samples if "running" in name) == 4
