"""Preflight of both backends: what they can take together, or why they cannot be compared."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from replay import backends, matching, probes, settings, snapshot, source, speculation
from replay.emulator.settings import resolve
from replay.experiment import Backend, Experiment
from replay.order import block_order
from replay.progress import Event, Finding, Tell
from replay.servers import Running, Servers
from replay.wire import Wire
from workloads.content import load_tokenizer
from workloads.errors import UserError
from workloads.rendering import Rendering

_KEY = "additional-config.decode_backend"

_IDLE_S = 1.0
"""How long an idle connection is left to see whether the server keeps it."""


class Prepared(msgspec.Struct, kw_only=True):
    """Preflight's result: what both backends can take, and how they differ."""

    rendering: Rendering
    facts: dict[str, probes.ServerFacts]
    settings: dict[str, matching.Settings]
    """Of each backend, as it shows them, else as its command says; empty if neither is known."""
    max_context: int | None
    matching: matching.Matching


def prepare(
    experiment: Experiment,
    servers: Servers,
    scratch: Path,
    tell: Tell,
    *,
    allow_unmatched: bool = False,
    first: str | None = None,
    control: bool = True,
    also: Callable[[str, Running], None] | None = None,
) -> Prepared:
    """Ask both backends a handful of requests. Servers are started for it, and stay up if they can; emulators too, with
    their logs in ``scratch``. ``first``: the backend to be measured first, if not that of the first block. ``control``:
    False if the start-up control has been made before. ``also``: what else is to be asked of each while it runs.

    Raises UserError when the comparison cannot be measured, or means nothing, with what to change.
    """
    matched = without_servers(experiment, tell)
    matched.refuse(allow_unmatched=allow_unmatched)
    if control:
        _start_up_control(experiment, servers, matched, tell)
    matched.refuse(allow_unmatched=allow_unmatched)
    base = Rendering(
        api=experiment.api,
        model=experiment.model,
        vocabulary=backends.vocabulary(experiment, emulated=_emulated(experiment)),
        sampling=experiment.sampling,
    )
    tokenizer = load_tokenizer(experiment.tokenizer) if experiment.tokenizer is not None else None
    # the last one asked stays up, if only one server can: it is the first to be measured
    order = sorted(backends.NAMES, key=lambda name: name == (first or block_order(experiment)[0]))
    way = 0
    for attempt in itertools.count():
        found: dict[str, matching.Seen] = {}
        for name in order:
            rendering = msgspec.structs.replace(base, model=backends.model_name(experiment, name))
            # faults are for the measured blocks: they prove that the report sees them
            with servers.answering(name, scratch / f"{name}-{attempt}", with_faults=False) as running:
                found[name] = asyncio.run(_look(experiment, name, running, rendering, way, tokenizer))
                if also is not None and attempt == 0:
                    also(name, running)
        facts = {name: found[name].facts for name in backends.NAMES}
        controls = [facts[name].control for name in backends.NAMES]
        if controls[0] == controls[1]:
            break
        way = max(controls)  # both get the same fields: ask again from the weaker one's
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
    matching.seen(experiment, matched, found)
    for finding in matched.findings:
        tell(Event(text=str(finding)))
    for doubt in matched.doubts:
        tell(Event(text=str(Finding("note", f"not verified: {doubt}"))))
    matched.refuse(allow_unmatched=allow_unmatched)
    limits = [facts[name].max_model_len for name in backends.NAMES]
    known = [limit for limit in limits if limit is not None]
    if experiment.workload is not None and experiment.workload.max_context is not None:
        known.append(experiment.workload.max_context)
    rendering = msgspec.structs.replace(probes.with_control(base, controls[0]), template=templates[0])
    return Prepared(
        rendering=rendering,
        facts=facts,
        settings={name: found[name].settings or matched.told.get(name, {}) for name in backends.NAMES},
        max_context=min(known) if known else None,
        matching=matched,
    )


def without_servers(experiment: Experiment, tell: Tell) -> matching.Matching:
    """The part of preflight that needs no server. Raises UserError for what cannot be measured."""
    if experiment.workload is not None:
        source.check(experiment)
    for name in backends.NAMES:
        backends.request_headers(experiment, name)
        if experiment.backend(name).emulator is not None:
            resolve(backends.emulator_settings(experiment, name))
    matched = matching.declared(experiment)
    if _one_server(experiment) and (differs := _declared_to_differ(experiment)):
        matched.impossible.append(
            f"both backends are one server, at {experiment.backends.baseline.url}, but {differs} is to differ: give "
            "each its own url, or, to measure the noise of one server, the same decode_backend and under_test left out"
        )
    for finding in [*_doubts(experiment), *_unknown_methods(matched), *matched.findings]:
        tell(Event(text=str(finding)))
    return matched


