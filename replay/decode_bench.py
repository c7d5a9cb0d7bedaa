"""Decode tables: exactly so many streams decode together, on each backend, cell by cell, in balanced order.

One window: a warm-up batch, then all streams of the cell, sent at once; none takes the place of one that has ended.
Everything that arrives is recorded; which part of it counts is a matter of judging.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import uvloop
from msgspec.structs import replace

from replay import backends, batch, health, host, matching, rundir, settings, speculation
from replay.attempt import attempt, make_room
from replay.emulator import profiles
from replay.emulator.settings import resolve
from replay.experiment import Decode, Experiment, frozen_yaml
from replay.manifest import refuse_changed, run_facts, setup_facts
from replay.order import window_order
from replay.outcomes import CountTokens
from replay.preflight import Prepared, prepare, without_servers
from replay.progress import Event, Tell
from replay.recorder import Recorder
from replay.records import Cell, DecodeManifest, Window, WindowPlace
from replay.sender import Sender, ServerGone
from replay.servers import Running, Servers
from replay.watch import Watch
from replay.wire import Wire
from replay.worker import token_counter
from replay.workers import Ended
from workloads.errors import UserError
from workloads.rendering import Rendering

_FEWEST_STEPS = 10
"""Decode steps of a window below which reports give no rate (reports/decode)."""


class Tables(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be measured, as the experiment alone tells."""

    experiment: Experiment
    decode: Decode
    setups: list[Experiment]
    """The experiment with each speculative setting."""
    declared: list[matching.Matching]
    """Of each setup."""
    cells: list[Cell]
    order: list[WindowPlace]


def planned(experiment: Experiment, tell: Tell, *, allow_unmatched: bool) -> Tables:
    """Everything that needs no server. Raises UserError if it cannot be measured, or, unless ``allow_unmatched``,
    should not be."""
    decode = experiment.decode
    if decode is None:
        raise UserError("the experiment has no decode: give its batch, input_tokens and output_tokens")
    setups = [speculation.with_speculation(experiment, index) for index in range(len(decode.speculation))]
    cells = speculation.cells(decode)
    check_steps(decode, cells)
    declared = []
    for setup in setups:
        matched = without_servers(setup, tell)
        matched.refuse(allow_unmatched=allow_unmatched)
        check_room(setup, cells, matched.told, {})
        declared.append(matched)
    return Tables(
        experiment=experiment,
        decode=decode,
        setups=setups,
        declared=declared,
        cells=cells,
        order=window_order(decode, cells, experiment.replay.seed),
    )


def check_steps(decode: Decode, cells: Sequence[Cell]) -> None:
    """Raises UserError, naming the cell, for one whose windows are too short for a result."""
    for cell in cells:
        chosen = decode.speculation[cell.setup]
        length = speculation.step_tokens(chosen)
        if (cell.output_tokens - 1) / length < _FEWEST_STEPS:
            raise UserError(
                f"decode: {_words(cell)}, {speculation.label(chosen)}, may end after fewer than {_FEWEST_STEPS} steps, "
                "too few for a result: raise decode.output_tokens to at least "
                f"{math.ceil(_FEWEST_STEPS * length) + 1}"
            )


def check_room(
    setup: Experiment,
    cells: Sequence[Cell],
    known: Mapping[str, matching.Settings],
    longest: Mapping[str, int | None],
) -> None:
    """Raises UserError, naming the cell, for one that a backend cannot decode together. ``known``: settings of the
    backends, ``longest``: their max_model_len, where they are known."""
    for name, cell in itertools.product(backends.NAMES, cells):
        told = known.get(name, {})
        emulated = setup.backend(name).emulator is not None
        profile = resolve(backends.emulator_settings(setup, name)) if emulated else None
        length = longest.get(name) or (profile.max_model_len if profile else _number(told, "max-model-len"))
        needed = cell.input_tokens + cell.output_tokens
        if length is not None and needed > length:
            raise UserError(
                f"decode: {_words(cell)} takes {needed:,} tokens of context, but the {name} allows {length:,}: lower "
                "decode.input_tokens or output_tokens, or raise its max-model-len"
            )
        streams = settings.most_requests(told) if profile is None else profile.max_num_seqs
        if streams is not None and cell.batch > streams:
            raise UserError(
                f"decode: {_words(cell)} would not decode together: the {name} runs at most {streams:,} requests: "
                "lower decode.batch, or raise its max-num-seqs"
            )


