"""Which path the exams' decode steps took: against step logs made by hand, and the emulator's truth."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evals import invented
from evals.answer_key import exams_for, write_exams
from evals.records import Answer, Repeat
from replay.emulator.truth import read_steps
from replay.records import STEP_MODES, GraphCount, GraphTable, PathRule
from reports.coverage import EAGER, PROMPT
from reports.signoff.coverage import exam_paths
from reports.signoff.parts import EvalsPart, load
from reports.signoff.result import ExamPath
from tests.evals import fixtures
from tests.evals.fixtures import items_of
from tests.integration import runs
from tests.integration.runs import silent
from tests.reports.accuracy.exams import plan
from tests.reports.make_run import MS, START_NS, write_step_log
from tests.reports.signoff import sat

NONE, PIECEWISE, FULL = (STEP_MODES.index(mode) for mode in ("NONE", "PIECEWISE", "FULL"))
RULE = PathRule(model="Kimi K3", source="vLLM 0.33.0", sizes=[1, 2, 4, 8], tokens_per_request=1, max_requests=8)
BACKENDS = [sat.backend(name, path=RULE if name == "candidate" else None) for name in sat.NAMES]
SHORT, LONG = "4k-8k", "8k-16k"
ITEMS, REPEATS, TOKENS = 4, 2, 11
"""Items 1 and 3 are short, 0 and 2 long. Every reply has 10 decode tokens."""

Step = dict[str, Any]


def step(ms: float, **changes: Any) -> Step:
    """One token of a request that decodes alone in a FULL graph, so many ms after the start of everything."""
    plain = {
        "t_ns": START_NS + round(ms * MS), "prompt_tokens": 0, "first_tokens": 0, "decode_tokens": 1, "unpadded": 1,
        "padded": 1, "draft_requests": 0, "draft_tokens": 0, "accepted_tokens": 0, "mode": FULL,
    }  # fmt: skip
    return plain | changes


def begins(repeat: int, item: int) -> int:
    """When it is asked, ms: one item after the other; in between nothing for 10 ms, after a repeat for 600."""
    return 1000 * repeat + 100 * item


def decoding(item: int, repeat: int) -> list[Step]:
    """Short ones decode specialised; long ones in 6 of 10 steps, one more holds prompt rows, and three are eager."""
    at = [begins(repeat, item) + 5 * (token + 1) for token in range(TOKENS - 1)]
    if item % 2:
        return [step(ms) for ms in at]
    return [*map(step, at[:6]), step(at[6], prompt_tokens=50), *(step(ms, mode=NONE) for ms in at[7:])]


ALL_STEPS = [each for repeat in range(REPEATS) for item in range(ITEMS) for each in decoding(item, repeat)]
ELSEWHERE = [step(700 + ms, mode=PIECEWISE) for ms in range(200)]
"""Of another exam, between the repeats."""


def timed(_: str, answer: Answer, *, length_ms: int = 90, tokens: int | None = TOKENS) -> Answer:
    """One at a time, if not longer."""
    sent_ns = START_NS + begins(answer.repeat, answer.item) * MS
    ended_ns = sent_ns + length_ms * MS
    return msgspec.structs.replace(answer, sent_ns=sent_ns, ended_ns=ended_ns, completion_tokens=tokens)


def ended(run: Path, name: str, repeat: int, **changes: Any) -> None:
    """Give a repeat its times, and what else is changed of its record."""
    path = run / "evals" / name / "mrcr" / f"r{repeat:03d}.json"
    start = START_NS + begins(repeat, 0) * MS
    record = msgspec.json.decode(path.read_bytes(), type=Repeat)
    record = msgspec.structs.replace(record, **{"started_ns": start, "ended_ns": start + 400 * MS} | changes)
    path.write_bytes(msgspec.json.encode(record))


def sat_of(run: Path, *, concurrency: int = 1, backends: Any = BACKENDS, change: sat.Change = timed) -> Path:
    """MRCR that was sat on both backends; no logs yet."""
    exam = sat.exam("mrcr", ITEMS, REPEATS, 0.9)
    planned = plan(exam)
    tasks = [msgspec.structs.replace(each, concurrency=concurrency) for each in planned.tasks]
    planned = msgspec.structs.replace(planned, tasks=tasks)
    sat.write(run, [exam], change=change, planned=planned, backends=backends)
    for name in sat.NAMES:
        for repeat in range(REPEATS):
            ended(run, name, repeat)
    return run


def served(run: Path, steps: Iterable[Step] = (*ALL_STEPS, *ELSEWHERE), **head: Any) -> Path:
    """Both backends ran on servers that decodegate started, with these steps."""
    for name in sat.NAMES:
        decode = {"decode_backend": "latency_specialized" if name == "candidate" else None}
        write_step_log(run / "evals" / "servers" / name / "steps", list(steps), **decode | head)
        for repeat in range(REPEATS):
            ended(run, name, repeat, server=f"servers/{name}")
    return run


def evals(run: Path) -> EvalsPart:
    part = load(run).evals
    assert part is not None
    return part


def paths(run: Path) -> dict[tuple[str, str], ExamPath]:
    """By backend and stratum."""
    found = exam_paths(evals(run))
    by_place = {(each.backend, each.stratum): each for each in found}
    assert len(by_place) == len(found)
    return by_place


def test_shares_of_steps_made_by_hand(tmp_path: Path) -> None:
    found = paths(served(sat_of(tmp_path / "run")))
    assert list(found) == [(name, stratum) for name in sat.NAMES for stratum in ("", SHORT, LONG)]
    whole, short, long = (found["candidate", stratum] for stratum in ("", SHORT, LONG))
    for each in (whole, short, long):
        assert (each.task, each.source, each.counted, each.note) == ("mrcr", "step log", "specialised", "")
        assert each.at_least == each.at_most == each.share
    assert [(each.tokens, each.answers, each.of_answers) for each in (whole, short, long)] == [
        (80, 8, 8), (40, 4, 4), (40, 4, 4),
    ]  # fmt: skip
    assert [each.share for each in (whole, short, long)] == pytest.approx([0.8, 1.0, 0.6])
    assert long.reasons == {EAGER: pytest.approx(0.3), PROMPT: pytest.approx(0.1)}
    assert (list(long.reasons), short.reasons) == ([EAGER, PROMPT], {})
    # held against the candidate's rule
    baseline = found["baseline", LONG]
    assert baseline.counted == "would have been eligible"
    assert baseline.share == pytest.approx(0.6)


def test_steps_between_answers_are_of_no_stratum(tmp_path: Path) -> None:
    """The last attempt's time counts: here an attempt that was given up decodes before it."""
    given_up = [step(begins(0, 1) + 94 + n, mode=NONE) for n in range(4)]
    found = paths(served(sat_of(tmp_path / "run"), [*ALL_STEPS, *given_up]))
    assert [found["candidate", stratum].tokens for stratum in ("", SHORT, LONG)] == [84, 40, 40]


