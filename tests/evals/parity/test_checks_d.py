"""Checks D, L and S: what they ask, and that what goes wrong is on record, with endpoints that go wrong on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from msgspec.structs import replace

from evals.faults import proxy
from evals.parity.asking import groups
from evals.parity.check import Budget, Check, Given, Situation
from evals.parity.checks import (
    d1_streams,
    d2_lengths,
    d3_sampler,
    d4_neighbours,
    d5_prefix,
    d6_tools,
    d7_garbage,
    l1_lengths,
    l2_repetition,
    s1_acceptance,
)
from evals.parity.endpoint import Ask, Chat, ChatReply, Generation, Need
from evals.parity.http import Server
from evals.parity.http_replies import nothing
from evals.parity.local import Local
from evals.parity.prompts import prompt
from evals.records import Case, ParityReply
from replay.emulator import language, process
from replay.emulator.replies import PIECES
from replay.emulator.settings import EmulatorSettings
from replay.emulator.speculation import Speculation
from replay.wire import Limits
from reports.parity.calibration import Calibration, calibration, greedy
from workloads.content import vocabulary_of_tokenizer

CHECKS = [
    each.CHECK
    for each in (
        *(d1_streams, d2_lengths, d3_sampler, d4_neighbours, d5_prefix, d6_tools, d7_garbage),
        *(l1_lengths, l2_repetition, s1_acceptance),
    )
]
WORDS = vocabulary_of_tokenizer(language.tokenizer())
QUICK = Situation(
    budget="quick",
    seed=7,
    max_context=1024,
    max_requests=64,
    specialised_requests=None,
    block=16,
    has=frozenset(get_args(Need)) - {"chat"},
)
CHATTING = replace(QUICK, has=QUICK.has | {"chat"})

Change = Callable[[Ask, Generation], object]


class Kept:
    """A sink in memory."""

    def __init__(self) -> None:
        self.replies: dict[int, ParityReply] = {}
        self.generations: dict[int, Generation] = {}

    def reply(self, reply: ParityReply) -> None:
        assert reply.case not in self.replies
        self.replies[reply.case] = reply

    def tokens(self, case: int, generation: Generation, *, repeat: int = 0) -> None:
        self.generations[case] = generation


class Fake:
    """The language model with text, and with chats and metrics that are given; ``change`` spoils generations."""

    has = frozenset(get_args(Need))

    def __init__(
        self,
        change: Change = lambda ask, generation: None,
        *,
        faults: Sequence[str] = (),
        chat: Callable[[Chat], ChatReply] = lambda chat: ChatReply(error="no chat"),
        pages: Sequence[str] = (),
    ) -> None:
        self.asked: list[Ask] = []
        self.bodies: list[dict[str, object]] = []
        self._local = Local(faults)
        self._change = change
        self._chat = chat
        self._pages = iter(pages)

    async def generate(self, group: Sequence[Ask]) -> list[list[Generation]]:
        self.asked += group
        found = await self._local.generate(group)
        for ask, generations in zip(group, found, strict=True):
            for generation in generations:
                generation.text = b"".join(PIECES[token] for token in generation.ids).decode("utf-8", "replace")
                self._change(ask, generation)
        return found

    async def chat(self, group: Sequence[Chat]) -> list[ChatReply]:
        self.bodies += [each.body for each in group]
        return [self._chat(each) for each in group]

    async def page(self, path: str) -> tuple[int | None, bytes]:
        page = next(self._pages, None)
        return (404, b"") if page is None else (200, page.encode())


def prompts(case: Case) -> list[int]:
    return prompt(case.prompt_seed, case.prompt_tokens, WORDS)


def measured(check: Check, endpoint: Fake, at: Situation = QUICK) -> tuple[list[Case], Kept]:
    cases, kept = check.cases(at), Kept()
    asyncio.run(check.run(Given(endpoint=endpoint, prompts=prompts, traces={}, sink=kept), cases))
    assert kept.replies.keys() == {each.number for each in cases}
    return cases, kept


def by_variant(cases: Sequence[Case], kept: Kept, variant: str) -> list[ParityReply]:
    return [kept.replies[each.number] for each in cases if each.variant == variant]


def problems(kept: Kept) -> set[str]:
    return {reply.problem for reply in kept.replies.values() if reply.problem}


# -- cases


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
@pytest.mark.parametrize("budget", get_args(Budget))
@pytest.mark.parametrize(
    "changes", [{}, {"specialised_requests": 3, "max_context": 400}, {"max_requests": 1, "block": 784}], ids=str
)
def test_cases_are_the_same_again_and_fit(check: Check, budget: Budget, changes: dict[str, int]) -> None:
    at = replace(CHATTING, budget=budget, max_context=40_000)
    at = replace(at, **changes)
    cases = check.cases(at)
    assert cases
    assert cases == check.cases(at)
    assert [each.number for each in cases] == list(range(len(cases)))
    most = min(at.max_requests, at.specialised_requests or 64)
    for group in groups(cases):
        assert {each.batch for each in group} == {len(group)}
        assert len(group) <= most
        assert len({each.variant for each in group}) == 1
        assert len({str(each.stratum) for each in group}) == 1
    for each in cases:
        assert each.output_tokens > 0
        assert each.prompt_tokens + each.output_tokens <= at.max_context
        assert bool(each.prompt_tokens) != bool(each.prompt_digest)  # who makes the prompt of ids fills it in
    others = check.cases(replace(at, seed=8))
    assert {each.prompt_seed for each in cases}.isdisjoint(each.prompt_seed for each in others)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_a_reply_that_fails_is_on_record_and_takes_no_other_with_it(check: Check) -> None:
    def lose(ask: Ask, generation: Generation) -> None:
        if ask.seed == victim.seed and ask.prompt == prompts(victim):
            for name in ("ids", "logprobs", "top_ids", "top_logprobs", "error", "finish_reason"):
                setattr(generation, name, getattr(nothing("HTTP 500"), name))

    victim = check.cases(QUICK)[1]
    cases, kept = measured(check, Fake(lose, chat=lambda chat: ChatReply(error="HTTP 500")))
    lost = {number for number, reply in kept.replies.items() if reply.error}
    assert victim.number in lost
    assert all(kept.replies[number].error == "HTTP 500" for number in lost)
    assert len(lost) == len(cases) if check.id == "D6" else len(lost) < len(cases) / 2
    assert kept.generations.keys() == kept.replies.keys() - lost
    assert all(reply.problem is None for number, reply in kept.replies.items() if number in lost)


# -- D1


def test_d1_sound_streams_agree() -> None:
    cases, kept = measured(d1_streams.CHECK, Fake())
    whole, streams = (by_variant(cases, kept, variant) for variant in ("whole", "stream"))
    assert [each.ids_hash for each in whole] == [each.ids_hash for each in streams]
    assert {each.text_agrees for each in streams} == {True}
    assert {each.text_agrees for each in whole} == {None}
    assert not problems(kept)


def test_d1_counts_that_differ_from_the_ids() -> None:
    def drop(ask: Ask, generation: Generation) -> None:
        generation.completion_tokens = generation.ids.size
        if ask.stream:
            generation.ids = generation.ids[:-1]

    cases, kept = measured(d1_streams.CHECK, Fake(drop))
    assert {each.problem for each in by_variant(cases, kept, "stream")} == {"usage counts 32 tokens, 31 came"}
    assert {each.text_agrees for each in by_variant(cases, kept, "stream")} == {None}
    assert {each.problem for each in by_variant(cases, kept, "whole")} == {None}


def test_d1_text_that_is_not_that_of_the_ids() -> None:
    def garble(ask: Ask, generation: Generation) -> None:
        assert generation.text is not None
        generation.text = generation.text[:-2] if ask.stream else generation.text

    cases, kept = measured(d1_streams.CHECK, Fake(garble))
    assert {each.text_agrees for each in by_variant(cases, kept, "stream")} == {False}


# -- D2


def test_d2_lengths_and_stops_are_heeded() -> None:
    cases, kept = measured(d2_lengths.CHECK, Fake())
    assert [each.ids for each in by_variant(cases, kept, "length")] == [1, 2, 17]  # the context holds no more
    assert {each.finish_reason for each in by_variant(cases, kept, "length")} == {"length"}
    stops = by_variant(cases, kept, "stop")
    assert {each.finish_reason for each in stops} == {"stop"}
    assert all(d2_lengths.STOP_AFTER < each.ids <= d2_lengths.STOP_TOKENS for each in stops)
    assert not problems(kept)


def test_d2_lengths_go_as_far_as_the_context() -> None:
    longest = {
        context: max(
            each.output_tokens
            for each in d2_lengths.CHECK.cases(replace(QUICK, budget="standard", max_context=context))
            if each.variant == "length"
        )
        for context in (4096, 8_225, 131_072)
    }
    assert longest == {4096: 17, 8_225: 8_193, 131_072: 32_769}


def test_d2_a_limit_of_somebody_else() -> None:
    def cut(ask: Ask, generation: Generation) -> None:
        generation.ids = generation.ids[:10]
        generation.completion_tokens = generation.ids.size

    _, kept = measured(d2_lengths.CHECK, Fake(cut))
    assert "17 tokens asked for, 10 came" in problems(kept)


def test_d2_stop_ids_that_are_ignored() -> None:
    class Deaf(Fake):
        async def generate(self, group: Sequence[Ask]) -> list[list[Generation]]:
            return await super().generate([replace(ask, stop_token_ids=()) for ask in group])

    cases, kept = measured(d2_lengths.CHECK, Deaf())
    assert {each.problem for each in by_variant(cases, kept, "stop")} == {"it went on after a stop id"}
    assert {each.problem for each in by_variant(cases, kept, "free")} == {None}


def test_d2_reasons_that_are_wrong() -> None:
    def lie(ask: Ask, generation: Generation) -> None:
        generation.finish_reason = "stop"

    cases, kept = measured(d2_lengths.CHECK, Fake(lie))
    assert {each.problem for each in by_variant(cases, kept, "length")} == {"finish reason stop at the limit"}


# -- D3


def calibrated(kept: Kept, cases: Sequence[Case], variant: str) -> Calibration:
    found = [kept.generations[each.number] for each in cases if each.variant == variant]
    ids, logprobs, top_ids, top_logprobs = (
        np.concatenate([getattr(each, name) for each in found])
        for name in ("ids", "logprobs", "top_ids", "top_logprobs")
    )
    return calibration(ids, logprobs, top_ids, top_logprobs, temperature=1.0, top_p=0.95)


def test_d3_records_enough_to_see_temperature_and_top_p_ignored() -> None:
    cases, kept = measured(d3_sampler.CHECK, Fake())
    for variant in ("sampled", "unseeded"):
        sound = calibrated(kept, cases, variant)
        assert sound.rank_one.n >= 500
        assert sound.rank_one.p is not None
        assert sound.rank_one.p > 1e-3
        assert sound.outside.statistic == 0
    drawn = [kept.generations[each.number] for each in cases if each.variant == "greedy"]
    first = np.concatenate([each.top_logprobs for each in drawn])
    assert greedy(np.concatenate([each.logprobs for each in drawn]), first).statistic == 0
    cold = calibrated(measured(d3_sampler.CHECK, Fake(faults=["ignore-temperature"]))[1], cases, "sampled")
    assert cold.rank_one.p is not None
    assert cold.rank_one.p < 1e-6
    whole = calibrated(measured(d3_sampler.CHECK, Fake(faults=["ignore-top-p"]))[1], cases, "sampled")
    assert whole.outside.statistic


def test_d3_every_reply_has_a_seed_of_its_own() -> None:
    seeds = [each.seed for each in d3_sampler.CHECK.cases(QUICK) if each.variant == "sampled"]
    assert len(set(seeds)) == len(seeds)


# -- D4


def hashes(cases: Sequence[Case], kept: Kept, variant: str) -> dict[int, list[str]]:
    """Of the ids of each prompt's replies."""
    found: dict[int, list[str]] = {}
    for each in cases:
        if each.variant == variant:
            found.setdefault(each.prompt_seed, []).append(kept.replies[each.number].ids_hash)
    return found