def _number(told: matching.Settings, key: str) -> int | None:
    text = told.get(key, "")
    return int(text) if text.isdecimal() else None


def measure(
    experiment: Experiment, run: Path, tell: Tell, *, resume: bool = False, allow_unmatched: bool = False
) -> None:
    """Measure every window into ``run``, which is made; with ``resume``, every window that is not finished.

    Each setup's servers are looked at before its first window. Raises UserError if it cannot be measured, or, unless
    ``allow_unmatched``, should not be; if the experiment has changed since the run was started; if another process
    measures into ``run``; and Ended if a window is cut off.
    """
    manifest = _resumed(experiment, run) if resume else None
    allow_unmatched = allow_unmatched or (manifest is not None and not manifest.matched_gpus)
    tables = planned(experiment, lambda event: None, allow_unmatched=allow_unmatched)
    for finding in host.check_client(max(cell.batch for cell in tables.cells), "streams"):
        tell(Event(text=str(finding)))
    if manifest is None:
        rundir.create(run, "windows")
    else:
        tables = replace(tables, cells=manifest.cells, order=manifest.order)
        _say_where(run, tell)
    try:
        with rundir.held(run):
            for number, setup in enumerate(tables.setups):
                due = _due(tables, run, number)
                if not due:
                    continue
                tell(Event(text=f"setup {number + 1} of {len(tables.setups)}: {_label(tables, number)}"))
                with Servers(setup, run, tell) as servers:
                    prepared = prepare(
                        setup,
                        servers,
                        rundir.check_folder(run),
                        tell,
                        allow_unmatched=allow_unmatched,
                        first=tables.order[due[0] - 1].backend,
                        control=manifest is None,  # model and build stay the same
                    )
                    _refuse_seen(tables, number, prepared)
                    if manifest is None:
                        manifest = _start(tables, run, prepared)
                        _say_where(run, tell)
                    seen = setup_facts(tables.decode.speculation[number], prepared.matching)
                    rundir.write_json(run / "setups" / f"{number + 1:02d}.json", seen)
                    counter = token_counter(setup.tokenizer)
                    measuring = _Measuring(tables, setup, servers, run, prepared.rendering, manifest, tell, counter)
                    for index in due:
                        measuring.window(index)
    except BaseException:
        if not (run / "manifest.json").exists() and not (run / "servers").exists():  # their logs say why
            shutil.rmtree(run)  # only what we have just made: nothing is measured yet
        raise


def _say_where(run: Path, tell: Tell) -> None:
    """Once it stays: before, a failure takes the folder away."""
    tell(Event(text=f"run directory: {run}"))


def _resumed(experiment: Experiment, run: Path) -> DecodeManifest:
    manifest = rundir.read_manifest(run, DecodeManifest)
    refuse_changed(experiment, run)
    return manifest


def _due(tables: Tables, run: Path, number: int) -> list[int]:
    """Windows of a setup that are not finished, from 1."""
    return [
        index
        for index, place in enumerate(tables.order, start=1)
        if tables.cells[place.cell].setup == number
        and not rundir.is_finished(rundir.window_folder(run, index, place.backend) / "window.json")
    ]


