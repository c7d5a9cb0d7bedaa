"""Every gate of the sign-off passes where nothing is wrong, and does not where something is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from evals.records import DIED, Answer, EvalPlan
from replay.records import Difference, Snapshot
from reports.signoff.controls import controls
from reports.signoff.document import verdict
from reports.signoff.gates import (
    accuracy,
    controls_hold,
    exam_path,
    hygiene,
    length_stops,
    one_difference,
    parts_measured,
    plan_kept,
    prompts_same,
)
from reports.signoff.gates.evidence import Evidence, Judge
from reports.signoff.parts import ReplayPart, load
from reports.signoff.result import ExamPath, Gate
from tests.reports.accuracy.exams import plan
from tests.reports.signoff import sat
from workloads.errors import UserError

EXAMS = [sat.exam("aime25", 30, 8, 0.9), sat.exam("gpqa_diamond", 40, 8, 0.8), sat.exam("mrcr", 40, 4, 0.8)]
REPLACED = msgspec.structs.replace


def evidence(run: Path, coverage: list[ExamPath] | None = None) -> Evidence:
    parts = load(run)
    return Evidence(parts, coverage or [], controls(parts))


def judged(judge: Judge, run: Path, coverage: list[ExamPath] | None = None) -> Gate:
    (gate,) = judge(evidence(run, coverage))
    return gate


def path(task: str = "aime25", **changes: Any) -> ExamPath:
    made = ExamPath(
        task=task, stratum="", backend="candidate", source="step log", counted="specialised", tokens=1000, answers=240,
        of_answers=240, share=0.95, at_least=0.94, at_most=0.96, reasons={"prompt rows in the batch": 0.05}, note="",
    )  # fmt: skip
    return REPLACED(made, **changes)


@pytest.mark.parametrize(
    "judge", [plan_kept.judge, one_difference.judge, prompts_same.judge, hygiene.judge, length_stops.judge]
)
def test_nothing_is_wrong(judge: Judge, tmp_path: Path) -> None:
    gate = judged(judge, sat.write(tmp_path / "run", EXAMS))
    assert (gate.outcome, gate.reasons) == ("PASS", [])
    assert gate.said


def test_what_was_not_measured_cannot_pass(tmp_path: Path) -> None:
    gate = judged(parts_measured.judge, sat.write(tmp_path / "run", EXAMS[:2]))
    assert gate.outcome == "INCONCLUSIVE"
    assert "decodegate compare" in gate.reasons[0]
    assert "decodegate parity" in gate.reasons[1]
    assert "MRCR was not planned" in gate.reasons[2]


def test_nothing_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run directory"):
        load(tmp_path / "none")
    with pytest.raises(UserError, match="holds nothing to sign off: no replay was measured"):
        load(tmp_path)


def test_a_plan_that_was_changed(tmp_path: Path) -> None:
    run = sat.write(tmp_path / "run", EXAMS)
    file = run / "evals" / "plan.json"
    laxer = msgspec.json.decode(file.read_bytes(), type=EvalPlan)
    file.write_bytes(msgspec.json.encode(REPLACED(laxer, alpha_fail=1e-9)))
    gate = judged(plan_kept.judge, run)
    assert gate.outcome == "INCONCLUSIVE"
    assert "not the plan that was registered" in gate.reasons[0]


def test_a_plan_that_is_younger_than_the_candidates_answers(tmp_path: Path) -> None:
    late = REPLACED(plan(*EXAMS), registered_utc="2026-12-01T00:00:12+00:00")
    gate = judged(plan_kept.judge, sat.write(tmp_path / "run", EXAMS, planned=late))
    assert gate.outcome == "INCONCLUSIVE"
    assert "after the candidate's first request (2026-12-01T00:00:11+00:00)" in gate.reasons[0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"unmatched_reasons": ["8 against 4 GPUs"], "matched_gpus": False}, "not matched: 8 against 4 GPUs"),
        (
            {"differences": [Difference(key="kv-cache-dtype", baseline="fp8", candidate=None, under_test=False)]},
            "kv-cache-dtype differs and is not under test (fp8 against not set)",
        ),
    ],
)
def test_other_differences(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    gate = judged(one_difference.judge, sat.write(tmp_path / "run", EXAMS, **changes))
    assert gate.outcome == "INCONCLUSIVE"
    assert told in gate.reasons[0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"prompt_ids_hash": "other"}, "prompts had other token ids"),
        ({"prompt_ids_hash": None, "prompt_tokens": 99}, "prompts had another number of tokens"),
        ({"prompt_ids_hash": None, "prompt_tokens": None}, "cannot be compared: a server told neither"),
    ],
)
def test_other_prompts(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    def other(name: str, answer: Answer) -> Answer:
        return REPLACED(answer, **change) if name == "candidate" and answer.item == 3 else answer

    gate = judged(prompts_same.judge, sat.write(tmp_path / "run", EXAMS, change=other))
    assert gate.outcome == "INCONCLUSIVE"
    assert told in gate.reasons[0]


def test_answers_of_another_server(tmp_path: Path) -> None:
    """A cache that answers with the baseline's replies is perfect parity (fault 12)."""

    def stale(name: str, answer: Answer) -> Answer:
        return REPLACED(answer, fingerprint="vllm-baseline") if answer.item < 5 else answer

    gate = judged(hygiene.judge, sat.write(tmp_path / "run", EXAMS, change=stale))
    assert gate.outcome == "INCONCLUSIVE"
    assert gate.reasons == [
        "candidate: 100 of 720 answers carry another fingerprint than the server that preflight saw: they are another "
        "server's, or a cache's. Ask the server itself."
    ]


