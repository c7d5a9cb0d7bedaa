"""From the parts of a run directory to the sign-off: what it says, what it holds for, and where it comes from."""

from __future__ import annotations

import hashlib
import importlib.metadata
import shlex
from collections.abc import Iterator
from pathlib import Path

from evals.records import TaskPlan
from replay.records import Backend, Difference, RunFacts
from reports import gpus
from reports.accuracy.result import Outcome
from reports.accuracy.tasks import KINDS
from reports.coverage import SPECIALISED
from reports.render import words
from reports.signoff.controls import controls
from reports.signoff.coverage import exam_paths
from reports.signoff.gates import GATES
from reports.signoff.gates.evidence import Evidence
from reports.signoff.gates.plan_kept import first_request
from reports.signoff.parts import EvalsPart, Parts, ReplayPart, load
from reports.signoff.result import Arm, Data, Fact, Gate, Part, PartName, Registered, Signoff
from reports.stamps import stamps

OUTPUTS = ("signoff.json", "signoff.md", "signoff.html", "report.json", "report.md", "report.html")
"""What the verbs write into a run directory: made from it, and no part of it."""

_PRIVATE = "private"


def signoff(run: Path) -> Signoff:
    """Judge a run directory. Raises UserError if it holds nothing to judge, or something damaged."""
    parts = load(run)
    evidence = Evidence(parts, exam_paths(parts.evals) if parts.evals is not None else [], controls(parts))
    gates = [gate for judge in GATES for gate in judge(evidence)]
    outcome = verdict(gates)
    facts = _facts(parts)
    return Signoff(
        outcome=outcome,
        line=_line(outcome, parts, facts),
        reasons=[f"{gate.title}: {why}" for gate in gates if gate.outcome == outcome for why in _why(gate)],
        stamps=_stamps(parts),
        name=facts.name,
        decodegate_version=importlib.metadata.version("decodegate"),
        measured_utc=min(each.created_utc for each in _all_facts(parts)),
        measured_by=facts.measured_by,
        scope=list(_scope(parts, facts)),
        not_covered=list(_not_covered(parts)),
        parts=[_replay_part(parts), _evals_part(parts), _parity_part(parts)],
        arms=[_arm(backend) for backend in facts.backends],
        differences=_differences(parts),
        unverified=list(dict.fromkeys(each for facts in _all_facts(parts) for each in facts.unverified)),
        data=[_data(task) for task in parts.evals.plan.tasks] if parts.evals is not None else [],
        registered=_registered(parts.evals) if parts.evals is not None else None,
        coverage=evidence.coverage,
        controls=evidence.controls,
        gates=gates,
        tasks=parts.evals.accuracy.tasks if parts.evals is not None else [],
        parity=parts.parity.parity if parts.parity is not None else None,
        speed=list(_speed(parts.replay)) if parts.replay is not None else [],
        deviations=list(_deviations(parts)),
        reproduction=list(_reproduction(parts)),
        rollout=ROLLOUT,
        inputs=inputs(run),
    )


def verdict(gates: list[Gate]) -> Outcome:
    """FAIL if any gate fails, PASS if all pass, else INCONCLUSIVE."""
    outcomes = {gate.outcome for gate in gates}
    return "FAIL" if "FAIL" in outcomes else "PASS" if outcomes == {"PASS"} else "INCONCLUSIVE"


def _why(gate: Gate) -> list[str]:
    return gate.reasons or [gate.said]


def _stamps(parts: Parts) -> list[str]:
    """Each stamp once, in the replay's words where it has it."""
    by_form = {stamp.split(":")[0]: stamp for each in _all_facts(parts) for stamp in stamps(each)}
    return list(by_form.values())


def _all_facts(parts: Parts) -> list[RunFacts]:
    return [part.manifest for part in (parts.evals, parts.replay, parts.parity) if part is not None]


def _facts(parts: Parts) -> RunFacts:
    """The run's name and backends: as the evals saw them, else as the replay did, else as parity did."""
    return _all_facts(parts)[0]


