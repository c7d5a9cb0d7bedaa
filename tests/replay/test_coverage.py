"""Reading what servers wrote about their steps: tables out of a log as vLLM 0.32.0 prints it, and step logs."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay import coverage
from replay.coverage import read_steps, tables
from replay.records import STEP, GraphCount, StepLog

PREFIX = "(APIServer pid=4711) INFO 11-30 19:40:02 [cuda_graph.py:118] "


def table(rows: list[tuple[int, int, str, int]], prefix: str = PREFIX) -> str:
    """As vLLM prints it: columns as wide as their longest word, the logger's prefix before every line."""
    cells = [["Unpadded Tokens", "Padded Tokens", "Num Paddings", "Runtime Mode", "Count"]]
    cells += [[str(a), str(b), str(b - a), mode, str(count)] for a, b, mode, count in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    lines = [
        "| " + " | ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    settings = [
        "**CUDAGraph Config Settings:**",
        "",
        "- Mode: FULL",
        "- Capture sizes: [1, 2, 4]",
        "",
        "**CUDAGraph Stats:**",
        "",
    ]
    return "".join(f"{prefix}{line}\n" for line in [*settings, *lines, ""])


OTHER = PREFIX + "Avg prompt throughput: 102.4 tokens/s, Running: 3 reqs | 1 | 2 |\n"


def test_tables_are_summed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        OTHER
        + table([(3, 4, "FULL", 100), (700, 700, "NONE", 2)])
        + OTHER
        + table([(3, 4, "FULL", 11), (3, 4, "PIECEWISE", 5)])
    )
    assert tables(log, 0, log.stat().st_size) == [
        GraphCount(unpadded=3, padded=4, mode="FULL", count=111),
        GraphCount(unpadded=3, padded=4, mode="PIECEWISE", count=5),
        GraphCount(unpadded=700, padded=700, mode="NONE", count=2),
    ]


def test_only_what_lies_between_the_edges_counts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    parts = [table([(1, 1, "FULL", 9)]), table([(2, 2, "FULL", 7)], prefix=""), table([(4, 4, "FULL", 5)])]
    log.write_text("".join(parts))
    start, end = len(parts[0]), len(parts[0]) + len(parts[1])
    assert tables(log, start, end) == [GraphCount(unpadded=2, padded=2, mode="FULL", count=7)]
    assert tables(log, end, end) == []


@given(edge=st.integers(0, 1000))
def test_an_edge_in_a_row_never_changes_its_numbers(tmp_path_factory: pytest.TempPathFactory, edge: int) -> None:
    log = tmp_path_factory.mktemp("log") / "log"
    text = table([(1234, 2345, "PIECEWISE", 987)])
    log.write_text(text)
    edge = min(edge, len(text))
    row = GraphCount(unpadded=1234, padded=2345, mode="PIECEWISE", count=987)
    before, after = tables(log, 0, edge), tables(log, edge, len(text))
    assert before + after in ([], [row])


def test_step_logs_are_read_as_far_as_they_are_written(tmp_path: Path) -> None:
    head = StepLog(
        engine=1, pid=7, started_ns=5, started_unix_s=1.0, vllm_version="0.32.0", cudagraph_mode=None,
        capture_sizes=[], cudagraph_metrics=False, draft_tokens=0, decode_backend=None,
    )  # fmt: skip
    records = np.zeros(3, STEP)
    records["decode_tokens"] = [4, 5, 6]
    (tmp_path / "1-7.json").write_bytes(msgspec.json.encode(head))
    (tmp_path / "1-7.bin").write_bytes(records.tobytes()[:-9])
    [(found, steps)] = read_steps(tmp_path)
    assert found == head
    assert steps["decode_tokens"].tolist() == [4, 5]
    assert read_steps(tmp_path / "nothing") == []


@pytest.mark.parametrize("days", [0, 3])
def test_a_running_servers_log_is_copied_for_the_window_and_in_this_hosts_clock(tmp_path: Path, days: int) -> None:
    """Three steps, a minute apart; only the second falls into the window. A host that was booted earlier has a
    monotonic clock that is days ahead."""
    ahead_ns = days * 86_400 * 10**9
    now_ns = time.monotonic_ns()
    log = tmp_path / "log"
    log.mkdir()
    head = StepLog(
        engine=0, pid=7, started_ns=now_ns - 10**12 + ahead_ns, started_unix_s=time.time() - 1000,
        vllm_version="0.33.0", cudagraph_mode="FULL", capture_sizes=[1], cudagraph_metrics=True,
        draft_tokens=0, decode_backend=None,
    )  # fmt: skip
    (log / "0-7.json").write_bytes(msgspec.json.encode(head))
    steps = np.zeros(3, STEP)
    steps["t_ns"] = now_ns + ahead_ns + np.array([-120, -60, 0]) * 10**9
    steps["decode_tokens"] = [1, 2, 3]
    steps.tofile(log / "0-7.bin")
    coverage.copy_steps(log, tmp_path / "steps", now_ns - 61 * 10**9, now_ns - 59 * 10**9)
    ((copied, kept),) = coverage.read_steps(tmp_path / "steps")
    assert kept["decode_tokens"].tolist() == [2]
    assert abs(int(kept["t_ns"][0]) - (now_ns - 60 * 10**9)) < 0.2 * 10**9
    assert abs(copied.started_ns - (now_ns - 10**12)) < 0.2 * 10**9
    coverage.copy_steps(log, tmp_path / "none", now_ns + 10 * 10**9, now_ns + 20 * 10**9)
    assert not (tmp_path / "none").exists()
