"""Faults and harmless changes put into the candidate of a battery, each with the check that is to see it and no more
than accuracy.md, section (f), names: shared by the tests and by the table of docs/faults.md."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec

from evals.faults import parse as parse_fault
from evals.faults import proxy, requests
from evals.faults.events import Event, Moment
from evals.faults.requests import Api, Asked
from evals.parity.check import Budget
from evals.parity.checks import (
    CHECKS,
    d1_streams,
    d2_lengths,
    d3_sampler,
    d4_neighbours,
    d5_prefix,
    d6_tools,
    d7_garbage,
    l1_lengths,
    l2_repetition,
    p1_replay,
    p3_divergence,
    p4_cut_points,
    p6_batches,
    p7_soak,
    t0,
)
from evals.parity.endpoint import Ask, Chat, ChatReply, Endpoint, Generation, Need
from evals.parity.http import Server
from evals.parity.http_replies import ChatDocument, GrowingChat, decoded
from evals.parity.local import Local
from evals.records import ArmName, CheckRun
from replay.emulator import process, tools
from replay.emulator.noise import mix, text_number
from replay.emulator.requests import ToolChoice
from replay.emulator.settings import EmulatorSettings
from replay.records import STEP_MODES
from replay.wire import Limits
from reports.parity.result import CheckVerdict, Parity
from reports.parity.verdict import judge_parity
from tests.reports.make_run import write_step_log
from tests.reports.parity.battery import Sizes, Start, measure

NOISE = 0.01
"""Standard deviation of the noise of every arm's logits, as rounding makes it: each arm has its own."""

Inject = Callable[[int, float], Start]
"""From a seed and the noise's standard deviation to the arms, those of the candidate with the fault."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, and the battery that is to see it."""

    fault: str
    """NAME or NAME:NUMBER; NAME is of evals/faults/registry.py."""
    size: str = ""
    """Of the fault, in words."""
    expected: str
    n: int
    """Of each arm."""
    unit: str = ""
    """Of ``n``; empty: the registry's."""
    names: str = ""
    """What section (f) names for this check; empty: as the registry says."""
    checks: tuple[str, ...] = ()
    sizes: Sizes = ()
    inject: Inject
    has: frozenset[Need] = Local.has
    steps: bool = False
    """The servers' step logs are what is looked at."""


# -- how faults come in ------------------------------------------------------------------------------------------------


def in_model(fault: str | None) -> Inject:
    """A fault of the decode path (replay/emulator/faults.py): in the emulator's language model, without HTTP."""
    return lambda seed, noise: lambda arm: nullcontext(_model(arm, seed, noise, fault))


def _model(arm: ArmName, seed: int, noise: float, fault: str | None = None) -> Local:
    rounding = [f"bf16-noise:{noise}"] if noise else []
    faults = [fault] if fault is not None and _candidate(arm) else []
    return Local([*rounding, *faults], seed=10 * seed + get_args(ArmName).index(arm))


def _candidate(arm: ArmName) -> bool:
    return arm in ("B1", "B2")


def at_proxy(url: str, fault: str) -> Inject:
    """One of evals/faults, at the proxy in front of the emulator at ``url``; no other noise than the emulator's."""

    def inject(seed: int, noise: float) -> Start:
        @asynccontextmanager
        async def start(arm: ArmName) -> AsyncIterator[Endpoint]:
            async with proxy(url, fault if _candidate(arm) else None, seed=10 * seed + (arm == "B2")) as front:
                server = Server(front, SERVED.model, {}, Limits())
                server.has = OVER_HTTP
                yield server

        return start

    return inject


def behind(fault: str) -> Inject:
    """One of evals/faults as the proxy applies it, but without HTTP, in front of the language model with tools."""
    return lambda seed, noise: (
        lambda arm: nullcontext(
            Behind(_model(arm, seed, noise), fault if _candidate(arm) else "identity", 10 * seed + (arm == "B2"))
        )
    )


