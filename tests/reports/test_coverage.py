"""Path coverage against steps made by hand, the emulator's truth, and what a prediction from the client must say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.emulator.truth import read_steps
from replay.records import STEP, STEP_MODES, Backend, Difference, Gpus, GraphCount, GraphTable, PathRule
from reports import coverage
from reports.analysis import Analysis, analyse
from reports.charts.chart import svg
from reports.charts.coverage import CHART
from reports.coverage import (
    EAGER,
    NOT_SHOWN,
    PREFILLING,
    PROMPT,
    RAGGED,
    TOO_MANY,
    UNPREPARED,
    classified,
)
from reports.coverage.emulator import _COLUMNS, _within
from reports.gates.gate import Gate
from reports.measures import measured
from reports.render import html, markdown
from reports.run import load
from tests.integration import runs
from tests.reports.make_run import (
    BASELINE,
    CANDIDATE,
    MS,
    START_NS,
    Chunks,
    add_step_log,
    make_run,
    request,
    rewrite_block,
    write_block,
    write_frame,
)
from workloads.errors import UserError

NONE, PIECEWISE, FULL = (STEP_MODES.index(mode) for mode in ("NONE", "PIECEWISE", "FULL"))
PLAIN = PathRule(model="Kimi K3", source="vLLM 0.33.0", sizes=[1, 2, 4, 8], tokens_per_request=1, max_requests=8)
DRAFTS = PathRule(model="Kimi K3", source="vLLM 0.33.0", sizes=[8, 16, 32, 64], tokens_per_request=8, max_requests=8)

Step = dict[str, Any]


def step(decoding: int = 1, **changes: Any) -> Step:
    """A pure decode step without drafts, in a FULL graph padded to a power of two."""
    padded = 1 << (decoding - 1).bit_length()
    plain = {
        "t_ns": START_NS, "running": decoding, "waiting": 0, "prompt_tokens": 0, "first_tokens": 0, "draft_requests": 0,
        "decode_tokens": decoding, "unpadded": decoding, "padded": padded, "draft_tokens": 0, "accepted_tokens": 0,
        "kv_use": 0.5, "mode": FULL,
    }  # fmt: skip
    return plain | changes


def verify(requests: int, accepted: int, **changes: Any) -> Step:
    """A pure decode step in which every request verifies seven drafts, of which ``accepted`` are over all."""
    drafts = {"draft_requests": requests, "draft_tokens": 7 * requests, "accepted_tokens": accepted}
    size = 8 << (requests - 1).bit_length()
    return step(requests, decode_tokens=requests + accepted, unpadded=8 * requests, padded=size, **drafts) | changes


HIDDEN: Step = {"unpadded": -1, "padded": -1, "mode": 0, "prompt_tokens": -1}


def classes(rule: PathRule | None, steps: list[Step]) -> list[str]:
    return classified(pl.DataFrame(steps), rule)["class"].to_list()


@pytest.mark.parametrize(
    ("rule", "each", "reason"),
    [
        (PLAIN, step(8), ""),
        (PLAIN, step(3, padded=4), ""),
        (PLAIN, step(3, prompt_tokens=500, mode=PIECEWISE), PROMPT),
        (PLAIN, step(3, first_tokens=1), PROMPT),
        (PLAIN, step(3, mode=PIECEWISE), EAGER),
        (PLAIN, step(3, mode=NONE), EAGER),
        (PLAIN, step(9, mode=PIECEWISE), EAGER),
        (PLAIN, step(9), TOO_MANY),
        (PLAIN, step(3, padded=6), UNPREPARED),
        (PLAIN, step(3, **HIDDEN), NOT_SHOWN),
        (PLAIN, step(9, **HIDDEN), TOO_MANY),
        (PLAIN, step(3, first_tokens=1, **HIDDEN), PROMPT),
        (PLAIN, step(7, unpadded=8, padded=8), ""),  # a request that ended in the step before
        (DRAFTS, verify(8, 20), ""),
        (DRAFTS, verify(9, 20, padded=72), TOO_MANY),
        (DRAFTS, verify(4, 20, draft_requests=3, draft_tokens=21, unpadded=25), RAGGED),
        (DRAFTS, verify(4, 20, draft_tokens=24, unpadded=28), RAGGED),
        (DRAFTS, step(8), RAGGED),  # none drafts, although the tokens are those of one request that does
        (DRAFTS, verify(2, 14, decode_tokens=9), ""),  # a reply ended inside its accepted drafts
        (DRAFTS, verify(3, 9, unpadded=32, padded=32), ""),  # three, and one that ended in the step before
        (DRAFTS, verify(4, 20, padded=40), UNPREPARED),
        (None, step(100), ""),
        (None, step(3, prompt_tokens=5), PROMPT),
        (None, step(3, mode=PIECEWISE), EAGER),
        (None, step(3, **HIDDEN), NOT_SHOWN),
    ],
)
def test_which_steps_count(rule: PathRule | None, each: Step, reason: str) -> None:
    assert classes(rule, [each]) == [reason]


def test_requests_that_decode() -> None:
    steps = [step(5, prompt_tokens=700, unpadded=705), verify(4, 20), verify(2, 14, decode_tokens=9)]
    assert classified(pl.DataFrame(steps), DRAFTS)["decoding"].to_list() == [5, 4, 2]


def backends(
    rule: PathRule | None, candidate: str = "latency_specialized", on_baseline: PathRule | None = None
) -> list[Backend]:
    gpus = Gpus(count=8, kind="GB300", layout={"TP": 8})
    return [
        Backend(name=name, decode_backend=decode, url=None, gpus=gpus, emulated=False, path=path)
        for name, decode, path in ((BASELINE, "auto", on_baseline), (CANDIDATE, candidate, rule))
    ]


def at(*steps: Step, start_ns: int = START_NS) -> list[Step]:
    """The steps, one a millisecond, the first after one."""
    return [{**each, "t_ns": start_ns + MS * n} for n, each in enumerate(steps, 1)]


def replies(*each: tuple[int, int], start_ns: int = START_NS) -> list[tuple[Any, Chunks]]:
    """Requests sent at the start, of (prompt, output) tokens: the first token after 0.5 ms, then one a millisecond,
    each a tenth after its step."""
    return [
        request(
            at_ns=start_ns, ttft_s=0.0001, seconds_per_token=0.001, output=output, session=f"s{n}", asked_input=prompt
        )
        for n, (prompt, output) in enumerate(each)
    ]


def run_of(folder: Path, *steps: Step, rule: PathRule | None = PLAIN, **options: Any) -> Path:
    """Two blocks of the same two requests, with 1,000 and 9,000 tokens of prompt; ``steps`` on both servers."""
    head = options.pop("head", {})
    options = {"backends": backends(rule), **options}
    write_frame(folder, send=2, order=[BASELINE, CANDIDATE], **options)
    for index, backend in enumerate((BASELINE, CANDIDATE), 1):
        start = START_NS + index * 1000 * MS
        block = replies((1000, 6), (9000, 3), start_ns=start)
        write_block(folder, index, backend, block, started_ns=start, ended_ns=start + 20 * MS)
        if steps:
            add_step_log(folder, index, backend, at(*steps, start_ns=start), **(head if backend == CANDIDATE else {}))
    return folder


def gate(found: Analysis) -> Gate:
    return next(gate for gate in found.gates if gate.id == "path_proof")


# Both requests decode for two steps, then the first alone for three: 7 decode tokens. The third step computes a prompt.
BY_HAND = (step(2), step(2, padded=6), step(1, prompt_tokens=300, mode=PIECEWISE), step(1), step(1))


def test_shares_of_steps_made_by_hand(tmp_path: Path) -> None:
    baseline, candidate = analyse(run_of(tmp_path, *BY_HAND)).paths
    assert (candidate.source, candidate.counted, candidate.set_by_server) == (
        "step log", "specialised", ["latency_specialized"],
    )  # fmt: skip
    total = candidate.total
    assert total is not None
    assert (total.steps, total.tokens) == (5, 7)
    assert total.share_of_steps == pytest.approx(3 / 5)
    assert total.share_of_tokens == pytest.approx(4 / 7)
    assert total.reasons == {UNPREPARED: pytest.approx(2 / 7), PROMPT: pytest.approx(1 / 7)}
    assert (candidate.at_least, candidate.at_most) == (pytest.approx(4 / 7), pytest.approx(4 / 7))
    assert candidate.full_graphs == pytest.approx(6 / 7)
    assert [(s.label, s.steps, s.tokens, s.share_of_tokens) for s in candidate.by_concurrency] == [
        ("1", 3, 3, pytest.approx(2 / 3)),
        ("2", 2, 4, pytest.approx(1 / 2)),
    ]
    # the long request decodes in the first two steps; the short one in all five
    assert [(s.label, s.steps, s.tokens, s.share_of_tokens) for s in candidate.by_context] == [
        ("0-2k", None, 5, pytest.approx(3 / 5)),
        ("8k-32k", None, 2, pytest.approx(1 / 2)),
    ]
    assert candidate.advice == coverage.ADVICE[UNPREPARED]
    assert (baseline.counted, baseline.advice) == ("would have been eligible", "")
    assert baseline.total == total  # held against the candidate's rule


def test_a_log_copied_from_a_server_that_we_did_not_start_counts_as_much(tmp_path: Path) -> None:
    """RUN/blocks/NN-BACKEND/steps, where a block has no start of ours (replay/watch.py)."""
    ours = analyse(run_of(tmp_path, *BY_HAND)).paths
    for name in ("01-baseline", "02-candidate"):
        (tmp_path / "servers" / name / "steps").rename(tmp_path / "blocks" / name / "steps")
        rewrite_block(tmp_path / "blocks" / name, server=None)
    assert analyse(tmp_path).paths == ours


def test_only_the_measured_window_counts_and_a_torn_record_does_not(tmp_path: Path) -> None:
    outside = [step(4, mode=NONE)] * 30
    found = analyse(run_of(tmp_path, *BY_HAND, *outside)).paths[1]
    assert found.total is not None
    assert found.total.steps == 20  # the window ends at 20 ms
    folder = tmp_path / "servers" / "02-candidate" / "steps"
    records = folder / "0-77.bin"
    records.write_bytes(records.read_bytes()[: 5 * STEP.itemsize + 20])
    again = analyse(tmp_path).paths[1]
    assert again.total is not None
    assert again.total.steps == 5


def test_engines_add_up(tmp_path: Path) -> None:
    run = run_of(tmp_path, *BY_HAND)
    add_step_log(run, 2, CANDIDATE, at(step(4), step(4), start_ns=START_NS + 2000 * MS), engine=1)
    found = analyse(run).paths[1]
    assert found.total is not None
    assert (found.total.steps, found.total.tokens) == (7, 15)
    assert found.total.share_of_tokens == pytest.approx(12 / 15)
    assert found.notes == ["Several engines: chunks are assigned to the nearest step of any of them"]


def test_a_measured_share_passes_or_fails(tmp_path: Path) -> None:
    passed = gate(analyse(run_of(tmp_path / "a", *BY_HAND)))
    assert (passed.status, passed.number) == ("pass", pytest.approx(4 / 7))
    assert passed.numbers[f"{BASELINE}: decode tokens, would have been eligible"] == pytest.approx(4 / 7)
    failed = gate(analyse(run_of(tmp_path / "b", *BY_HAND[1:4], *BY_HAND[1:3])))
    assert failed.status == "fail"
    assert failed.explanation.startswith(f"Only 14.3% of {CANDIDATE}'s decode tokens ran specialised; the rest: ")
    assert f"{UNPREPARED} (57%), {PROMPT} (29%)" in failed.explanation


def test_a_server_that_does_not_show_its_batches_proves_nothing(tmp_path: Path) -> None:
    hidden = [{**each, **HIDDEN} for each in BY_HAND]
    found = analyse(run_of(tmp_path, *hidden, head={"cudagraph_metrics": False}))
    assert gate(found).status == "unknown"
    assert "--cudagraph-metrics" in gate(found).explanation
    assert (found.paths[1].at_least, found.paths[1].at_most) == (0, pytest.approx(1))
    crowded = analyse(run_of(tmp_path / "crowded", *({**step(9), **HIDDEN},) * 3))
    assert gate(crowded).status == "fail"  # whatever the batches were


def test_a_log_that_lacks_steps_proves_nothing(tmp_path: Path) -> None:
    """Two of seven tokens are in the log, and specialised: the others may have been either."""
    found = analyse(run_of(tmp_path, step(2)))
    assert (found.paths[1].at_least, found.paths[1].at_most) == (pytest.approx(2 / 7), pytest.approx(1))
    assert gate(found).status == "unknown"
    assert "steps are missing" in gate(found).explanation


def test_a_deployment_that_cannot_run_specialised_fails_with_its_reasons(tmp_path: Path) -> None:
    unfit = msgspec.structs.replace(PLAIN, problems=["tensor-parallel-size 4 is not supported: 8 or 16"])
    found = analyse(run_of(tmp_path, *BY_HAND, rule=unfit))
    assert gate(found).status == "fail"
    assert "tensor-parallel-size 4 is not supported: 8 or 16" in gate(found).explanation
    assert found.paths[1].counted == "would have been eligible"


def test_a_server_without_the_setting_runs_standard_decode(tmp_path: Path) -> None:
    found = gate(analyse(run_of(tmp_path, *BY_HAND, head={"decode_backend": None})))
    assert found.status == "fail"
    assert found.explanation.startswith(f"{CANDIDATE[0].upper()}{CANDIDATE[1:]} is running standard decode")


def test_an_ordinary_model_is_shown_by_its_full_graphs(tmp_path: Path) -> None:
    found = analyse(run_of(tmp_path / "a", *BY_HAND, rule=None))
    candidate = found.paths[1]
    assert candidate.total is not None
    assert (candidate.counted, candidate.total.share_of_tokens) == ("pure decode in FULL graphs", pytest.approx(6 / 7))
    assert (gate(found).status, gate(found).number) == ("unknown", None)
    other: dict[str, Any] = {
        "rule": None, "backends": backends(None, "auto"), "under_test": ["compilation-config.cudagraph_mode"],
    }  # fmt: skip
    neither = analyse(run_of(tmp_path / "b", *BY_HAND, **other, head={"decode_backend": None}))
    assert gate(neither).status == "pass"
    assert gate(neither).numbers[f"{CANDIDATE}: decode tokens, pure decode in FULL graphs"] == pytest.approx(6 / 7)
    assert neither.conclusion.reasons[0] == (
        "What is compared here is compilation-config.cudagraph_mode: neither backend is set to the specialised decode "
        "path."
    )
    mode = Difference(key="compilation-config.cudagraph_mode", baseline=None, candidate="PIECEWISE", under_test=True)
    known = analyse(run_of(tmp_path / "c", *BY_HAND, **other, head={"decode_backend": None}, differences=[mode]))
    assert f"compared here is {mode.key} (not set against PIECEWISE): neither" in known.conclusion.reasons[0]


def test_a_server_that_is_set_otherwise_than_declared(tmp_path: Path) -> None:
    found = gate(analyse(run_of(tmp_path, *BY_HAND, backends=backends(PLAIN, "auto"))))
    assert found.status == "fail"
    assert f"{CANDIDATE[1:]} is set to auto, but its server's own configuration has" in found.explanation


def test_graph_tables_tell_of_steps_only(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    table = [(8, 8, "FULL", 60), (5, 6, "FULL", 10), (700, 700, "PIECEWISE", 20), (16, 16, "FULL", 10)]
    counts = [GraphCount(unpadded=u, padded=p, mode=mode, count=count) for u, p, mode, count in table]
    for block in (run / "blocks").iterdir():
        (block / "graph_table.json").write_bytes(msgspec.json.encode(GraphTable(counts=counts)))
    found = analyse(run)
    total = found.paths[1].total
    assert total is not None
    assert found.paths[1].source == "graph table"
    assert (total.steps, total.tokens, total.share_of_tokens, total.share_of_steps) == (100, None, None, 0.6)
    assert total.reasons == {EAGER: 0.2, UNPREPARED: 0.1, TOO_MANY: 0.1}
    assert (gate(found).status, gate(found).number, gate(found).number_is) == ("unknown", 0.6, "of steps")
    html.render([found])


def test_a_prediction_is_never_a_proof(tmp_path: Path) -> None:
    """One request decodes from 0.1 to 5.1 ms, the other to 2.1 ms; a third waits for its first token from 3.5 ms on.
    Decode chunks: at 1.1 and 2.1 two each while two decode, at 3.1 one alone, at 4.1 and 5.1 one beside a prefill."""
    rule = msgspec.structs.replace(PLAIN, max_requests=1)
    write_frame(tmp_path, send=3, order=[BASELINE, CANDIDATE], backends=backends(rule))
    for index, backend in enumerate((BASELINE, CANDIDATE), 1):
        start = START_NS + index * 1000 * MS
        third = request(at_ns=start + 3_500_000, ttft_s=0.01, output=1, session="s2")
        rows = [*replies((1000, 6), (9000, 3), start_ns=start), third]
        write_block(tmp_path, index, backend, rows, started_ns=start, ended_ns=start + 20 * MS)
    found = analyse(tmp_path)
    candidate = found.paths[1]
    assert candidate.total is not None
    assert (candidate.source, candidate.total.steps, candidate.total.tokens) == ("prediction", None, 7)
    assert candidate.total.reasons == {TOO_MANY: pytest.approx(4 / 7), PREFILLING: pytest.approx(2 / 7)}
    assert (candidate.at_least, candidate.at_most) == (pytest.approx(1 / 7), pytest.approx(3 / 7))
    proof = gate(found)
    assert (proof.status, proof.number_is, proof.number) == ("unknown", "predicted", pytest.approx(1 / 7))
    assert "predicted, not measured: 14.3% to 42.9%" in proof.explanation
    assert "expect less than the 50%" in proof.explanation
    assert "two deployments" in found.conclusion.reasons[0]


def test_the_report_shows_it_in_every_rendering(tmp_path: Path) -> None:
    found = analyse(run_of(tmp_path, *BY_HAND))
    for text in (html.render([found]), markdown.render([found])):
        assert "60.0% of 5 decode steps and 57.1% of 7 decode tokens" in text
        assert coverage.ADVICE[UNPREPARED] in text
        assert f"{UNPREPARED} 28.6%, {PROMPT} 14.3%" in text
    drawn = svg(CHART, [found])
    assert drawn is not None
    assert "would have been eligible" in drawn
    assert svg(CHART, [analyse(make_run(tmp_path / "none", sessions=6, turns=5))]) is None


@pytest.mark.parametrize("file", ["servers/02-candidate/steps/0-77.json", "blocks/02-candidate/server/steps.jsonl"])
def test_a_damaged_log_is_named(tmp_path: Path, file: str) -> None:
    run = run_of(tmp_path, *BY_HAND) if "servers" in file else make_run(tmp_path, sessions=6, turns=5, order="AB",
                                                                       specialised_share=0.9)  # fmt: skip
    (run / file).write_bytes(b"{oops}\n")
    with pytest.raises(UserError, match=f"{file} is damaged"):
        analyse(run)


ANY_STEP = st.fixed_dictionaries(
    {
        "prompt_tokens": st.integers(-1, 3), "first_tokens": st.integers(0, 1), "decode_tokens": st.integers(1, 90),
        "unpadded": st.integers(-1, 80), "padded": st.sampled_from([-1, 1, 2, 4, 6, 8, 16, 32, 64]),
        "draft_requests": st.integers(-1, 9), "draft_tokens": st.integers(-1, 63),
        "accepted_tokens": st.integers(-1, 63), "mode": st.integers(0, 3),
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run for each rule, whose step logs are to be written over."""
    rules = {"plain": PLAIN, "drafts": DRAFTS, "none": None}
    return {name: run_of(tmp_path_factory.mktemp(name), *BY_HAND, rule=rule) for name, rule in rules.items()}


