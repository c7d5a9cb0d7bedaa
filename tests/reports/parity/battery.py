"""RUN/parity of the emulator's language model, measured in this process as the command measures servers: plan, cases,
both arms of the baseline, floor, both of the candidate, by the checks themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import msgspec

from evals import registration
from evals.parity import plan as plans
from evals.parity.check import Budget, Given, Situation
from evals.parity.checks import CHECKS
from evals.parity.endpoint import Ask, Chat, ChatReply, Endpoint, Generation, Need
from evals.parity.harness import FLOOR_ARMS, fix_floor, read_traces
from evals.parity.local import Local
from evals.parity.plan import Battery, Prompts, Wanted
from evals.parity.record import Recorder
from evals.records import ArmName, CheckRun, ParityManifest
from replay import rundir
from replay.emulator import language
from replay.records import PathRule
from tests.reports.signoff import sat
from workloads.content import vocabulary_of_tokenizer

BUDGET: Budget = "quick"
"""Whose sizes are changed: it holds no bounds, which need more than a fault that is to be seen."""
Sizes = Sequence[tuple[dict[Budget, Any] | ModuleType, Any]]
"""Tables of sizes in evals/parity/checks and what they are to say; of a check's module, its WIDTH."""
Start = Callable[[ArmName], AbstractAsyncContextManager[Endpoint]]

PROMPTS = Prompts(vocabulary_of_tokenizer(language.tokenizer()))
RULE = PathRule(model="Kimi K3", source="vLLM 0.33.0", sizes=[1, 2, 4, 8], tokens_per_request=1, max_requests=8)
"""Of a specialised candidate."""


def measure(
    run: Path,
    checks: Sequence[str],
    start: Start,
    sizes: Sizes,
    *,
    seed: int,
    has: frozenset[Need] = Local.has,
    specialised: bool = False,
) -> Path:
    """Write RUN/parity, and return it. ``checks``: their ids; ``start``: of each arm's endpoint; ``has``: what all of
    them offer; ``specialised``: the candidate is said to be, which its servers' step logs then have to show."""
    at = Situation(
        budget=BUDGET,
        seed=seed,
        max_context=1 << 18,
        max_requests=128,
        specialised_requests=None,
        block=16,
        has=has,
    )
    with sized(sizes):
        battery = plans.planned(Wanted(budget=BUDGET, checks=tuple(checks)), CHECKS, at, {}, PROMPTS)
    assert not [each for each in battery.plan.checks if each.not_run]
    folder = run / "parity"
    (folder / "cases").mkdir(parents=True)
    for id, cases in battery.cases.items():
        (folder / "cases" / f"{id}.jsonl").write_bytes(plans.encoded(cases))
    plan_sha256 = registration.register(folder, battery.plan)
    decode = {"baseline": ("auto", None), "candidate": ("latency_specialized", RULE) if specialised else ("auto", None)}
    backends = [sat.backend(name, decode_backend=by, path=rule, settings={}) for name, (by, rule) in decode.items()]
    rundir.write_json(folder / "manifest.json", ParityManifest(**sat.facts(backends=backends), plan_sha256=plan_sha256))
    asyncio.run(_arms(folder, battery, start))
    return folder


@contextmanager
def sized(sizes: Sizes) -> Iterator[None]:
    """Checks make their cases with other sizes."""
    if not sizes:
        yield
        return
    (of, size), *others = sizes
    changed = patch.object(of, "WIDTH", size) if isinstance(of, ModuleType) else patch.dict(of, {BUDGET: size})
    with changed, sized(others):
        yield


async def _arms(folder: Path, battery: Battery, start: Start) -> None:
    for arm in battery.plan.arms:
        if arm not in FLOOR_ARMS:
            fix_floor(folder)
        async with start(arm) as endpoint:
            for each in battery.plan.checks:
                if arm in plans.arms_of(battery.plan, each.id):
                    await _check(folder, battery, arm, each.id, Timed(endpoint))


async def _check(folder: Path, battery: Battery, arm: ArmName, id: str, endpoint: Endpoint) -> None:
    place = folder / arm / id
    place.mkdir(parents=True)
    started, started_ns = time.time(), time.monotonic_ns()
    with Recorder(place) as recorder:
        given = Given(endpoint, PROMPTS, read_traces(folder), recorder, f"{battery.plan.seed}/{arm}")
        await CHECKS[id].run(given, battery.cases[id])
    run = CheckRun(
        arm=arm,
        check=id,
        started_unix_s=started,
        ended_unix_s=time.time(),
        replies=recorder.replies,
        positions=recorder.positions,
        server=f"servers/{arm}",
        started_ns=started_ns,
        ended_ns=time.monotonic_ns(),
    )
    rundir.write_json(place / "run.json", run)


class Timed:
    """An endpoint whose generations say when they were asked for, which one in this process does not."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.has = endpoint.has
        self._endpoint = endpoint

    async def generate(self, group: Sequence[Ask]) -> list[list[Generation]]:
        """See Endpoint."""
        sent = time.time()
        found = await self._endpoint.generate(group)
        return [[msgspec.structs.replace(each, sent_unix_s=sent) for each in choices] for choices in found]

    async def chat(self, group: Sequence[Chat]) -> list[ChatReply]:
        """See Endpoint."""
        return await self._endpoint.chat(group)

    async def page(self, path: str) -> tuple[int | None, bytes]:
        """See Endpoint."""
        return await self._endpoint.page(path)