WITH_TOOLS: frozenset[Need] = frozenset({"chat", "tools"})


class Behind:
    """An endpoint behind a fault in requests, or in whole chat replies, which are tool calls."""

    def __init__(self, endpoint: Endpoint, fault: str, seed: int) -> None:
        self.has = endpoint.has | WITH_TOOLS
        self._endpoint = endpoint
        self._fault, self._number = parse_fault(fault)
        self._seed = seed

    async def generate(self, group: Sequence[Ask]) -> list[list[Generation]]:
        """See Endpoint."""
        return await self._endpoint.generate([self._changed(ask) for ask in group])

    def _changed(self, ask: Ask) -> Ask:
        sampling = {"max_tokens": ask.max_tokens, "temperature": ask.temperature, "top_p": ask.top_p}
        asked = self._asked("completions", {"prompt": list(map(int, ask.prompt)), **sampling})
        if self._fault.ask is not None and ask.force is None:
            self._fault.ask(asked, self._number)
        return msgspec.structs.replace(ask, **{name: asked.body[name] for name in sampling})

    def _asked(self, api: Api, body: dict[str, Any]) -> Asked:
        encoded = msgspec.json.encode(body)
        asked = requests.asked(api, encoded, mix(text_number(encoded.decode()), self._seed))
        assert asked is not None
        return asked

    async def chat(self, group: Sequence[Chat]) -> list[ChatReply]:
        """See Endpoint."""
        return [self._called(each.body) for each in group]

    def _called(self, body: dict[str, Any]) -> ChatReply:
        asked = self._asked("chat", body)
        choice = msgspec.convert(body["tool_choice"], ToolChoice)
        made = tools.call(msgspec.json.encode(body["tools"]), choice, mix(body["seed"], 0))
        assert made is not None
        call = {"type": "function", "function": {"name": made.name, "arguments": made.arguments}}
        whole = {"choices": [{"index": 0, "message": {"tool_calls": [call]}, "finish_reason": "stop"}]}
        event = Event(msgspec.json.encode(whole), whole)
        rewrite = None if self._fault.reply is None else self._fault.reply(asked, self._number)
        for each in [event] if rewrite is None else rewrite(event, Moment(batch=len(body), joins=0)):
            chat = GrowingChat()
            chat.add(decoded(each.encoded(streamed=False), ChatDocument))
        return chat.reply()

    async def page(self, path: str) -> tuple[int | None, bytes]:
        """See Endpoint."""
        return await self._endpoint.page(path)


SERVED = EmulatorSettings(language="model", time_scale=1000, max_num_seqs=128)
OVER_HTTP: frozenset[Need] = frozenset(get_args(Need)) - {"speculation"}


@contextmanager
def emulator() -> Iterator[str]:
    """Its URL."""
    with tempfile.TemporaryDirectory() as folder:
        running = process.start(SERVED, Path(folder))
        try:
            yield running.url
        finally:
            process.stop(running)


def stale(seed: int, noise: float) -> Start:
    """What A1 was told the candidate is told again."""
    store: dict[bytes, list[Generation]] = {}

    def start(arm: ArmName) -> AbstractAsyncContextManager[Endpoint]:
        model = _model(arm, seed, noise)
        return nullcontext(model if arm == "A2" else Cached(model, store))

    return start


class Cached:
    """An endpoint behind a cache of replies, that does not know whose they are."""

    def __init__(self, endpoint: Endpoint, store: dict[bytes, list[Generation]]) -> None:
        self.has = endpoint.has
        self._endpoint = endpoint
        self._store = store

    async def generate(self, group: Sequence[Ask]) -> list[list[Generation]]:
        """See Endpoint."""
        keys = [repr(msgspec.structs.replace(ask, salt="")).encode() for ask in group]
        if not self._store.keys() >= set(keys):
            self._store.update(zip(keys, await self._endpoint.generate(group), strict=True))
        return [self._store[key] for key in keys]

    async def chat(self, group: Sequence[Chat]) -> list[ChatReply]:
        """See Endpoint."""
        return await self._endpoint.chat(group)

    async def page(self, path: str) -> tuple[int | None, bytes]:
        """See Endpoint."""
        return await self._endpoint.page(path)


