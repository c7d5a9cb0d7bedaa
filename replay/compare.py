"""The A/B replay: preflight, plan, then blocks in balanced order, each one backend's turn at the same plan."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from replay import concurrency, estimate, host, probes, rundir, source
from replay.attempt import attempt, make_room
from replay.backends import model_name, request_headers, wire_limits
from replay.experiment import Experiment, frozen_yaml
from replay.lanes import Counts
from replay.manifest import refuse_changed, run_facts
from replay.order import begins_start, block_order
from replay.plan import SessionFile, build_plan, plan_digest, read_plan
from replay.preflight import Prepared, prepare
from replay.progress import Event, Finding, Tell
from replay.records import Block, Manifest, Plan
from replay.servers import Running, Servers
from replay.watch import Watch
from replay.worker import Assignment
from replay.workers import Workers
from workloads.errors import UserError
from workloads.rendering import Rendering
from workloads.trace import Notes

_READY_GRACE_S = 60.0
"""Beyond the warm-up's own budget: loading the plan, first prompts, first connections."""

_FEWEST_TURNS = 50
"""Turns of each backend, over its blocks, below which reports give no interval of P90 (reports/intervals.py)."""

_START_DELAY_NS = 200_000_000
"""From telling the workers to the common start: longer than any message takes."""


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison that is ready to be measured."""

    prepared: Prepared
    plan: Plan
    workload_digest: str
    estimated: estimate.Estimate


def make_plan(
    experiment: Experiment, servers: Servers, folder: Path, tell: Tell, *, allow_unmatched: bool, room: Path
) -> Planned:
    """Preflight, then the plan into ``folder``, and what it lets expect. ``room``: where the run directory will be.

    Raises UserError if it cannot be measured, or, unless ``allow_unmatched``, should not be.
    """
    for finding in host.check_client(experiment.replay.lanes, "lanes"):
        tell(Event(text=str(finding)))
    prepared = prepare(experiment, servers, folder / "check", tell, allow_unmatched=allow_unmatched)
    notes = Notes()
    workload = source.Source(experiment, notes)
    plan = build_plan(
        workload.traces(),
        experiment,
        max_context=prepared.max_context,
        rendering_digest=prepared.rendering.digest(),
        folder=folder,
        notes=notes,
    )
    tell(Event(text=f"ok: plan {plan_digest(plan)[:12]}: {plan_summary(plan)}"))
    scale = prepared.facts["baseline"].time_scale
    estimated = estimate.estimate(experiment, plan, folder, block_order(experiment), time_scale=scale)
    tell(Event(text=str(estimate.check_disk(estimated, room))))
    for finding in _foreseen(experiment, prepared, plan, folder, estimated):
        tell(Event(text=str(finding)))
    return Planned(prepared=prepared, plan=plan, workload_digest=workload.digest(), estimated=estimated)


def _foreseen(
    experiment: Experiment, prepared: Prepared, plan: Plan, folder: Path, estimated: estimate.Estimate
) -> Iterator[Finding]:
    """Room in the KV caches, and steps that cannot run specialised. Raises UserError if it cannot be measured so."""
    values = estimated.work.rated * block_order(experiment).count("baseline")
    if values < _FEWEST_TURNS:
        yield Finding(
            "warning",
            f"{values} turns of several tokens on each backend are too few: P90 needs {_FEWEST_TURNS}",
            "take more sessions or turns, or raise replay.rounds",
            why="its ratio will have no interval, and the report will be INCONCLUSIVE",
        )
    for facts in prepared.facts.values():
        yield from probes.check_capacity(facts, estimated.work, lanes=experiment.replay.lanes)
    with contextlib.closing(SessionFile(folder / "sessions.jsonl")) as sessions:
        for backend in prepared.matching.backends:
            if backend.path is not None and backend.decode_backend == "latency_specialized":
                words, share = concurrency.expected(plan, sessions.__getitem__, backend.path)
                level: Literal["note", "warning"] = "warning" if share is not None and share > 0.5 else "note"
                yield Finding(level, f"{backend.name}: {words}")


def start_run(experiment: Experiment, servers: Servers, run: Path, *, allow_unmatched: bool, tell: Tell) -> Manifest:
    """Preflight, plan and manifest into a new run directory. Nothing is measured yet.

    Raises UserError for backends that are not matched unless ``allow_unmatched``.
    """
    rundir.create(run, "blocks")
    try:
        planned = make_plan(experiment, servers, run, tell, allow_unmatched=allow_unmatched, room=run)
        prepared = planned.prepared
        (run / "experiment.yaml").write_text(frozen_yaml(experiment))
        (run / "rendering.json").write_bytes(msgspec.json.encode(prepared.rendering))
        facts = run_facts(experiment, prepared.matching, time_scale=prepared.facts["baseline"].time_scale)
        manifest = Manifest(
            **msgspec.structs.asdict(facts),
            plan_digest=plan_digest(planned.plan),
            workload_digest=planned.workload_digest,
            workload_source=source.source_name(experiment),
            order=block_order(experiment),
            workers=experiment.replay.workers,
        )
        rundir.write_json(run / "manifest.json", manifest)
        return manifest
    except BaseException:
        if not (run / "servers").exists():  # their logs say why they did not start
            shutil.rmtree(run)  # only what we have just made: nothing is measured yet
        raise


def resume_run(experiment: Experiment, run: Path) -> Manifest:
    """Check that ``run`` is the same experiment, with its plan untouched.

    Raises UserError if the experiment file has changed since.
    """
    manifest = rundir.read_manifest(run, Manifest)
    refuse_changed(experiment, run)
    plan = read_plan(run)
    if plan_digest(plan) != manifest.plan_digest or _rendering(run).digest() != plan.rendering_digest:
        raise UserError(f"{run}/plan.json or rendering.json was changed after the run was started: start a new run")
    return manifest


def _rendering(run: Path) -> Rendering:
    return msgspec.json.decode((run / "rendering.json").read_bytes(), type=Rendering)


def run_blocks(experiment: Experiment, servers: Servers, run: Path, manifest: Manifest, tell: Tell) -> None:
    """Measure every block that is not finished, in order. Finished ones are not touched. Raises UserError if another
    process measures into this run directory."""
    host.check_client(experiment.replay.lanes, "lanes")  # a resumed run needs the raised limits too
    plan, rendering = read_plan(run), _rendering(run)
    used: set[str] = set()
    """Starts of servers on which a block was measured."""
    with rundir.held(run):
        for index, name in enumerate(manifest.order, start=1):
            if rundir.is_finished(rundir.block_folder(run, index, name) / "block.json"):
                tell(Event(text=f"block {index} of {len(manifest.order)} ({name}) is finished already"))
                continue
            _Measuring(experiment, servers, run, plan, rendering, manifest, tell).block(index, used)


class _Measuring(msgspec.Struct, frozen=True):
    """What every block of a run shares."""

    experiment: Experiment
    servers: Servers
    run: Path
    plan: Plan
    rendering: Rendering
    manifest: Manifest
    tell: Tell

    def block(self, index: int, used: set[str]) -> None:
        """Measure one block. ``used``: starts of servers that have measured one; added to."""
        experiment, manifest = self.experiment, self.manifest
        name = manifest.order[index - 1]
        folder = rundir.block_folder(self.run, index, name)
        # an earlier attempt's prompts may still be in the server's cache
        salt = f"{manifest.salt}/{index}.{make_room(folder, f'block {index}', self.tell)}"
        folder.mkdir(parents=True)
        block = Block(index=index, backend=name, salt=salt, started_unix_s=time.time(), started_ns=time.monotonic_ns())
        start = self.servers.start_of(name)
        fresh = self.servers.in_turn and begins_start(experiment, index) and start in used
        with (
            attempt(block, folder / "block.json", self.servers),
            self.servers.answering(name, folder / "server", fresh=fresh) as running,
        ):
            block.server = running.start
            used |= {running.start} if running.start else set()
            self._measure(block, folder, running)

    def _measure(self, block: Block, folder: Path, running: Running) -> None:
        """Play the plan; fills in ``block``."""
        experiment, plan = self.experiment, self.plan
        with Watch(experiment, block.backend, folder, running) as watch:
            block.prefix_cache_reset = watch.before()
            crew = Workers(self._assignments(folder, block, running.url))
            try:
                ready = crew.wait_ready(experiment.replay.warmup.seconds + _READY_GRACE_S)
                block.warmup_s = max(message.warmup_s for message in ready)
                block.warmup_requests = sum(message.warmup_requests for message in ready)
                block.warmup_planned = sum(message.warmup_planned for message in ready)
                watch.opens()
                block.started_ns = time.monotonic_ns() + _START_DELAY_NS
                block.started_unix_s = time.time() + _START_DELAY_NS / 1e9
                rundir.write_json(folder / "block.json", block)
                crew.go(block.started_ns)
                done = crew.wait_done(lambda counts, in_flight: self._progress(block, counts, in_flight))
                block.drained_ns = time.monotonic_ns()
                watch.closes()
            finally:
                crew.close()
        block.sent = sum(message.counts.sent for message in done)
        block.plays_ended = sum(message.counts.plays_ended for message in done)
        block.plays_cut = sum(message.counts.plays_cut for message in done)
        if plan.end == "duration" and plan.duration_s is not None:
            block.ended_ns = block.started_ns + int(plan.duration_s / self.manifest.time_scale * 1e9)
        else:
            block.ended_ns = max([message.last_end_ns for message in done] + [block.started_ns])
            block.not_reached = plan.turns.get("send", 0) - block.sent

    def _progress(self, block: Block, counts: Counts, in_flight: int) -> None:
        self.tell(
            Event(
                block=block.index,
                blocks=len(self.manifest.order),
                backend=block.backend,
                counts=counts,
                in_flight=in_flight,
                planned=self.plan.turns.get("send", 0),
                elapsed_s=(time.monotonic_ns() - block.started_ns) / 1e9,
            )
        )

    def _assignments(self, folder: Path, block: Block, url: str) -> list[Assignment]:
        """The block's lanes dealt out over worker processes."""
        experiment, plan = self.experiment, self.plan
        replay = experiment.replay
        count = min(replay.workers, len(plan.lanes))
        limit = replay.max_in_flight
        return [
            Assignment(
                run=self.run,
                folder=folder,
                worker=number,
                lanes=list(range(number, len(plan.lanes), count)),
                url=url,
                headers=request_headers(experiment, block.backend),
                rendering=msgspec.structs.replace(self.rendering, model=model_name(experiment, block.backend)),
                tokenizer=experiment.tokenizer,
                limits=wire_limits(experiment),
                block_salt=block.salt,
                end_session_on_failure=replay.on_failure == "end_session",
                max_in_flight=None if limit is None else max(1, len(range(number, limit, count))),
                warmup_requests=len(range(number, replay.warmup.requests, count)),
                warmup_s=replay.warmup.seconds,
                time_scale=self.manifest.time_scale,
            )
            for number in range(count)
        ]


def plan_summary(plan: Plan) -> str:
    """One line: what will be sent."""
    played = {play.session for entries in plan.lanes for play in entries}
    fates = ", ".join(f"{plan.turns[fate]:,} {fate}" for fate in sorted(plan.turns, key=lambda fate: fate != "send"))
    of = f" of {plan.sessions:,}" if len(played) < plan.sessions else ""
    again = " (some played again: fewer sessions than lanes)" if len(played) < len(plan.lanes) else ""
    return f"{len(played):,}{of} sessions on {len(plan.lanes)} lanes{again}; turns: {fates}"
