"""The battery from the experiment to RUN/parity, with tiny made-up checks, against emulators with a known truth."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl
import psutil
import pytest

from evals import registration
from evals.parity import harness, http
from evals.parity.asking import ask, record
from evals.parity.check import Check, Given, Situation
from evals.parity.endpoint import Need
from evals.parity.harness import Progress, fix_floor, measure
from evals.parity.plan import Wanted
from evals.parity.record import read_ids
from evals.parity.reproduce import lines, reproduce, together
from evals.parity.traces import forced, in_step
from evals.records import Case, CheckRun, Floor, ParityManifest, ParityPlan, ParityReply
from replay import rundir
from replay.emulator import language, process
from replay.emulator.settings import EmulatorSettings
from replay.experiment import Experiment
from replay.preflight import without_servers
from replay.servers import Servers
from tests.integration import runs
from tests.integration.runs import silent
from tests.integration.test_served import unspecial
from workloads.content import vocabulary_of_tokenizer
from workloads.errors import UserError

ROOT = Path(__file__).parents[3]
CASES, TOKENS = 3, 5
QUICK = Wanted(budget="quick")


class Asked(NamedTuple):
    """A case that a made-up check was about to ask."""

    arm: str
    check: str
    case: int


At = Callable[[Asked], None]


def nothing(_: Asked | Progress) -> None:
    """Does nothing."""


def tiny(id: str, at: At = nothing, needs: Sequence[Need] = (), count: int = CASES) -> Check:
    """A check that asks one case after the other, and calls ``at`` before each."""

    def cases(situation: Situation) -> list[Case]:
        return [
            Case(number=number, prompt_seed=number, prompt_tokens=20, prompt_digest="", output_tokens=TOKENS)
            for number in range(count)
        ]

    async def run(given: Given, cases: Sequence[Case]) -> None:
        for case in cases:
            at(Asked(given.salt.split("/")[1], id, case.number))
            ((generation,),) = await given.endpoint.generate([ask(given, case, id)])
            record(given, case, generation)

    return Check(
        id=id,
        title=f"made up {id}",
        finds="",
        statistic="",
        needs=frozenset(needs),
        cases=cases,
        run=run,
        instead="another one, of less power" if needs else "",
    )


def replay_of(reference: Check) -> Check:
    """A check that forces the reference traces."""

    def cases(situation: Situation) -> list[Case]:
        return [forced(trace, number, batch=1) for number, trace in enumerate(reference.cases(situation))]

    async def run(given: Given, cases: Sequence[Case]) -> None:
        await in_step(given, cases, "replay")

    return Check(id="P1", title="replay", finds="", statistic="", needs=frozenset(), cases=cases, run=run)


def registry(*checks: Check) -> dict[str, Check]:
    return {check.id: check for check in checks}


def emulated(**changes: Any) -> Experiment:
    emulator = {"time_scale": 1000, **changes}
    described = runs.experiment(parity={"max_context": 1024}, emulator=emulator, replay={"salt": "pepper"})
    return described.model_copy(update={"workload": None})


def asked_by(run: Path, arm: str, id: str) -> list[int]:
    """Cases on record."""
    lines = (run / "parity" / arm / id / "replies.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=ParityReply).case for line in lines]


def run_of(run: Path, arm: str, id: str) -> CheckRun:
    return msgspec.json.decode((run / "parity" / arm / id / "run.json").read_bytes(), type=CheckRun)


def positions(run: Path, arm: str, id: str) -> pl.DataFrame:
    return pl.read_parquet(run / "parity" / arm / id / "tokens.parquet")


def hurried(
    experiment: Experiment, servers: Servers, scratch: Path, tell: object, *, also: Callable[..., None], **_: Any
) -> Any:
    """As replay.preflight.prepare, without its questions."""
    for name in ("baseline", "candidate"):
        with servers.answering(name, scratch / name, with_faults=False) as running:
            also(name, running)
    facts = SimpleNamespace(time_scale=1.0)
    return SimpleNamespace(
        settings={"baseline": {}, "candidate": {}},
        matching=without_servers(experiment, silent),
        max_context=2048,
        facts={"baseline": facts, "candidate": facts},
        rendering=SimpleNamespace(vocabulary=vocabulary_of_tokenizer(language.tokenizer())),
    )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preflight asks nothing of its own."""
    monkeypatch.setattr(harness, "prepare", hurried)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experiment]:
    """An experiment with one running emulator as both backends."""
    settings = EmulatorSettings(time_scale=1000, language="model")
    running = process.start(settings, tmp_path_factory.mktemp("emulator"))
    yield at_url(running.url)
    process.stop(running)