def _refuse_seen(tables: Tables, number: int, prepared: Prepared) -> None:
    """Raises UserError for a setup whose servers, as they show themselves, cannot decode its cells as it says."""
    longest = {name: facts.max_model_len for name, facts in prepared.facts.items()}
    check_room(tables.setups[number], tables.cells, prepared.settings, longest)
    chosen = tables.decode.speculation[number]
    for name, facts in prepared.facts.items():
        if facts.speculative is not None and facts.speculative != bool(chosen.draft_tokens):
            raise UserError(
                f"{name}: decode.speculation says {speculation.label(chosen)}, but its server "
                f"{'speculates' if facts.speculative else 'does not speculate'}: name there what it does"
            )


def _start(tables: Tables, run: Path, prepared: Prepared) -> DecodeManifest:
    """Write what the run directory says of the whole run."""
    experiment = tables.experiment
    (run / "experiment.yaml").write_text(frozen_yaml(experiment))
    (run / "setups").mkdir()
    facts = run_facts(experiment, prepared.matching, time_scale=prepared.facts["baseline"].time_scale)
    manifest = DecodeManifest(
        **msgspec.structs.asdict(facts),
        setups=[
            setup_facts(chosen, matched)
            for chosen, matched in zip(tables.decode.speculation, tables.declared, strict=True)
        ],
        cells=tables.cells,
        order=tables.order,
        repeats=tables.decode.repeats,
        warmup_tokens=tables.decode.warmup_tokens,
    )
    rundir.write_json(run / "manifest.json", manifest)
    return manifest


class _Measuring(msgspec.Struct, frozen=True):
    """What every window of a setup shares."""

    tables: Tables
    setup: Experiment
    servers: Servers
    run: Path
    rendering: Rendering
    manifest: DecodeManifest
    tell: Tell
    count_tokens: CountTokens | None

    def window(self, index: int) -> None:
        """Measure one window."""
        place = self.manifest.order[index - 1]
        cell, name = self.manifest.cells[place.cell], place.backend
        what = f"window {index} of {len(self.manifest.order)}"
        self.tell(Event(text=f"{what}: {name}, {_words(cell)}, {_label(self.tables, cell.setup)}"))
        folder = rundir.window_folder(self.run, index, name)
        # an earlier attempt's prompts may still be in the server's cache
        tried = f"{index}.{make_room(folder, what, self.tell)}"
        folder.mkdir(parents=True)
        window = Window(
            index=index,
            backend=name,
            cell=place.cell,
            started_unix_s=time.time(),
            started_ns=time.monotonic_ns(),
        )
        with (
            _writable(folder),  # a full disk may also refuse the record of how the window ended
            attempt(window, folder / "window.json", self.servers),
            _writable(folder),
            self.servers.answering(name, folder / "server") as running,
        ):
            window.server = running.start
            try:
                self._measure(window, cell, folder, tried, running)
            except ServerGone as error:
                raise Ended("server gone", str(error)) from None

    def _measure(self, window: Window, cell: Cell, folder: Path, tried: str, running: Running) -> None:
        """Decode the warm-up batch and then the cell's; fills in ``window``. ``tried``: this window and attempt."""
        setup, name = self.setup, window.backend
        rendering = replace(self.rendering, model=backends.model_name(setup, name))
        key = f"decode/{self.manifest.salt}/{tried}"
        short = replace(cell, output_tokens=self.manifest.warmup_tokens)
        warmup = batch.fresh(rendering, short, f"{key}/warmup", tried)
        measured = batch.fresh(rendering, cell, key, tried)

        def opens() -> None:
            window.started_ns, window.started_unix_s = time.monotonic_ns(), time.time()
            rundir.write_json(folder / "window.json", window)

        async def decode(watch: Watch, recorder: Recorder) -> None:
            headers, limits = backends.request_headers(setup, name), backends.wire_limits(setup)
            async with Wire(running.url, limits, connections=cell.batch, headers=headers) as wire:
                sender = Sender(wire, rendering, recorder, self.count_tokens)
                await batch.decode(wire, sender, warmup, "warmup")
                await asyncio.to_thread(watch.opens)
                watching = asyncio.create_task(health.watch(recorder.health, lambda: (wire.in_flight, wire.in_flight)))
                try:
                    with _collector_frozen():
                        await batch.decode(wire, sender, measured, "measured", opens)
                    window.ended_ns = time.monotonic_ns()
                finally:
                    watching.cancel()
                    with suppress(asyncio.CancelledError):
                        await watching

        with Watch(setup, name, folder, running) as watch, Recorder(folder, 0) as recorder:
            watch.before()
            uvloop.run(decode(watch, recorder))
            watch.closes()


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """What cannot be written ends the window, and can be mended."""
    try:
        yield
    except OSError as error:
        raise Ended("client", f"{folder}: {error.strerror or error}; mend it, then --resume") from None