def test_a_candidate_whose_requests_had_to_be_sent_again(tmp_path: Path) -> None:
    def again(name: str, answer: Answer) -> Answer:
        return REPLACED(answer, attempts=2) if name == "candidate" and answer.item == 0 else answer

    gate = judged(hygiene.judge, sat.write(tmp_path / "run", EXAMS, change=again))
    assert gate.outcome == "INCONCLUSIVE"
    assert "20 of 720 requests were sent again, of baseline 0 of 720" in gate.reasons[0]


def test_a_few_retries_on_both_are_no_reason(tmp_path: Path) -> None:
    def again(name: str, answer: Answer) -> Answer:
        return REPLACED(answer, attempts=2) if (answer.item, answer.repeat) == (0, 0) else answer

    gate = judged(hygiene.judge, sat.write(tmp_path / "run", EXAMS, change=again))
    assert gate.outcome == "PASS"
    assert "Requests sent again: 3 against 3" in gate.said


def counted(run: Path, backend: str, **grown: float) -> None:
    """Counters at the edges of a repeat."""
    edges = {
        "start": [(f"vllm:{name}_total", {}, 5.0) for name in grown],
        "end": [(f"vllm:{name}_total", {}, 5 + by) for name, by in grown.items()],
    }
    lines = [{"t_ns": 1, "at": at, "samples": samples} for at, samples in edges.items()]
    text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    (run / "evals" / backend / "aime25" / "r000" / "metrics.jsonl").write_bytes(text)


def test_logits_that_are_not_numbers_on_the_candidate_alone_fail(tmp_path: Path) -> None:
    run = sat.write(tmp_path / "run", EXAMS)
    counted(run, "candidate", corrupted_requests=2, num_preemptions=0)
    counted(run, "baseline", corrupted_requests=0, num_preemptions=0)
    gate = judged(hygiene.judge, run)
    assert gate.outcome == "FAIL"
    assert "2 requests had logits that are not numbers" in gate.reasons[0]
    counted(run, "baseline", corrupted_requests=2, num_preemptions=0)
    assert judged(hygiene.judge, run).outcome == "PASS"


