"""The evals, measured: every sitting of the plan is one run of lm-eval, whose answers go into RUN/evals as they come.
Nothing here judges more than one reply.

RUN/evals is a run directory in itself, so that it can stand in one that holds a replay. Of what it writes only private/
holds text: neither records nor events nor errors quote a benchmark or a reply.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from evals import fitting, registration
from evals import plan as plans
from evals.model import Asked, Examinee
from evals.plan import Sitting
from evals.records import DIED, Answer, EvalManifest, EvalPlan, Repeat, TaskPlan
from evals.tasks import INCLUDE_PATH, TASKS, TEXTS
from evals.tasks.items import Item
from evals.tasks.replies import thinks_aloud
from replay import backends, rundir
from replay.experiment import Experiment, frozen_yaml
from replay.manifest import refuse_changed, run_facts
from replay.preflight import Prepared, prepare, without_servers
from replay.progress import Event, Tell
from replay.servers import Servers
from replay.watch import Watch
from replay.wire import Wire
from workloads.errors import UserError

_VERSIONS = ("lm-eval", "datasets", "aiohttp")


class Progress(msgspec.Struct, frozen=True):
    """Where a sitting stands."""

    sitting: Sitting
    number: int
    """Of the sitting, from 1."""
    sittings: int
    answered: int
    items: int
    errors: int


Show = Callable[[Progress], None]


def planned(experiment: Experiment, tell: Tell, *, limit: int | None, allow_unmatched: bool) -> EvalPlan:
    """Everything that needs no server. Raises UserError for data that are not what was agreed on, and for backends that
    cannot be compared, or, unless ``allow_unmatched``, should not be."""
    plan = plans.registered(experiment, limit=limit)
    matched = without_servers(experiment, tell)
    matched.refuse(allow_unmatched=allow_unmatched)
    plans.refuse_synthetic(matched.told)
    plans.refuse_no_parser(matched.told)
    plans.refuse_telling(matched.told)
    plans.refuse_stock(plan, matched.backends[1])
    return plan


def measure(
    experiment: Experiment,
    run: Path,
    tell: Tell,
    show: Show,
    *,
    resume: bool = False,
    limit: int | None = None,
    allow_unmatched: bool = False,
) -> None:
    """Sit all exams into RUN/evals, which is made; with ``resume``, what is not yet answered.

    Raises UserError if the plan has changed since it was registered, if the backends cannot be compared, if a server of
    ours ends, and if another process measures into ``run``.
    """
    folder = run / "evals"
    manifest = rundir.read_manifest(folder, EvalManifest) if resume else None
    if manifest is not None:
        limit = limit or registration.read(folder, EvalPlan).limit
        allow_unmatched = allow_unmatched or not manifest.matched_gpus
    plan = planned(experiment, lambda event: None, limit=limit, allow_unmatched=allow_unmatched)
    if manifest is None:
        rundir.create(folder, "private")
    else:
        plan = plans.without(plan, plans.unfit(registration.read(folder, EvalPlan)))
    with rundir.held(folder):
        if manifest is None:
            _salt(folder)
        else:
            _refuse_changed_plan(folder, plan, manifest)
            refuse_changed(experiment, folder)
        order = plans.sittings(plan, experiment.serving.blocks_per_start)
        due = [(number, each) for number, each in enumerate(order, 1) if not _complete(_paths(folder, each))]
        tell(Event(text=f"run directory: {run}"))
        if not due:
            return
        left = [each for _, each in due]
        for name, text in plans.lines(plan, left, _ended(folder, order)).items():
            tell(Event(text=f"{name:<13}{text}"))
        with registration.gone_unless_asked(folder), Servers(experiment, folder, tell) as servers:
            prepared = _prepared(experiment, servers, folder, plan, tell, left[0], manifest, allow_unmatched)
            exams = _Exams(experiment, folder, plan, servers, (folder / "private" / "salt").read_text(), {})
            if manifest is None:
                exams = msgspec.structs.replace(exams, plan=exams.fitted(prepared, left[0].backend, tell))
                _write_manifest(folder, experiment, prepared, registration.register(folder, exams.plan))
            for number, sitting in due:
                exams.sit(sitting, lambda *at, n=number, s=sitting: show(Progress(s, n, len(order), *at)))


def _salt(folder: Path) -> None:
    """Draw the salt of all hashes."""
    (folder / "private").chmod(0o700)
    (folder / "private" / "salt").write_text(secrets.token_hex(16))


def _refuse_changed_plan(folder: Path, plan: EvalPlan, manifest: EvalManifest) -> None:
    asked = any((folder / backends.NAMES[1]).glob("*/*.jsonl"))
    registration.refuse_changed(registration.read(folder, EvalPlan), plan, asked=asked)
    registration.refuse_edited(folder, manifest.plan_sha256)


def _prepared(
    experiment: Experiment,
    servers: Servers,
    folder: Path,
    plan: EvalPlan,
    tell: Tell,
    first: Sitting,
    manifest: EvalManifest | None,
    allow_unmatched: bool,
) -> Prepared:
    """Preflight, and what evals refuse besides."""
    prepared = prepare(
        experiment,
        servers,
        rundir.check_folder(folder),
        tell,
        allow_unmatched=allow_unmatched,
        first=first.backend,
        control=manifest is None,
    )
    plans.refuse_synthetic(prepared.settings)
    plans.refuse_no_parser(prepared.settings)
    plans.refuse_stock(plan, prepared.matching.backends[1])
    plans.refuse_no_room(plan, {name: facts.max_model_len for name, facts in prepared.facts.items()})
    return prepared


def _write_manifest(folder: Path, experiment: Experiment, prepared: Prepared, plan_sha256: str) -> None:
    (folder / "experiment.yaml").write_text(frozen_yaml(experiment))
    facts = run_facts(experiment, prepared.matching, time_scale=prepared.facts["baseline"].time_scale)
    manifest = EvalManifest(**msgspec.structs.asdict(facts), plan_sha256=plan_sha256)
    rundir.write_json(folder / "manifest.json", manifest)


class _Paths(msgspec.Struct, frozen=True):
    """The files of a sitting."""

    answers: Path
    ended: Path
    beside: Path
    raw: Path


def _paths(folder: Path, sitting: Sitting) -> _Paths:
    place = Path(sitting.backend, sitting.task, f"r{sitting.repeat:03d}.jsonl")
    answers = folder / place
    return _Paths(answers, answers.with_suffix(".json"), answers.with_suffix(""), folder / "private" / place)


def _complete(paths: _Paths) -> bool:
    """Whether a sitting has ended with a reply to every request."""
    return paths.ended.exists() and all(answer.outcome != "error" for answer in _whole(paths.answers))


def _ended(folder: Path, order: list[Sitting]) -> Iterator[Repeat]:
    for sitting in order:
        if (path := _paths(folder, sitting).ended).exists():
            try:
                yield msgspec.json.decode(path.read_bytes(), type=Repeat)
            except msgspec.MsgspecError as error:
                raise UserError(f"{path} is damaged: {error}. Delete it to go on with its repeat") from None


class _Exams(msgspec.Struct, frozen=True):
    """What all sittings share."""

    experiment: Experiment
    folder: Path
    plan: EvalPlan
    servers: Servers
    salt: str
    loaded: dict[str, Any]
    """Tasks of lm-eval, by name: the data are read once."""

    def sit(self, sitting: Sitting, show: Callable[[int, int, int], None]) -> None:
        """One run of lm-eval, for the items that are not answered yet."""
        task = next(each for each in self.plan.tasks if each.task == sitting.task)
        exam, paths = self._task(task), _paths(self.folder, sitting)
        exam.repeat = sitting.repeat
        places = plans.places(
            plans.described(self.experiment).exams[sitting.task], exam.items, self.plan.limit, task.data.unfit
        )
        with _resumed(paths) as (answered, tries, files):
            left = [place for place in places if exam.items[place].row not in answered]
            sheet = _Sheet(self.salt, sitting, exam, task.seed + sitting.repeat, tries, files, time.time())
            if left:
                self._ask(
                    sitting, task, left, sheet, lambda: show(len(answered) + sheet.kept, len(places), sheet.errors)
                )
        if sheet.turned_away == len(places):
            raise UserError(
                f"the {sitting.backend} took up no request of {sitting.task} ({sheet.last_error}): {paths.raw} has its "
                "words. Mend the server and go on with --resume, or change evals.sampling and start a new run"
            )
        ended = Repeat(
            backend=sitting.backend,
            task=sitting.task,
            repeat=sitting.repeat,
            seed=task.seed + sitting.repeat,
            started_unix_s=sheet.started_unix_s,
            ended_unix_s=time.time(),
            answers=len(places),
            server=sheet.server,
            started_ns=sheet.started_ns,
            ended_ns=sheet.ended_ns,
            versions={name: importlib.metadata.version(name) for name in _VERSIONS},
        )
        rundir.write_json(paths.ended, ended)

    def fitted(self, prepared: Prepared, name: str, tell: Tell) -> EvalPlan:
        """The plan without the items that the smaller of the backends' contexts does not hold beside the longest reply.
        The server of the backend called ``name`` counts; the other's tokenizer is the same."""
        contexts = [facts.max_model_len for facts in prepared.facts.values() if facts.max_model_len is not None]
        unfit: dict[str, list[int]] = {}
        for task in (each for each in self.plan.tasks if each.task in TEXTS):
            all_items = self._task(task).items
            given = plans.described(self.experiment).exams[task.task]
            items = [all_items[place] for place in plans.places(given, all_items)]
            rows = self._too_long(task, items, name, min(contexts) - plans.most_tokens(task)) if contexts else None
            if rows is None:
                words = "the server does not count them (/tokenize), or does not tell its context (max_model_len)"
                tell(Event(text=f"{task.task}: prompts are as long as o200k_base and max_context say: {words}"))
            unfit[task.task] = rows or []
            kept = [item for item in items if item.row not in set(unfit[task.task])]
            if not kept:
                raise UserError(
                    f"no item of {task.task} fits a context of {min(contexts):,} tokens beside a reply of "
                    f"{plans.most_tokens(task):,}: raise max-model-len, or lower evals.sampling.max_tokens"
                )
            left_out = f"; {len(items) - len(kept):,} {plans.UNFIT}" if rows else ""
            tell(Event(text=f"{task.task}: {len(kept):,} items: {fitting.sizes(task, kept)}{left_out}"))
        return plans.without(self.plan, unfit)

    def _too_long(self, task: TaskPlan, items: list[Item], name: str, room: int) -> list[int] | None:
        experiment, model = self.experiment, backends.model_name(self.experiment, name)

        async def ask(url: str) -> list[int] | None:
            limits, headers = backends.wire_limits(experiment), backends.request_headers(experiment, name)
            async with Wire(url, limits, connections=1, headers=headers) as wire:
                return await fitting.too_long(wire, model, task, items, room)

        with self.servers.answering(name, self.folder / "check" / "lengths", with_faults=False) as running:
            return asyncio.run(ask(running.url))

    def _task(self, task: TaskPlan) -> Any:
        """lm-eval's task, with the plan's data and sampling."""
        if task.task not in self.loaded:
            given = plans.described(self.experiment).exams[task.task]
            metadata = {"data": given.data, "sha256": task.data.sha256, "subset": given.subset}
            manager = TaskManager(include_path=str(INCLUDE_PATH), include_defaults=False, metadata=metadata)
            (loaded,) = manager.load([f"signoff_{task.task}"])["tasks"].values()
            # an empty until: no stop string, which would be looked for in thoughts too
            sent = {name: value for name, value in task.sampling.items() if value is not None}
            loaded.set_config("generation_kwargs", {"until": [], **sent})
            self.loaded[task.task] = loaded
        return self.loaded[task.task]

    def _ask(self, sitting: Sitting, task: TaskPlan, left: list[int], sheet: _Sheet, show: Callable[[], None]) -> None:
        experiment, name = self.experiment, sitting.backend
        evals = plans.described(experiment)
        first = Sitting(name, self.plan.tasks[0].task, 0)
        beside = _paths(self.folder, sitting).beside

        def refuse_dead() -> None:
            if (why := self.servers.died(name)) is not None:
                (beside / DIED).write_text(f"{why}\n")
                raise UserError(f"the {name}'s server has ended: {why}\nwhat was answered is kept: go on with --resume")

        def keep(asked: Asked) -> None:
            if asked.received.reply.error is not None:
                refuse_dead()
            if sitting == first and thinks_aloud(asked.received.reply):
                raise UserError(
                    f"the {name}'s replies hold thoughts in their text, where a draft could be scored: start its "
                    "server with --reasoning-parser (kimi_k3 for Kimi K3), and start a new run"
                )
            sheet.keep(asked)
            show()

        rundir.set_aside(beside)
        beside.mkdir(parents=True)
        with (
            self.servers.answering(name, beside / "server") as running,
            Watch(experiment, name, beside, running) as watch,
        ):
            sheet.server = running.start
            model = Examinee(
                model=backends.model_name(experiment, name),
                base_url=f"{running.url}/v1/chat/completions",
                header=backends.request_headers(experiment, name),
                num_concurrent=task.concurrency,
                seed=sheet.seed,
                timeout=evals.timeout_s,
                retries=evals.retries,
                keep=keep,
            )
            label = f"signoff_{sitting.task}"
            watch.before()
            watch.opens()
            # the server's start is no part of it
            sheet.started_unix_s, sheet.started_ns = time.time(), time.monotonic_ns()
            evaluate(
                lm=model,
                task_dict={"tasks": {label: self.loaded[sitting.task]}},
                samples={label: left},
                apply_chat_template=True,
                log_samples=False,
                bootstrap_iters=0,
            )
            sheet.ended_ns = time.monotonic_ns()
            refuse_dead()
            watch.closes()


