"""The parity battery, measured: each arm is asked every check's cases, into RUN/parity as replies come.

Nothing here judges. The order is the proof: both A arms end, and floor.json fixes what thresholds are made of, before
the first request to a B.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import uvloop

from evals import registration
from evals.faults import proxy
from evals.parity import http
from evals.parity import plan as plans
from evals.parity.check import Check, Given, Situation
from evals.parity.checks import CHECKS
from evals.parity.endpoint import Ask, Chat, ChatReply, Generation, Ints
from evals.parity.plan import BACKENDS, Battery, Offer, Prompts, Wanted
from evals.parity.record import Recorder, read_ids
from evals.plan import refuse_synthetic
from evals.records import ArmName, Case, CheckRun, Floor, ParityManifest, ParityPlan, ParityReply
from replay import backends, rundir
from replay.experiment import Experiment, frozen_yaml
from replay.manifest import refuse_changed, run_facts
from replay.preflight import Prepared, prepare, without_servers
from replay.progress import Event, Tell
from replay.servers import DYING_S, Running, Servers
from replay.watch import Watch
from workloads.errors import UserError

FLOOR_ARMS: tuple[ArmName, ...] = ("A1", "A2")


class Progress(msgspec.Struct, frozen=True):
    """Where a check on an arm stands."""

    arm: ArmName
    check: str
    number: int
    """Among all that are to be run, from 1."""
    numbers: int
    replied: int
    cases: int
    errors: int


Show = Callable[[Progress], None]


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    """What preflight found."""

    prepared: Prepared
    offers: dict[str, Offer]
    at: Situation

    @property
    def prompts(self) -> Prompts:
        return Prompts(self.prepared.rendering.vocabulary)

    @property
    def token_s(self) -> float:
        """Of the slower one."""
        return max(offer.token_s for offer in self.offers.values())


def stated(
    experiment: Experiment,
    folder: Path,
    tell: Tell,
    wanted: Wanted,
    *,
    allow_unmatched: bool,
    checks: Mapping[str, Check] = CHECKS,
) -> dict[str, str]:
    """What a battery would ask, by name, for the user. Servers are started for it, with their logs in ``folder``;
    nothing is registered. Raises UserError as measure does."""
    experiment = _modelled(experiment)
    plans.refuse_unknown(wanted, checks)
    with Servers(experiment, folder, tell) as servers:
        found = _found(experiment, servers, folder, tell, wanted, control=True, allow_unmatched=allow_unmatched)
    return plans.lines(_planned(wanted, checks, found), checks, found.token_s)


def measure(
    experiment: Experiment,
    run: Path,
    tell: Tell,
    show: Show,
    wanted: Wanted,
    *,
    resume: bool = False,
    allow_unmatched: bool = False,
    checks: Mapping[str, Check] = CHECKS,
) -> None:
    """Run the battery into RUN/parity, which is made; with ``resume``, what has not ended.

    Raises UserError if the plan or the experiment has changed since it was registered, if the backends cannot be
    compared, if a server ends, and if another process measures into ``run``.
    """
    experiment, folder = _modelled(experiment), run / "parity"
    plans.refuse_unknown(wanted, checks)
    manifest = rundir.read_manifest(folder, ParityManifest) if resume else None
    allow_unmatched = allow_unmatched or (manifest is not None and not manifest.matched_gpus)
    without_servers(experiment, lambda event: None).refuse(allow_unmatched=allow_unmatched)
    plan = None
    if manifest is None:
        rundir.create(folder, "cases")
    else:
        plan = _registered(experiment, folder, wanted, manifest)
        wanted = Wanted(budget=plan.budget)
    with rundir.held(folder):
        tell(Event(text=f"run directory: {run}"))
        if plan is not None and not _due(folder, plan):
            return
        with registration.gone_unless_asked(folder), Servers(experiment, folder, tell) as servers:
            control = manifest is None
            found = _found(experiment, servers, folder, tell, wanted, control=control, allow_unmatched=allow_unmatched)
            if plan is None:
                battery = _planned(wanted, checks, found)
                manifest = _register(experiment, folder, battery, found)
            else:
                plans.refuse_lacking(plan, checks, found.at, found.offers)
                battery = Battery(plan=plan, cases=_cases(folder, plan))
            assert manifest is not None
            for name, text in plans.lines(battery, checks, found.token_s).items():
                tell(Event(text=f"{name:<7}{text}"))
            _Run(experiment, folder, battery, checks, found, servers, manifest.salt, tell, show).arms()


def _modelled(experiment: Experiment) -> Experiment:
    """With the language model in emulators: words have no logprobs."""
    changed = {}
    for name in backends.NAMES:
        backend = experiment.backend(name)
        if backend.emulator is not None:
            emulator = backend.emulator.model_copy(update={"language": "model"})
            changed[name] = backend.model_copy(update={"emulator": emulator})
    return experiment.model_copy(update={"backends": experiment.backends.model_copy(update=changed)})


def _found(
    experiment: Experiment,
    servers: Servers,
    folder: Path,
    tell: Tell,
    wanted: Wanted,
    *,
    control: bool,
    allow_unmatched: bool,
) -> _Found:
    """Preflight, and what parity asks of both backends besides."""
    offers: dict[str, Offer] = {}

    def also(name: str, running: Running) -> None:
        headers, limits = backends.request_headers(experiment, name), backends.wire_limits(experiment)
        offers[name] = asyncio.run(plans.look(running.url, backends.model_name(experiment, name), headers, limits))

    prepared = prepare(
        experiment,
        servers,
        rundir.check_folder(folder),
        tell,
        allow_unmatched=allow_unmatched,
        first=plans.BASELINE,
        control=control,
        also=also,
    )
    refuse_synthetic(prepared.settings)
    at = plans.situation(experiment, prepared, offers, wanted.budget or "standard")
    return _Found(prepared=prepared, offers=offers, at=at)


def _planned(wanted: Wanted, checks: Mapping[str, Check], found: _Found) -> Battery:
    return plans.planned(wanted, checks, found.at, found.offers, found.prompts)


def _register(experiment: Experiment, folder: Path, battery: Battery, found: _Found) -> ParityManifest:
    """Write what is decided: before the first request of a check."""
    for id, cases in battery.cases.items():
        _cases_file(folder, id).write_bytes(plans.encoded(cases))
    plan_sha256 = registration.register(folder, battery.plan)
    (folder / "experiment.yaml").write_text(frozen_yaml(experiment))
    facts = run_facts(experiment, found.prepared.matching, time_scale=found.prepared.facts[plans.BASELINE].time_scale)
    manifest = ParityManifest(**msgspec.structs.asdict(facts), plan_sha256=plan_sha256)
    rundir.write_json(folder / "manifest.json", manifest)
    return manifest


def _registered(experiment: Experiment, folder: Path, wanted: Wanted, manifest: ParityManifest) -> ParityPlan:
    """The plan of a run that is taken up again. Raises UserError if it, or the experiment, is not what it was."""
    registration.refuse_edited(folder, manifest.plan_sha256)
    plan = registration.read(folder, ParityPlan)
    plans.refuse_other(plan, wanted)
    refuse_changed(experiment, folder)
    return plan


def _cases_file(folder: Path, id: str) -> Path:
    return folder / "cases" / f"{id}.jsonl"


def _cases(folder: Path, plan: ParityPlan) -> dict[str, list[Case]]:
    """The cases of the plan. Raises UserError if they are not those that were registered."""
    return {each.id: read_cases(folder, each.id, each.cases_sha256) for each in plan.checks if each.not_run is None}


def read_cases(folder: Path, id: str, sha256: str) -> list[Case]:
    """The cases of a check in RUN/parity. Raises UserError if they are not those that were registered."""
    path = _cases_file(folder, id)
    data = path.read_bytes() if path.exists() else b""
    if hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(f"{path} is not the one that was registered: start a new run")
    return [msgspec.json.decode(line, type=Case) for line in data.splitlines()]


def ended(folder: Path, arm: ArmName, id: str) -> CheckRun | None:
    """The record of a check that has ended on an arm, or that could not be run; else None."""
    path = folder / arm / id / "run.json"
    return msgspec.json.decode(path.read_bytes(), type=CheckRun) if path.exists() else None


def _order(plan: ParityPlan) -> list[tuple[ArmName, str]]:
    return [(arm, each.id) for arm in plan.arms for each in plan.checks if arm in plans.arms_of(plan, each.id)]


def _due(folder: Path, plan: ParityPlan) -> list[tuple[ArmName, str]]:
    return [(arm, id) for arm, id in _order(plan) if ended(folder, arm, id) is None]


def fix_floor(folder: Path) -> None:
    """Put on record what thresholds are made of. Raises UserError if it was on record, and has changed since."""
    files = [path for arm in FLOOR_ARMS for path in sorted((folder / arm).rglob("*")) if path.is_file()]
    found = {str(path.relative_to(folder)): registration.sha256(path) for path in files}
    path = folder / "floor.json"
    if not path.exists():
        rundir.write_json(path, Floor(fixed_unix_s=time.time(), sha256=found))
        return
    fixed = msgspec.json.decode(path.read_bytes(), type=Floor).sha256
    if changed := sorted(name for name in found.keys() | fixed.keys() if found.get(name) != fixed.get(name)):
        raise UserError(f"{folder / changed[0]} has changed since the floor was fixed: start a new run")


class _Run(msgspec.Struct, frozen=True):
    """What all arms share."""

    experiment: Experiment
    folder: Path
    battery: Battery
    checks: Mapping[str, Check]
    found: _Found
    servers: Servers
    salt: str
    tell: Tell
    show: Show

    def arms(self) -> None:
        """Every arm, in order, with what is due on it."""
        plan = self.battery.plan
        for arm in plan.arms:
            due = [id for each, id in _due(self.folder, plan) if each == arm]
            if not due:
                continue
            if arm not in FLOOR_ARMS:
                fix_floor(self.folder)
            not_run = {each.id: each.not_run for each in plan.checks if each.not_run is not None}
            for id in due:
                if id in not_run:
                    self._leave_out(arm, id, not_run[id])
            if due := [id for id in due if id not in not_run]:
                with self._answering(arm) as running:
                    for id in due:
                        self._check(arm, id, running)

    def _leave_out(self, arm: ArmName, id: str, why: str) -> None:
        place = self.folder / arm / id
        place.mkdir(parents=True, exist_ok=True)
        now = time.time()
        left_out = CheckRun(arm=arm, check=id, not_run=why, started_unix_s=now, ended_unix_s=now)
        rundir.write_json(place / "run.json", left_out)

    def _answering(self, arm: ArmName) -> AbstractContextManager[Running]:
        """The arm's server, started anew if another arm has used this start of it."""
        name = BACKENDS[arm]
        others = [
            run for each, id in _order(self.battery.plan) if each != arm and (run := ended(self.folder, each, id))
        ]
        used = self.servers.start_of(name) in {run.server for run in others if run.server is not None}
        place = self.folder / "emulators" / arm / "server"
        rundir.set_aside(place)
        return self.servers.answering(name, place, fresh=used, noise=1 + list(BACKENDS).index(arm))

    def _check(self, arm: ArmName, id: str, running: Running) -> None:
        """One check on one arm. What an interrupted attempt left is set aside."""
        place = self.folder / arm / id
        tried = rundir.attempts(place) + int(rundir.set_aside(place) is not None)
        place.mkdir(parents=True)
        order, cases = _order(self.battery.plan), self.battery.cases[id]
        number = order.index((arm, id)) + 1
        replied: set[int] = set()
        errors = 0

        def heard(reply: ParityReply) -> None:
            nonlocal errors
            errors += reply.error is not None
            if reply.case not in replied:
                replied.add(reply.case)
                self.show(Progress(arm, id, number, len(order), len(replied), len(cases), errors))

        with Watch(self.experiment, BACKENDS[arm], place, running) as watch, Recorder(place, heard) as recorder:
            watch.before()
            watch.opens()
            started, started_ns = time.time(), time.monotonic_ns()
            uvloop.run(self._ask(arm, id, running, recorder, f"{self.salt}/{arm}/{tried}"))
            ended_unix_s, ended_ns = time.time(), time.monotonic_ns()
            watch.closes()
        run = CheckRun(
            arm=arm,
            check=id,
            started_unix_s=started,
            ended_unix_s=ended_unix_s,
            replies=recorder.replies,
            positions=recorder.positions,
            server=running.start,
            started_ns=started_ns,
            ended_ns=ended_ns,
        )
        rundir.write_json(place / "run.json", run)

    async def _ask(self, arm: ArmName, id: str, running: Running, recorder: Recorder, salt: str) -> None:
        fault = self.battery.plan.fault if arm == "X" else None
        async with _front(running.url, fault) as url:
            endpoint = _Endpoint(self.experiment, BACKENDS[arm], url, self.servers, self.found.at)
            given = Given(endpoint, self.found.prompts, self._traces(id), recorder, salt)
            try:
                await self.checks[id].run(given, self.battery.cases[id])
            except BaseException:
                if endpoint.gone is not None:  # the check may have wrapped it, or failed for the lack of a reply
                    raise endpoint.gone from None
                raise

    def _traces(self, id: str) -> Mapping[int, Ints]:
        """The reference traces, for a check that uses them."""
        used = any(case.trace is not None for case in self.battery.cases[id])
        return read_traces(self.folder) if used else {}