@pytest.mark.parametrize("baseline", [{"num_preemptions": 0}, {"num_preemptions": 0, "corrupted_requests": 1}])
def test_more_logits_that_are_not_numbers_are_no_pass(baseline: dict[str, float], tmp_path: Path) -> None:
    """On a baseline that does not count them, or has some, they prove no harm."""
    run = sat.write(tmp_path / "run", EXAMS)
    counted(run, "candidate", corrupted_requests=2, num_preemptions=0)
    counted(run, "baseline", **baseline)
    gate = judged(hygiene.judge, run)
    assert gate.outcome == "INCONCLUSIVE"
    assert gate.reasons[0].endswith(f"baseline: {baseline.get('corrupted_requests', 'not told')}.")


def test_a_server_that_was_started_anew(tmp_path: Path) -> None:
    """Its counters begin at 0 again."""
    run = sat.write(tmp_path / "run", EXAMS)
    counted(run, "candidate", generation_tokens=-4, num_preemptions=0)
    counted(run, "baseline", generation_tokens=900, num_preemptions=0)
    gate = judged(hygiene.judge, run)
    assert gate.outcome == "INCONCLUSIVE"
    assert gate.reasons == ["candidate: its server was started anew during aime25 repeat 0: see why in its log."]


def test_a_damaged_snapshot_is_named(tmp_path: Path) -> None:
    run = sat.write(tmp_path / "run", EXAMS)
    (run / "evals" / "candidate" / "aime25" / "r000" / "after.json").write_text("{")
    with pytest.raises(UserError, match=r"after\.json is damaged"):
        judged(hygiene.judge, run)


def test_a_candidate_whose_server_ended_by_itself_fails(tmp_path: Path) -> None:
    """And was gone on with: the answers are all there."""
    run = sat.write(tmp_path / "run", EXAMS)
    for name, wanted in (("candidate", "FAIL"), ("baseline", "INCONCLUSIVE")):
        interrupted = run / "evals" / name / "aime25" / "r001.interrupted-1"
        interrupted.mkdir()
        (interrupted / DIED).write_text("out of memory")
        gate = judged(hygiene.judge, run)
        assert gate.outcome == wanted
        assert "its server ended by itself in 1 sittings" in gate.reasons[0]


def test_a_backend_that_ignores_seeds(tmp_path: Path) -> None:
    """Fault 11: its answers are one answer, however often it is asked."""

    def same(name: str, answer: Answer) -> Answer:
        luck = answer.item if name == "candidate" else 1000 * answer.item + answer.repeat
        return REPLACED(answer, reply_hash=f"{luck:016x}")

    gate = judged(hygiene.judge, sat.write(tmp_path / "run", EXAMS, change=same))
    assert gate.outcome == "INCONCLUSIVE"
    assert [reason.split(" to ")[0] for reason in gate.reasons] == [
        "AIME25: candidate gave one and the same reply in all repeats",
        "GPQA-Diamond: candidate gave one and the same reply in all repeats",
    ]


def test_preemptions_of_the_candidate_alone(tmp_path: Path) -> None:
    run = sat.write(tmp_path / "run", EXAMS)
    counted(run, "candidate", num_preemptions=3)
    counted(run, "baseline", num_preemptions=0)
    gate = judged(hygiene.judge, run)
    assert gate.outcome == "INCONCLUSIVE"
    assert "3 preemptions" in gate.reasons[0]


def test_a_server_that_changed(tmp_path: Path) -> None:
    run = sat.write(tmp_path / "run", EXAMS)
    for repeat, version in (("r000", "0.33.0"), ("r001", "0.33.1")):
        folder = run / "evals" / "candidate" / "aime25" / repeat
        (folder / "before.json").write_bytes(msgspec.json.encode(Snapshot(t_ns=1, version=version)))
    gate = judged(hygiene.judge, run)
    assert gate.outcome == "INCONCLUSIVE"
    assert "its version changed from sitting to sitting" in gate.reasons[0]