def at_url(url: str) -> Experiment:
    backend = {"url": url, "gpus": runs.GPUS}
    described = runs.experiment(parity={"max_context": 1024}, both=backend)
    return described.model_copy(update={"workload": None})


def test_the_floor_is_fixed_between_the_baseline_and_the_candidate(tmp_path: Path) -> None:
    """With preflight and starts as they are: order of arms, separate starts, traces, fault, floor, plan."""
    run = tmp_path / "run"
    seen: list[tuple[str, bool, bool]] = []

    def at(asked: Asked) -> None:
        parity = run / "parity"
        seen.append((asked.arm, (parity / "plan.json").exists(), (parity / "floor.json").exists()))

    reference = tiny("T0")
    checks = registry(reference, replay_of(reference), tiny("D9", at))
    described = emulated(faults=["bf16-noise:0.02"])
    told: list[str] = []
    measure(
        described,
        run,
        lambda event: told.append(event.text),
        nothing,
        Wanted(budget="quick", fault="flip-token:1"),
        checks=checks,
    )
    arms = ["A1", "A2", "B1", "B2", "X"]
    assert seen == [(arm, True, arm not in ("A1", "A2")) for arm in arms for _ in range(CASES)]

    plan = registration.read(run / "parity", ParityPlan)
    assert (plan.arms, plan.fault, plan.max_context) == (arms, "flip-token:1", 1024)
    assert [(each.id, each.cases, each.tokens) for each in plan.checks] == [
        (id, CASES, CASES * TOKENS) for id in ("T0", "P1", "D9")
    ]
    assert f"tokens {(1 + 2 * len(arms)) * CASES * TOKENS} output tokens at most" in told

    # what the floor is made of was there before, and nothing of it has changed
    floor = msgspec.json.decode((run / "parity" / "floor.json").read_bytes(), type=Floor)
    files = [path for arm in ("A1", "A2") for path in (run / "parity" / arm).rglob("*") if path.is_file()]
    assert floor.sha256 == {
        str(path.relative_to(run / "parity")): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }
    assert "A2/D9/tokens.parquet" in floor.sha256
    assert run_of(run, "A2", "D9").ended_unix_s < floor.fixed_unix_s < run_of(run, "B1", "P1").started_unix_s

    # traces are A1's alone, and forced on every arm
    assert not (run / "parity" / "A2" / "T0").exists()
    traces = read_ids(run / "parity" / "A1" / "T0" / "tokens.parquet")
    for arm in arms:
        ids = read_ids(run / "parity" / arm / "P1" / "tokens.parquet")
        assert {case: each.tolist() for case, each in ids.items()} == {
            case: each.tolist() for case, each in traces.items()
        }
        assert run_of(run, arm, "P1").positions == CASES * TOKENS
    # starts of their own: noise differs, and so does the fault's arm, by far
    logprobs = {arm: positions(run, arm, "P1")["logprob"].to_numpy() for arm in arms}
    for arm in arms[1:-1]:
        gap = np.abs(logprobs[arm] - logprobs["A1"]).max()
        assert 0 < gap < 0.5
    assert np.abs(logprobs["X"] - logprobs["A1"]).min() > 0.5

    found = reproduce(run, "P1", 1, tmp_path / "again", silent, backend="candidate")
    assert list(found.sides) == [*(f"{arm}, on record" for arm in arms), "candidate, now"]
    ids, logprobs_now = found.sides["candidate, now"]
    assert ids.tolist() == traces[1].tolist()
    assert np.abs(logprobs_now - found.sides["A1, on record"][1]).max() < 0.5
    assert "the same ids, logprobs up to" in "\n".join(lines(found))