class _Files(msgspec.Struct, frozen=True):
    answers: BinaryIO
    raw: BinaryIO


class _Sheet(msgspec.Struct):
    """What one sitting's replies become."""

    salt: str
    sitting: Sitting
    exam: Any
    seed: int
    tries: dict[int, int]
    """Attempts of an interrupted sitting that ended in an error, by row."""
    files: _Files
    started_unix_s: float
    started_ns: int | None = None
    ended_ns: int | None = None
    kept: int = 0
    errors: int = 0
    turned_away: int = 0
    last_error: str | None = None
    server: str | None = None

    def keep(self, asked: Asked) -> None:
        """Judge one reply and append it: first the text, which is private, then the answer."""
        received, item = asked.received, self.exam.items[asked.doc["place"]]
        reply, module, repeat = received.reply, TASKS[self.sitting.task], self.sitting.repeat
        ids = received.prompt_token_ids
        judged = module.judge(item, reply, repeat)
        raw = {
            "item": item.row,
            "text": reply.text,
            "reasoning": reply.reasoning,
            "stop_reason": received.stop_reason,
            "token_ids": received.token_ids,
            "body": received.body,
        }
        answer = Answer(
            item=item.row,
            item_hash=self._hash(msgspec.json.encode(item)),
            prompt_hash=self._hash(_prompt(asked.payload)),
            repeat=repeat,
            seed=self.seed,
            outcome=judged.outcome,
            score=judged.score,
            given=judged.given,
            route=judged.route,
            scores=judged.scores,
            stratum=module.strata(item),
            finish_reason=reply.finish_reason,
            prompt_tokens=received.prompt_tokens,
            completion_tokens=received.completion_tokens,
            reasoning_tokens=received.reasoning_tokens,
            attempts=asked.attempts + self.tries.get(item.row, 0),
            error=reply.error or ("empty reply" if judged.outcome == "error" else None),
            fingerprint=received.fingerprint,
            reply_hash=None
            if reply.error is not None
            else self._hash(json.dumps([reply.reasoning, reply.text]).encode()),
            prompt_ids_hash=None if ids is None else self._hash(msgspec.json.encode(ids)),
            sent_unix_s=asked.sent_unix_s,
            latency_s=(asked.ended_ns - asked.sent_ns) / 1e9,
            sent_ns=asked.sent_ns,
            ended_ns=asked.ended_ns,
        )
        for file, line in ((self.files.raw, raw), (self.files.answers, answer)):
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
        self.kept += 1
        self.errors += judged.outcome == "error"
        self.turned_away += received.turned_away
        self.last_error = answer.error or self.last_error

    def _hash(self, data: bytes) -> str:
        return hashlib.sha256(self.salt.encode() + b"\0" + data).hexdigest()[:16]