def read_traces(folder: Path) -> dict[int, Ints]:
    """The reference traces in RUN/parity; none if they were not made."""
    path = folder / plans.REFERENCE_ARM / plans.REFERENCE / "tokens.parquet"
    return read_ids(path) if path.exists() else {}


@asynccontextmanager
async def _front(url: str, fault: str | None) -> AsyncIterator[str]:
    """Where an arm's requests go: to the server itself, or, with a fault, to a proxy before it."""
    if fault is None:
        yield url
        return
    async with proxy(url, fault) as front:
        yield front


class _Endpoint(http.Server):
    """A server whose end ends the battery: its silence is no answer."""

    def __init__(self, experiment: Experiment, name: str, url: str, servers: Servers, at: Situation) -> None:
        headers, limits = backends.request_headers(experiment, name), backends.wire_limits(experiment)
        super().__init__(url, backends.model_name(experiment, name), headers, limits)
        self.has = at.has
        self.gone: UserError | None = None
        self._died = partial(servers.died, name)
        self._name = name

    async def generate(self, group: Sequence[Ask]) -> list[list[Generation]]:
        found = await super().generate(group)
        await self._refuse_dead(any(each.error for choices in found for each in choices))
        return found

    async def chat(self, group: Sequence[Chat]) -> list[ChatReply]:
        found = await super().chat(group)
        await self._refuse_dead(any(each.error for each in found))
        return found

    async def _refuse_dead(self, failed: bool) -> None:
        if not failed or await self.alive():
            return
        why = await asyncio.to_thread(self._died, within_s=DYING_S)
        self.gone = UserError(
            f"the {self._name}'s server has ended: {why or 'it no longer answers'}\nthe checks that had ended are "
            "kept: go on with --resume"
        )
        raise self.gone