@pytest.mark.usefixtures("quick")
def test_each_arm_has_a_start_of_its_server_to_itself(tmp_path: Path) -> None:
    """Also after an interruption: a start is shared by an arm's own checks alone."""

    def at(asked: Asked) -> None:
        if asked == ("A2", "D9", 1) and not stop:
            stop.append(asked)
            raise KeyboardInterrupt

    stop: list[Asked] = []
    checks = registry(tiny("D8"), tiny("D9", at))
    described = unspecial(tmp_path, parity={"max_context": 1024}).model_copy(update={"workload": None})
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        measure(described, run, silent, nothing, QUICK, allow_unmatched=True, checks=checks)
    measure(described, run, silent, nothing, QUICK, resume=True, checks=checks)
    starts = {(arm, id): run_of(run, arm, id).server for arm in ("A1", "A2", "B1", "B2") for id in checks}
    by_arm = {arm: {start for (each, _), start in starts.items() if each == arm} for arm, _ in starts}
    assert [len(by_arm[arm]) for arm in ("A1", "A2", "B1", "B2")] == [1, 2, 1, 1]  # A2 was interrupted
    assert len(set.union(*by_arm.values())) == 5
    assert all((run / "parity" / str(start) / "command.json").exists() for start in starts.values())


@pytest.mark.usefixtures("quick")
def test_what_cannot_be_run_is_on_record_with_the_reason(urls: Experiment, tmp_path: Path) -> None:
    checks = registry(
        tiny("D9"),
        tiny("S9", needs=["speculation"]),
        tiny("V9", needs=["two starts"]),
        tiny("P9", count=0),
    )
    told: list[str] = []
    measure(urls, tmp_path, lambda event: told.append(event.text), nothing, QUICK, checks=checks)
    for arm in ("A1", "A2", "B1", "B2"):
        assert run_of(tmp_path, arm, "D9").not_run is None
        speculation = run_of(tmp_path, arm, "S9").not_run
        assert speculation is not None
        assert "needs speculation (speculation: baseline and candidate: nothing shows" in speculation
        assert speculation.endswith("another one, of less power")
        assert "url is not started by decodegate" in (run_of(tmp_path, arm, "V9").not_run or "")
        assert "no case of it fits 1,024 tokens" in (run_of(tmp_path, arm, "P9").not_run or "")
    assert any(text.startswith("S9") and "NOT RUN: needs speculation" in text for text in told)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.evals.parity import test_harness as own
from evals.parity import harness, http

def at(asked):
    print(*asked, flush=True)
    if asked == ("A2", "D9", 1):
        os.kill(os.getpid(), signal.SIGKILL)