def pairs_alike(cases: Sequence[Case], kept: Kept, one: str, other: str) -> tuple[int, int]:
    """Prompts whose replies are the same, of how many."""
    mine, theirs = hashes(cases, kept, one), hashes(cases, kept, other)
    both = mine.keys() & theirs.keys()
    return sum(mine[each] == theirs[each] for each in both), len(both)


def test_d4_prompt_and_seed_decide() -> None:
    cases, kept = measured(d4_neighbours.CHECK, Fake())
    assert pairs_alike(cases, kept, "first", "again") == (20, 20)
    assert pairs_alike(cases, kept, "first", "no logprobs") == (20, 20)
    assert pairs_alike(cases, kept, "first", "alone") == (4, 4)
    assert pairs_alike(cases, kept, "first", "other seed") == (0, 20)
    assert pairs_alike(cases, kept, "n", "calls") == (5, 5)
    assert all(len(set(each)) == d4_neighbours.N for each in hashes(cases, kept, "n").values())


@pytest.mark.parametrize(
    ("fault", "again", "other"), [("ignore-seed", (0, 20), (0, 20)), ("shared-seed", (20, 20), (20, 20))]
)
def test_d4_seeds_that_do_not_count(fault: str, again: tuple[int, int], other: tuple[int, int]) -> None:
    cases, kept = measured(d4_neighbours.CHECK, Fake(faults=[fault]))
    assert pairs_alike(cases, kept, "first", "again") == again
    assert pairs_alike(cases, kept, "first", "other seed") == other