@settings(max_examples=25, deadline=None)
@given(st.lists(ANY_STEP, min_size=1, max_size=30), st.sampled_from(["plain", "drafts", "none"]))
def test_shares_sum_to_one_whatever_the_steps(written: dict[str, Path], steps: list[Step], rule: str) -> None:
    for index, backend in enumerate((BASELINE, CANDIDATE), 1):
        start = START_NS + index * 1000 * MS
        add_step_log(written[rule], index, backend, at(*({**step(), **each} for each in steps), start_ns=start))
    run = load(written[rule])
    by_block = [measured(loaded.requests, 1.0, "server") for loaded in run.blocks]
    for path in coverage.coverage(run, by_block):
        assert path.total is not None
        assert path.at_least is not None
        assert path.at_most is not None
        assert -1e-9 <= path.at_least <= path.at_most + 1e-9 <= 1 + 2e-9
        inside = steps[:20]  # of the window's 20 ms
        assert (path.total.steps, path.total.tokens) == (len(inside), sum(each["decode_tokens"] for each in inside))
        for stratum in (path.total, *path.by_concurrency, *path.by_context):
            assert stratum.share + sum(stratum.reasons.values()) == pytest.approx(1)
            assert 0 <= stratum.share <= 1
        assert sum(stratum.tokens or 0 for stratum in path.by_concurrency) == path.total.tokens
        assert sum(stratum.steps or 0 for stratum in path.by_concurrency) == path.total.steps


