"""What is decided before anything is asked: the plan of the battery, its cases, and what they may take."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from evals.faults import parse as parse_fault
from evals.parity import http, prompts
from evals.parity.check import Budget, Check, Situation
from evals.parity.endpoint import TOP, Ask, Need
from evals.records import ArmName, Case, ParityCheck, ParityPlan
from replay import backends, metrics, settings
from replay.emulator.settings import resolve
from replay.experiment import Experiment, Parity
from replay.preflight import Prepared
from replay.wire import Limits
from workloads.content import Vocabulary
from workloads.errors import UserError

REFERENCE = "T0"
"""The check that makes the traces of others, on one arm."""
REFERENCE_ARM: ArmName = "A1"

BASELINE = "baseline"
BACKENDS: dict[ArmName, str] = {"A1": BASELINE, "A2": BASELINE, "B1": "candidate", "B2": "candidate", "X": BASELINE}
"""Of each arm, in measured order."""

_SHOWN_BY_FAULTS: frozenset[Need] = frozenset({"seeds", "streaming"})
"""What no option switches off: a candidate that lacks it is at fault, which the checks that need it are to find."""

_CONTEXT = 8192
_REQUESTS = 128
_BLOCK = 16
"""Where servers do not tell: of vLLM every default is as large, or (_BLOCK) this."""

_TIMED = Ask(prompt=range(16, 80), max_tokens=32, seed=1, logprobs=TOP, salt="parity rate")


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What the command asks for. None: what the run was started with, or the default."""

    budget: Budget | None = None
    checks: tuple[str, ...] | None = None
    """Their ids; by default all."""
    fault: str | None = None
    """For arm X, NAME or NAME:NUMBER; by default there is no X."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What one backend was found to offer."""

    has: frozenset[Need]
    why_not: Mapping[Need, str]
    token_s: float
    """Seconds that a token of a reply that decodes alone takes, about."""
    block: int | None
    """Tokens of a block of its prefix cache; null: it does not tell."""


class Battery(msgspec.Struct, frozen=True, kw_only=True):
    """The plan, and the cases of each of its checks that will be run."""

    plan: ParityPlan
    cases: dict[str, list[Case]]


class Prompts(msgspec.Struct, frozen=True):
    """Makes prompts of a vocabulary (check.Prompts). Raises UserError for one that is no longer as it was planned."""

    vocabulary: Vocabulary

    def __call__(self, case: Case) -> list[int]:
        """The ids of the case's prompt."""
        ids = prompts.prompt(case.prompt_seed, case.prompt_tokens, self.vocabulary)
        if case.prompt_digest not in ("", prompts.digest(ids)):
            raise UserError(
                "prompts are no longer those that were planned: the tokenizer, or token_ids, has changed: change it "
                "back, or start a new run"
            )
        return ids


async def look(url: str, model: str, headers: Mapping[str, str], limits: Limits) -> Offer:
    """Find out what a server offers, and about how fast it decodes, with some tiny requests. Raises UserError for one
    that does not complete token ids."""
    server = await http.connect(url, model, headers, limits)
    ((timed,),) = await server.generate([_TIMED])
    assert timed.sent_unix_s is not None
    assert timed.ended_unix_s is not None
    return Offer(
        has=server.has,
        why_not=server.why_not,
        token_s=(timed.ended_unix_s - timed.sent_unix_s) / max(timed.ids.size, 1),
        block=_block(*await server.page("/metrics")),
    )


def _block(status: int | None, page: bytes) -> int | None:
    with suppress(ValueError):
        samples = metrics.parse(page.decode("utf-8", "replace")) if status == 200 else []
        sizes = [labels.get("block_size", "") for name, labels, _ in samples if name == "vllm:cache_config_info"]
        return next((int(size) for size in sizes if size.isdecimal()), None)
    return None


def started_twice(experiment: Experiment) -> bool:
    """Whether A1 and A2, and B1 and B2, are starts of their own."""
    return all(experiment.backend(name).url is None for name in backends.NAMES)


def situation(experiment: Experiment, prepared: Prepared, offers: Mapping[str, Offer], budget: Budget) -> Situation:
    """What cases are made from: what both backends can take."""
    baseline, candidate = (offers[name] for name in backends.NAMES)
    has = baseline.has & (candidate.has | _SHOWN_BY_FAULTS)
    described = experiment.parity or Parity()
    contexts = [length for length in (prepared.max_context, described.max_context) if length is not None]
    rule = prepared.matching.backends[1].path
    return Situation(
        budget=budget,
        seed=described.seed,
        max_context=min(contexts, default=_CONTEXT),
        max_requests=min(_requests(experiment, prepared, name) for name in backends.NAMES),
        specialised_requests=rule.max_requests if rule is not None and not rule.problems else None,
        block=baseline.block or _BLOCK,
        has=has | ({"two starts"} if started_twice(experiment) else set()),
    )


def _requests(experiment: Experiment, prepared: Prepared, name: str) -> int:
    if experiment.backend(name).emulator is not None:
        return resolve(backends.emulator_settings(experiment, name)).max_num_seqs
    return settings.most_requests(prepared.settings[name]) or _REQUESTS