harness.prepare = own.hurried
checks = own.registry(own.tiny("D8", at), own.tiny("D9", at))
harness.measure(own.at_url(sys.argv[1]), Path(sys.argv[2]), own.silent, own.nothing, own.QUICK, checks=checks)
"""


@pytest.mark.usefixtures("quick")
def test_resume_after_kill_9_asks_nothing_that_was_recorded(urls: Experiment, tmp_path: Path) -> None:
    url, run = urls.backends.baseline.url, tmp_path / "run"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(url), str(run)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert killed.stdout.splitlines()[-1] == "A2 D9 1"
    assert not (run / "parity" / "A2" / "D9" / "run.json").exists()
    assert not (run / "parity" / "A2" / "D9" / "tokens.parquet").exists()
    plan = (run / "parity" / "plan.json").read_bytes()
    kept = {path: path.read_bytes() for path in (run / "parity").glob("A*/*/*") if (path.parent / "run.json").exists()}
    assert {path.parent.name for path in kept} == {"D8", "D9"}

    again: list[Asked] = []
    checks = registry(tiny("D8", again.append), tiny("D9", again.append))
    measure(urls, run, silent, nothing, Wanted(), resume=True, checks=checks)
    due = [("A2", "D9"), *((arm, id) for arm in ("B1", "B2") for id in ("D8", "D9"))]
    assert again == [Asked(arm, id, case) for arm, id in due for case in range(CASES)]
    assert (run / "parity" / "plan.json").read_bytes() == plan
    assert {path: path.read_bytes() for path in kept} == kept
    assert asked_by(run, "A2", "D9") == list(range(CASES))
    assert asked_by(run, "A2", "D9.interrupted-1") == [0]
    again.clear()
    measure(urls, run, silent, nothing, Wanted(), resume=True, checks=checks)
    assert not again


@pytest.mark.usefixtures("quick")
def test_an_interrupted_check_is_asked_again_under_another_salt(urls: Experiment, tmp_path: Path) -> None:
    """A server may still hold what the first attempt left in its prefix cache."""
    salts: list[str] = []

    async def run(given: Given, cases: Sequence[Case]) -> None:
        salts.append(given.salt)
        if len(salts) == 1:
            raise KeyboardInterrupt

    checks = registry(msgspec.structs.replace(tiny("D9"), run=run))
    with pytest.raises(KeyboardInterrupt):
        measure(urls, tmp_path, silent, nothing, QUICK, checks=checks)
    measure(urls, tmp_path, silent, nothing, QUICK, resume=True, checks=checks)
    assert len(salts) == len(set(salts)) == 5


@pytest.fixture
def stopped(urls: Experiment, tmp_path: Path, quick: None) -> Path:
    """A run that was interrupted on B1."""

    def at(asked: Asked) -> None:
        if asked.arm == "B1":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(urls, tmp_path, silent, nothing, QUICK, checks=registry(tiny("D8", at), tiny("D9", at)))
    return tmp_path


def resumed(experiment: Experiment, run: Path, wanted: Wanted = Wanted()) -> None:  # noqa: B008 (frozen)
    measure(experiment, run, silent, nothing, wanted, resume=True, checks=registry(tiny("D8"), tiny("D9")))


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Wanted(budget="full"), "--budget was quick"),
        (Wanted(fault="identity"), "--fault was not given"),
        (Wanted(checks=("D9",)), "--checks was D8,D9"),
    ],
)
def test_another_plan_is_refused(wanted: Wanted, words: str, urls: Experiment, stopped: Path) -> None:
    with pytest.raises(UserError, match=f"plan was changed since it was registered: {words}"):
        resumed(urls, stopped, wanted)
    resumed(urls, stopped, Wanted(budget="quick", checks=("D8", "D9")))
    assert asked_by(stopped, "B2", "D9") == list(range(CASES))


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("plan.json", "plan.json is not the one that was registered"),
        ("cases/D9.jsonl", "D9.jsonl is not the one that was registered"),
        ("A2/D8/replies.jsonl", "replies.jsonl has changed since the floor was fixed"),
        ("A1/D8/added", "added has changed since the floor was fixed"),
    ],
)
def test_what_was_fixed_and_has_changed_is_refused(file: str, words: str, urls: Experiment, stopped: Path) -> None:
    path = stopped / "parity" / file
    path.write_bytes((path.read_bytes() if path.exists() else b"") + b"\n")
    with pytest.raises(UserError, match=words):
        resumed(urls, stopped)


def test_another_experiment_is_refused(urls: Experiment, stopped: Path) -> None:
    with pytest.raises(UserError, match="the experiment differs"):
        resumed(urls.model_copy(update={"name": "other"}), stopped)


def test_other_prompts_are_refused(urls: Experiment, stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer's file has changed, say."""

    def other(*args: Any, **more: Any) -> Any:
        found = hurried(*args, **more)
        found.rendering.vocabulary.ids.reverse()
        return found

    monkeypatch.setattr(harness, "prepare", other)
    with pytest.raises(UserError, match="prompts are no longer those that were planned"):
        resumed(urls, stopped)


def test_servers_that_no_longer_offer_what_was_planned_are_refused(
    urls: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: Asked) -> None:
        raise KeyboardInterrupt

    def shorter(*args: Any, **more: Any) -> Any:
        found = hurried(*args, **more)
        found.max_context = 512
        return found

    def go_on() -> None:
        measure(urls, tmp_path, silent, nothing, Wanted(), resume=True, checks=checks)

    monkeypatch.setattr(harness, "prepare", hurried)
    checks = registry(tiny("D9", stop, needs=["trace replay"]))
    with pytest.raises(KeyboardInterrupt):
        measure(urls, tmp_path, silent, nothing, QUICK, checks=checks)
    monkeypatch.setattr(harness, "prepare", shorter)
    with pytest.raises(UserError, match=r"the backends take 512 tokens of context, .* up to 1,024"):
        go_on()
    monkeypatch.setattr(harness, "prepare", hurried)
    monkeypatch.setitem(http._LOOKS, "trace replay", lambda *_: gone())
    with pytest.raises(UserError, match="D9 was planned, but can no longer be run: needs trace replay"):
        go_on()


async def gone() -> str:
    return "HTTP 403"


