"""The plugin against hand-made statistics of steps, and its way into a server's process.

A stand-in for vLLM gives its base class and nothing else; tests/integration/test_step_log_vllm.py has the real one.
"""

from __future__ import annotations

import ast
import logging
import math
import os
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace as Stats
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay import step_log, step_plugin
from replay.coverage import read_steps
from replay.records import SCHEMA_VERSION, STEP, STEP_MODES, StepLog

CONFIG = Stats(
    compilation_config=Stats(cudagraph_mode=Stats(name="FULL_AND_PIECEWISE"), cudagraph_capture_sizes=[1, 2, 4, 8]),
    observability_config=Stats(cudagraph_metrics=True),
    speculative_config=Stats(num_speculative_tokens=3),
    additional_config={"decode_backend": "latency_specialized"},
    scheduler_config=Stats(async_scheduling=True),
)

VLLM_BASE = """
from abc import ABC, abstractmethod
class StatLoggerBase(ABC):
    @abstractmethod
    def __init__(self, vllm_config, engine_index=0): ...
    @abstractmethod
    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0): ...
    @abstractmethod
    def log_engine_initialized(self): ...
"""


def iteration(firsts: int = 0, decoding: int = 0, tokens: int | None = None, finished: int = 0) -> Stats:
    """As vLLM's IterationStats: ``tokens`` handed out, to requests of which ``firsts`` ended a prefill."""
    return Stats(
        num_generation_tokens=firsts + decoding if tokens is None else tokens,
        time_to_first_tokens_iter=[0.1] * firsts,
        inter_token_latencies_iter=[0.01] * decoding,
        finished_requests=[None] * finished,
    )