RUNS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40), st.integers(1, 5), st.integers(0, 30)), max_size=8)
SPANS = st.lists(st.integers(0, 100), min_size=2, max_size=12, unique=True).map(sorted)


@settings(max_examples=200, deadline=None)
@given(RUNS, SPANS)
def test_runs_of_steps_are_cut_at_the_edges_of_every_span(cuts: list[tuple[int, ...]], edges: list[int]) -> None:
    rows = [(at, at + length, steps, 1, 0, tokens, True, "") for at, length, steps, tokens in cuts]
    log = pl.DataFrame(rows, schema=_COLUMNS, orient="row")
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    expected = []
    for start, end in spans:
        for at, until, steps, *_, tokens, _specialised, _reason in rows:
            overlap = min(until, end) - max(at, start)
            if overlap > 0:
                kept = round(steps * overlap / (until - at))
                expected.append((max(at, start), min(until, end), kept, round(tokens * kept / steps)))
    found = _within(log, spans).select("t_ns", "end_ns", "steps", "decode_tokens").rows()
    assert sorted(found) == sorted(each for each in expected if each[2] > 0 and each[3] > 0)


def test_a_million_steps_are_counted(tmp_path: Path) -> None:
    """Against numpy on the same arrays; a loop over steps would make this test the slowest of all."""
    rng = np.random.default_rng(1)
    run = run_of(tmp_path, *BY_HAND)
    decoding = rng.integers(1, 20, 1_000_000)
    records = np.zeros(len(decoding), STEP)
    records["t_ns"] = START_NS + 2000 * MS + np.linspace(0, 20 * MS, len(decoding)).astype(np.int64)
    records["decode_tokens"] = records["unpadded"] = decoding
    records["padded"] = np.where(decoding <= 4, 4, 8)
    records["mode"] = FULL
    (run / "servers" / "02-candidate" / "steps" / "0-77.bin").write_bytes(records.tobytes())
    total = analyse(run).paths[1].total
    assert total is not None
    assert total.steps == len(decoding)
    assert total.share_of_tokens == pytest.approx(decoding[decoding <= 8].sum() / decoding.sum())


def test_the_emulators_truth(tmp_path: Path) -> None:
    """The share of the emulator's own log, counted here line by line."""
    folder = runs.run(runs.experiment(), tmp_path / "run")
    found = analyse(folder).paths[1]
    specialised = tokens = 0
    for path, block in runs.blocks(folder):
        if block.backend != CANDIDATE:
            continue
        for each in read_steps(path / "server"):
            if block.started_ns <= each.t_ns <= (block.ended_ns or 0):
                tokens += each.decode_tokens
                specialised += each.decode_tokens * each.specialised
    assert found.total is not None
    assert (found.source, found.counted, found.total.tokens) == ("emulator", "specialised", tokens)
    assert found.total.share_of_tokens == pytest.approx(specialised / tokens)
    assert 0 < specialised < tokens
    assert PROMPT in found.total.reasons
    # the client saw the same tokens (but for those of first chunks), and at other times
    received = sum(stratum.tokens or 0 for stratum in found.by_context)
    assert received == pytest.approx(tokens, rel=0.02)
    by_context = sum(stratum.share * (stratum.tokens or 0) for stratum in found.by_context) / received
    assert by_context == pytest.approx(specialised / tokens, abs=0.1)