def test_a_step_counts_in_every_stratum_that_has_an_answer_in_flight(tmp_path: Path) -> None:
    """The long item 0 lasts until the end, so its time holds that of item 2, long too, and of both short ones."""

    def long(name: str, answer: Answer) -> Answer:
        return timed(name, answer, length_ms=390 if answer.item == 0 else 90)

    found = paths(served(sat_of(tmp_path / "run", concurrency=2, change=long)))
    whole, short, long_ones = (found["candidate", stratum] for stratum in ("", SHORT, LONG))
    assert [each.tokens for each in (whole, short, long_ones)] == [80, 40, 80]
    assert long_ones.share == pytest.approx(0.8)
    assert whole.note == ""
    expected = "With up to 2 requests in flight a step counts in every bin that had an answer in flight"
    assert short.note == long_ones.note == expected


def test_a_log_copied_from_a_server_that_we_did_not_start_counts_as_much(tmp_path: Path) -> None:
    ours = paths(served(sat_of(tmp_path / "ours")))
    run = sat_of(tmp_path / "copied")
    for name in sat.NAMES:
        decode = "latency_specialized" if name == "candidate" else None
        for repeat in range(REPEATS):
            folder = run / "evals" / name / "mrcr" / f"r{repeat:03d}" / "steps"
            write_step_log(folder, [*ALL_STEPS, *ELSEWHERE], decode_backend=decode)
    assert paths(run) == ours