def scheduler(size: tuple[int, int, str] | None = None, drafts: tuple[int, int, int] | None = None) -> Stats:
    """As vLLM's SchedulerStats: (unpadded, padded, mode), and (requests, drafted, accepted)."""
    return Stats(
        num_running_reqs=5,
        num_waiting_reqs=2,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=0.25,
        cudagraph_stats=size and Stats(num_unpadded_tokens=size[0], num_padded_tokens=size[1], runtime_mode=size[2]),
        spec_decoding_stats=drafts
        and Stats(num_drafts=drafts[0], num_draft_tokens=drafts[1], num_accepted_tokens=drafts[2]),
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODEGATE_STEPS", str(tmp_path / "steps"))
    return tmp_path / "steps"


def steps(folder: Path) -> npt.NDArray[np.void]:
    [(_, found)] = read_steps(folder)
    return found


def test_the_records_are_laid_out_as_the_schema_says() -> None:
    assert step_log.STEP.size == STEP.itemsize
    values = [1 << 40, *range(2, 12), 0.5, 13]
    [record] = np.frombuffer(step_log.STEP.pack(*values), STEP)
    assert list(record.tolist()) == values
    assert {STEP_MODES[index]: index for index in (1, 2, 3)} == step_log.MODES


def test_a_decode_step(folder: Path) -> None:
    step_log.Steps(CONFIG, 1).record(
        scheduler((16, 16, "FULL"), drafts=(4, 12, 7)), iteration(decoding=4, tokens=11), mm_cache_stats=None
    )
    [(head, [record])] = read_steps(folder)
    assert head.engine == 1
    assert (folder / f"1-{os.getpid()}.bin").stat().st_size == STEP.itemsize
    fields = dict(zip(STEP.names or (), record.tolist(), strict=True))
    assert fields.pop("t_ns") > head.started_ns
    assert fields == {
        "running": 5, "waiting": 3, "prompt_tokens": 0, "first_tokens": 0, "decode_tokens": 11, "unpadded": 16,
        "padded": 16, "draft_requests": 4, "draft_tokens": 12, "accepted_tokens": 7, "kv_use": 0.25, "mode": 3,
    }  # fmt: skip


def test_the_head(folder: Path) -> None:
    step_log.Steps(CONFIG, 0)
    [(head, found)] = read_steps(folder)
    assert not len(found)
    assert head == StepLog(
        schema_version=SCHEMA_VERSION, engine=0, pid=os.getpid(), started_ns=head.started_ns,
        started_unix_s=head.started_unix_s, vllm_version="unknown", cudagraph_mode="FULL_AND_PIECEWISE",
        capture_sizes=[1, 2, 4, 8], cudagraph_metrics=True, draft_tokens=3, decode_backend="latency_specialized",
    )  # fmt: skip


def test_the_head_of_a_vllm_that_shows_nothing(folder: Path) -> None:
    step_log.Steps(Stats())
    [(head, _)] = read_steps(folder)
    assert (head.cudagraph_mode, head.capture_sizes, head.decode_backend) == (None, [], None)
    assert (head.cudagraph_metrics, head.draft_tokens) == (False, 0)


@pytest.mark.parametrize(
    ("scheduled", "given_out", "prompt"),
    [
        (500, iteration(firsts=1), 500),  # a prefill ends
        (512, None, 512),  # a chunk of one, alone
        (512, iteration(decoding=12, tokens=20), 500 - 9),  # with decode rows that verify 9 drafts
        (1, iteration(decoding=1), 0),
        (0, iteration(decoding=1), 0),  # an output that needed no row: a failure told late
    ],
)
def test_prompt_tokens_are_what_decoding_left(
    folder: Path, scheduled: int, given_out: Stats | None, prompt: int
) -> None:
    drafts = (3, 9, 8) if given_out and given_out.num_generation_tokens == 20 else None
    step_log.Steps(CONFIG).record(scheduler((scheduled, 512, "PIECEWISE"), drafts), given_out)
    assert steps(folder)["prompt_tokens"].tolist() == [prompt]


@pytest.mark.parametrize(("asynchronous", "prompts"), [(True, [0, 0, 5, 4]), (False, [0, 4, 5, 4])])
def test_rows_scheduled_after_a_requests_end_are_no_prompt(
    folder: Path, asynchronous: bool, prompts: list[int]
) -> None:
    config = Stats(**{**vars(CONFIG), "scheduler_config": Stats(async_scheduling=asynchronous)})
    log = step_log.Steps(config)
    log.record(scheduler((3, 4, "FULL")), iteration(decoding=3, finished=1))
    log.record(scheduler((6, 8, "FULL")), iteration(decoding=2))  # 2 rows, 1 + 3 tokens of the one that ended
    log.record(None, iteration(finished=1))  # told between steps
    log.record(scheduler((7, 8, "NONE")), iteration(decoding=2))  # 5 is more than it can be
    log.record(scheduler((6, 8, "NONE")), iteration(decoding=2))
    assert steps(folder)["prompt_tokens"].tolist() == prompts


def test_unknown_is_minus_one(folder: Path) -> None:
    log = step_log.Steps(CONFIG)
    log.record(None, iteration(firsts=1, decoding=2))
    log.record(scheduler(), iteration(decoding=2))
    with_nothing, with_counts = steps(folder)
    for field in ("running", "waiting", "prompt_tokens", "unpadded", "padded", "draft_requests", "draft_tokens"):
        assert with_nothing[field] == -1
    assert math.isnan(with_nothing["kv_use"])
    assert with_nothing["mode"] == with_counts["mode"] == 0
    assert with_counts[["prompt_tokens", "unpadded", "padded"]].tolist() == (-1, -1, -1)
    assert with_counts[["running", "draft_requests", "draft_tokens", "accepted_tokens"]].tolist() == (5, 0, 0, 0)


def test_a_call_without_a_step_leaves_no_record(folder: Path) -> None:
    log = step_log.Steps(CONFIG)
    log.record(scheduler(), None)
    log.record(None, None)
    log.record(None, iteration(decoding=1, tokens=0, finished=1))
    assert not len(steps(folder))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 20)), min_size=1, max_size=20))
def test_first_and_decode_tokens_are_all_tokens(calls: list[tuple[int, int, int]]) -> None:
    """Also where outputs carry no token."""
    log = step_log.Steps(Stats())
    records = [log._step(None, iteration(*call)) for call in calls]
    assert sum(r[3] + r[4] for r in records if r) == sum(tokens for _, _, tokens in calls)
    assert all(r[3] >= 0 and r[4] >= 0 for r in records if r)


def test_without_the_variable_it_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DECODEGATE_STEPS", raising=False)
    monkeypatch.chdir(tmp_path)
    log = step_log.Steps(None)
    log.record(None, object())  # would raise if it were looked at
    assert not list(tmp_path.iterdir())


