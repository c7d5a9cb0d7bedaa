"""Judging of made-up parity records whose truth is known."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from evals.faults import FAULTS
from evals.records import CheckRun, Floor, ParityPlan
from reports.parity.checks import CHECKS
from reports.parity.faults import CAUGHT_BY
from reports.parity.load import Records, load
from reports.parity.result import CheckVerdict, Parity
from reports.parity.verdict import judge, judge_parity
from tests.reports.parity import made
from tests.reports.parity.made import SITUATION, START, Change, Said
from workloads.errors import UserError


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole quick battery, sound on all arms."""
    return made.write(tmp_path_factory.mktemp("sound"))


def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "parity"))


def of(parity: Parity, id: str) -> CheckVerdict:
    return next(each for each in parity.checks if each.id == id)


def on_candidate(change: Change, *ids: str) -> Change:
    """A change of the candidate's arms, in some checks."""

    def changed(said: Said) -> None:
        if said.arm.startswith("B") and said.check in ids:
            change(said)

    return changed


def test_equal_arms_pass(sound: Path) -> None:
    parity = judge_parity(sound)
    assert parity.outcome == "PASS", parity.reasons
    assert {each.id for each in parity.checks if each.outcome == "PASS"} == {each.id for each in CHECKS} - {"S1"}
    assert parity.arms == ["A1", "A2", "B1", "B2"]
    assert parity.thresholds.positions > 1_000
    assert [each.pair for each in parity.itself] == ["B2-B1"]
    assert {each.pair for each in parity.curves} == {"A2-A1", "B1-A1", "B1-A2", "B2-A1", "B2-A2"}
    assert any("Acceptance" in each for each in parity.not_covered)


def test_a_quick_battery_holds_no_bounds_and_a_standard_one_does(sound: Path, tmp_path: Path) -> None:
    records = load(sound)
    standard = Records(**(msgspec.structs.asdict(records) | {"plan": replace_budget(records.plan, "standard")}))
    parity = judge(standard)
    assert parity.outcome == "INCONCLUSIVE"
    assert any("positions are too few" in reason for reason in of(parity, "P2").reasons)


def replace_budget(plan: ParityPlan, budget: str) -> ParityPlan:
    return msgspec.convert(msgspec.to_builtins(plan) | {"budget": budget}, ParityPlan)


# --- harm -------------------------------------------------------------------------------------------------------------


def variant(said: Said, name: str) -> np.ndarray:
    """Rows of the cases of a variant."""
    return np.array([each.variant == name for each in said.cases])[said.of]


def some(said: Said, share: float) -> np.ndarray:
    return said.dice.random(len(said.of)) < share


def problem(words: str, case: int) -> Change:
    def change(said: Said) -> None:
        said.replies[case].problem = words

    return change


def greedy_draws(said: Said) -> None:
    hot = np.array([each.temperature > 0 for each in said.cases])[said.of]
    said.token[hot] = said.logprobs[hot].argmax(axis=1)


def seeds_ignored(said: Said) -> None:
    rows = variant(said, "again")
    said.token[rows] = said.dice.integers(0, 20, int(rows.sum()))


def other_seeds_shared(said: Said) -> None:
    at = {each.prompt_seed: index for index, each in enumerate(said.cases) if each.variant == "first"}
    for index, each in enumerate(said.cases):
        if each.variant == "other seed":
            said.token[said.of == index] = said.token[said.of == at[each.prompt_seed]]


def broken_calls(said: Said) -> None:
    for reply in said.replies[::10]:
        reply.valid_call, reply.problem = False, "arguments are no JSON"


def noisier(said: Said) -> None:
    said.logprobs += said.dice.normal(0, 0.3, said.logprobs.shape)


def drifting(said: Said) -> None:
    said.logprobs += said.dice.normal(0, 1, said.logprobs.shape) * (0.2 * said.position / 128)[:, None]


def sure_tokens(said: Said) -> None:
    """At position 40 of every greedy reply another token than a sure one."""
    rows = np.flatnonzero(variant(said, "free greedy") & (said.position == 40))
    said.token[rows] = said.logprobs[rows].argmin(axis=1)


def shorter(said: Said) -> None:
    kept = said.position < 10
    for name in ("of", "position", "token", "logprobs"):
        setattr(said, name, getattr(said, name)[kept])
    for reply in said.replies:
        reply.completion_tokens = min(reply.completion_tokens or 0, 10)