def test_d4_asks_in_the_ways_that_it_says() -> None:
    endpoint = Fake()
    measured(d4_neighbours.CHECK, endpoint)
    assert [ask.n for ask in endpoint.asked].count(4) == 5
    assert [ask.logprobs for ask in endpoint.asked].count(0) == 20


# -- D5


def test_d5_the_second_reply_is_warm_and_the_same() -> None:
    cases, kept = measured(d5_prefix.CHECK, Fake())
    cold, warm = (by_variant(cases, kept, variant) for variant in ("cold", "warm"))
    lengths = [each.prompt_tokens for each in cases if each.variant == "warm"]
    assert {each.cached_tokens for each in cold} == {0}
    assert [each.cached_tokens for each in warm] == [(length - 1) // 16 * 16 for length in lengths]
    assert [each.ids_hash for each in cold] == [each.ids_hash for each in warm]
    assert len(lengths) >= 20
    assert {length % 16 for length in lengths} == {15, 0, 1}
    assert {each.stratum["edge"] for each in cases} == {"-1", "+0", "+1"}


def test_d5_records_the_state_that_a_hit_restores_wrongly() -> None:
    cases, kept = measured(d5_prefix.CHECK, Fake(faults=["prefix-off-by-one"]))
    first = {(each.prompt_seed, each.variant): kept.generations[each.number].logprobs[0] for each in cases}
    shifts = [abs(first[seed, "warm"] - first[seed, "cold"]) for seed, variant in first if variant == "warm"]
    assert np.median(shifts) > 0.01


# -- D6

GOOD = '{"lamp": "hall", "switch": true}'


@pytest.mark.parametrize(
    ("calls", "text", "finish", "choice", "expected"),
    [
        ([("set_lamp", GOOD)], None, "tool_calls", "auto", (True, True, None)),
        ([("set_lamp", GOOD)], None, "stop", "auto", (True, True, "finish reason stop with a call")),
        ([("set_lamp", GOOD)], None, "stop", "named", (True, True, None)),
        ([("set_lamp", GOOD)] * 2, None, "tool_calls", "required", (True, True, None)),
        ([("check_stock", '{"article": "kettle", "shop": "Zellbach"}')], None, "stop", "named", "another tool"),
        ([("set_lamps", GOOD)], None, "tool_calls", "auto", "undeclared tool"),
        ([("set_lamp", GOOD), ("set_lamp", GOOD[:9])], None, "tool_calls", "auto", "arguments are no JSON"),
        ([("set_lamp", "")], None, "length", "required", "the limit of tokens cut it"),
        ([("set_lamp", '{"lamp": "hall"}')], None, "tool_calls", "auto", "arguments do not fit"),
        ([("set_lamp", '{"lamp": "hall", "switch": 1}')], None, "tool_calls", "auto", "arguments do not fit"),
        ([("set_lamp", GOOD[:-1] + ', "x": 1}')], None, "tool_calls", "auto", "arguments do not fit"),
        ([], "It is dark.", "stop", "auto", (False, None, None)),
        ([], "It is dark.", "stop", "required", "no call"),
        ([], f'<tool_call>{{"name": "set_lamp", "arguments": {GOOD}}}', "stop", "auto", "a call in the text"),
    ],
)
def test_d6_calls_are_held_against_their_schema(
    calls: list[tuple[str, str]], text: str | None, finish: str, choice: str, expected: tuple[bool, bool, str] | str
) -> None:
    suits = [each for each in d6_tools.CHECK.cases(CHATTING) if each.prompt_seed % 4 == 1]  # set_lamp
    case = replace(next(each for each in suits if each.variant == choice), number=0, batch=1)
    kept = Kept()
    endpoint = Fake(chat=lambda chat: ChatReply(text=text, tool_calls=calls, finish_reason=finish))
    asyncio.run(d6_tools.CHECK.run(Given(endpoint, prompts, {}, kept), [case]))
    reply = kept.replies[0]
    assert reply.problem is None or text is None or text not in reply.problem
    if isinstance(expected, tuple):
        assert (reply.called, reply.valid_call, reply.problem) == expected
    else:
        assert reply.problem is not None
        assert reply.problem.startswith(expected)
        assert reply.valid_call is (None if expected == "a call in the text" else False)


def test_d6_most_prompts_suit_a_tool() -> None:
    endpoint = Fake(chat=lambda chat: ChatReply(text=""))
    measured(d6_tools.CHECK, endpoint, replace(CHATTING, budget="standard"))
    choices = [body["tool_choice"] for body in endpoint.bodies]
    assert (choices.count("auto"), choices.count("required"), len(choices)) == (400, 400, 1700)
    texts = {str(body["messages"]) for body in endpoint.bodies}
    assert len(texts) > 100
    assert not any("{" in text.replace("[{", "") for text in texts)


# -- D7


@pytest.mark.parametrize(
    ("ids", "text", "problem"),
    [
        ([5, 0, 0, 0, 0, 0, 0, 0, 0], "!!!!!!!!", "one token 8 times in a row"),
        ([5, 0, 0, 0, 0, 0, 0, 0, 6], "!!!!!!!", None),
        ([1, 2, 3], "caf\ufffd au lait", "invalid UTF-8"),
        ([1, 2, 3], "an unfinished \ufffd", None),
        ([1, 2, 3], "yes<|im_end|>", "a marker in the text"),
        ([1, 2, 3], "hm</think> yes", "a marker in the text"),
        ([1, 2, 3], "a < b | c > d", None),
    ],
)
@pytest.mark.parametrize("variant", ["ids", "chat"])
def test_d7_garbage_is_named(ids: list[int], text: str, problem: str | None, variant: str) -> None:
    def spoil(ask: Ask, generation: Generation) -> None:
        generation.ids, generation.text = np.array(ids, np.int32), text

    endpoint = Fake(spoil, chat=lambda chat: ChatReply(text=text, ids=ids))
    cases, kept = measured(d7_garbage.CHECK, endpoint, CHATTING)
    assert {each.problem for each in by_variant(cases, kept, variant)} == {problem}


def test_d7_finds_the_replies_that_nan_turns_into_one_token() -> None:
    assert not problems(measured(d7_garbage.CHECK, Fake())[1])
    _, kept = measured(d7_garbage.CHECK, Fake(faults=["nan-zero:0.05"]))
    hit = sum(reply.problem is not None for reply in kept.replies.values())
    assert 10 <= hit <= 40  # of 460, 23 in the mean


# -- L1, L2


def test_l1_replies_end_by_themselves_or_at_the_limit() -> None:
    endpoint = Fake()
    cases, kept = measured(l1_lengths.CHECK, endpoint)
    assert not any(ask.ignore_eos for ask in endpoint.asked)
    reasons = {reply.finish_reason: reply.ids for reply in kept.replies.values()}
    assert reasons.keys() == {"stop", "length"}
    assert reasons["length"] == 256
    assert {each.variant for each in cases} == {"ids"}


def test_l1_asks_questions_where_there_are_chats() -> None:
    endpoint = Fake(chat=lambda chat: ChatReply(text="So.", reasoning="Hm.", ids=[1, 2, 3], finish_reason="stop"))
    cases, kept = measured(l1_lengths.CHECK, endpoint, CHATTING)
    assert {reply.ids for reply in kept.replies.values()} == {3}
    assert kept.generations.keys() == kept.replies.keys()
    assert not endpoint.asked
    assert len({str(body["messages"]) for body in endpoint.bodies}) > len(cases) * 0.9


def test_l2_replies_go_on_to_the_limit() -> None:
    _, kept = measured(l2_repetition.CHECK, Fake())
    assert {reply.ids for reply in kept.replies.values()} == {512}
    assert all(each.ids.size == 512 for each in kept.generations.values())


# -- S1


def metrics(drafts: int, *accepted: int) -> str:
    lines = [f'vllm:spec_decode_num_drafts_total{{engine="{engine}"}} {drafts}' for engine in (0, 1)]
    lines += [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{engine}",position="{position}"}} {count}'
        for engine in (0, 1)
        for position, count in enumerate(accepted)
    ]
    return "\n".join(lines)


def test_s1_what_the_counters_grew_by_goes_to_the_first_reply_of_a_window() -> None:
    pages = [metrics(100, 50, 20), metrics(130, 75, 30), metrics(130, 75, 30), metrics(131, 75, 30)]
    cases, kept = measured(s1_acceptance.CHECK, Fake(pages=pages))
    windows = list(groups(cases))
    firsts = [kept.replies[window[0].number] for window in windows]
    assert [(each.drafts, each.accepted) for each in firsts[:2]] == [(60, [50, 20]), (2, [0, 0])]
    assert all(each.drafts is None and not each.accepted for each in firsts[2:])  # no metrics any more
    others = [kept.replies[each.number] for window in windows for each in window[1:]]
    assert {each.drafts for each in others} == {None}


# -- over HTTP


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[process.Emulator]:
    speculation = Speculation(draft_tokens=3, acceptance_length=2.5)
    settings = EmulatorSettings(time_scale=20, language="model", speculation=speculation)
    running = process.start(settings, tmp_path_factory.mktemp("emulator"))
    yield running
    process.stop(running)


def measured_over_http(check: Check, url: str, fault: str | None = None) -> tuple[list[Case], Kept]:
    async def run() -> None:
        async with proxy(url, fault) as front:
            server = Server(front, EmulatorSettings().model, {}, Limits())
            await check.run(Given(server, prompts, {}, kept), cases)

    # the emulator knows no stop ids
    cases, kept = [each for each in check.cases(CHATTING) if each.variant != "stop"], Kept()
    asyncio.run(run())
    assert kept.replies.keys() == {each.number for each in cases}
    assert {reply.error for reply in kept.replies.values()} == {None}
    return cases, kept


@pytest.mark.parametrize(
    "check",
    [d1_streams.CHECK, d2_lengths.CHECK, d4_neighbours.CHECK, d5_prefix.CHECK, d6_tools.CHECK, s1_acceptance.CHECK],
    ids=lambda check: check.id,
)
def test_a_sound_server_has_no_problem(check: Check, emulator: process.Emulator) -> None:
    cases, kept = measured_over_http(check, emulator.url)
    assert not problems(kept)
    if check is d1_streams.CHECK:
        assert {each.text_agrees for each in by_variant(cases, kept, "stream")} == {True}
    if check is d6_tools.CHECK:
        assert {each.valid_call for each in by_variant(cases, kept, "named")} == {True}
        assert {each.called for each in by_variant(cases, kept, "auto")} == {True, False}
    if check is s1_acceptance.CHECK:
        told = [reply for reply in kept.replies.values() if reply.drafts is not None]
        assert len(told) == s1_acceptance.WINDOWS["quick"]
        assert all(one >= other for each in told for one, other in pairwise([each.drafts, *each.accepted]))


@pytest.mark.parametrize(
    ("check", "fault", "variant", "problem", "share"),
    [
        (d1_streams.CHECK, "drop-last-chunk", "stream", "usage counts 32 tokens, 31 came", 1.0),
        (d2_lengths.CHECK, "truncate-at:10", "free", "64 tokens asked for, 10 came", 1.0),
        (d6_tools.CHECK, "cut-tools:0.2", "named", "arguments are no JSON", 0.2),
        (d7_garbage.CHECK, "nan-zero:0.1", "ids", "one token 12 times in a row", 0.1),
    ],
    ids=["D1", "D2", "D6", "D7"],
)
def test_a_proxy_s_fault_is_on_record(
    check: Check, fault: str, variant: str, problem: str, share: float, emulator: process.Emulator
) -> None:
    cases, kept = measured_over_http(check, emulator.url, fault)
    found = [reply.problem for reply in by_variant(cases, kept, variant)]
    assert found.count(problem) / len(found) == pytest.approx(share, rel=0.5)
    assert set(found) <= {problem, None}


@pytest.mark.parametrize(
    ("fault", "again", "other"), [("ignore-seed", (0, 20), (0, 20)), ("shared-seed", (20, 20), (20, 20))]
)
def test_seeds_that_a_proxy_takes_away(
    fault: str, again: tuple[int, int], other: tuple[int, int], emulator: process.Emulator
) -> None:
    cases, kept = measured_over_http(d4_neighbours.CHECK, emulator.url, fault)
    assert pairs_alike(cases, kept, "first", "again") == again
    assert pairs_alike(cases, kept, "first", "other seed") == other