def test_without_a_log_nothing_is_known(tmp_path: Path) -> None:
    for each in paths(sat_of(tmp_path / "run")).values():
        assert (each.source, each.tokens, each.share, each.at_least, each.at_most) == ("none", None, None, None, None)
        assert (each.answers, each.of_answers) == (0, 4 if each.stratum else 8)
        assert (each.reasons, each.note) == ({}, "The server does not tell which path its decode steps took")


def test_graph_tables_tell_nothing_of_tokens(tmp_path: Path) -> None:
    run = sat_of(tmp_path / "run")
    counts = [GraphCount(unpadded=1, padded=1, mode="FULL", count=60), GraphCount(unpadded=9, padded=9, mode="NONE",
                                                                                  count=40)]  # fmt: skip
    for repeat in range(REPEATS):
        beside = run / "evals" / "candidate" / "mrcr" / f"r{repeat:03d}"
        (beside / "graph_table.json").write_bytes(msgspec.json.encode(GraphTable(counts=counts)))
    whole, short = (paths(run)["candidate", stratum] for stratum in ("", SHORT))
    assert (whole.source, whole.share, whole.at_least, whole.tokens, whole.answers) == (
        "graph table",
        None,
        None,
        None,
        0,
    )
    assert "60.0% of the steps were in FULL graphs" in whole.note
    assert (short.source, short.counted, short.share) == ("none", "", None)


def test_what_was_answered_before_an_interruption_is_not_judged(tmp_path: Path) -> None:
    """Items 0 and 1 of the first repeat were answered under another process, whose server is not known any more."""
    run = served(sat_of(tmp_path / "run"), [each for each in ALL_STEPS if each["t_ns"] > START_NS + 200 * MS])
    start = START_NS + begins(0, 2) * MS
    ended(run, "candidate", 0, server="servers/candidate", started_ns=start, ended_ns=start + 200 * MS)
    whole, short = (paths(run)["candidate", stratum] for stratum in ("", SHORT))
    assert (whole.tokens, whole.answers, whole.of_answers) == (60, 6, 8)
    assert whole.share == pytest.approx((3 * 10 + 3 * 6) / 60)
    # the 20 tokens that are not judged may be of either kind
    assert whole.at_least == pytest.approx(48 / 80)
    assert whole.at_most == pytest.approx(68 / 80)
    assert "2 of 8 answers are not of the recorded part" in whole.note
    assert (short.tokens, short.share, short.answers, short.of_answers) == (30, 1.0, 3, 4)
    assert "1 of 4 answers are not of the recorded part" in short.note


def test_a_repeat_of_which_nothing_was_left_to_ask(tmp_path: Path) -> None:
    """It has no time and no server; the other repeat is judged."""
    run = served(sat_of(tmp_path / "run"))
    ended(run, "candidate", 1, started_ns=None, ended_ns=None, server=None)
    found = paths(run)["candidate", ""]
    assert (found.source, found.tokens, found.answers, found.of_answers) == ("step log", 40, 4, 8)


def test_a_repeat_without_a_log_is_told_apart_from_one_without_tokens(tmp_path: Path) -> None:
    first = [each for each in ALL_STEPS if each["t_ns"] < START_NS + begins(1, 0) * MS]
    found = paths(served(sat_of(tmp_path / "logs"), first))["candidate", LONG]
    assert (found.tokens, found.answers, found.of_answers) == (20, 2, 4)
    assert found.share == pytest.approx(0.6)
    assert found.at_least == pytest.approx(0.3)
    assert found.note.endswith("2 of 4 answers have no log")

    def failing(name: str, answer: Answer) -> Answer:
        return timed(name, answer, tokens=None if answer.repeat == 1 else TOKENS)

    found = paths(served(sat_of(tmp_path / "tokens", change=failing), first))["candidate", LONG]
    assert (found.tokens, found.answers, found.note) == (20, 4, "")
    assert found.at_least == pytest.approx(0.6)