def planned(
    wanted: Wanted, checks: Mapping[str, Check], at: Situation, offers: Mapping[str, Offer], prompts: Prompts
) -> Battery:
    """The plan, not yet registered, and its cases, with the digests of their prompts."""
    chosen = {id: checks[id] for id in checks if wanted.checks is None or id in wanted.checks}
    not_run = {id: _lacking(check, at, offers) for id, check in chosen.items()}
    cases = {id: check.cases(at) for id, check in chosen.items() if not not_run[id]}
    if REFERENCE in checks and any(case.trace is not None for each in cases.values() for case in each):
        chosen = {REFERENCE: checks[REFERENCE]} | chosen
        cases = {REFERENCE: checks[REFERENCE].cases(at)} | cases
    for id, none in cases.items():
        if not none:
            not_run[id] = f"no case of it fits {at.max_context:,} tokens of context and {at.max_requests:,} requests"
    cases = {id: [_digested(case, prompts) for case in each] for id, each in cases.items() if each}
    return Battery(
        plan=ParityPlan(
            registered_utc="",
            budget=at.budget,
            seed=at.seed,
            arms=[arm for arm in BACKENDS if arm != "X" or wanted.fault is not None],
            checks=[
                ParityCheck(
                    id=id,
                    cases=len(cases.get(id, ())),
                    tokens=sum(case.output_tokens for case in cases.get(id, ())),
                    cases_sha256=hashlib.sha256(encoded(cases[id])).hexdigest() if id in cases else "",
                    not_run=not_run.get(id) or None,
                )
                for id in chosen
            ],
            fault=wanted.fault,
            max_context=at.max_context,
        ),
        cases=cases,
    )


def _digested(case: Case, prompts_of: Prompts) -> Case:
    return case if case.prompt_digest else replace(case, prompt_digest=prompts.digest(prompts_of(case)))


def encoded(cases: Sequence[Case]) -> bytes:
    """The file of a check's cases."""
    return b"".join(msgspec.json.encode(case) + b"\n" for case in cases)


def _lacking(check: Check, at: Situation, offers: Mapping[str, Offer]) -> str:
    """Why the check cannot be run, and what takes its place; empty if it can."""
    if not (lacking := sorted(check.needs - at.has)):
        return ""
    whys = [
        f"{need}: {' and '.join(names)}: {why}" for need in lacking for why, names in _by_reason(need, offers).items()
    ]
    if "two starts" in lacking:
        whys.append("two starts: a server at a url is not started by decodegate")
    return "; ".join([f"needs {', '.join(lacking)} ({'; '.join(whys)})", *([check.instead] if check.instead else [])])


def _by_reason(need: Need, offers: Mapping[str, Offer]) -> dict[str, list[str]]:
    """Why it is not offered -> by which backends."""
    found: dict[str, list[str]] = {}
    for name, offer in offers.items():
        if need in offer.why_not:
            found.setdefault(offer.why_not[need], []).append(name)
    return found


def refuse_unknown(wanted: Wanted, checks: Mapping[str, Check]) -> None:
    """Raises UserError for a check or a fault that does not exist."""
    if unknown := [id for id in wanted.checks or () if id not in checks]:
        raise UserError(f"no check is called {', '.join(unknown)}; known: {', '.join(checks)}")
    if wanted.fault is not None:
        parse_fault(wanted.fault)


def refuse_other(plan: ParityPlan, wanted: Wanted) -> None:
    """Raises UserError for a run that is to be taken up again with another plan than it has."""
    chosen = [each.id for each in plan.checks if each.id != REFERENCE]
    changed = [
        f"--{name} was {before or 'not given'}"
        for name, before, differs in (
            ("budget", plan.budget, wanted.budget not in (None, plan.budget)),
            ("fault", plan.fault, wanted.fault not in (None, plan.fault)),
            ("checks", ",".join(chosen), wanted.checks is not None and {*wanted.checks} - {REFERENCE} != {*chosen}),
        )
        if differs
    ]
    if changed:
        raise UserError(f"the plan was changed since it was registered: {'; '.join(changed)}: leave it, or start anew")


def refuse_lacking(plan: ParityPlan, checks: Mapping[str, Check], at: Situation, offers: Mapping[str, Offer]) -> None:
    """Raises UserError if the backends no longer offer what the plan's checks need, or take."""
    if at.max_context < plan.max_context:
        raise UserError(
            f"the backends take {at.max_context:,} tokens of context, and the plan's cases have up to "
            f"{plan.max_context:,}: serve them as before, or start a new run"
        )
    for each in plan.checks:
        if each.not_run is None and (why := _lacking(checks[each.id], at, offers)):
            raise UserError(f"{each.id} was planned, but can no longer be run: {why}: serve as before, or start anew")


def arms_of(plan: ParityPlan, id: str) -> list[ArmName]:
    """The arms that a check is run on."""
    return [REFERENCE_ARM] if id == REFERENCE else plan.arms


def lines(battery: Battery, checks: Mapping[str, Check], token_s: float) -> dict[str, str]:
    """What the battery will take, by name. ``token_s``: as Offer.token_s."""
    plan = battery.plan
    shown = {
        each.id: f"{checks[each.id].title}: {each.cases:,} cases, {each.tokens:,} tokens an arm"
        if each.not_run is None
        else f"{checks[each.id].title}: NOT RUN: {each.not_run}"
        for each in plan.checks
    }
    arms = {each.id: len(arms_of(plan, each.id)) for each in plan.checks}
    fault = f", X with {plan.fault}" if plan.fault else ""
    shown["arms"] = f"{', '.join(plan.arms)}: A the baseline, B the candidate, twice each{fault}"
    shown["tokens"] = f"{sum(each.tokens * arms[each.id] for each in plan.checks):,} output tokens at most"
    steps = sum(case.output_tokens / case.batch * arms[id] for id, each in battery.cases.items() for case in each)
    minutes = max(1, math.ceil(steps * token_s / 60))
    shown["time"] = (
        f"roughly {minutes:,} min, at the {1 / token_s:,.0f} tokens/s of one short reply before the start; long "
        "prompts and starts of servers come on top"
    )
    return shown