def _line(outcome: Outcome, parts: Parts, facts: RunFacts) -> str:
    baseline, candidate = facts.backends
    told = [str(candidate.settings.get("model") or facts.name)]
    if (declared := gpus.declared(candidate)) is not None:
        told.append(f"on {declared}")
    if (version := candidate.settings.get("version")) is not None:
        told.append(f"{'emulator' if candidate.emulated else 'vLLM'} {version}")
    if baseline.decode_backend != candidate.decode_backend:
        what = f"{candidate.decode_backend} instead of {baseline.decode_backend}"
    else:
        what = ", ".join(f"{each.key} ({each.values})" for each in facts.differences if each.under_test) or "no change"
    margins = ""
    if parts.evals is not None:
        each = (f"{KINDS[task.task].title} {task.margin * 100:g}" for task in parts.evals.plan.tasks)
        margins = f"; margins in points: {', '.join(each)}"
    by = f" by {facts.measured_by}" if facts.measured_by else ""
    return (
        f"{outcome}: {what}, {', '.join(told)}{margins}; measured {facts.created_utc[:10]}{by} with decodegate "
        f"{facts.decodegate_version}"
    )


def _scope(parts: Parts, facts: RunFacts) -> Iterator[Fact]:
    baseline, candidate = facts.backends
    yield Fact("model", str(candidate.settings.get("model") or "not told"))
    yield Fact("decode backend", f"{candidate.decode_backend}, compared with {baseline.decode_backend}")
    yield Fact("server", str(candidate.settings.get("version") or "version not told"))
    yield Fact("GPUs", gpus.declared(candidate) or "not declared")
    for each in facts.differences:
        yield Fact(f"under test: {each.key}" if each.under_test else f"differs: {each.key}", each.values)
    if candidate.path is not None and candidate.decode_backend == SPECIALISED:
        rule = candidate.path
        yield Fact(
            "specialised path",
            f"{rule.model} ({rule.source}): steps of at most {rule.max_requests} requests, {rule.tokens_per_request} "
            "tokens each",
        )
    if parts.evals is not None:
        evals = parts.evals
        yield Fact(
            "requests at once",
            ", ".join(f"{KINDS[task.task].title} {task.concurrency}" for task in evals.plan.tasks),
        )
        if (longest := _longest(evals)) is not None:
            yield Fact("longest context in the evals", f"{longest:,} tokens, thoughts and answer included")
        sampling = evals.plan.tasks[0].sampling if evals.plan.tasks else {}
        yield Fact("sampling", ", ".join(f"{name} {value}" for name, value in sampling.items()))
    if parts.parity is not None:
        ran = ", ".join(each.id for each in parts.parity.parity.checks if each.outcome != "not run")
        longest, budget = parts.parity.plan.max_context, parts.parity.plan.budget
        yield Fact("output parity", f"{ran}: {budget} battery, up to {longest:,} tokens of context")
    if parts.replay is not None:
        plan = parts.replay.analysis.plan
        yield Fact("replayed traffic", f"{plan.lanes:,} lanes, {plan.sessions:,} sessions, {plan.api}")


def _longest(evals: EvalsPart) -> int | None:
    found = [
        answer.prompt_tokens + answer.completion_tokens
        for sitting in evals.sittings
        for answer in sitting.answers
        if answer.prompt_tokens is not None and answer.completion_tokens is not None
    ]
    return max(found, default=None)


def _not_covered(parts: Parts) -> Iterator[str]:
    yield (
        "Any other model, weights, server version, GPU, parallel layout, KV-cache type, speculative setting, driver or "
        "image than above; more requests at once, and longer contexts."
    )
    if parts.parity is None:
        yield (
            "Whether both backends emit the same tokens: corruption that is too sparse for a benchmark's score to show."
        )
    else:
        for each in parts.parity.parity.not_covered:
            yield f"Output parity: {each}"
    ran = {each.id for each in parts.parity.parity.checks if each.outcome != "not run"} if parts.parity else set()
    first = "Structured" if "D6" in ran else "Tool calls, structured"
    yield f"{first} output, images, and languages other than those of the benchmarks."
    if parts.evals is not None:
        for task in parts.evals.plan.tasks:
            kind = KINDS[task.task]
            asked = parts.evals.plan.items(task)
            if asked < kind.items:
                yield f"The rest of {kind.title}: {asked:,} of its {kind.items:,} items were asked."
            for why, count in task.data.dropped.items():
                yield f"{count:,} items of {kind.title}: {why}."


