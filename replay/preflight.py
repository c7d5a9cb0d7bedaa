"""Preflight of both backends: what they can take together, or why they cannot be compared."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from string import Template

import msgspec

from replay import backends, probes, source
from replay.emulator.settings import resolve
from replay.experiment import Experiment
from replay.progress import Event, Finding, Tell
from replay.wire import Limits, Wire
from workloads.errors import UserError
from workloads.rendering import Rendering


class Prepared(msgspec.Struct, kw_only=True):
    """Preflight's result: what both backends can take."""

    rendering: Rendering
    facts: dict[str, probes.ServerFacts]
    max_context: int | None


def prepare(experiment: Experiment, scratch: Path, tell: Tell) -> Prepared:
    """Ask both backends a handful of requests. Emulators are started for it, with their logs in ``scratch``.

    Raises UserError when the comparison cannot be measured, with what to change.
    """
    source.check(experiment)  # what needs no server comes first
    for name in backends.NAMES:
        request_headers(experiment, name)
        if getattr(experiment.backends, name).emulator is not None:
            resolve(backends.emulator_settings(experiment, name))
    base = Rendering(
        api=experiment.api,
        model=experiment.model,
        vocabulary=backends.vocabulary(experiment, emulated=_emulated(experiment)),
        sampling=experiment.sampling,
    )
    for finding in _doubts(experiment):
        tell(Event(text=str(finding)))
    control = 0
    for attempt in itertools.count():
        facts: dict[str, probes.ServerFacts] = {}
        for name in backends.NAMES:
            rendering = msgspec.structs.replace(base, model=model_name(experiment, name))
            # faults are for the measured blocks: they prove that the report sees them
            with backends.running(experiment, name, scratch / f"{name}-{attempt}", with_faults=False) as url:
                facts[name] = asyncio.run(_probe(experiment, name, url, rendering, control))
        controls = [facts[name].control for name in backends.NAMES]
        if controls[0] == controls[1]:
            break
        control = max(controls)  # both get the same fields: ask again from the weaker one's
    for name in backends.NAMES:
        for finding in facts[name].findings:
            tell(Event(text=f"{name}: {finding}"))
    templates = [facts[name].template for name in backends.NAMES]
    if templates[0] != templates[1]:
        raise UserError(
            f"the backends' chat templates differ (baseline adds {templates[0]}, candidate {templates[1]}): the same "
            "messages would be different prompts; serve both with one template, or use api: completions"
        )
    if facts["baseline"].emulated != facts["candidate"].emulated:
        raise UserError("one backend is an emulator and the other is not: their difference would mean nothing")
    if facts["baseline"].time_scale != facts["candidate"].time_scale:
        raise UserError("the emulators' time scales differ: both must run equally fast")
    limits = [facts[name].max_model_len for name in backends.NAMES]
    known = [limit for limit in limits if limit is not None]
    if experiment.workload.max_context is not None:
        known.append(experiment.workload.max_context)
    rendering = msgspec.structs.replace(probes.with_control(base, controls[0]), template=templates[0])
    return Prepared(rendering=rendering, facts=facts, max_context=min(known) if known else None)


def _doubts(experiment: Experiment) -> Iterator[Finding]:
    """What is allowed, but hardly meant."""
    baseline, candidate = experiment.backends.baseline, experiment.backends.candidate
    if baseline.url is not None and _address(baseline.url) == _address(candidate.url or ""):
        yield Finding("warning", "both backends are one server: this measures its noise, not a difference")
    if (baseline.decode_backend, candidate.decode_backend) != ("auto", "latency_specialized"):
        yield Finding(
            "warning",
            f"decode_backend is {baseline.decode_backend} for the baseline and {candidate.decode_backend} for the "
            "candidate: this does not compare the specialised decode backend with the standard one",
        )
    if not experiment.emulated:
        yield Finding("note", "which decode path the servers take is as declared: it is not proven here")
    if experiment.replay.order == "AB":
        yield Finding("warning", "order: AB cannot tell drift from effect: the report will be INCONCLUSIVE")


def _address(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _emulated(experiment: Experiment) -> bool:
    """Whether the backends are emulators, also behind URLs: their vocabulary is known then."""

    async def ask(url: str, name: str) -> bool:
        async with Wire(url, wire_limits(experiment), connections=1, headers=request_headers(experiment, name)) as wire:
            return (await probes.version(wire)).emulated

    urls = {name: getattr(experiment.backends, name).url for name in backends.NAMES}
    return experiment.emulated or any(asyncio.run(ask(url, name)) for name, url in urls.items() if url is not None)


async def _probe(experiment: Experiment, name: str, url: str, rendering: Rendering, control: int) -> probes.ServerFacts:
    async with Wire(url, wire_limits(experiment), connections=8, headers=request_headers(experiment, name)) as wire:
        return await probes.probe(wire, rendering, control=control)


def model_name(experiment: Experiment, name: str) -> str:
    """The model's name as this backend serves it."""
    own: str | None = getattr(experiment.backends, name).model
    return own or experiment.model


def request_headers(experiment: Experiment, name: str) -> dict[str, str]:
    """The backend's extra headers, with ${NAME} taken from the environment. Raises UserError for a name not set."""
    headers: dict[str, str] = {}
    for header, value in getattr(experiment.backends, name).headers.items():
        try:
            headers[header] = Template(value).substitute(os.environ)
        except (KeyError, ValueError) as error:
            raise UserError(
                f"backends.{name}.headers.{header}: {error} is not set in the environment (a plain $ is written $$)"
            ) from None
    return headers


def wire_limits(experiment: Experiment) -> Limits:
    """The experiment's limits as the wire takes them."""
    return Limits(**experiment.replay.limits.model_dump())