def reordered(seed: int, noise: float) -> Start:
    """The candidate gets each group of requests in halves, and the last ones first; rounding is that of the batch's
    size, and equal on all arms otherwise."""

    def start(arm: ArmName) -> AbstractAsyncContextManager[Endpoint]:
        model = Local(["batch-noise:0.02"], seed=seed)
        return nullcontext(Halves(model) if _candidate(arm) else model)

    return start


class Halves(Cached):
    """An endpoint that is asked the second half of a group, and then the first."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint, {})

    async def generate(self, group: Sequence[Ask]) -> list[list[Generation]]:
        """See Endpoint."""
        half = len(group) // 2
        last = await self._endpoint.generate(group[half:])
        first = await self._endpoint.generate(group[:half]) if half else []
        return [*first, *last]


# -- batteries ---------------------------------------------------------------------------------------------------------


def traces(count: int, tokens: int, *, kind: str = t0.BASE, prompt: int = 64) -> Sizes:
    """Reference traces of one kind."""
    none = {t0.BASE: (0, 0), t0.LONG: (0, 0), t0.CONTEXT: (0, 0)}
    return [(t0.TRACES, none | {kind: (count, tokens)}), (t0.PROMPTS, (prompt,))]


FLOOR: Sizes = [*traces(8, 32), (p1_replay.REPLAYED, {8: 8})]
"""The least that thresholds can be made of."""


def beside_floor(*sizes: tuple[dict[Budget, Any] | ModuleType, Any]) -> Sizes:
    return [*FLOOR, *sizes]


def trials(url: str, *, full: bool) -> list[Trial]:
    """Every fault at no more than the n that section (f) names; unless ``full``, those that take long by other sizes
    (later, rarer, longer), which say as much of the check. ``url``: of the emulator."""
    k = 1024
    beyond, replayed = (128 * k, 256) if full else (8 * k, 96)
    loops, looped = (8 * k, 10 * k) if full else (128, 400)
    most = 4096 if full else 256
    race, steps = (1e-4, 72_500) if full else (1e-3, 7_250)
    drift, drifted = (0.05, 2 * k) if full else (0.2, 512)
    odds, ended = ((4.0, 0.25), k) if full else ((8.0,), 256)
    cut, calls = (0.01, 1293) if full else (0.05, 260)
    free = 256 if full else 128
    return [
        Trial(
            fault="flip-token:0.002",
            expected="P2",
            n=2000,
            checks=("P1",),
            sizes=[*traces(8, 250), (p1_replay.REPLAYED, {8: 8})],
            inject=in_model("flip-token:0.002"),
        ),
        Trial(
            fault="flip-token:0.002",
            size=f"{free} tokens a reply",
            expected="P3",
            n=24,
            unit="prompts, greedy and sampled",
            names="24 prompts of 2k tokens",
            checks=("P3",),
            sizes=[(p3_divergence.PROMPTS, 24), (p3_divergence.TOKENS, free), (p3_divergence, 24)],
            inject=in_model("flip-token:0.002"),
        ),
        Trial(
            fault=f"truncate-at:{most}",
            expected="D2",
            n=1,
            checks=("D2", "P1"),
            sizes=beside_floor((d2_lengths.LENGTHS, (most + 1,)), (d2_lengths.REPLIES, 1), (d2_lengths.STOPS, 0)),
            inject=behind(f"truncate-at:{most}"),
        ),
        Trial(
            fault="drop-last-chunk",
            expected="D1",
            n=5,
            checks=("D1", "P1"),
            sizes=beside_floor((d1_streams.PAIRS, 5)),
            inject=at_proxy(url, "drop-last-chunk"),
            has=OVER_HTTP,
        ),
        Trial(
            fault=f"repeat-after:{loops}",
            expected="L2",
            n=5,
            checks=("L2", "P1"),
            sizes=beside_floor((l2_repetition.REPLIES, 5), (l2_repetition.TOKENS, looped)),
            inject=in_model(f"repeat-after:{loops}"),
        ),
        Trial(
            fault=f"kv-beyond:{beyond}",
            expected="P5",
            n=5 * replayed,
            checks=("P5",),
            sizes=[*traces(5, replayed, kind=t0.CONTEXT), (t0.CONTEXTS, (k, beyond + 64))],
            inject=in_model(f"kv-beyond:{beyond}"),
        ),
        Trial(
            fault="prefix-off-by-one",
            expected="D5",
            n=18 * 16,
            checks=("D5", "P1"),
            sizes=beside_floor((d5_prefix.EDGES, 6), (d5_prefix.LONGEST, 512)),
            inject=in_model("prefix-off-by-one"),
        ),
        Trial(
            fault="ignore-temperature",
            expected="D3",
            n=300,
            checks=("D3", "P1"),
            sizes=beside_floor((d3_sampler.REPLIES, 3), (d3_sampler.TOKENS, 50)),
            inject=in_model("ignore-temperature"),
        ),
        Trial(
            fault="ignore-top-p",
            expected="D3",
            n=500,
            checks=("D3", "P1"),
            sizes=beside_floor((d3_sampler.REPLIES, 5), (d3_sampler.TOKENS, 50)),
            inject=in_model("ignore-top-p"),
        ),
        Trial(
            fault="batch-corrupts:32",
            expected="P6",
            n=1980,
            checks=("P6",),
            sizes=[
                *traces(2, 64),
                (p6_batches.LADDER, (32, 33, 64)),
                (p6_batches.TOKENS, 1980),
                (p6_batches.CHURN, {}),
            ],
            inject=in_model("batch-corrupts:32"),
        ),
        Trial(
            fault=f"race:{race:g}",
            expected="P7",
            n=steps,
            checks=("P7",),
            sizes=[*traces(8, k if full else 256), (p7_soak.STEPS, {1: steps})],
            inject=in_model(f"race:{race:g}"),
        ),
        *(
            Trial(
                fault=fault,
                expected="D4",
                n=20,
                checks=("D4", "P1"),
                sizes=beside_floor((d4_neighbours.PROMPTS, 20), (d4_neighbours.ALONE, 0)),
                inject=in_model(fault),
            )
            for fault in ("ignore-seed", "shared-seed")
        ),
        Trial(
            fault="stale-replies",
            expected="V4",
            n=1,
            unit="unseeded replies",
            checks=("D3", "P1"),
            sizes=beside_floor((d3_sampler.REPLIES, 1), (d3_sampler.TOKENS, 64)),
            inject=stale,
        ),
        Trial(
            fault="never-specialised",
            size="eager, piecewise, 80 rows, or mixed with prompts, in turn",
            expected="V2",
            n=1,
            checks=("P1",),
            sizes=FLOOR,
            inject=in_model(None),
            steps=True,
        ),
        Trial(
            fault="neighbour-leak",
            size="one row at each join",
            expected="P6",
            n=200,
            checks=("P6",),
            sizes=[*traces(8, 400), (p6_batches.LADDER, ()), (p6_batches.CHURN, {8: 400})],
            inject=in_model("neighbour-leak"),
        ),
        Trial(
            fault=f"state-drift:{drift}",
            expected="P1",
            n=20,
            unit=f"traces of {drifted:,}",
            checks=("P1",),
            sizes=[*traces(20, drifted), (t0, 20), (p1_replay.REPLAYED, {20: 20})],
            inject=in_model(f"state-drift:{drift}"),
        ),
        *(
            Trial(
                fault="early-stop",
                size=f"odds of EOS x {factor:g}",
                expected="L1",
                n=100,
                checks=("L1", "P1"),
                sizes=beside_floor((l1_lengths.REPLIES, 100), (l1_lengths.TOKENS, ended), (l1_lengths, 100)),
                inject=in_model(f"eos-scaled:{factor}"),
            )
            for factor in odds
        ),
        Trial(
            fault="nan-zero:0.005",
            expected="D7",
            n=460,
            unit="requests of both arms together",
            checks=("D7", "P1"),
            sizes=beside_floor((d7_garbage.IDS, 230)),
            inject=in_model("nan-zero:0.005"),
        ),
        Trial(
            fault=f"cut-tools:{cut}",
            expected="D6",
            n=calls,
            checks=("D6", "P1"),
            sizes=beside_floor((d6_tools.REQUESTS, {"auto": 0, "required": 0, "named": calls})),
            inject=behind(f"cut-tools:{cut}"),
            has=Local.has | WITH_TOOLS,
        ),
        Trial(
            fault="padded-batch",
            expected="P6",
            n=1980,
            checks=("P6",),
            sizes=[
                *traces(2, 1000 if full else 250),
                (p6_batches.LADDER, (2, 3, 4, 5, 8, 9, 16, 17) if full else (8, 9, 16, 17)),
                (p6_batches.TOKENS, 1980),
                (p6_batches.CHURN, {}),
            ],
            inject=in_model("padded-batch"),
        ),
        Trial(
            fault="low-precision:0.1",
            expected="P1",
            n=104,
            checks=("P1",),
            sizes=[*traces(104, 64), (p1_replay.REPLAYED, {8: 104})],
            inject=in_model("low-precision:0.1"),
        ),
    ]


EVERY_CHECK: Sizes = [
    (t0.TRACES, {t0.BASE: (16, 24), t0.LONG: (0, 0), t0.CONTEXT: (1, 16)}),
    (t0, 16),
    (t0.PROMPTS, (64,)),
    (t0.CONTEXTS, (256, 1024)),
    (p1_replay.REPLAYED, {1: 2, 16: 16}),
    (p3_divergence.PROMPTS, 16),
    (p3_divergence.TOKENS, 24),
    (p3_divergence, 16),
    (p4_cut_points.TRACES, 8),
    (p4_cut_points.POINTS, 2),
    (p6_batches.LADDER, (1, 2, 3, 8, 9)),
    (p6_batches.CHURN, {4: 16}),
    (p7_soak.STEPS, {4: 64}),
    (d1_streams.PAIRS, 8),
    (d1_streams.TOKENS, 16),
    (d2_lengths.LENGTHS, (1, 2, 17)),
    (d2_lengths.STOPS, 0),
    (d3_sampler.REPLIES, 24),
    (d3_sampler.TOKENS, 16),
    (d4_neighbours.PROMPTS, 16),
    (d4_neighbours.ALONE, 2),
    (d4_neighbours.TOKENS, 8),
    (d5_prefix.EDGES, 2),
    (d5_prefix.LONGEST, 128),
    (d6_tools.REQUESTS, {"auto": 16, "required": 8, "named": 8}),
    (d6_tools.TOKENS, 16),
    (d7_garbage.IDS, 32),
    (d7_garbage.CHATS, 16),
    (l1_lengths.REPLIES, 32),
    (l1_lengths.TOKENS, 32),
    (l2_repetition.REPLIES, 8),
    (l2_repetition.TOKENS, 72),
]
"""Short, so that there can be many."""


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """A harmless change of the candidate, and the battery in which nobody may take it for a fault."""

    name: str
    noise: float = NOISE
    """Of every arm; 0: the baseline repeats itself exactly."""
    inject: Inject
    checks: tuple[str, ...] = tuple(id for id in CHECKS if not CHECKS[id].needs - Local.has and id != "T0")
    has: frozenset[Need] = Local.has


A2_FOR_A1 = "A2 for A1"


def controls(url: str) -> list[Control]:
    """All of them. ``url``: of the emulator."""
    over_http = ("D1", "D2", "D4", "D6", "D7", "P1", "P3", "L1")
    return [
        Control(name=A2_FOR_A1, inject=in_model(None)),
        Control(name="A2 for A1, floor of 0", noise=0.0, inject=in_model(None)),
        Control(name="other batches, in another order", inject=reordered),
        *(
            Control(name=f"bf16-noise:{sd}, floor of 0", noise=0.0, inject=in_model(f"bf16-noise:{sd}"))
            for sd in (0.01, 0.02, 0.03)
        ),
        *(
            Control(name=fault, inject=at_proxy(url, fault), checks=over_http, has=OVER_HTTP)
            for fault in ("renamed", "slower:0.002")
        ),
    ]


# -- what is seen ------------------------------------------------------------------------------------------------------


def judged(trial: Trial, seed: int, noise: float = NOISE) -> Parity:
    """The battery of a trial, with the fault in it."""
    with tempfile.TemporaryDirectory() as run:
        start = trial.inject(seed, noise)
        folder = measure(Path(run), trial.checks, start, trial.sizes, seed=seed, has=trial.has, specialised=trial.steps)
        if trial.steps:
            for arm in ("B1", "B2"):
                log_steps(folder, arm, **_NOT_TAKEN[seed % len(_NOT_TAKEN)])
        return judge_parity(folder)


def harmless(control: Control, seed: int) -> Parity:
    """The battery of a control."""
    with tempfile.TemporaryDirectory() as run:
        start = control.inject(seed, control.noise)
        folder = measure(Path(run), control.checks, start, EVERY_CHECK, seed=seed, has=control.has, specialised=True)
        for arm in ("B1", "B2"):
            log_steps(folder, arm)
        return judge_parity(folder)


_NOT_TAKEN: list[dict[str, int]] = [
    {"mode": STEP_MODES.index("NONE")},
    {"mode": STEP_MODES.index("PIECEWISE")},
    {"unpadded": 80, "padded": 80},
    {"prompt_tokens": 64},
]
"""Why decode steps did not run specialised: eager, piecewise, too large, mixed with prompts."""


def log_steps(folder: Path, arm: str, **changes: int) -> None:
    """What the arm's server logged of the steps of those checks that its path is shown by: full graphs of eight rows,
    or with ``changes``."""
    step = {
        "t_ns": 0, "prompt_tokens": 0, "first_tokens": 0, "decode_tokens": 8, "unpadded": 8, "padded": 8,
        "draft_requests": 0, "draft_tokens": 0, "accepted_tokens": 0, "mode": STEP_MODES.index("FULL"),
    }  # fmt: skip
    steps = []
    for path in sorted((folder / arm).glob("*/run.json")):
        run = msgspec.json.decode(path.read_bytes(), type=CheckRun)
        assert run.started_ns is not None
        assert run.ended_ns is not None
        count = -(-(run.positions - run.replies) // 8)
        apart = (run.ended_ns - run.started_ns) / (count + 1)
        steps += [step | changes | {"t_ns": run.started_ns + int(apart * (at + 1))} for at in range(count)]
    steps.sort(key=lambda each: each["t_ns"])
    write_step_log(folder / "servers" / arm / "steps", steps, decode_backend="latency_specialized")


def verdict(parity: Parity, check: str) -> CheckVerdict:
    """Of one check."""
    return next(each for each in parity.checks if each.id == check)


def saw(parity: Parity, check: str) -> bool:
    """It failed; of validity, which fails nobody, it did not pass."""
    found = verdict(parity, check)
    return found.outcome == "FAIL" or (found.family == "validity" and found.outcome == "INCONCLUSIVE")


def number(fault: str) -> int | None:
    """In section (f)."""
    return parse_fault(fault)[0].number


def named(trial: Trial) -> tuple[str, str]:
    """What section (f) names, and the unit of the trial's own n."""
    fault = parse_fault(trial.fault)[0]
    return trial.names or f"{fault.n:,} {fault.unit}", trial.unit or fault.unit