def _prompt(payload: dict[str, Any]) -> bytes:
    """What was sent, besides the seed and what the backend calls its model."""
    sent = {name: value for name, value in payload.items() if name not in ("seed", "model")}
    return json.dumps(sent, sort_keys=True, ensure_ascii=False).encode()


@contextmanager
def _resumed(paths: _Paths) -> Iterator[tuple[set[int], dict[int, int], _Files]]:
    """The rows that an interrupted sitting answered, the attempts it made at others, and the files, to append to.

    A request that got no reply is asked again: a fault of that moment is no answer to keep. So is one whose line the
    interruption tore.
    """
    kept, tries = [], {}
    for answer in _whole(paths.answers):
        if answer.outcome == "error":
            tries[answer.item] = answer.attempts
        else:
            kept.append(answer)
    for path in (paths.answers, paths.raw):
        path.parent.mkdir(parents=True, exist_ok=True)
    part = paths.answers.with_suffix(".part")
    part.write_bytes(b"".join(msgspec.json.encode(answer) + b"\n" for answer in kept))
    part.replace(paths.answers)
    with paths.answers.open("ab") as answers, paths.raw.open("ab") as raw:
        raw.write(b"\n" * bool(raw.tell()))  # ends a torn line
        yield {answer.item for answer in kept}, tries, _Files(answers, raw)


def _whole(path: Path) -> Iterator[Answer]:
    """Answers of a file whose last line may be torn."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            yield msgspec.json.decode(line, type=Answer)
        except msgspec.MsgspecError as error:
            raise UserError(
                f"{path}:{number} is damaged: {error}. Take the line out to have its item asked again"
            ) from None