def _replay_part(parts: Parts) -> Part:
    replay, title = parts.replay, "Replay of recorded traffic"
    if replay is None:
        return _not_measured("replay", title, parts)
    return _measured("replay", title, replay.manifest, _no_result(replay) + words.headline(replay.analysis))


def _no_result(replay: ReplayPart) -> str:
    return "not a result: " if replay.analysis.conclusion.outcome == "INCONCLUSIVE" else ""


def _evals_part(parts: Parts) -> Part:
    evals, title = parts.evals, "Accuracy evals"
    if evals is None:
        return _not_measured("evals", title, parts)
    summary = ", ".join(f"{task.title} {task.outcome}" for task in evals.accuracy.tasks)
    return _measured("evals", title, evals.manifest, summary)


def _measured(name: PartName, title: str, facts: RunFacts, summary: str) -> Part:
    return Part(
        name=name,
        title=title,
        measured=True,
        measured_utc=facts.created_utc,
        measured_by=facts.measured_by,
        decodegate_version=facts.decodegate_version,
        summary=summary,
    )


def _not_measured(name: PartName, title: str, parts: Parts) -> Part:
    return Part(
        name=name,
        title=title,
        measured=False,
        measured_utc=None,
        measured_by="",
        decodegate_version=None,
        summary=parts.missing[name],
    )


def _parity_part(parts: Parts) -> Part:
    parity, title = parts.parity, "Output parity"
    if parity is None:
        return _not_measured("parity", title, parts)
    found = parity.parity
    passed = sum(each.outcome == "PASS" for each in found.checks)
    summary = f"{found.outcome}: {passed:,} of {len(found.checks):,} checks pass, {found.budget} battery"
    return _measured("parity", title, parity.manifest, summary)


def _arm(backend: Backend) -> Arm:
    facts = {name: str(value) for name, value in sorted(backend.settings.items()) if value not in (None, "")}
    if (declared := gpus.declared(backend)) is not None:
        facts["GPUs"] = declared
    if backend.command:
        facts["command"] = shlex.join(backend.command)
    if backend.emulated:
        facts["emulated"] = "yes"
    return Arm(name=backend.name, decode_backend=backend.decode_backend, facts=facts, files=backend.files)


def _differences(parts: Parts) -> list[Difference]:
    """Those that were seen; of backends that do not show their settings, the one that is declared."""
    seen = [each for facts in _all_facts(parts) for each in facts.differences]
    if not seen:
        pairs = [[backend.decode_backend for backend in facts.backends] for facts in _all_facts(parts)]
        seen = [
            Difference(key="decode_backend", baseline=one, candidate=other, under_test=True)
            for one, other in pairs
            if one != other
        ]
    return list({(each.key, each.baseline, each.candidate): each for each in seen}.values())


def _data(task: TaskPlan) -> Data:
    kind, facts = KINDS[task.task], task.data
    return Data(
        task=task.task,
        title=kind.title,
        name=facts.name,
        revision=facts.revision,
        sha256=facts.sha256,
        items=facts.items,
        dropped=facts.dropped,
        licence=kind.licence,
    )


def _registered(evals: EvalsPart) -> Registered:
    first = first_request(evals, evals.names[1])
    return Registered(
        sha256=evals.manifest.plan_sha256,
        unchanged=evals.plan_sha256 == evals.manifest.plan_sha256,
        first_candidate_request_utc=first.isoformat(timespec="seconds") if first is not None else None,
        plan=evals.plan,
    )


def _speed(replay: ReplayPart) -> Iterator[Fact]:
    analysis = replay.analysis
    yield Fact("conclusion", analysis.conclusion.outcome)
    for line in analysis.headlines:
        if line.effect is None:
            continue
        for backend, level in zip(analysis.backends, (line.effect.baseline, line.effect.candidate), strict=True):
            yield Fact(f"{line.label}, {backend.name}", f"{words.level(level, 'tok/s')} tokens/s")
        interval = words.ratio_interval(line.effect.ratio)
        ratio = words.ratio(line.effect.ratio) + (f" ({interval})" if interval else "")
        yield Fact(f"{line.label}, ratio", _no_result(replay) + ratio)