def test_a_failure_switches_it_off_with_one_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = step_log.Steps(CONFIG)
    log.record(scheduler((1, 1, "FULL")), iteration(decoding=1))
    with caplog.at_level(logging.WARNING):
        log.record(scheduler((1, 1, "FULL")), Stats())  # a vLLM without these counters
        log.record(scheduler((1, 1, "FULL")), iteration(decoding=1))
    [line] = caplog.messages
    assert "off" in line
    assert "num_generation_tokens" in line
    assert len(steps(folder)) == 1


def test_a_full_disk_switches_it_off(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = step_log.Steps(CONFIG)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    log.record(scheduler((1, 1, "FULL")), iteration(decoding=1))
    assert "disk is full" in caplog.text
    assert not len(steps(folder))  # seven bytes are no record


def test_a_folder_that_cannot_be_switches_it_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DECODEGATE_STEPS", str(tmp_path / "file" / "steps"))
    step_log.Steps(CONFIG).record(scheduler(), iteration(decoding=1))
    assert len(caplog.messages) == 1


def test_loaded_twice_it_writes_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for log in [step_log.Steps(CONFIG), step_log.Steps(CONFIG)]:
        log.record(scheduler((1, 1, "FULL")), iteration(decoding=1))
    assert len(steps(folder)) == 1
    assert len([line for line in caplog.messages if "off" in line]) == 1


def test_the_class_needs_vllm_and_the_module_does_not() -> None:
    with pytest.raises(ImportError, match="no vLLM in this environment"):
        _ = step_log.StepLog
    with pytest.raises(AttributeError, match="has no attribute 'Other'"):
        _ = step_log.Other


def test_the_class_is_one_that_vllm_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("vllm.v1.metrics.loggers")
    exec(VLLM_BASE, module.__dict__)
    for name in ("vllm", "vllm.v1", "vllm.v1.metrics"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("DECODEGATE_STEPS", raising=False)
    made: Any = step_log.StepLog
    monkeypatch.delitem(step_log.__dict__, "StepLog")
    assert issubclass(made, module.StatLoggerBase)
    made(CONFIG, 0).record(None, None)  # nothing abstract is left


def test_the_plugin_needs_the_standard_library_only() -> None:
    tree = ast.parse(Path(step_log.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - {"vllm"} <= sys.stdlib_module_names


def test_a_server_finds_the_installed_plugin(tmp_path: Path) -> None:
    """As vLLM looks for it, in a Python that has nothing of ours."""
    package = tmp_path / "site" / "vllm" / "v1" / "metrics"
    package.mkdir(parents=True)
    for parent in (package, package.parent, package.parent.parent):
        (parent / "__init__.py").touch()
    (package / "loggers.py").write_text(VLLM_BASE)
    added = step_plugin.environment(
        step_plugin.install(tmp_path), tmp_path / "steps", {"PYTHONPATH": str(tmp_path / "site")}
    )
    script = """
from importlib.metadata import entry_points
from vllm.v1.metrics.loggers import StatLoggerBase
[found] = entry_points(group="vllm.stat_logger_plugins")
made = found.load()
assert issubclass(made, StatLoggerBase)
made(None, 0)
print(found.name, made.__module__)
"""
    out = subprocess.run(
        [sys.executable, "-S", "-c", script], env=added, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert out.stdout.split() == ["decodegate", "decodegate_step_log"]
    assert [path.suffix for path in sorted((tmp_path / "steps").iterdir())] == [".bin", ".json"]


def test_installing_twice_is_installing(tmp_path: Path) -> None:
    assert step_plugin.install(tmp_path) == step_plugin.install(tmp_path)


def test_a_list_of_allowed_plugins_gets_ours_added(tmp_path: Path) -> None:
    def allowed(given: dict[str, str]) -> str | None:
        return step_plugin.environment(tmp_path, tmp_path, given).get("VLLM_PLUGINS")

    assert allowed({}) is None
    assert allowed({"VLLM_PLUGINS": "lora,other"}) == "lora,other,decodegate"
    assert allowed({"VLLM_PLUGINS": ""}) == "decodegate"