def looping(said: Said) -> None:
    said.token[said.position > 100] = said.position[said.position > 100] % 8


def wrong_at(where: Callable[[Said], np.ndarray]) -> Change:
    return lambda said: said.shift(where(said) & some(said, 0.1))


def context(said: Said, name: str) -> np.ndarray:
    return np.array([each.stratum.get("context") == name for each in said.cases])[said.of]


def batch(said: Said, sizes: set[int]) -> np.ndarray:
    return np.array([each.batch in sizes for each in said.cases])[said.of]


HARM: dict[str, tuple[str, Change]] = {
    "a usage that counts other tokens": ("D1", problem("usage counts 32 tokens, 31 came", 9)),
    "a reply beyond its limit": ("D2", problem("17 tokens asked for, 18 came", 2)),
    "temperature ignored": ("D3", greedy_draws),
    "seeds ignored": ("D4", seeds_ignored),
    "one seed for all": ("D4", other_seeds_shared),
    "a prefix restored wrongly": ("D5", wrong_at(lambda said: variant(said, "warm"))),
    "broken calls": ("D6", broken_calls),
    "garbage": ("D7", problem("one token 12 times in a row", 100)),
    "noise": ("P1", noisier),
    "drift": ("P1", drifting),
    "other tokens where the baseline is sure": ("P3", sure_tokens),
    "wrong numbers next to block edges": ("P4", wrong_at(lambda said: variant(said, "block edge"))),
    "wrong numbers beyond a context": ("P5", wrong_at(lambda said: context(said, "2k"))),
    "wrong numbers in large batches": ("P6", wrong_at(lambda said: batch(said, {33, 64, 65}))),
    "rare errors": ("P7", lambda said: said.shift(some(said, 0.01))),
    "replies that end early": ("L1", shorter),
    "loops": ("L2", looping),
}


@pytest.mark.parametrize("name", HARM)
def test_harm_fails_with_its_reproducer(name: str, tmp_path: Path) -> None:
    id, change = HARM[name]
    parity = judge_parity(made.write(tmp_path, on_candidate(change, id), checks=["T0", id]))
    assert parity.outcome == "FAIL"
    found = of(parity, id)
    assert found.outcome == "FAIL"
    assert found.reproducer is not None
    assert found.reproducer.check == id
    assert found.reproducer.arm in ("B1", "B2")
    assert parity.reasons[0].startswith(id)


def test_the_reproducer_is_the_smallest_that_shows_it(tmp_path: Path) -> None:
    def change(said: Said) -> None:
        said.shift(batch(said, {16, 33}) & (said.position % 8 == 5))

    found = of(judge_parity(made.write(tmp_path, on_candidate(change, "P6"), checks=["P6"])), "P6")
    assert found.reproducer is not None
    assert (found.reproducer.batch, found.reproducer.position) == (16, 5)
    assert found.reproducer.prompt_digest
    worst = {each.name: each for each in found.strata}
    assert worst["16"].holm_p < 0.01
    assert worst["17"].holm_p == 1.0
    assert "16" in found.of or "33" in found.of


def test_one_wrong_reply_in_one_arm_fails(tmp_path: Path) -> None:
    def change(said: Said) -> None:
        if said.arm == "B2":
            said.replies[7].problem = "invalid UTF-8"

    found = of(judge_parity(made.write(tmp_path, change, checks=["D7"])), "D7")
    assert found.outcome == "FAIL"
    assert found.reproducer is not None
    assert (found.reproducer.arm, found.reproducer.case) == ("B2", 7)


def test_what_the_baseline_breaks_as_well_is_no_harm(tmp_path: Path) -> None:
    def change(said: Said) -> None:
        said.replies[7].problem = "invalid UTF-8"

    assert of(judge_parity(made.write(tmp_path, change, checks=["D7"])), "D7").outcome == "PASS"


def test_numbers_that_are_none_are_outliers(tmp_path: Path) -> None:
    def change(said: Said) -> None:
        said.logprobs[some(said, 0.02)] = np.nan

    parity = judge_parity(made.write(tmp_path, on_candidate(change, "P1"), checks=["P1"]))
    assert of(parity, "P2").outcome == "FAIL"


