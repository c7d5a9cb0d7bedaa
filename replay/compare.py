"""The A/B replay: preflight, plan, then blocks in balanced order, each one backend's turn at the same plan."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import secrets
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import psutil

from replay import backends, gpus, host, rundir, source
from replay.experiment import Experiment, frozen_yaml
from replay.lanes import Counts
from replay.plan import build_plan, plan_digest, read_plan
from replay.preflight import Prepared, model_name, prepare, request_headers, wire_limits
from replay.progress import Event, Tell
from replay.records import Block, Manifest, Plan
from replay.worker import Assignment
from replay.workers import Ended, Workers
from workloads.content import stable_random
from workloads.errors import UserError
from workloads.rendering import Rendering
from workloads.trace import Notes

_READY_GRACE_S = 60.0
"""Beyond the warm-up's own budget: loading the plan, first prompts, first connections."""

_START_DELAY_NS = 200_000_000
"""From telling the workers to the common start: longer than any message takes."""


def make_plan(experiment: Experiment, prepared: Prepared, folder: Path) -> tuple[Plan, str]:
    """Read the workload and write the plan into ``folder``; returns it with the workload's digest."""
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
    return plan, workload.digest()


def block_order(experiment: Experiment) -> list[str]:
    """Backend of each block: in each round A B B A or B A A B, drawn by the seed; or always A B."""
    order: list[str] = []
    for number in range(experiment.replay.rounds):
        first, second = backends.NAMES
        if experiment.replay.order == "AB":
            order += [first, second]
            continue
        if stable_random("order of blocks", experiment.replay.seed, number).random() < 0.5:
            first, second = second, first
        order += [first, second, second, first]
    return order


def start_run(experiment: Experiment, run: Path, *, allow_unmatched: bool, tell: Tell) -> Manifest:
    """Preflight, plan and manifest into a new run directory. Nothing is measured yet.

    Raises UserError for unmatched GPUs unless ``allow_unmatched``.
    """
    described = [backends.described(experiment, name) for name in backends.NAMES]
    reasons = gpus.mismatches(*described)
    if reasons and not allow_unmatched:
        raise UserError(
            "the backends' GPUs are not matched, so a difference would not be the decode path's:\n  "
            + "\n  ".join(reasons)
            + "\nMatch them, or measure anyway with --allow-unmatched (every page of the report will say so)."
        )
    for finding in host.check_client(experiment.replay.lanes):
        tell(Event(text=str(finding)))
    rundir.create(run)
    try:
        prepared = prepare(experiment, run / "check", tell)
        for backend in described:
            backend.settings |= prepared.facts[backend.name].server
            backend.emulated = backend.emulated or prepared.facts[backend.name].emulated
        plan, workload_digest = make_plan(experiment, prepared, run)
        tell(Event(text=f"plan {plan_digest(plan)[:12]}: {plan_summary(plan)}"))
        (run / "experiment.yaml").write_text(frozen_yaml(experiment))
        (run / "rendering.json").write_bytes(msgspec.json.encode(prepared.rendering))
        manifest = Manifest(
            name=experiment.name,
            created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            decodegate_version=importlib.metadata.version("decodegate"),
            versions=_versions(),
            host=_host(),
            plan_digest=plan_digest(plan),
            workload_digest=workload_digest,
            workload_source=source.source_name(experiment),
            backends=described,
            order=block_order(experiment),
            matched_gpus=not reasons,
            unmatched_reasons=reasons,
            emulated=any(backend.emulated for backend in described),
            workers=experiment.replay.workers,
            salt=experiment.replay.salt if experiment.replay.salt is not None else secrets.token_hex(4),
            time_scale=prepared.facts["baseline"].time_scale,
        )
        rundir.write_json(run / "manifest.json", manifest)
        return manifest
    except BaseException:
        shutil.rmtree(run)  # only what we have just made: nothing is measured yet
        raise


def resume_run(experiment: Experiment, run: Path) -> Manifest:
    """Check that ``run`` is the same experiment, with its plan untouched.

    Raises UserError if the experiment file has changed since.
    """
    manifest = rundir.read_manifest(run)
    if (run / "experiment.yaml").read_text() != frozen_yaml(experiment):
        raise UserError(
            f"the experiment differs from {run}/experiment.yaml, with which this run was started: "
            "change it back, or start a new run"
        )
    plan = read_plan(run)
    if plan_digest(plan) != manifest.plan_digest or _rendering(run).digest() != plan.rendering_digest:
        raise UserError(f"{run}/plan.json or rendering.json was changed after the run was started: start a new run")
    return manifest


def _rendering(run: Path) -> Rendering:
    return msgspec.json.decode((run / "rendering.json").read_bytes(), type=Rendering)


