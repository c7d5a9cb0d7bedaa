"""The demo's exams: the same every time, fit for use, and large enough for what they are to show."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import evals.cli
from evals import demo, plan
from evals.data import load
from evals.records import EvalPlan
from evals.tasks import TASKS
from replay.backends import NAMES, emulator_settings
from replay.emulator.eligibility import MAX_TOKENS
from replay.emulator.exams import load as load_exams
from replay.emulator.settings import fingerprint
from replay.experiment import Experiment
from reports.accuracy.drop import equal_weight, t_alone
from reports.accuracy.measure import cells_alike
from reports.accuracy.power import repeats_for_bound, repeats_needed


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return demo.experiment(tmp_path_factory.mktemp("demo") / "exams")


@pytest.fixture(scope="module")
def planned(described: Experiment) -> EvalPlan:
    return plan.registered(described)


def test_it_is_the_same_every_time(described: Experiment, planned: EvalPlan, tmp_path: Path) -> None:
    again = demo.experiment(tmp_path)
    assert [task.data for task in plan.registered(again).tasks] == [task.data for task in planned.tasks]
    assert [fingerprint(emulator_settings(again, name)) for name in NAMES] == [
        fingerprint(emulator_settings(described, name)) for name in NAMES
    ]


def test_both_emulators_know_as_much_and_have_luck_of_their_own(described: Experiment) -> None:
    baseline, candidate = (emulator_settings(described, name) for name in NAMES)
    assert baseline.exams is not None
    assert baseline.exams == candidate.exams
    assert (baseline.seed, baseline.noise_seed) != (candidate.seed, candidate.noise_seed)
    assert baseline.seed == candidate.seed, "or they would not say the same words"
    assert {question.harm for question in load_exams(Path(baseline.exams))} == {0.0}


def test_exams_are_sat_on_the_deployments_of_the_replay(described: Experiment) -> None:
    """Only time passes faster."""
    hurried = demo.hurried(described)
    for name in NAMES:
        replayed, sat = (emulator_settings(each, name) for each in (described, hurried))
        assert replayed.time_scale == 1.0
        assert sat.time_scale > 1
        assert fingerprint(replayed) == fingerprint(sat)


def test_concurrency_is_within_the_specialised_path(planned: EvalPlan) -> None:
    assert [task.task for task in planned.tasks] == ["aime25", "gpqa_diamond", "mrcr"]
    assert max(task.concurrency for task in planned.tasks) <= MAX_TOKENS


def test_sizes_are_designed(described: Experiment, planned: EvalPlan) -> None:
    """A pass is nine times of ten what equal backends of this quality get, by the tool's own formula; as luck is fixed,
    the demo gets it always."""
    for task in planned.tasks:
        right = demo._RIGHT[task.task]
        rates = np.full(task.data.items, right)
        if task.task == "mrcr":
            assert described.evals is not None
            items = load("mrcr", described.evals.exams["mrcr"].data, subset=True).items
            assert t_alone(cells_alike([str(TASKS["mrcr"].strata(item)) for item in items]), binary=False)
        needed = (
            repeats_needed(right * (1 - right), len(rates), task.margin, planned.alpha_pass)
            if task.task == "mrcr"
            else repeats_for_bound(rates, rates, equal_weight(len(rates)), task.margin, planned.alpha_pass)
        )
        assert needed <= task.repeats, task.task


def test_without_lm_eval_it_goes_on_without_exams(
    described: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not evals.cli.demo(described, tmp_path / "run")
    assert capsys.readouterr().out == "no exams: they need lm-eval: pip install 'decodegate[evals]'\n"
    assert not (tmp_path / "run").exists()