def test_fewer_accepted_drafts_fail(tmp_path: Path) -> None:
    situation = replace(SITUATION, has=SITUATION.has | {"metrics", "speculation"})

    def change(said: Said) -> None:
        worse = 0.1 if said.arm.startswith("B") and said.cases[0].batch > harmless else 0.0
        for reply in said.replies[:: said.cases[0].batch]:
            reply.drafts = 2_000
            reply.accepted = said.dice.binomial(2_000, [0.8 - worse, 0.6 - worse]).tolist()

    outcomes = []
    for harmless in (0, 1_000):
        run = tmp_path / str(harmless)
        outcomes.append(of(judge_parity(made.write(run, change, checks=["S1"], situation=situation)), "S1").outcome)
    assert outcomes == ["FAIL", "PASS"]


def test_noise_of_rounding_is_harmless_where_the_baseline_has_none(tmp_path: Path) -> None:
    checks = ["P1", "P3", "P4", "P5", "P6", "P7"]
    parity = judge_parity(made.write(tmp_path, checks=checks, noise={"A1": 0.0, "A2": 0.0, "B1": 0.004, "B2": 0.004}))
    assert [each.outcome for each in parity.checks if each.id in checks] == ["PASS"] * len(checks)


# --- order ------------------------------------------------------------------------------------------------------------


def change_floor(folder: Path, **changes: object) -> None:
    path = folder / "floor.json"
    floor = msgspec.json.decode(path.read_bytes(), type=Floor)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(floor, **changes)))


def floor_after(folder: Path) -> None:
    change_floor(folder, fixed_unix_s=START + 400)


def no_floor(folder: Path) -> None:
    (folder / "floor.json").unlink()


def changed_floor(folder: Path) -> None:
    with (folder / "A2" / "D7" / "replies.jsonl").open("r+b") as file:
        data = file.read().replace(b'"ids":12', b'"ids":11', 1)
        file.seek(0)
        file.write(data)


def added_to_floor(folder: Path) -> None:
    (folder / "A1" / "D7" / "more.json").write_text("{}")


def changed_plan(folder: Path) -> None:
    path = folder / "plan.json"
    plan = msgspec.json.decode(path.read_bytes(), type=ParityPlan)
    plan.seed += 1
    path.write_bytes(msgspec.json.encode(plan))


DISORDER: list[tuple[Callable[[Path], None], str]] = [
    (floor_after, "after the candidate's first request"),
    (no_floor, "no floor was fixed"),
    (changed_floor, "A2/D7/replies.jsonl"),
    (added_to_floor, "A1/D7/more.json"),
    (changed_plan, "plan.json is not the one"),
]


@pytest.mark.parametrize(("spoil", "words"), DISORDER, ids=lambda each: getattr(each, "__name__", ""))
def test_an_order_that_is_not_proved_is_inconclusive(
    spoil: Callable[[Path], None], words: str, sound: Path, tmp_path: Path
) -> None:
    folder = copied(sound, tmp_path)
    spoil(folder)
    parity = judge_parity(folder)
    assert parity.outcome == "INCONCLUSIVE"
    assert words in parity.reasons[0]


# --- what is missing --------------------------------------------------------------------------------------------------


def test_half_a_check_counts_for_nothing(sound: Path, tmp_path: Path) -> None:
    folder = copied(sound, tmp_path)
    place = folder / "B2" / "P3"
    (place / "run.json").unlink()
    (place / "tokens.parquet").write_bytes(b"torn")
    parity = judge_parity(folder)
    assert parity.outcome == "INCONCLUSIVE"
    assert of(parity, "P3").outcome == "INCONCLUSIVE"
    assert of(parity, "P3").reasons == ["B2 has not ended it: go on with --resume."]
    assert of(parity, "P4").outcome == "PASS"
    assert any("B2/P3" in note for note in parity.notes)


def test_half_a_check_fails_by_the_arm_that_ended(tmp_path: Path) -> None:
    folder = made.write(tmp_path, on_candidate(problem("invalid UTF-8", 3), "D7"), checks=["D7"])
    (folder / "B1" / "D7" / "run.json").unlink()
    assert of(judge_parity(folder), "D7").outcome == "FAIL"


def test_requests_without_a_reply_are_missing(tmp_path: Path) -> None:
    def change(said: Said) -> None:
        said.replies[3].error = "HTTP 500"

    parity = judge_parity(made.write(tmp_path, on_candidate(change, "D2"), checks=["D2"]))
    assert of(parity, "D2").outcome == "INCONCLUSIVE"
    assert of(parity, "V4").outcome == "INCONCLUSIVE"
    assert "HTTP 500" in of(parity, "V4").reasons[0]


