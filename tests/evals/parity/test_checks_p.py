"""The token-level checks and the endpoint in this process, against the language model whose numbers are known."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from evals.parity import prompts
from evals.parity.check import Budget, Given, Situation
from evals.parity.checks import CHECKS
from evals.parity.checks.p4_cut_points import BETWEEN, EDGE, points
from evals.parity.checks.p6_batches import LADDER_VARIANT, NEIGHBOUR, VICTIM
from evals.parity.checks.t0 import BASE, CONTEXT, LONG
from evals.parity.endpoint import Ask, Endpoint, Generation, Ints, Need
from evals.parity.http import Server
from evals.parity.http_replies import nothing
from evals.parity.local import Local
from evals.parity.traces import label
from evals.records import Case, ParityReply
from replay.emulator import decoding, language, process
from replay.emulator.lm import Sampling
from replay.emulator.settings import EmulatorSettings
from replay.wire import Limits
from workloads.content import vocabulary_of_range
from workloads.errors import UserError

IDS = ("T0", "P1", "P3", "P4", "P5", "P6", "P7")
WORDS = vocabulary_of_range(language.FIRST_WORD, language.VOCAB_SIZE)
QUICK = Situation(
    budget="quick", seed=1, max_context=4096, max_requests=72, specialised_requests=64, block=16, has=Local.has
)
WITHOUT_REPLAY = msgspec.structs.replace(QUICK, has=Local.has - {"trace replay"})


class Records:
    """A Sink that keeps all."""

    def __init__(self) -> None:
        self.replies: list[ParityReply] = []
        self.of: dict[int, Generation] = {}

    def reply(self, reply: ParityReply) -> None:
        self.replies.append(reply)

    def tokens(self, case: int, generation: Generation, *, repeat: int = 0) -> None:
        assert repeat == 0
        assert case not in self.of
        self.of[case] = generation


def made(case: Case) -> list[int]:
    return prompts.prompt(case.prompt_seed, case.prompt_tokens, WORDS)


def ask(endpoint: Endpoint, id: str, traces: Mapping[int, Ints], situation: Situation = QUICK) -> Records:
    sink = Records()
    given = Given(endpoint=endpoint, prompts=made, traces=traces, sink=sink)

    async def run() -> None:
        await CHECKS[id].run(given, CHECKS[id].cases(situation))

    asyncio.run(run())
    return sink


@pytest.fixture(scope="module")
def traces() -> dict[int, Ints]:
    return {case: generation.ids for case, generation in ask(Local(), "T0", {}).of.items()}


# --- cases ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", get_args(Budget))
@pytest.mark.parametrize("most", [200, 2048, 40_000, 1 << 20])
@pytest.mark.parametrize("id", IDS)
def test_cases_are_the_same_every_time_and_fit_the_server(id: str, most: int, budget: Budget) -> None:
    alone: frozenset[Need] = frozenset({"token ids"})
    for has in (Local.has, alone):
        situation = Situation(
            budget=budget, seed=5, max_context=most, max_requests=20, specialised_requests=6, block=32, has=has
        )
        cases = CHECKS[id].cases(situation)
        assert cases == CHECKS[id].cases(situation)
        assert cases != CHECKS[id].cases(msgspec.structs.replace(situation, seed=6))
        assert [case.number for case in cases] == list(range(len(cases)))
        reference = {case.number: case for case in CHECKS["T0"].cases(situation)}
        for case in cases:
            assert case.output_tokens > 0
            assert case.prompt_tokens + (case.cut or 0) + case.output_tokens <= most
            assert case.batch <= (20 if case.variant == LADDER_VARIANT else 6)
            assert case.stratum == {"context": label(case.prompt_tokens), "batch": str(case.batch)}
            if case.trace is not None:
                trace = reference[case.trace]
                assert (case.prompt_seed, case.prompt_tokens) == (trace.prompt_seed, trace.prompt_tokens)
                assert (case.output_tokens if case.cut is None else case.cut) <= trace.output_tokens


@pytest.mark.parametrize("id", ["T0", "P1", "P3", "P4", "P5", "P6"])
def test_what_decodes_together_stands_together_and_is_as_many_as_it_says(id: str) -> None:
    """In lanes a batch is what is under way at once."""
    cases = [case for case in CHECKS[id].cases(QUICK) if case.variant not in (VICTIM, NEIGHBOUR)]
    while cases:
        lot, cases = cases[: cases[0].batch], cases[cases[0].batch :]
        assert [case.batch for case in lot] == [len(lot)] * len(lot)
        if id == "P6":
            assert len({(case.trace, case.output_tokens) for case in lot}) == 1
        if id == "P4":
            assert len({case.trace for case in lot}) == len(lot)


def test_the_standard_budget_meets_the_numbers_of_the_specification() -> None:
    """accuracy.md, section (f)."""
    situation = msgspec.structs.replace(QUICK, budget="standard", max_context=1 << 20)
    cases = {id: CHECKS[id].cases(situation) for id in IDS}
    assert Counter(case.variant for case in cases["P1"])[LONG] >= 20  # 15: traces of 16k
    assert {case.output_tokens for case in cases["P1"] if case.variant == LONG} == {16_384}
    assert len({case.trace for case in cases["P1"] if case.variant == BASE}) >= 105  # 20
    free = Counter((case.variant, case.output_tokens) for case in cases["P3"])
    assert free == {("free greedy", 2048): 24, ("free T=1", 2048): 24}  # 1
    assert Counter(case.variant for case in cases["P4"])[EDGE] >= 20  # 6
    beyond = Counter(case.stratum["context"] for case in cases["P5"])  # 5
    assert list(beyond) == ["1k", "8k", "32k", "128k-64", "128k+64", "256k", "512k", "1024k-256"]
    assert set(beyond.values()) == {5}
    assert {case.output_tokens for case in cases["P5"]} == {256}
    at_size: Counter[int] = Counter()
    for case in cases["P6"]:
        at_size[case.batch] += case.output_tokens * (case.variant == LADDER_VARIANT)
    ladder = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 25, 32, 33, 40, 48, 63, 64, 65)
    assert all(at_size[size] >= 2000 for size in ladder)  # 9, 19
    assert Counter(case.variant for case in cases["P6"])[NEIGHBOUR] >= 200  # 14
    assert sum((case.output_tokens - 1) / case.batch for case in cases["P7"]) >= 73_000  # 10


def test_contexts_that_do_not_fit_become_the_longest_that_does() -> None:
    situation = msgspec.structs.replace(QUICK, budget="standard", max_context=40_000)
    contexts = {case.prompt_tokens for case in CHECKS["T0"].cases(situation) if case.variant == CONTEXT}
    assert contexts == {1024, 8192, 32_768, 40_000 - 256}


def test_points_lie_around_the_ends_of_blocks_and_between() -> None:
    found = points(prompt=70, trace=400, block=32, count=12)
    assert {(70 + at) % 32 for at, kind in found if kind == EDGE} == {31, 0, 1}
    spread = [at for at, kind in found if kind == BETWEEN]
    assert len(spread) >= 5
    assert np.diff(spread).max() < 150
    assert found == sorted(found)
    assert points(prompt=10, trace=5, block=64, count=4) == [(2, BETWEEN), (4, BETWEEN)]


def test_contexts_for_reading() -> None:
    assert [label(tokens) for tokens in (64, 1000, 1024, 8192, 131_008, 131_136)] == [
        *("64", "1000", "1k", "8k"),
        *("128k-64", "128k+64"),
    ]


# --- records ----------------------------------------------------------------------------------------------------------


def check_complete(cases: Sequence[Case], sink: Records, traces: Mapping[int, Ints]) -> None:
    replies = {reply.case: reply for reply in sink.replies}
    assert len(sink.replies) == len(cases)
    for case in cases:
        reply, generation = replies[case.number], sink.of[case.number]
        assert reply.error is None
        assert reply.ids == generation.ids.size == case.output_tokens
        assert reply.ids_hash == prompts.digest(generation.ids.tolist())
        if case.trace is not None and case.cut is None:
            assert generation.ids.tolist() == traces[case.trace][: case.output_tokens].tolist()


@pytest.mark.parametrize("situation", [QUICK, WITHOUT_REPLAY], ids=["replay", "without"])
@pytest.mark.parametrize("id", IDS)
def test_every_case_is_on_record_with_all_its_positions(id: str, situation: Situation, traces: dict[int, Ints]) -> None:
    if not CHECKS[id].needs <= situation.has:
        assert CHECKS[id].instead
        return
    sink = ask(Local(), id, traces, situation)
    cases = CHECKS[id].cases(situation)
    check_complete(cases, sink, traces)
    for generation in sink.of.values():
        told = generation.top_ids >= 0
        assert (told.sum(axis=1) == {"T0": 0, "P7": 1}.get(id, 20)).all()
    assert any(case.trace is not None and case.cut is None for case in cases) == (
        situation is QUICK and id in ("P1", "P5", "P6", "P7")
    )


class Failing(Local):
    """Fails every second request."""

    asked = 0

    async def generate(self, group: Sequence[Ask]) -> list[list[Generation]]:
        found = await super().generate(group)
        for index in range(len(group)):
            self.asked += 1
            if self.asked % 2 == 0:
                found[index] = [nothing("broke off")]
        return found


@pytest.mark.parametrize("id", IDS)
def test_one_that_fails_takes_no_other_with_it(id: str, traces: dict[int, Ints]) -> None:
    cases = CHECKS[id].cases(QUICK)
    sink = ask(Failing(), id, traces)
    assert sorted(reply.case for reply in sink.replies) == list(range(len(cases)))
    failed = [reply for reply in sink.replies if reply.error]
    assert len(failed) == len(cases) // 2
    assert {(reply.error, reply.ids) for reply in failed} == {("broke off", 0)}
    assert set(sink.of) == set(range(len(cases))) - {reply.case for reply in failed}


def test_a_trace_that_is_missing_or_too_short_is_said_to_be(traces: dict[int, Ints]) -> None:
    lacking = {number: ids[:5] if number == 1 else ids for number, ids in traces.items() if number != 0}
    cases = CHECKS["P1"].cases(QUICK)
    sink = ask(Local(), "P1", lacking)
    assert {reply.case for reply in sink.replies} == set(range(len(cases)))
    for reply in sink.replies:
        assert reply.error == ("no trace" if cases[reply.case].trace in (0, 1) else None)


# --- what they see ----------------------------------------------------------------------------------------------------


def differing(id: str, fault: str, traces: Mapping[int, Ints], situation: Situation = QUICK) -> dict[int, Any]:
    """Of each case the positions whose logprob a fault has changed, as far as ids agree (and one more)."""
    sound, faulty = ask(Local(), id, traces, situation), ask(Local([fault]), id, traces, situation)
    return {case: changed(sound.of[case], faulty.of[case]) for case in sound.of}


def changed(one: Generation, other: Generation) -> NDArray[np.int64]:
    differs = (one.logprobs != other.logprobs) | (one.ids != other.ids)
    apart = np.flatnonzero(one.ids != other.ids)
    return np.flatnonzero(differs[: apart[0] + 1] if apart.size else differs)


def test_without_a_fault_nothing_differs(traces: dict[int, Ints]) -> None:
    for id in IDS[1:]:
        assert not any(each.size for each in differing(id, "bf16-noise:0", traces).values())


Struck = Callable[[Case, int], bool]

SEEN: list[tuple[str, str, Struck]] = [
    ("P5", "kv-beyond:2000", lambda case, at: at > 0 and case.prompt_tokens + at > 2000),
    ("P1", "padded-batch", lambda case, at: False),
    ("P6", "low-precision:0.1", lambda case, at: at > 0),
]


@pytest.mark.parametrize(("id", "fault", "struck"), SEEN, ids=lambda each: each if isinstance(each, str) else "")
def test_faults_show_where_they_are(id: str, fault: str, struck: Struck, traces: dict[int, Ints]) -> None:
    cases = CHECKS[id].cases(QUICK)
    for number, positions in differing(id, fault, traces).items():
        case = cases[number]
        assert positions.tolist() == [at for at in range(case.output_tokens) if struck(case, at)]


def test_batches_of_the_ladder_are_in_step_and_as_large_as_they_say(traces: dict[int, Ints]) -> None:
    cases = CHECKS["P6"].cases(QUICK)
    found = differing("P6", "padded-batch", traces)
    by_size = {case.batch: found[case.number].size for case in cases if case.variant == LADDER_VARIANT}
    assert {size for size, changes in by_size.items() if changes} == {3, 9, 17, 33, 65}
    found = differing("P6", "batch-corrupts:32", traces)
    corrupt = Counter[int]()
    for case in cases:
        if case.variant == LADDER_VARIANT:
            corrupt[case.batch] += found[case.number].size
    steps = {case.batch: case.output_tokens - 1 for case in cases if case.variant == LADDER_VARIANT}
    assert +corrupt == {size: steps[size] for size in (33, 64, 65)}  # one row of each step


def test_joining_and_leaving_shows_in_churn_alone(traces: dict[int, Ints]) -> None:
    cases = CHECKS["P6"].cases(QUICK)
    found = differing("P6", "neighbour-leak", traces)
    hits = Counter(cases[number].variant for number, positions in found.items() for _ in positions)
    joins = Counter(case.variant for case in cases)[NEIGHBOUR]
    assert hits[LADDER_VARIANT] == 0
    assert joins / 4 < hits[NEIGHBOUR] + hits[VICTIM] <= 2 * joins


def test_a_prefix_that_was_restored_wrongly_shows_after_a_trace_s_first_cut(traces: dict[int, Ints]) -> None:
    cases = CHECKS["P4"].cases(QUICK)
    sound = ask(Local(), "P4", traces)
    warm = {reply.case: reply.cached_tokens for reply in sound.replies}
    first = {case.trace: case.number for case in reversed(cases)}
    for number, positions in differing("P4", "prefix-off-by-one", traces).items():
        assert (positions.size > 0) == (number != first[cases[number].trace])
        assert bool(warm[number]) == (number != first[cases[number].trace])


def test_a_soak_sees_a_race_once_a_step(traces: dict[int, Ints]) -> None:
    """In half of the steps one row; the quick budget has 128 steps of 8 rows."""
    hits = sum(positions.size for positions in differing("P7", "race:0.5", traces).values())
    assert 64 - 4 * 32**0.5 < hits < 96 + 4 * 32**0.5


def test_free_replies_show_a_wrong_token_as_well(traces: dict[int, Ints]) -> None:
    for id in ("P3", "P4", "P5", "P6"):
        found = differing(id, "flip-token:0.05", traces, WITHOUT_REPLAY)
        assert sum(positions.size > 0 for positions in found.values()) > 1


# --- the endpoint in this process -------------------------------------------------------------------------------------


def some_prompts(count: int) -> list[list[int]]:
    return [prompts.prompt(seed, 30 + seed, WORDS) for seed in range(count)]


def test_free_and_forced_replies_are_those_of_the_language_model() -> None:
    asked = some_prompts(5)
    expected = decoding.generate(asked, 40, Sampling(1.0, 0.95, seed=np.arange(5)), top=20, ignore_eos=True)
    asks = [
        Ask(prompt=prompt, max_tokens=40, temperature=1.0, top_p=0.95, seed=seed) for seed, prompt in enumerate(asked)
    ]
    endpoint = Local()
    free = asyncio.run(endpoint.generate(asks))
    forced = asyncio.run(
        endpoint.generate(
            [msgspec.structs.replace(each, force=expected.ids[i].tolist()) for i, each in enumerate(asks)]
        )
    )
    for number in range(5):
        for (found,) in (free[number], forced[number]):
            rows = slice(number * 40, number * 40 + 40)
            assert found.ids.tolist() == expected.ids[number].tolist()
            assert found.logprobs.tolist() == expected.scores.logprobs[rows].tolist()
            assert found.top_ids.tolist() == expected.scores.top_ids[rows].tolist()
            assert found.top_logprobs.tolist() == expected.scores.top_logprobs[rows].tolist()
            assert found.finish_reason == "length"


def test_several_choices_have_seeds_that_count_on_and_logprobs_as_asked() -> None:
    prompt = some_prompts(1)[0]
    one = Ask(prompt=prompt, max_tokens=20, temperature=1.0, seed=7, logprobs=3)
    (choices, (alone,)) = asyncio.run(
        Local().generate([msgspec.structs.replace(one, n=2), msgspec.structs.replace(one, seed=8)])
    )
    assert choices[1].ids.tolist() == alone.ids.tolist() != choices[0].ids.tolist()
    assert ((alone.top_ids >= 0).sum(axis=1) == 3).all()
    assert np.isneginf(alone.top_logprobs[:, 3:]).all()
    ((silent,),) = asyncio.run(Local().generate([msgspec.structs.replace(one, logprobs=0)]))
    assert (silent.logprobs.size, silent.top_ids.shape) == (0, (0, 20))


def test_replies_end_at_eos_and_stop_ids_while_others_go_on() -> None:
    asked = some_prompts(20)
    expected = decoding.generate(asked, 600, Sampling(1.0, seed=np.arange(20)))
    asks = [
        Ask(prompt=prompt, max_tokens=600, temperature=1.0, seed=seed, ignore_eos=False)
        for seed, prompt in enumerate(asked)
    ]
    found = asyncio.run(Local().generate(asks))
    assert [each.ids.tolist() for (each,) in found] == [ids.tolist() for ids in expected.replies()]
    assert {each.finish_reason for (each,) in found} == {"stop", "length"}
    stop = int(expected.ids[0, 4])
    ((stopped,),) = asyncio.run(Local().generate([msgspec.structs.replace(asks[0], stop_token_ids=[stop])]))
    assert stopped.ids.tolist() == expected.ids[0, :5].tolist()


def test_calls_at_the_same_time_decode_in_one_batch() -> None:
    """padded-batch strikes batches of three: here the steps in which all of three calls are under way."""
    asked = some_prompts(3)
    asks = [
        Ask(prompt=prompt, max_tokens=length, force=[400] * length)
        for prompt, length in zip(asked, (30, 20, 10), strict=True)
    ]

    async def three(endpoint: Local) -> list[Generation]:
        found = await asyncio.gather(*(endpoint.generate([each]) for each in asks))
        return [generation for ((generation,),) in found]

    sound, faulty = Local(), Local(["padded-batch"])
    for one, other in zip(asyncio.run(three(sound)), asyncio.run(three(faulty)), strict=True):
        assert changed(one, other).tolist() == list(range(1, 10))  # the first token comes from the prefill
    assert sound.steps == faulty.steps == 30


def test_nobody_joins_or_leaves_in_the_middle_of_long_replies() -> None:
    """Which are worked on in pieces."""
    asks = [Ask(prompt=prompt, max_tokens=3000, force=[400] * 3000, logprobs=1) for prompt in some_prompts(3)]
    sound, faulty = (asyncio.run(Local(faults).generate(asks)) for faults in ([], ["neighbour-leak"]))
    assert not any(changed(one, other).size for (one,), (other,) in zip(sound, faulty, strict=True))


def test_steps_count_on_from_call_to_call() -> None:
    """So that a race strikes elsewhere when the same is asked again."""
    asked = Ask(prompt=some_prompts(1)[0], max_tokens=100)
    ((sound,),) = asyncio.run(Local().generate([asked]))
    asked, endpoint = msgspec.structs.replace(asked, force=sound.ids.tolist()), Local(["race:0.2"])
    ((first,),), ((second,),) = (asyncio.run(endpoint.generate([asked])) for _ in range(2))
    assert changed(first, second).size > 10


def test_prefixes_are_shared_by_equal_salts_in_whole_blocks() -> None:
    prompt = prompts.prompt(3, 100, WORDS)

    async def cached(endpoint: Local, tokens: int, salt: str) -> int | None:
        ((found,),) = await endpoint.generate([Ask(prompt=prompt[:tokens], max_tokens=1, salt=salt)])
        return found.cached_tokens

    async def all_of_them() -> list[int | None]:
        endpoint = Local(block=16)
        asked = [(50, "a"), (100, "a"), (100, "a"), (96, "a"), (97, "a"), (100, "b")]
        return [await cached(endpoint, tokens, salt) for tokens, salt in asked]

    assert asyncio.run(all_of_them()) == [0, 48, 96, 80, 96, 0]


def test_the_emulator_says_over_http_what_its_model_says_here(tmp_path: Path, traces: dict[int, Ints]) -> None:
    settings = EmulatorSettings(time_scale=50, language="model")
    emulator = process.start(settings, tmp_path)
    try:
        server = Server(emulator.url, settings.model, {}, Limits())
        for id in ("P4", "P7"):
            here, there = ask(Local(), id, traces), ask(server, id, traces)
            assert here.of.keys() == there.of.keys()
            assert not any(changed(one, there.of[case]).size for case, one in here.of.items())
    finally:
        process.stop(emulator)


def test_faults_outside_of_decode_are_refused() -> None:
    with pytest.raises(UserError, match="stall is none of the decode path"):
        Local(["stall:0.1"])