def _words(cell: Cell) -> str:
    return f"batch {cell.batch}, ISL {cell.input_tokens}, OSL {cell.output_tokens}"


def _label(tables: Tables, number: int) -> str:
    return speculation.label(tables.decode.speculation[number])


@contextmanager
def _collector_frozen() -> Iterator[None]:
    """What is there stays: a collection in mid-window would only delay stamps."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def lines(tables: Tables) -> dict[str, str]:
    """What measuring will take, for the user: by name."""
    decode, order = tables.decode, tables.order
    shown = {
        f"setup {number + 1}": f"{_label(tables, number)}: batch {_list(chosen.batch or decode.batch)}; "
        f"ISL {_list(decode.input_tokens)}; OSL {_list(decode.output_tokens)}"
        for number, chosen in enumerate(decode.speculation)
    }
    shown["windows"] = (
        f"{len(order)}: {len(tables.cells)} cells, {4 * decode.rounds} passes over them in balanced order, "
        f"{decode.repeats} of each in a pass"
    )
    if starts := _starts(tables):
        shown["starts"] = f"{starts} starts of servers, preflight included"
    times = [_window_s(tables, place) for place in order]
    known = [time_s for time_s in times if time_s is not None]
    if len(known) == len(times):
        shown["time"] = f"about {sum(known) / 60:.1f} minutes for the windows alone; starts and preflight come on top"
    return shown


def _starts(tables: Tables) -> int:
    """How often a server of ours is started."""
    experiment, setups = tables.experiment, len(tables.setups)
    candidate = experiment.backends.candidate
    specialised = candidate.serve is not None and candidate.decode_backend == "latency_specialized"
    control = int(specialised and experiment.serving.start_up_control)
    served = sum(experiment.backend(name).serve is not None for name in backends.NAMES)
    if served < 2 or experiment.serving.arrangement == "side_by_side":
        return control + served * setups
    passes = itertools.groupby(tables.order, key=lambda place: (tables.cells[place.cell].setup, place.backend))
    return control + setups + len(list(passes))  # in preflight of each setup, one is asked that is not measured next


def _window_s(tables: Tables, place: WindowPlace) -> float | None:
    """Seconds that an emulated backend takes for a window; None for a real one, of which nothing is known."""
    cell = tables.cells[place.cell]
    setup = tables.setups[cell.setup]
    if setup.backend(place.backend).emulator is None:
        return None
    emulated = backends.emulator_settings(setup, place.backend)
    profile, drafts = resolve(emulated), emulated.speculation
    verify = 1 + (drafts.draft_tokens if drafts is not None else 0)
    step_s = profiles.step_time(profile, emulated.decode_backend).seconds(cell.batch * verify, verify)
    length = 1.0 if drafts is None else drafts.acceptance_length or 1 + sum(drafts.acceptance_rates)
    steps = (cell.output_tokens + tables.decode.warmup_tokens) / length
    prefill_s = 2 * cell.batch * cell.input_tokens / profile.prefill_tokens_per_s  # the warm-up's, too
    return (prefill_s + steps * step_s) / emulated.time_scale


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
