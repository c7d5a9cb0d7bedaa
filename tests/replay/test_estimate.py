"""Estimates: what a comparison takes, by hand and against what runs took."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from replay.estimate import Estimate, Work, check_disk, estimate, lines, planned_work
from replay.experiment import Experiment
from replay.order import block_order
from replay.plan import read_plan
from replay.records import CHUNK, STEP, Plan, Play, Session, Stream, Turn
from tests.integration.runs import blocks, experiment, records, run
from workloads.errors import UserError

SESSIONS = [
    Session(
        id="one",
        content_key="1/one",
        block_size=64,
        streams=[
            Stream(
                agent="main",
                turns=[
                    Turn(input_tokens=100, output_tokens=10, keep=0, new_blocks=[0, 1]),
                    Turn(input_tokens=200, output_tokens=20, keep=1, new_blocks=[2, 3, 4], ideal_cached=64),
                    Turn(input_tokens=9000, output_tokens=30, keep=1, new_blocks=[], fate="cut", cut_reason="x"),
                ],
            )
        ],
    ),
    Session(
        id="two",
        content_key="1/two",
        block_size=64,
        streams=[Stream(agent="main", turns=[Turn(input_tokens=50, output_tokens=5, keep=0, new_blocks=[9])])],
    ),
]


def plan_in(folder: Path, **changes: Any) -> Plan:
    """Lane 0 plays both sessions, lane 1 the first one from its second turn."""
    (folder / "sessions.jsonl").write_bytes(b"".join(msgspec.json.encode(session) + b"\n" for session in SESSIONS))
    return Plan(
        **{
            "seed": 1,
            "mode": "closed",
            "end": "work",
            "duration_s": None,
            "drain_s": 30,
            "lanes": [[Play(0, 0), Play(1, 0)], [Play(0, 1, start_turn=1)]],
            "lane_start_s": [0, 0],
            "sessions": 2,
            "sessions_digest": "",
            "api": "completions",
            "rendering_digest": "",
            "pause_cap_s": None,
            "pause_removed_share": 0.0,
            "estimated_s": 900.0,
            "turns": {"send": 4},
            **changes,
        }
    )


def urls(**candidate: Any) -> Experiment:
    """Two servers at URLs, four GPUs each, at 3 an hour each."""
    base = {"url": "http://127.0.0.1:1", "gpus": {"count": 4, "kind": "GB300"}, "price_per_gpu_hour": 3.0}
    described = experiment(both=base)
    changed = described.backends.candidate.model_copy(update=candidate)
    mixed = described.backends.model_copy(update={"candidate": changed})
    return described.model_copy(update={"backends": mixed})


def test_the_work_of_a_block_by_hand(tmp_path: Path) -> None:
    assert planned_work(plan_in(tmp_path), tmp_path) == Work(
        requests=4,
        input_tokens=100 + 200 + 50 + 200,
        cached_tokens=64 + 64,
        output_tokens=10 + 20 + 5 + 20,
        rated=4,
        longest=220,
        median=(110 + 220) // 2,
    )


def test_a_fixed_duration_plays_the_lanes_over_again(tmp_path: Path) -> None:
    work = planned_work(plan_in(tmp_path, end="duration", duration_s=1800.0), tmp_path)
    assert (work.requests, work.output_tokens, work.longest) == (8, 110, 220)


def test_time_gpu_hours_and_price_by_hand(tmp_path: Path) -> None:
    order = ["baseline", "candidate", "candidate", "baseline"]
    plan = plan_in(tmp_path)
    found = estimate(urls(), plan, tmp_path, order)
    assert (found.block_s, found.blocks) == (900.0, 4)
    assert found.gpu_hours == {"baseline": 2.0, "candidate": 2.0}  # 4 GPUs, 2 blocks, a quarter of an hour
    assert found.cost == {"baseline": 6.0, "candidate": 6.0}
    shown = lines(found)
    assert shown["how long"].startswith("15 min a block, 60 min in all")
    assert shown["GPU hours"].startswith("baseline 2.00 (costs 6.00), candidate 2.00 (costs 6.00); ")
    assert "4 requests: 550 prompt tokens (23% cached, ideally), 55 to be generated" in shown["a block"]
    found = estimate(urls(price_per_gpu_hour=None), plan, tmp_path, order, time_scale=9)
    assert found.block_s == 100.0
    assert list(found.cost) == ["baseline"]
    found = estimate(urls(gpus=None), plan, tmp_path, order)
    assert list(found.gpu_hours) == list(found.cost) == ["baseline"]


def test_disk_grows_by_a_chunk_and_a_step_for_every_token(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    one = estimate(urls(), plan, tmp_path, ["baseline"]).disk_bytes
    two = estimate(urls(), plan, tmp_path, ["baseline"] * 2).disk_bytes
    more = two - one - 55 * CHUNK.itemsize
    assert more > 4 * 620  # and four records, and what comes second by second
    served = experiment(both={"serve": {"command": "vllm serve m"}, "gpus": {"count": 4, "kind": "GB300"}})
    assert estimate(served, plan, tmp_path, ["baseline"]).disk_bytes - one == 55 * STEP.itemsize


def test_a_run_takes_the_disk_that_was_estimated_for_it(tmp_path: Path) -> None:
    described = experiment()
    folder = run(described, tmp_path / "run")
    plan = read_plan(folder)
    found = estimate(described, plan, folder, block_order(described), time_scale=20)
    measured = blocks(folder)
    assert len(measured) == found.blocks
    for path, _ in measured:
        sent = records(path)
        assert len(sent) == found.work.requests
        assert sum(record.input_tokens or 0 for record in sent) == found.work.input_tokens
        assert sum(record.output_tokens or 0 for record in sent) == found.work.output_tokens
        assert max((record.input_tokens or 0) + (record.output_tokens or 0) for record in sent) == found.work.longest
    took = sum(file.stat().st_size for file in (folder / "blocks").rglob("*") if file.is_file())
    rest = estimate(described, plan, folder, [], time_scale=20).disk_bytes
    assert took < found.disk_bytes - rest < 2 * took


def described(disk_bytes: int) -> Estimate:
    work = Work(requests=1, input_tokens=1, cached_tokens=0, output_tokens=1, rated=0, longest=2, median=2)
    return Estimate(block_s=1, blocks=1, work=work, disk_bytes=disk_bytes, gpu_hours={}, cost={})


def test_a_full_disk_is_refused_and_a_small_one_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def usage(folder: Path) -> SimpleNamespace:
        asked.append(folder)
        return SimpleNamespace(free=3 * 2**30)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    run = tmp_path / "not" / "there"
    assert check_disk(described(3 * 2**29), run).level == "ok"
    assert check_disk(described(3 * 2**29 + 1), run).level == "warning"
    assert check_disk(described(3 * 2**30), run).level == "warning"
    with pytest.raises(UserError, match=r"takes up to 4 GiB, .* has 3 GiB free: name a folder on another disk"):
        check_disk(described(4 * 2**30), run)
    assert set(asked) == {tmp_path}