@pytest.mark.parametrize("file", ["tokens.parquet", "replies.jsonl"])
def test_damaged_files_are_refused(file: str, tmp_path: Path) -> None:
    folder = made.write(tmp_path, checks=["D2"])
    path = folder / "B1" / "D2" / file
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(UserError, match=file):
        judge_parity(folder)


def test_fewer_positions_than_were_recorded_are_refused(tmp_path: Path) -> None:
    folder = made.write(tmp_path, checks=["D2"])
    path = folder / "B1" / "D2" / "run.json"
    run = msgspec.json.decode(path.read_bytes(), type=CheckRun)
    run.positions += 1
    path.write_bytes(msgspec.json.encode(run))
    with pytest.raises(UserError, match="it was changed since"):
        judge_parity(folder)


def test_no_pass_without_a_check_that_was_not_planned(tmp_path: Path) -> None:
    parity = judge_parity(made.write(tmp_path, checks=["D7"]))
    assert of(parity, "D7").outcome == "PASS"
    assert parity.outcome == "INCONCLUSIVE"
    assert "P3 First divergence: it was not planned." in parity.reasons


def test_without_trace_replay_others_stand_in(tmp_path: Path) -> None:
    situation = replace(SITUATION, has=SITUATION.has - {"trace replay"})
    parity = judge_parity(made.write(tmp_path, situation=situation))
    assert of(parity, "P1").outcome == of(parity, "P7").outcome == "not run"
    assert parity.outcome == "PASS", parity.reasons
    assert any(each.startswith("Soak") for each in parity.not_covered)


def test_the_candidate_alone_without_a_second_baseline_is_inconclusive(tmp_path: Path) -> None:
    folder = made.write(tmp_path, checks=["P4"])
    shutil.rmtree(folder / "A2")
    assert of(judge_parity(folder), "P4").outcome == "INCONCLUSIVE"


def test_another_servers_replies_are_no_pass(tmp_path: Path) -> None:
    def change(said: Said) -> None:
        for reply in said.replies:
            reply.fingerprint = "vllm-baseline"

    parity = judge_parity(made.write(tmp_path, change, checks=["D7"]))
    assert of(parity, "V1").outcome == "INCONCLUSIVE"


def test_a_cache_that_answers_is_no_pass(tmp_path: Path) -> None:
    heard: dict[str, np.ndarray] = {}

    def change(said: Said) -> None:
        said.logprobs = heard.setdefault(said.check, said.logprobs) if said.arm in ("A1", "B1") else said.logprobs

    found = of(judge_parity(made.write(tmp_path, change, checks=["P1"])), "V4")
    assert found.outcome == "INCONCLUSIVE"
    assert found.reasons[0].startswith("B1 gave the logprobs of A1 to the last bit")


def test_servers_that_repeat_themselves_exactly_are_no_cache(tmp_path: Path) -> None:
    noise: dict[str, float] = dict.fromkeys(made.ARMS, 0.0)
    assert of(judge_parity(made.write(tmp_path, checks=["P1"], noise=noise)), "V4").outcome == "PASS"


# --- control X --------------------------------------------------------------------------------------------------------


def flips(said: Said) -> None:
    if said.arm == "X":
        said.shift(some(said, 0.01))


@pytest.mark.parametrize(
    ("fault", "change", "holds"),
    [
        ("flip-token", flips, True),
        ("flip-token", made.nothing, False),
        ("bf16-noise:0.02", made.nothing, True),
        ("bf16-noise:0.02", flips, False),
    ],
)
def test_control_x(fault: str, change: Change, holds: bool, tmp_path: Path) -> None:
    folder = made.write(tmp_path, change, checks=["P1", "P3"], arms=(*made.ARMS, "X"), fault=fault)
    parity = judge_parity(folder)
    assert parity.fault is not None
    assert parity.fault.holds is holds
    assert ("P2" in parity.fault.seen) == (change is flips)
    assert of(parity, "P2").outcome == "PASS"  # X says nothing of the candidate
    assert (parity.fault.n is not None) == (holds and bool(parity.fault.expected))
    assert any("Control X" in reason for reason in parity.reasons) is not holds


def test_the_table_of_faults_is_that_of_the_proxy() -> None:
    theirs = {name: (each.number, each.caught_by) for name, each in FAULTS.items() if each.number is not None}
    assert theirs == CAUGHT_BY
