"""A run of layer profiles: one backend after the other decodes a batch while its server's profiler runs, and its traces
are kept. No order is balanced, since kernels are compared and not rates; nothing is resumed, since it takes minutes."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import time
import zlib
from pathlib import Path

import msgspec

from replay import batch, matching, profiler, rundir, serve_command, serving, settings
from replay.backends import NAMES, model_name, request_headers, wire_limits
from replay.decode_bench import check_room
from replay.eligibility import read_config
from replay.experiment import Decode, Experiment, Speculating, frozen_yaml
from replay.manifest import run_facts, setup_facts
from replay.preflight import Prepared, prepare
from replay.progress import Event, Tell
from replay.records import Cell, Profile, ProfileManifest
from replay.servers import DYING_S, Running, Servers
from replay.speculation import with_speculation
from workloads.errors import UserError
from workloads.rendering import Rendering

_WRITTEN_S = 60.0
"""Longest time until the traces of a stopped profiler are there: a shared file system may show them late."""

_UNCHANGED_S = 1.0
"""Traces are complete when each can be read to its end, and nothing has come for so long."""

_OPTION = "profiler-config"


class Wanted(msgspec.Struct, kw_only=True, frozen=True):
    """What is to be profiled."""

    speculation: int = 0
    """Index into decode.speculation."""
    batch: int | None = None
    """Streams; None: the first batch size of that setting."""
    steps: int = 50
    """Decode steps, about."""
    traces: Path | None = None
    """Where servers at a URL write their traces, or a folder above."""


def measure(experiment: Experiment, run: Path, wanted: Wanted, tell: Tell, *, allow_unmatched: bool = False) -> None:
    """Preflight, and a profile of each backend, into the new run directory ``run``.

    Raises UserError for backends that have no profiler, are not matched (unless ``allow_unmatched``) or fail, then with
    the place of the server's log.
    """
    if experiment.decode is None:
        raise UserError("the experiment has no decode: give one, with batch, input_tokens and output_tokens")
    chosen, cell = _chosen(experiment.decode, wanted)
    profiled = with_profilers(with_speculation(experiment, wanted.speculation), run, wanted.traces)
    check_room(profiled, [cell], matching.declared(profiled).told, {})
    rundir.create(run, "profiles", resumable=False)
    with rundir.held(run), Servers(profiled, run, tell) as servers:
        try:
            prepared = prepare(profiled, servers, run / "check", tell, allow_unmatched=allow_unmatched, first=NAMES[0])
            check_room(profiled, [cell], prepared.settings, {n: f.max_model_len for n, f in prepared.facts.items()})
        except BaseException:
            if not (run / "servers").exists():  # as in replay/compare.py
                shutil.rmtree(run)
            raise
        (run / "experiment.yaml").write_text(frozen_yaml(experiment))
        manifest = _manifest(profiled, prepared, chosen, cell)
        rundir.write_json(run / "manifest.json", manifest)
        for name in NAMES:
            running = servers.running(name)
            tell(Event(text=f"{name}: profiling about {wanted.steps} decode steps of {cell.batch} streams"))
            decoded = _batch(profiled, name, manifest, prepared.rendering, wanted.steps)
            try:
                found = _profile(profiled, name, running, decoded, _folder(run, name), wanted.traces)
            except UserError as error:
                why = servers.died(name, within_s=DYING_S)
                log = f"\nIts whole log: {running.folder / serving.LOG}" if running.folder is not None else ""
                raise UserError(f"{name}: {error}{f': {why}' if why else ''}{log}") from None
            rundir.write_json(_folder(run, name) / "profile.json", found)


def _chosen(decode: Decode, wanted: Wanted) -> tuple[Speculating, Cell]:
    """The speculative setting and what is decoded. Raises UserError for what would not last for the steps."""
    if wanted.speculation >= len(decode.speculation):
        raise UserError(
            f"--speculation {wanted.speculation}: decode.speculation has {len(decode.speculation)}, counted from 0"
        )
    chosen = decode.speculation[wanted.speculation]
    cell = Cell(
        batch=wanted.batch or (chosen.batch or decode.batch)[0],
        input_tokens=decode.input_tokens[0],
        output_tokens=decode.output_tokens[0],
        setup=0,
    )
    fewest = profiler.fewest_tokens(wanted.steps, 1 + chosen.draft_tokens)
    if cell.output_tokens < fewest:
        raise UserError(
            f"decode.output_tokens is {cell.output_tokens}: streams must last for {fewest} tokens, so that "
            f"{wanted.steps} steps can be profiled; raise it, or give fewer --steps"
        )
    return chosen, cell


def with_profilers(experiment: Experiment, run: Path, traces: Path | None) -> Experiment:
    """The experiment with a profiler in each server that we start, which writes into ``run``.

    Raises UserError for backends that cannot be profiled, or whose ``traces`` would not be found.
    """
    changed = {}
    for name in NAMES:
        backend = experiment.backend(name)
        if backend.emulator is not None:
            raise UserError(f"backends.{name}: the embedded emulator has no kernels: give a real server, serve or url")
        if backend.url is not None and (traces is None or not traces.is_dir()):
            raise UserError(
                f"--traces must name the folder, as this host sees it, into which the server of backends.{name} writes "
                "its traces: the torch_profiler_dir of its --profiler-config, or a folder above"
            )
        if backend.serve is None:
            continue
        told = settings.from_command(serve_command.completed(backend, model_name(experiment, name), name))
        if any(settings.covers(_OPTION, key) for key in told):
            raise UserError(f"backends.{name}.serve has a {_OPTION}: leave it out, decode profile gives its own")
        config = profiler.config(str(_folder(run, name).resolve()))
        serve = backend.serve.model_copy(update={"options": backend.serve.options | {_OPTION: config}})
        changed[name] = backend.model_copy(update={"serve": serve})
    return experiment.model_copy(update={"backends": experiment.backends.model_copy(update=changed)})


def _manifest(experiment: Experiment, prepared: Prepared, chosen: Speculating, cell: Cell) -> ProfileManifest:
    facts = run_facts(experiment, prepared.matching, time_scale=1.0)
    folders = [told.get("model") for told in prepared.settings.values()] + [experiment.tokenizer]
    layers = layers_of([str(folder) for folder in folders if folder])
    setup = setup_facts(chosen, prepared.matching)
    return ProfileManifest(**msgspec.structs.asdict(facts), setup=setup, cell=cell, layers=layers)


def layers_of(models: list[str]) -> int | None:
    """How many layers the model has, by the first of these folders that is here and says so."""
    for folder in models:
        config = read_config(folder) or {}
        layers = (config.get("text_config") or config).get("num_hidden_layers")
        if isinstance(layers, int):
            return layers
    return None


def _batch(
    experiment: Experiment, name: str, manifest: ProfileManifest, rendering: Rendering, steps: int
) -> profiler.Batch:
    """What the backend decodes: the same prompts as the other."""
    assert experiment.decode is not None
    rendering = msgspec.structs.replace(rendering, model=model_name(experiment, name))
    cell, key = manifest.cell, f"profile/{manifest.salt}"
    small = msgspec.structs.replace(cell, output_tokens=experiment.decode.warmup_tokens)
    return profiler.Batch(
        warmup=[b"".join(each.body) for each in batch.fresh(rendering, small, f"{key}/warmup")],
        measured=[b"".join(each.body) for each in batch.fresh(rendering, cell, key)],
        tokens_per_step=1 + manifest.setup.speculation.draft_tokens,
        steps=steps,
    )


def _profile(
    experiment: Experiment, name: str, running: Running, decoded: profiler.Batch, folder: Path, traces: Path | None
) -> Profile:
    """Profile one running backend; its traces are then in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    written = folder if running.server is not None or traces is None else traces
    before = _trace_files(written)
    seen = asyncio.run(
        profiler.profile(running.url, request_headers(experiment, name), wire_limits(experiment), decoded)
    )
    found = await_traces(written, before)
    if written != folder:
        for trace in found:
            shutil.copy(trace, folder)
    return Profile(
        backend=name,
        server=running.start,
        opened_ns=seen.opened_ns,
        closed_ns=seen.closed_ns,
        step_s=seen.step_s,
        traces=[trace.name for trace in found],
    )


def _folder(run: Path, name: str) -> Path:
    return run / "profiles" / name


def _trace_files(folder: Path) -> set[Path]:
    return set(folder.rglob("*.json.gz"))


def await_traces(folder: Path, before: set[Path]) -> list[Path]:
    """The traces in ``folder`` that were not there ``before``, once they are complete. Raises UserError if none comes,
    or one stays incomplete."""
    deadline = time.monotonic() + _WRITTEN_S
    sizes: dict[Path, int] = {}
    while True:
        last, sizes = sizes, {path: path.stat().st_size for path in _trace_files(folder) - before}
        if sizes and sizes == last and all(map(_complete, sizes)):
            return sorted(sizes)
        if time.monotonic() > deadline:
            raise UserError(
                f"its trace {min(sizes)} is not complete {_WRITTEN_S:.0f} s after its profiler has stopped"
                if sizes
                else f"no trace (*.json.gz) has come into {folder} {_WRITTEN_S:.0f} s after its profiler has stopped: "
                "is that its torch_profiler_dir?"
            )
        time.sleep(_UNCHANGED_S)


def _complete(path: Path) -> bool:
    try:
        with gzip.open(path) as file:
            while file.read(1 << 20):
                pass
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return False
    return True