def test_answers_that_were_cut_off(tmp_path: Path) -> None:
    def cut(name: str, answer: Answer) -> Answer:
        return REPLACED(answer, finish_reason="length", outcome="truncated", score=0.0) if answer.item == 0 else answer

    gate = judged(length_stops.judge, sat.write(tmp_path / "run", EXAMS, change=cut))
    assert gate.outcome == "INCONCLUSIVE"
    assert gate.number == pytest.approx(1 / 30)
    assert "AIME25: 3.3% of the baseline's answers" in gate.reasons[0]


@pytest.mark.parametrize(
    ("judge", "told"),
    [(prompts_same.judge, "Not one prompt was answered on both"), (length_stops.judge, "The baseline has no answers.")],
)
def test_nothing_to_look_at_is_no_pass(judge: Judge, told: str, tmp_path: Path) -> None:
    run = sat.write(tmp_path / "run", EXAMS)
    for ended in (run / "evals" / "baseline").glob("*/r*.json"):
        ended.unlink()
    gate = judged(judge, run)
    assert (gate.outcome, gate.number) == ("INCONCLUSIVE", None)
    assert told in gate.reasons[0]


def test_exams_that_ran_specialised(tmp_path: Path) -> None:
    run = sat.write(tmp_path / "run", EXAMS)
    whole = [path("aime25"), path("gpqa_diamond"), path("mrcr"), path("mrcr", stratum="4k-8k", at_least=0.91)]
    gate = judged(exam_path.judge, run, whole)
    assert (gate.outcome, gate.number, gate.limit) == ("PASS", 0.91, 0.90)
    assert judged(exam_path.judge, run, whole[:2]).reasons == ["MRCR: no answer, so no path either."]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"source": "none", "share": None, "at_least": None, "counted": ""}, "MRCR, 4k-8k: the server does not tell"),
        ({"source": "prediction", "counted": "predicted to fit the specialised path"}, "the server does not tell"),
        ({"counted": "pure decode in FULL graphs"}, "are pure decode in FULL graphs, not specialised"),
        ({"at_least": 0.89}, "89.0% of decode tokens are shown to have run specialised; the rest: prompt rows"),
    ],
)
def test_exams_that_are_not_shown_to_have_run_specialised(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    run = sat.write(tmp_path / "run", EXAMS)
    found = [path("aime25"), path("gpqa_diamond"), path("mrcr"), path("mrcr", stratum="4k-8k", **changes)]
    gate = judged(exam_path.judge, run, found)
    assert gate.outcome == "INCONCLUSIVE"
    assert told in gate.reasons[0]


def test_no_path_is_to_be_proved_where_no_backend_is_set_so(tmp_path: Path) -> None:
    run = sat.write(tmp_path / "run", EXAMS, backends=[sat.backend(name, decode_backend="auto") for name in sat.NAMES])
    gate = judged(exam_path.judge, run)
    assert gate.outcome == "PASS"
    assert "none is signed off" in gate.said


def test_a_harmed_benchmark_fails_and_is_named(tmp_path: Path) -> None:
    run = sat.write(tmp_path / "run", EXAMS, {"gpqa_diamond": np.full(40, 0.5)})
    gates = {gate.id: gate for gate in accuracy.judge(evidence(run))}
    assert gates["gpqa_diamond"].outcome == "FAIL"
    assert "The candidate answers worse" in gates["gpqa_diamond"].reasons[0]
    assert (gates["aime25"].unit, gates["aime25"].limit) == ("points", 5.0)
    assert verdict(list(gates.values())) == "FAIL"


def test_a_benchmark_that_passes_fails_with_a_drop_put_in(tmp_path: Path) -> None:
    """The control of the verdict on these very answers; and a backend against itself."""
    sure = [sat.exam("aime25", 30, 16, 0.98), sat.exam("gpqa_diamond", 60, 16, 0.97)]
    found = evidence(sat.write(tmp_path / "run", sure))
    assert [gate.outcome for gate in accuracy.judge(found)] == ["PASS", "PASS"]
    struck = [each for each in found.controls if "struck out" in each.name]
    assert [(each.seen, each.holds) for each in struck] == [("FAIL", True)] * 2
    itself = [each for each in found.controls if "odd ones" in each.name]
    assert [each.holds for each in itself] == [True] * 4
    (gate,) = controls_hold.judge(found)
    assert gate.outcome == "PASS"


def test_a_drop_is_put_in_from_the_baseline_down(tmp_path: Path) -> None:
    """A candidate that is better by more than the margin loses that too: the control finds the drop all the same."""
    found = evidence(sat.write(tmp_path / "run", [sat.exam("aime25", 30, 16, 0.8)], {"aime25": np.full(30, 0.97)}))
    assert [gate.outcome for gate in accuracy.judge(found)] == ["PASS"]
    (struck,) = (each for each in found.controls if "struck out" in each.name)
    assert (struck.expected, struck.seen, struck.holds) == ("FAIL", "FAIL", True)


def test_the_start_up_control_of_either_part_counts(tmp_path: Path) -> None:
    run = sat.write(tmp_path / "run", EXAMS, start_up_control="unknown decode_backend")
    parts = load(run)
    assert parts.evals is not None
    silent = REPLACED(parts.evals.manifest, start_up_control="")
    for said, wanted in ((parts.evals.manifest, True), (silent, None)):
        evals = REPLACED(parts.evals, manifest=said)
        assert controls(REPLACED(parts, evals=evals))[0].holds is wanted
    replay = ReplayPart(manifest=parts.evals.manifest, analysis=None)  # type: ignore[arg-type]
    told = REPLACED(parts, evals=REPLACED(parts.evals, manifest=silent), replay=replay)
    assert controls(told)[0].seen == "refused: unknown decode_backend"


def test_a_backend_that_does_not_agree_with_itself(tmp_path: Path) -> None:
    """Its odd repeats are worse: something changed during the run."""

    def worse(name: str, answer: Answer) -> Answer:
        if name == "baseline" and answer.repeat % 2 and answer.item % 2:
            return REPLACED(answer, outcome="wrong", score=0.0)
        return answer

    gate = judged(controls_hold.judge, sat.write(tmp_path / "run", EXAMS, change=worse))
    assert gate.outcome == "INCONCLUSIVE"
    assert "baseline's even repeats against its odd ones" in gate.reasons[0]


def test_controls_with_one_repeat_are_not_run(tmp_path: Path) -> None:
    run = sat.write(tmp_path / "run", [sat.exam("aime25", 30, 1, 0.9)])
    found = evidence(run)
    assert all(each.holds is None for each in found.controls)
    assert judged(controls_hold.judge, run).reasons == ["No control could be run: too few repeats."]


def test_control_of_a_backend_against_itself_holds_its_level() -> None:
    """Equal repeats differ by chance no more often than the level of FAIL says: over all controls of a run."""
    from reports.signoff.controls import _two_sided
    from tests.reports.accuracy.exams import aime
    from tests.reports.accuracy.exams import plan as planned

    exam, dice = aime(repeats=8), np.random.default_rng(7)
    task = planned(exam).tasks[0]
    ps = [_two_sided((dice.random((30, 8)) < exam.rates[:, None]).astype(float), task) for _ in range(600)]
    assert np.mean(np.array(ps) <= 0.05) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 600)


@pytest.mark.parametrize(
    ("outcomes", "wanted"),
    [
        (["PASS", "PASS"], "PASS"),
        (["PASS", "INCONCLUSIVE"], "INCONCLUSIVE"),
        (["FAIL", "INCONCLUSIVE", "PASS"], "FAIL"),
        ([], "INCONCLUSIVE"),
    ],
)
def test_the_verdict_follows_from_the_gates(outcomes: list[Any], wanted: str) -> None:
    assert verdict([Gate(id="x", title="X", outcome=each, said="") for each in outcomes]) == wanted
