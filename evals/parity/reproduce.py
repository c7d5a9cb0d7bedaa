"""One case of a battery again: its prompt made anew and sent with its batch, beside what is on record of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from evals import registration
from evals.parity import http
from evals.parity import plan as plans
from evals.parity.asking import groups
from evals.parity.check import Given
from evals.parity.checks import CHECKS
from evals.parity.endpoint import Floats, Generation, Ints
from evals.parity.harness import read_cases, read_traces
from evals.parity.plan import Prompts
from evals.parity.record import read_case
from evals.records import ArmName, Case, ParityManifest, ParityPlan, ParityReply
from replay import backends, redaction, rundir
from replay.experiment import Experiment, load_experiment
from replay.progress import Event, Tell
from replay.servers import Servers
from workloads.errors import UserError

_SHOWN = 16
"""Positions, from the first difference on."""

Positions = tuple[Ints, Floats]
"""Token ids, and their logprobs: not a number where none was told."""


class Again(msgspec.Struct, frozen=True, kw_only=True):
    """A case as it is on record, and as it came now: each side by name, the reference first."""

    case: Case
    sides: dict[str, Positions]
    errors: list[str]
    """Of replies that came now."""


def reproduce(
    run: Path, id: str, number: int, scratch: Path, tell: Tell, *, backend: str, experiment: Experiment | None = None
) -> Again:
    """Ask ``backend`` the case again, with the cases of its batch. Its server is started if it is ours, with its log in
    ``scratch``. ``experiment``: by default the run's own. Raises UserError if the run has no such case, or no longer
    makes its prompt."""
    folder = run / "parity"
    manifest = rundir.read_manifest(folder, ParityManifest)
    plan = registration.read(folder, ParityPlan)
    planned = {each.id: each for each in plan.checks if each.not_run is None}
    if id not in planned:
        raise UserError(f"{run} has no check {id}: it has {', '.join(planned)}")
    cases = read_cases(folder, id, planned[id].cases_sha256)
    if not 0 <= number < len(cases):
        raise UserError(f"{id} has the cases 0 to {len(cases) - 1}, not {number}")
    case, batch = cases[number], together(cases, number)
    whole = experiment or _frozen(folder)
    prompts = Prompts(backends.vocabulary(whole, emulated=manifest.emulated))
    kept = _Kept(number)
    tell(Event(text=f"{id} case {number}: {len(batch)} cases go to the {backend}"))

    async def ask(url: str) -> None:
        headers, limits = backends.request_headers(whole, backend), backends.wire_limits(whole)
        server = await http.connect(url, backends.model_name(whole, backend), headers, limits)
        salt = f"reproduce/{registration.now()}"
        await CHECKS[id].run(Given(server, prompts, read_traces(folder), kept, salt), batch)

    with (
        Servers(whole, scratch, tell) as servers,
        servers.answering(backend, scratch / "emulator", noise=1 + len(plans.BACKENDS)) as running,
    ):
        asyncio.run(ask(running.url))
    recorded = dict(_recorded(folder, plan, id, number))
    repeat = _repeat([*recorded.values(), kept.found])
    sides = {f"{arm}, on record": found[repeat] for arm, found in recorded.items() if repeat in found}
    if repeat in kept.found:
        sides[f"{backend}, now"] = kept.found[repeat]
    return Again(case=case, sides=sides, errors=kept.errors)


def together(cases: Sequence[Case], number: int) -> list[Case]:
    """The case, the others of its batch, and the batches of the same size that have the same prompts: one may be what
    it is compared with, or what its prefix is cached by."""
    case = cases[number]
    alike = [each for each in cases if each.batch == case.batch and each.stratum == case.stratum]
    batches = list(groups(alike))
    prompts = {each.prompt_seed for batch in batches if case in batch for each in batch}
    return [each for batch in batches if any(each.prompt_seed in prompts for each in batch) for each in batch]


def _frozen(folder: Path) -> Experiment:
    path = folder / "experiment.yaml"
    if redaction.LEFT_OUT in path.read_text():
        raise UserError(
            f"{path} has keys left out, which the servers need: name the experiment file, with --experiment"
        )
    return load_experiment(path)


def _recorded(folder: Path, plan: ParityPlan, id: str, number: int) -> Iterator[tuple[ArmName, dict[int, Positions]]]:
    for arm in plan.arms:
        path = folder / arm / id / "tokens.parquet"
        if path.exists():
            yield arm, read_case(path, number)


def _repeat(found: Sequence[dict[int, Positions]]) -> int:
    """The first repeat in which ids differ, else the first."""
    for repeat in sorted(found[0]):
        ids = {each[repeat][0].tobytes() for each in found if repeat in each}
        if len(ids) > 1:
            return repeat
    return 0


class _Kept:
    """A Sink that keeps one case."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.found: dict[int, Positions] = {}
        self.errors: list[str] = []

    def reply(self, reply: ParityReply) -> None:
        if reply.error is not None:
            self.errors.append(reply.error)

    def tokens(self, case: int, generation: Generation, *, repeat: int = 0) -> None:
        if case == self._number:
            told = generation.logprobs if generation.logprobs.size else np.full(generation.ids.size, np.nan, np.float32)
            self.found[repeat] = generation.ids, told


def lines(again: Again) -> Iterator[str]:
    """What to say of it: how each side differs from the reference, and both from there on."""
    case = again.case
    cut = "" if case.cut is None else f" and {case.cut:,} of trace {case.trace}"
    sampling = f"temperature {case.temperature:g}, top_p {case.top_p:g}, seed {case.seed}"
    yield f"prompt {case.prompt_digest}, {case.prompt_tokens:,} tokens{cut}; batch {case.batch}; {sampling}"
    if again.errors:
        yield f"{len(again.errors)} replies failed: {', '.join(sorted(set(again.errors)))}"
    if len(again.sides) < 2:
        yield "nothing to compare: ids came on fewer than two sides"
        return
    (reference, first), *others = again.sides.items()
    yield f"compared with {reference}:"
    for name, side in others:
        at, words = _difference(first, side)
        yield f"{name}: {words}"
        if at is not None:
            shown = slice(at, at + _SHOWN)
            for each, (ids, logprobs) in ((reference, first), (name, side)):
                yield f"  {each}: {_in_words(ids[shown], logprobs[shown])}"


def _difference(reference: Positions, side: Positions) -> tuple[int | None, str]:
    """Position of the first other id, else of the largest difference of logprobs, and that in words; no position: there
    is none."""
    place = _first(reference[0], side[0])
    if place is not None:
        return place, f"other ids from position {place} on"
    where, gap = _farthest(reference[1], side[1])
    if not gap > 0:
        return None, "the same"
    return where, f"the same ids, logprobs up to {gap:.3g} apart, at position {where}"


def _first(one: Ints, other: Ints) -> int | None:
    """Where they begin to differ; None if they do not."""
    common = min(one.size, other.size)
    differ = np.flatnonzero(one[:common] != other[:common])
    return int(differ[0]) if differ.size else None if one.size == other.size else common


def _farthest(one: Floats, other: Floats) -> tuple[int, float]:
    """Position of the largest difference, and that; (0, not a number) where none can be told."""
    common = min(one.size, other.size)
    gaps = np.abs(one[:common] - other[:common])
    return (int(np.nanargmax(gaps)), float(np.nanmax(gaps))) if np.isfinite(gaps).any() else (0, float("nan"))


def _in_words(ids: Ints, logprobs: Floats) -> str:
    pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
    return " ".join(str(token) if np.isnan(logprob) else f"{token} ({logprob:.3f})" for token, logprob in pairs) or "-"