def test_steps_that_are_missing_in_the_log_may_be_of_either_kind(tmp_path: Path) -> None:
    """Every other step: all of those are specialised."""
    half = [
        step(begins(repeat, item) + 5 * n) for repeat in range(REPEATS) for item in range(ITEMS) for n in range(1, 6)
    ]
    found = paths(served(sat_of(tmp_path / "run"), half))["candidate", SHORT]
    assert (found.share, found.at_most) == (1.0, 1.0)
    assert found.at_least == pytest.approx(0.5)
    assert "only 50.0% of the decode tokens" in found.note


@pytest.mark.parametrize(
    ("decode", "problems", "note"),
    [
        (None, [], "decode_backend in its server's own configuration: not set"),
        ("latency_specialized", ["tensor-parallel-size 4"], "It cannot run specialised: tensor-parallel-size 4"),
    ],
)
def test_a_candidate_that_cannot_have_run_specialised(
    decode: str | None, problems: list[str], note: str, tmp_path: Path
) -> None:
    rule = msgspec.structs.replace(RULE, problems=problems)
    backends = [BACKENDS[0], msgspec.structs.replace(BACKENDS[1], path=rule)]
    run = served(sat_of(tmp_path / "run", backends=backends), decode_backend=decode)
    found = paths(run)["candidate", ""]
    assert (found.counted, found.note) == ("would have been eligible", note)


def test_no_repeat_that_has_ended(tmp_path: Path) -> None:
    run = served(sat_of(tmp_path / "run"))
    for path in (run / "evals" / "candidate" / "mrcr").glob("r*.json"):
        path.unlink()
    found = paths(run)
    assert found["candidate", SHORT].note == "No answers"
    assert (found["candidate", ""].share, found["candidate", ""].of_answers) == (None, 0)
    assert found["baseline", ""].share == pytest.approx(0.8)


def test_the_emulators_truth(tmp_path: Path) -> None:
    """MRCR at concurrency 1 on emulators, two bins; their own logs, counted here line by line."""
    pytest.importorskip("lm_eval")
    from evals.harness import measure

    rows = invented.mrcr(4)
    data = fixtures.write(rows, tmp_path / "mrcr.jsonl")
    fixtures.write_lengths(data, hashlib.sha256(data.read_bytes()).hexdigest(), [5000, 9000, 6000, 10000])
    exams = write_exams(exams_for(items_of("mrcr", rows), p=1.0), tmp_path / "exams")
    mrcr = {"data": str(data), "subset": True, "repeats": 2, "concurrency": 1}
    described = runs.experiment(emulator={"exams": str(exams)}, evals={"mrcr": mrcr, "sampling": {"max_tokens": 2000}})
    measure(described, tmp_path / "run", silent, lambda _: None)
    part = evals(tmp_path / "run")
    found = {(each.backend, each.stratum): each for each in exam_paths(part)}
    assert set(found) == {(name, stratum) for name in sat.NAMES for stratum in ("", SHORT, LONG)}
    for name in sat.NAMES:
        specialised, tokens = dict.fromkeys(("", SHORT, LONG), 0), dict.fromkeys(("", SHORT, LONG), 0)
        for sitting in part.of(name, "mrcr"):
            for each in read_steps(sitting.folder / "server"):
                answer = next(a for a in sitting.answers if (a.sent_ns or 0) <= each.t_ns <= (a.ended_ns or 0))
                for stratum in ("", answer.stratum["bin"]):
                    tokens[stratum] += each.decode_tokens
                    specialised[stratum] += each.decode_tokens * each.specialised
        for stratum, its in tokens.items():
            path = found[name, stratum]
            assert its > 0
            assert (path.source, path.counted, path.note) == ("emulator", "specialised", "")
            assert path.tokens == pytest.approx(its, abs=4)  # of runs of steps that an edge cuts
            assert path.share == pytest.approx(specialised[stratum] / its, abs=0.01)
            assert path.answers == path.of_answers == (4 if stratum else 8)
    assert found["baseline", ""].share == 0
    share = found["candidate", ""].share
    assert share is not None
    assert share > 0.9
