"""The evals on a real vLLM on the CPU, with a tiny random model: it takes every field that is sent, and tells what is
kept. One server is both backends, so that the same seed must give the same reply.

Needs vllm-cpu: see vllm_cpu.py.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evals import invented
from evals.records import Answer, EvalPlan
from tests.evals import fixtures
from tests.integration import vllm_cpu
from tests.integration.runs import experiment, silent
from tests.integration.vllm_cpu import GPUS

pytest.importorskip("lm_eval")

from evals.harness import measure

pytestmark = vllm_cpu.needs_vllm


def test_a_real_server_sits_three_exams(tiny_model: Path, tmp_path: Path) -> None:
    aime25 = fixtures.write(invented.aime25(4), tmp_path / "aime25.jsonl")
    gpqa = fixtures.write(invented.gpqa_diamond(3), tmp_path / "gpqa.csv")
    chats = invented.mrcr(2, needles=(2, 4), characters=400)  # of tokens that are bytes: the second does not fit
    mrcr = fixtures.write(chats, tmp_path / "mrcr.jsonl")
    fixtures.write_lengths(mrcr, hashlib.sha256(mrcr.read_bytes()).hexdigest(), [4200, 5000])
    few = {"subset": True, "repeats": 2, "concurrency": 1}
    evals = {
        "aime25": {"data": str(aime25), **few},
        "gpqa_diamond": {"data": str(gpqa), **few},
        "mrcr": {"data": str(mrcr), **few},
        "sampling": {"max_tokens": 24, "temperature": 2.0, "top_p": 1.0},  # at 1 the model says one thing only
    }
    # whole prompts in one step: vllm-cpu 0.32 falls over a seeded request whose prompt it cuts into chunks
    room: dict[str, Any] = {"max_model_len": 4096, "max_num_batched_tokens": 4096}
    with vllm_cpu.served(tiny_model, tmp_path / "server", **room) as server:
        described = experiment(
            model="tiny", tokenizer=str(tiny_model), both={"url": server.url, "gpus": GPUS}, evals=evals
        )
        measure(described, tmp_path / "run", silent, lambda at: None)

    def sat(backend: str, task: str, repeat: int) -> list[Answer]:
        lines = (tmp_path / "run" / "evals" / backend / task / f"r{repeat:03d}.jsonl").read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Answer) for line in lines]

    plan = msgspec.json.decode((tmp_path / "run" / "evals" / "plan.json").read_bytes(), type=EvalPlan)
    assert [task.data.unfit for task in plan.tasks] == [[], [], [1]]
    for task, items in (("aime25", 4), ("gpqa_diamond", 3), ("mrcr", 1)):
        for repeat in (0, 1):
            one, other = (sat(backend, task, repeat) for backend in ("baseline", "candidate"))
            assert [each.item for each in one] == list(range(items))
            assert {each.outcome for each in one} <= {"unparsed", "truncated", "wrong", "right"}
            for mine, theirs in zip(one, other, strict=True):
                assert mine.completion_tokens is not None
                assert mine.prompt_tokens is not None
                assert mine.completion_tokens <= 24
                assert mine.finish_reason in ("length", "stop")
                assert mine.fingerprint is not None
                assert mine.prompt_ids_hash == theirs.prompt_ids_hash is not None
                assert (mine.prompt_hash, mine.reply_hash) == (theirs.prompt_hash, theirs.reply_hash)
        first, second = (sat("baseline", task, repeat) for repeat in (0, 1))
        assert [each.reply_hash for each in first] != [each.reply_hash for each in second]