def _deviations(parts: Parts) -> Iterator[str]:
    if parts.evals is not None:
        yield from _deviations_of_evals(parts.evals)
    if parts.replay is not None:
        analysis = parts.replay.analysis
        for each in analysis.set_aside:
            yield f"Replay, block {each.name}: not judged, {each.why}."
        for note in analysis.notes:
            yield f"Replay: {note}."
        for why, count in analysis.plan.lost.items():
            yield f"Replay: reading the recordings dropped or changed {count:,} x {why}."
        for backend in analysis.backends:
            for why, count in backend.failures.items():
                yield f"Replay, {backend.name}: {count:,} turns failed: {why}."
    if parts.parity is not None:
        for note in parts.parity.parity.notes:
            yield f"Output parity: {note}."
    for facts in _all_facts(parts):
        for why in facts.unmatched_reasons:
            yield f"Measured although not matched ({facts.created_utc}): {why}."


def _deviations_of_evals(evals: EvalsPart) -> Iterator[str]:
    if evals.plan.limit is not None:
        yield f"Only the first {evals.plan.limit:,} items of each benchmark were asked."
    for note in evals.notes:
        yield f"Evals: {note}."
    for sitting in evals.sittings:
        repeat = sitting.repeat
        where = f"{KINDS[repeat.task].title} repeat {repeat.repeat}, {repeat.backend}"
        if sitting.interrupted:
            yield f"{where}: interrupted {sitting.interrupted} times, and gone on with."
        again = [each.attempts for each in sitting.answers if each.attempts > 1]
        if again:
            yield f"{where}: {len(again):,} requests were sent again, {max(again)} times at most."
        lost: dict[str, int] = {}
        for each in sitting.answers:
            if each.error is not None:
                lost[each.error] = lost.get(each.error, 0) + 1
        for why, count in lost.items():
            yield f"{where}: {count:,} requests got no reply: {why}."


def _reproduction(parts: Parts) -> Iterator[Fact]:
    yield Fact("command", "decodegate signoff RUN")
    yield Fact("decodegate that measured", ", ".join(sorted({each.decodegate_version for each in _all_facts(parts)})))
    yield Fact("libraries", ", ".join(f"{name} {version}" for name, version in sorted(_versions(parts).items())))
    if parts.evals is not None:
        seeds = (
            f"{KINDS[task.task].title} {task.seed} to {task.seed + task.repeats - 1}" for task in parts.evals.plan.tasks
        )
        yield Fact("seeds", ", ".join(seeds))
    if parts.replay is not None:
        yield Fact("replay's seed", str(parts.replay.analysis.plan.seed))
    if parts.parity is not None:
        yield Fact("output parity's seed", str(parts.parity.plan.seed))
    yield Fact("host", ", ".join(f"{name} {value}" for name, value in sorted(_facts(parts).host.items())))


def _versions(parts: Parts) -> dict[str, str]:
    found: dict[str, str] = {}
    for facts in _all_facts(parts):
        found |= facts.versions
    for sitting in parts.evals.sittings if parts.evals is not None else []:
        found |= sitting.repeat.versions
    return found


ROLLOUT = [
    "Start with a canary: 1 % of the traffic for an hour, 5 % for a day, then 25 % and 50 %, each time compared with "
    "the rest at the same hours.",
    "Watch on the canary: acceptance by draft position (vllm:spec_decode_num_accepted_tokens_per_pos), share of "
    "replies that end at their length limit, repetition, requests with NaN logits (vllm:corrupted_requests with "
    "VLLM_COMPUTE_NANS_IN_LOGITS=1), share of tool calls that do not fit their schema, preemptions, and which path "
    "the decode steps take (a share that is below the one measured here means that what is signed off does not run).",
    "Go back by starting the servers with decode_backend: auto; nothing else need change.",
    "Sign off again for a new image, vLLM or FlashInfer version, driver, weights or draft model, parallel layout, "
    "KV-cache type, speculative setting, or batch and context range.",
]


def inputs(run: Path) -> dict[str, str]:
    """SHA-256 of every file of the run directory that can be judged: private/ and what was made from it left out."""
    found = {}
    for path in sorted(run.rglob("*")):
        place = path.relative_to(run)
        if not path.is_file() or _PRIVATE in place.parts or place.name.removesuffix(".tmp") in OUTPUTS:
            continue
        with path.open("rb") as file:
            found[place.as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
