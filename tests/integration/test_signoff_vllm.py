"""A short eval of invented questions on two configurations of real vLLM (on the CPU, a tiny random model) that
decodegate starts itself, and its sign-off: the document is produced, and says what is missing.

Needs vllm-cpu: see vllm_cpu.py.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import reports.signoff.cli
from evals import invented
from replay.experiment import experiment_of
from reports.signoff.result import Signoff
from tests.integration import vllm_cpu
from tests.integration.runs import silent

pytest.importorskip("lm_eval")

from evals.harness import measure

pytestmark = vllm_cpu.needs_vllm

ITEMS = 4


def test_two_configurations_are_signed_off(tiny_model: Path, tmp_path: Path) -> None:
    questions = {"aime25": invented.aime25(ITEMS), "gpqa_diamond": invented.gpqa_diamond(ITEMS)}
    few = {"subset": True, "repeats": 2, "concurrency": 2}
    exams = {
        name: {"data": str(invented.write(rows, tmp_path / f"{name}.jsonl")), **few} for name, rows in questions.items()
    }
    described = experiment_of(
        {
            "name": "two configurations",
            "model": "tiny",
            "tokenizer": str(tiny_model),
            "evals": {**exams, "sampling": {"max_tokens": 24}},
            "serving": {"arrangement": "side_by_side", "under_test": ["max-num-seqs"]},
            "backends": {
                # whole prompts in one step: vllm-cpu 0.32 falls over a seeded request whose prompt it cuts into chunks
                "both": {
                    "serve": vllm_cpu.serve(tiny_model, max_model_len=2048, max_num_batched_tokens=2048),
                    "gpus": vllm_cpu.GPUS,
                },
                "baseline": {"serve": {"options": {"max-num-seqs": 4}}},
                "candidate": {"serve": {"options": {"max-num-seqs": 8}}},
            },
        }
    )
    run = tmp_path / "run"
    measure(described, run, silent, lambda at: None)
    assert reports.signoff.cli.signoff(run) == 2

    found = msgspec.json.decode((run / "signoff.json").read_bytes(), type=Signoff)
    gates = {gate.id: gate for gate in found.gates}
    assert found.outcome == "INCONCLUSIVE"
    assert any("no replay was measured" in reason for reason in found.reasons)
    assert any("MRCR was not planned" in reason for reason in found.reasons)
    assert [(each.key, each.values, each.under_test) for each in found.differences] == [
        ("max-num-seqs", "4 against 8", True)
    ]
    assert gates["plan_kept"].outcome == gates["one_difference"].outcome == "PASS"
    assert gates["prompts_same"].outcome == "PASS"
    assert gates["prompts_same"].said.startswith(f"{2 * 2 * ITEMS} pairs of prompts have equal token ids")
    assert [arm.facts["version"] for arm in found.arms] == [found.arms[0].facts["version"]] * 2
    assert {"config.json", "tokenizer.json"} <= set(found.arms[0].files)
    assert found.arms[0].files == found.arms[1].files
    assert {each.source for each in found.coverage} == {"step log"}
    assert all(each.answers == each.of_answers == 2 * ITEMS for each in found.coverage)
    assert [sum(counts for counts in msgspec.structs.astuple(each)[:5]) for each in found.tasks[0].counts.values()] == [
        2 * ITEMS,
        2 * ITEMS,
    ]
    shown = "".join((run / f"signoff.{kind}").read_text() for kind in ("json", "md", "html"))
    texts = [
        str(row[key]) for rows in questions.values() for row in rows for key in ("problem", "Question") if key in row
    ]
    assert len(texts) == 2 * ITEMS
    assert not [text for text in texts if text in shown]
