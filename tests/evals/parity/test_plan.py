"""What a battery asks, and what that takes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from evals.parity.check import Check, Given, Situation
from evals.parity.checks import CHECKS
from evals.parity.endpoint import Need
from evals.parity.plan import Battery, Offer, Prompts, Wanted, lines, planned, situation
from evals.parity.prompts import digest, prompt
from evals.records import Case
from replay.experiment import Experiment
from tests.integration import runs
from workloads.content import vocabulary_of_range

ALL: frozenset[Need] = frozenset(get_args(Need)) - {"two starts"}
PROMPTS = Prompts(vocabulary_of_range(1000, 2000))
URLS = {"url": "http://127.0.0.1:1", "gpus": runs.GPUS}


def offer(*without: Need, block: int | None = 32) -> Offer:
    return Offer(has=ALL - {*without}, why_not=dict.fromkeys(without, "not seen"), token_s=0.01, block=block)


def prepared(max_context: int | None = 4096, max_num_seqs: str | None = None, path: Any = None) -> Any:
    told = {} if max_num_seqs is None else {"max-num-seqs": max_num_seqs}
    backends = [SimpleNamespace(path=None), SimpleNamespace(path=path)]
    settings = {"baseline": {}, "candidate": told}
    return SimpleNamespace(settings=settings, max_context=max_context, matching=SimpleNamespace(backends=backends))


def at(one: Offer, other: Offer, experiment: Experiment | None = None, seen: Any = None) -> Situation:
    whole = experiment or runs.experiment(both=URLS)
    return situation(whole, seen or prepared(), {"baseline": one, "candidate": other}, "quick")


def check(id: str, *needs: Need, cases: Sequence[Case] = ()) -> Check:
    async def run(given: Given, cases: Sequence[Case]) -> None:
        raise AssertionError

    return Check(id=id, title="", finds="", statistic="", needs=frozenset(needs), cases=lambda at: list(cases), run=run)


def case(number: int, **other: Any) -> Case:
    plain = Case(number=number, prompt_seed=number, prompt_tokens=8, prompt_digest="", output_tokens=100)
    return replace(plain, **other)


def test_a_candidate_that_is_at_fault_is_not_excused() -> None:
    """Checks that need seeds are there to find a server that ignores them."""
    assert {"seeds", "streaming"} <= at(offer(), offer("seeds", "streaming")).has
    assert "seeds" not in at(offer("seeds"), offer()).has
    assert "tools" not in at(offer(), offer("tools")).has
    assert "tools" not in at(offer("tools"), offer()).has


def test_starts_are_two_where_decodegate_starts() -> None:
    assert "two starts" not in at(offer(), offer()).has
    assert "two starts" in at(offer(), offer(), runs.experiment()).has


def test_both_backends_can_take_what_is_asked() -> None:
    described = runs.experiment(both=URLS, parity={"max_context": 1000, "seed": 7})
    found = at(offer(), offer(), described)
    assert (found.max_context, found.seed, found.block) == (1000, 7, 32)
    rule = SimpleNamespace(max_requests=8, problems=[])
    found = at(offer(block=None), offer(), seen=prepared(2000, "12", rule))
    assert (found.max_context, found.max_requests, found.specialised_requests, found.block) == (2000, 12, 8, 16)
    refused = SimpleNamespace(max_requests=8, problems=["no"])
    assert at(offer(), offer(), seen=prepared(None, None, refused)).specialised_requests is None


def test_traces_are_made_where_they_are_used() -> None:
    reference = check("T0", "token ids", cases=[case(0)])
    free, forced = check("D1", cases=[case(0)]), check("P1", cases=[case(0, trace=0)])
    checks = {"T0": reference, "D1": free, "P1": forced}
    offers = {"baseline": offer(), "candidate": offer()}

    def ids(*chosen: str) -> list[str]:
        battery = planned(Wanted(checks=chosen), checks, at(offer(), offer()), offers, PROMPTS)
        assert [each.id for each in battery.plan.checks if each.not_run is None] == list(battery.cases)
        return list(battery.cases)

    assert ids("D1") == ["D1"]
    assert ids("P1") == ["T0", "P1"]
    assert ids("D1", "T0") == ["T0", "D1"]


def test_prompts_have_their_digests() -> None:
    offers = {"baseline": offer(), "candidate": offer()}
    cases = [case(0), case(1, prompt_digest="own")]
    battery = planned(Wanted(), {"D1": check("D1", cases=cases)}, at(offer(), offer()), offers, PROMPTS)
    first, second = battery.cases["D1"]
    assert first.prompt_digest == digest(prompt(0, 8, PROMPTS.vocabulary))
    assert second.prompt_digest == "own"


def test_what_is_said_beforehand_is_what_will_be_asked() -> None:
    """Ten cases in batches of five: 200 steps an arm; T0 on one arm alone."""
    batch = [case(number, batch=5) for number in range(10)]
    checks = {"T0": check("T0", cases=[case(0)]), "P1": check("P1", cases=batch), "S1": check("S1", "speculation")}
    offers = {"baseline": offer("speculation"), "candidate": offer("speculation")}
    wanted = Wanted(fault="identity")
    battery = planned(wanted, checks, at(*offers.values()), offers, PROMPTS)
    said = lines(battery, checks, 0.6)
    assert said["tokens"] == f"{100 + 5 * 1000:,} output tokens at most"
    assert said["time"].startswith(f"roughly {(100 + 5 * 200) * 0.6 / 60:.0f} min,")
    assert said["S1"].startswith(": NOT RUN: needs speculation (speculation: baseline and candidate: not seen)")
    assert said["arms"].startswith("A1, A2, B1, B2, X: ")


@pytest.mark.parametrize("budget", ["quick", "standard"])
def test_the_real_checks_can_be_planned(budget: Any) -> None:
    offers = {"baseline": offer(), "candidate": offer()}
    where = replace(at(offer(), offer()), budget=budget)
    battery: Battery = planned(Wanted(), CHECKS, where, offers, PROMPTS)
    assert [each.id for each in battery.plan.checks] == list(CHECKS)
    assert all(each.not_run is None for each in battery.plan.checks)
    for cases in battery.cases.values():
        assert [each.number for each in cases] == list(range(len(cases)))