@pytest.mark.usefixtures("quick")
def test_a_server_that_ends_loses_the_check_alone(tmp_path: Path) -> None:
    """And nothing of what comes of its silence is on record."""
    asked: list[Asked] = []

    def at(case: Asked) -> None:
        if case == ("A2", "D9", 1) and case not in asked:
            (server,) = [each for each in psutil.Process().children() if str(tmp_path) in " ".join(each.cmdline())]
            server.kill()
            server.wait()
        asked.append(case)

    checks = registry(tiny("D8", at), tiny("D9", at))
    described = emulated()
    with pytest.raises(UserError, match=r"(?s)the baseline's server has ended: .*--resume"):
        measure(described, tmp_path, silent, nothing, QUICK, checks=checks)
    assert not (tmp_path / "parity" / "A2" / "D9" / "run.json").exists()
    assert asked_by(tmp_path, "A2", "D9") == [0]
    before = len(asked)
    measure(described, tmp_path, silent, nothing, QUICK, resume=True, checks=checks)
    assert asked[before:][:CASES] == [Asked("A2", "D9", case) for case in range(CASES)]
    assert asked_by(tmp_path, "A2", "D9") == list(range(CASES))


@pytest.mark.usefixtures("quick")
def test_failures_of_a_server_that_lives_are_on_record(urls: Experiment, tmp_path: Path) -> None:
    """A prompt that it does not take, say."""

    async def run(given: Given, cases: Sequence[Case]) -> None:
        too_long = msgspec.structs.replace(ask(given, cases[0], ""), max_tokens=10**6)
        ((generation,),) = await given.endpoint.generate([too_long])
        record(given, cases[0], generation)

    shown: list[Progress] = []
    checks = registry(msgspec.structs.replace(tiny("D9"), run=run))
    measure(urls, tmp_path, silent, shown.append, QUICK, checks=checks)
    (line,) = (tmp_path / "parity" / "B2" / "D9" / "replies.jsonl").read_bytes().splitlines()
    assert msgspec.json.decode(line, type=ParityReply).error == "HTTP 400"
    assert (shown[-1].arm, shown[-1].number, shown[-1].numbers, shown[-1].errors) == ("B2", 4, 4, 1)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Wanted(checks=("D9", "Q1")), "no check is called Q1; known: D9"),
        (Wanted(fault="no-such"), "unknown fault"),
    ],
)
def test_what_does_not_exist_is_refused_before_anything(
    wanted: Wanted, words: str, urls: Experiment, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with pytest.raises(UserError, match=words):
        measure(urls, run, silent, nothing, wanted, checks=registry(tiny("D9")))
    assert not run.exists()


def test_a_failure_before_the_first_request_leaves_nothing(
    urls: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise UserError("cannot be compared")

    monkeypatch.setattr(harness, "prepare", refuses)
    with pytest.raises(UserError, match="cannot be compared"):
        measure(urls, tmp_path / "run", silent, nothing, QUICK, checks=registry(tiny("D9")))
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("quick")
def test_a_replay_in_the_same_run_directory_is_left_alone(urls: Experiment, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    measure(urls, tmp_path, silent, nothing, QUICK, checks=registry(tiny("D9")))
    assert (tmp_path / "manifest.json").read_text() == "{}"
    assert rundir.read_manifest(tmp_path / "parity", ParityManifest).kind == "parity"
    with pytest.raises(UserError, match="not empty"):
        measure(urls, tmp_path, silent, nothing, QUICK, checks=registry(tiny("D9")))


def test_a_floor_is_fixed_once(tmp_path: Path) -> None:
    (tmp_path / "A1" / "D9").mkdir(parents=True)
    (tmp_path / "A1" / "D9" / "replies.jsonl").write_text("x")
    fix_floor(tmp_path)
    first = (tmp_path / "floor.json").read_bytes()
    fix_floor(tmp_path)
    assert (tmp_path / "floor.json").read_bytes() == first


def test_a_case_goes_with_its_batch_and_with_what_it_is_compared_with() -> None:
    """As D1 asks: a lot of whole replies, the same lot as streams, then the next lot."""
    cases = [
        Case(
            number=number,
            prompt_seed=lot * 2 + place,
            prompt_tokens=1,
            prompt_digest="",
            output_tokens=1,
            batch=2,
            variant=variant,
        )
        for number, (lot, variant, place) in enumerate(
            (lot, variant, place) for lot in range(3) for variant in ("whole", "stream") for place in range(2)
        )
    ]
    assert [case.number for case in together(cases, 6)] == [4, 5, 6, 7]