def run_blocks(experiment: Experiment, run: Path, manifest: Manifest, tell: Tell) -> None:
    """Measure every block that is not finished, in order. Finished ones are not touched."""
    host.check_client(experiment.replay.lanes)  # a resumed run needs the raised limits too
    plan, rendering = read_plan(run), _rendering(run)
    for index, name in enumerate(manifest.order, start=1):
        if rundir.is_finished(run, index, name):
            tell(Event(text=f"block {index} of {len(manifest.order)} ({name}) is finished already"))
            continue
        kept = rundir.set_aside(rundir.block_folder(run, index, name))
        if kept is not None:
            tell(Event(text=f"an interrupted block is kept as {kept.name}; block {index} is measured again"))
        _run_block(experiment, run, plan, rendering, manifest, index, tell)


def _run_block(
    experiment: Experiment, run: Path, plan: Plan, rendering: Rendering, manifest: Manifest, index: int, tell: Tell
) -> None:
    name = manifest.order[index - 1]
    folder = rundir.block_folder(run, index, name)
    # an earlier attempt's prompts may still be in the server's cache
    salt = f"{manifest.salt}/{index}.{rundir.attempts(folder)}"
    folder.mkdir(parents=True)
    planned = plan.turns.get("send", 0)
    block = Block(index=index, backend=name, salt=salt, started_unix_s=time.time(), started_ns=time.monotonic_ns())
    try:
        with backends.running(experiment, name, folder / "server") as url:
            crew = Workers(_assignments(experiment, run, folder, plan, rendering, manifest, name, url, salt))
            try:
                ready = crew.wait_ready(experiment.replay.warmup.seconds + _READY_GRACE_S)
                block.started_ns = time.monotonic_ns() + _START_DELAY_NS
                block.started_unix_s = time.time() + _START_DELAY_NS / 1e9
                block.warmup_s = max(message.warmup_s for message in ready)
                block.warmup_requests = sum(message.warmup_requests for message in ready)
                block.warmup_planned = sum(message.warmup_planned for message in ready)
                rundir.write_json(folder / "block.json", block)
                crew.go(block.started_ns)

                def progress(counts: Counts, in_flight: int) -> None:
                    tell(
                        Event(
                            block=index,
                            blocks=len(manifest.order),
                            backend=name,
                            counts=counts,
                            in_flight=in_flight,
                            planned=planned,
                            elapsed_s=(time.monotonic_ns() - block.started_ns) / 1e9,
                        )
                    )

                done = crew.wait_done(progress)
            finally:
                crew.close()
    except KeyboardInterrupt:
        block.cut_short = "interrupted"
        rundir.write_json(folder / "block.json", block)
        raise
    except Ended as ended:
        block.cut_short = ended.why
        rundir.write_json(folder / "block.json", block)
        raise
    block.drained_ns = time.monotonic_ns()
    block.sent = sum(message.counts.sent for message in done)
    block.plays_ended = sum(message.counts.plays_ended for message in done)
    block.plays_cut = sum(message.counts.plays_cut for message in done)
    if plan.end == "duration" and plan.duration_s is not None:
        block.ended_ns = block.started_ns + int(plan.duration_s / manifest.time_scale * 1e9)
    else:
        block.ended_ns = max([message.last_end_ns for message in done] + [block.started_ns])
        block.not_reached = planned - block.sent
    block.finished = True
    rundir.write_json(folder / "block.json", block)


def _assignments(
    experiment: Experiment,
    run: Path,
    folder: Path,
    plan: Plan,
    rendering: Rendering,
    manifest: Manifest,
    name: str,
    url: str,
    salt: str,
) -> list[Assignment]:
    """The block's lanes dealt out over worker processes."""
    replay = experiment.replay
    count = min(replay.workers, len(plan.lanes))
    limit = replay.max_in_flight
    return [
        Assignment(
            run=run,
            folder=folder,
            worker=number,
            lanes=list(range(number, len(plan.lanes), count)),
            url=url,
            headers=request_headers(experiment, name),
            rendering=msgspec.structs.replace(rendering, model=model_name(experiment, name)),
            tokenizer=experiment.tokenizer,
            limits=wire_limits(experiment),
            block_salt=salt,
            end_session_on_failure=replay.on_failure == "end_session",
            max_in_flight=None if limit is None else max(1, len(range(number, limit, count))),
            warmup_requests=len(range(number, replay.warmup.requests, count)),
            warmup_s=replay.warmup.seconds,
            time_scale=manifest.time_scale,
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


def _versions() -> dict[str, str]:
    names = ("aiohttp", "uvloop", "msgspec", "numpy", "tokenizers")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def _host() -> dict[str, str]:
    return {
        "system": platform.platform(),
        "cpus": str(os.cpu_count()),
        "memory_bytes": str(psutil.virtual_memory().total),
    }