def _start_up_control(experiment: Experiment, servers: Servers, matched: matching.Matching, tell: Tell) -> None:
    """Whether the candidate's server reads decode_backend at all: start it with one that does not exist."""
    candidate = experiment.backends.candidate
    if candidate.decode_backend != "latency_specialized":
        return
    if candidate.serve is None or not experiment.serving.start_up_control:
        if candidate.emulator is None:
            matched.unverified.append(
                "candidate: whether its server reads decode_backend: it was not started with one that does not exist "
                "(the start-up control)"
            )
        return
    control = servers.control("candidate")
    if control.result == "ignored":
        matched.impossible.append(
            "candidate: its server also starts with a decode_backend that does not exist, so this model or this build "
            "of vLLM ignores the key: the candidate would be running standard decode"
        )
    elif control.result == "refused":
        matched.start_up_control = control.said
        tell(Event(text=str(Finding("ok", f"start-up control: a bogus decode_backend is refused: {control.said}"))))
    else:
        matched.unverified.append(
            f"candidate: whether its server reads decode_backend: started with a bogus one it ended for another "
            f"reason: {control.said}"
        )


def _doubts(experiment: Experiment) -> Iterator[Finding]:
    """What is allowed, but hardly meant."""
    baseline, candidate = experiment.backends.baseline, experiment.backends.candidate
    if _one_server(experiment):
        yield Finding("warning", "both backends are one server: this measures its noise, not a difference")
    under_test = any(settings.covers(name, _KEY) for name in experiment.serving.under_test)
    if under_test and (baseline.decode_backend, candidate.decode_backend) != ("auto", "latency_specialized"):
        yield Finding(
            "warning",
            f"decode_backend is {baseline.decode_backend} for the baseline and {candidate.decode_backend} for the "
            "candidate: this does not compare the specialised decode backend with the standard one",
        )
    if experiment.serving.arrangement == "side_by_side" and _may_share_gpus(baseline, candidate):
        what = "both servers run at the same time and may use the same GPUs"
        yield Finding("warning", what, "give each backend serve.devices of its own")
    if experiment.replay.order == "AB":
        yield Finding("warning", "order: AB cannot tell drift from effect: the report will be INCONCLUSIVE")


def _may_share_gpus(one: Backend, other: Backend) -> bool:
    if one.serve is None or other.serve is None:
        return False
    if any(backend.gpus is not None and backend.gpus.kind.lower() == "cpu" for backend in (one, other)):
        return False
    if one.serve.devices is None or other.serve.devices is None:
        return one.serve.env == other.serve.env  # which may name others
    return bool(set(one.serve.devices) & set(other.serve.devices))


def _unknown_methods(matched: matching.Matching) -> Iterator[Finding]:
    """Ways to speculate that we have not heard of: the server's own version may know them."""
    for method in {told.get("speculative-config.method") for told in matched.told.values()} - {None}:
        if words := speculation.unknown(str(method)):
            yield Finding("warning", words, why="if its server does not know it either, it will not start")


def _one_server(experiment: Experiment) -> bool:
    baseline, candidate = (experiment.backend(name).url for name in backends.NAMES)
    return baseline is not None and candidate is not None and _address(baseline) == _address(candidate)


def _declared_to_differ(experiment: Experiment) -> str:
    """What the experiment says is different between the two; empty for one against itself."""
    baseline, candidate = experiment.backends.baseline, experiment.backends.candidate
    others = [name for name in experiment.serving.under_test if not settings.covers(name, _KEY)]
    own = ["decode_backend"] if baseline.decode_backend != candidate.decode_backend else []
    return ", ".join([*own, *others])


def _address(url: str) -> tuple[str, str]:
    """Host with port, and path, however they are written."""
    scheme, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    host = host.rpartition("@")[2].lower().removesuffix(":443" if scheme == "https" else ":80")
    return host.replace("localhost", "127.0.0.1"), f"/{path}".rstrip("/").removesuffix("/v1")


def _emulated(experiment: Experiment) -> bool:
    """Whether the backends are emulators, also behind URLs: their vocabulary is known then."""

    async def ask(url: str, name: str) -> bool:
        headers = backends.request_headers(experiment, name)
        async with Wire(url, backends.wire_limits(experiment), connections=1, headers=headers) as wire:
            return (await probes.version(wire)).emulated

    urls = {name: experiment.backend(name).url for name in backends.NAMES}
    return experiment.emulated or any(asyncio.run(ask(url, name)) for name, url in urls.items() if url is not None)


async def _look(
    experiment: Experiment,
    name: str,
    running: Running,
    rendering: Rendering,
    control: int,
    tokenizer: Tokenizer | None,
) -> matching.Seen:
    headers = backends.request_headers(experiment, name)
    async with Wire(running.url, backends.wire_limits(experiment), connections=8, headers=headers) as wire:
        facts = await probes.probe(wire, rendering, control=control, tokenizer=tokenizer, idle_s=_IDLE_S)
        if facts.emulated:
            return matching.Seen(facts=facts, snapshot=None, settings=None)
        seen = await snapshot.take(wire, rendering.model, "before", running.command, running.beside)
        return matching.Seen(facts=facts, snapshot=seen, settings=await snapshot.shown_settings(wire))
