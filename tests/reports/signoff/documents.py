"""Made-up sign-off documents: one that passes, one that fails, and one of a run without evals."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgspec

from evals.records import DataFacts, EvalPlan, TaskPlan
from replay.records import Difference
from reports.accuracy.drop import Drop
from reports.accuracy.result import Counts, Flips, Measured, Outcome, Stratum, Table, TaskVerdict, Test
from reports.signoff.result import Arm, Control, Data, ExamPath, Fact, Gate, Part, Registered, Signoff

BASELINE, CANDIDATE = "auto", "specialised"
BINS = ["4k-8k", "8k-16k", "16k-32k", "32k-64k", "64k-128k", "128k-256k", "256k-512k", "512k-1M"]
NEEDLES = [2, 4, 8]
EMULATED = "EMULATED: no figure here is a measurement of hardware"
_SAMPLING: dict[str, str | int | float | bool | None] = {
    "temperature": 1.0,
    "top_p": 0.95,
    "max_tokens": 131072,
    "reasoning_effort": "max",
}


def digest(name: str) -> str:
    """A SHA-256 that differs by name."""
    return hashlib.sha256(name.encode()).hexdigest()


def drop(baseline: float, value: float, half: float) -> Drop:
    """With an interval of ``half`` on each side, and a bound where one would be."""
    return Drop(
        baseline=baseline,
        candidate=baseline - value,
        value=value,
        low=value - half,
        high=value + half,
        bound=value + 0.9 * half,
        bound_t=value + 0.85 * half,
        bound_stratified=value + 0.9 * half,
    )


def strata(names: list[str], items: int, harmed: float = 0.0) -> list[Stratum]:
    """Scores fall with context; the last three bins are worse by ``harmed``."""
    found = []
    for name in names:
        at = next(n for n, each in enumerate(BINS) if each in name)
        needles = next((n for n, each in enumerate(NEEDLES) if f"needles {each}" in name), 1)
        value = 0.002 * math.cos(3 * at + needles) + (harmed if at >= 5 else 0.0)
        p = 0.0004 if harmed and at >= 5 else 0.45
        baseline = 0.97 - 0.035 * at - 0.06 * needles
        found.append(Stratum(name, items, drop(baseline, value, 0.021), p, min(1.0, 8 * p)))
    return found


def aime(outcome: Outcome = "PASS") -> TaskVerdict:
    """30 questions, 32 repeats. INCONCLUSIVE: ended after 16."""
    judged = 32 if outcome == "PASS" else 16
    found = Measured(
        items=30,
        repeats=judged,
        level=0.05,
        drop=drop(0.9615, 0.0031, 0.0196 if outcome == "PASS" else 0.0391),
        tests=[Test("mean score", 1.0, 0.31, 0.31, 0.93)],
        bins=[],
        cells=[],
        table=Table(905, 18, 15, 22) if outcome == "PASS" else Table(450, 10, 8, 12),
        flips=Flips(1, 0, 1.0),
        within=0.021,
        correlation=0.12,
        repeats_needed=27 if outcome == "PASS" else 41,
        smallest_drop=0.0214,
    )
    needed = "Needs 41 repeats of AIME25 for 3.0 points at the observed variance, 32 were planned: a new run."
    return TaskVerdict(
        task="aime25",
        title="AIME25",
        outcome=outcome,
        reasons=["The drop is 0.3 points, at most 2.1 points; the margin is 3.0 points."]
        if outcome == "PASS"
        else [needed],
        margin=0.03,
        planned_repeats=32,
        ended_repeats={BASELINE: judged, CANDIDATE: judged},
        counts={BASELINE: Counts(923, 28, 4, 5, 0, 2), CANDIDATE: Counts(920, 29, 5, 6, 0, 3)},
        measured=found,
    )


def gpqa() -> TaskVerdict:
    """198 questions, 16 repeats, none compared: the candidate ended no repeat."""
    return TaskVerdict(
        task="gpqa_diamond",
        title="GPQA-Diamond",
        outcome="INCONCLUSIVE",
        reasons=[f"{BASELINE} ended 16 and {CANDIDATE} 0 of 16 repeats; looked at from 16 on. Finish the run."],
        margin=0.02,
        planned_repeats=16,
        ended_repeats={BASELINE: 16, CANDIDATE: 0},
        counts={BASELINE: Counts(2977, 180, 6, 5, 0, 0), CANDIDATE: Counts(0, 0, 0, 0, 0, 0)},
        measured=None,
    )


def mrcr(outcome: Outcome = "PASS") -> TaskVerdict:
    """2,400 items in 8 bins of 3 needle counts, 5 repeats. FAIL: worse beyond 128k."""
    failed = outcome == "FAIL"
    harmed = 0.12 if failed else 0.0
    found = Measured(
        items=2400,
        repeats=5,
        level=0.05,
        drop=drop(0.7421, 0.045 if failed else 0.0008, 0.0123),
        tests=[
            Test("mean score", 12 / 15, *((3e-6, 3e-6, 1.1e-5) if failed else (0.44, 0.44, 1.0))),
            Test("strata", 1 / 15, *((0.0004, 0.0032, 0.009) if failed else (0.9, 0.9, 1.0))),
            Test("trend", 1 / 15, *((2e-8, 2e-8, 9e-7) if failed else (0.6, 0.6, 1.0))),
            Test("strata with a drop", 1 / 15, 0.14, 0.14, 1.0),
        ],
        bins=strata(BINS, 300, harmed),
        cells=strata([f"bin {name}, needles {count}" for name in BINS for count in NEEDLES], 100, harmed),
        table=None,
        flips=None,
        within=0.108,
        correlation=None,
        repeats_needed=2,
        smallest_drop=0.0125,
    )
    return TaskVerdict(
        task="mrcr",
        title="MRCR",
        outcome=outcome,
        reasons=[
            "The candidate answers worse, shown by the mean score (p = 1.1e-05), after Holm's adjustment at 0.01.",
            "It is worse in 128k-256k (by 12.2 points), 256k-512k (by 12.1 points), 512k-1M (by 11.9 points).",
        ]
        if failed
        else ["The drop is 0.1 points, at most 1.2 points; the margin is 3.0 points."],
        margin=0.03,
        planned_repeats=5,
        ended_repeats={BASELINE: 5, CANDIDATE: 5},
        counts={BASELINE: Counts(8890, 3080, 20, 10, 0, 0), CANDIDATE: Counts(8876, 3090, 21, 12, 1, 4)},
        measured=found,
    )


def path(task: str, backend: str, stratum: str = "", share: float | None = 0.982) -> ExamPath:
    known = share is not None
    counted = "specialised" if backend == CANDIDATE else "would have been eligible"
    return ExamPath(
        task=task,
        stratum=stratum,
        backend=backend,
        source="step log" if known else "none",
        counted=counted if known else "",
        tokens=28_400_312 if known else None,
        answers=960 if known else 0,
        of_answers=960,
        share=share,
        at_least=share - 0.004 if share is not None else None,
        at_most=share + 0.001 if share is not None else None,
        reasons={"held prompt rows": 0.012, "more than 64 tokens": 0.006} if known else {},
        note="" if known else "The server was started without --cudagraph-metrics: its log tells no path",
    )


def passing() -> Signoff:
    """AIME25 and MRCR, all gates pass."""
    return _document(
        outcome="PASS",
        line=_line("PASS"),
        reasons=["All 7 gates pass."],
        gates=_GATES,
        tasks=[aime(), mrcr()],
    )


def failing() -> Signoff:
    """MRCR is worse beyond 128k, AIME25 was not finished, GPQA-Diamond has no answers of the candidate; one control
    does not hold and one was not run."""
    tasks = [aime("INCONCLUSIVE"), gpqa(), mrcr("FAIL")]
    worse = Gate(
        id="accuracy_mrcr",
        title="MRCR: drop within the margin",
        outcome="FAIL",
        said="The mean score is 69.7%, the baseline's 74.2%.",
        number=5.61,
        limit=3.0,
        unit="points",
        reasons=tasks[2].reasons,
    )
    open_gates = [
        Gate(
            id=f"accuracy_{task.task}",
            title=f"{task.title}: drop within the margin",
            outcome="INCONCLUSIVE",
            said="The margin is not shown to hold.",
            limit=task.margin * 100,
            unit="points",
            reasons=task.reasons,
        )
        for task in tasks[:2]
    ]
    unknown = [
        Control(name="Faults are found", expected="each fault is seen", seen="not run", n=None, holds=None),
        Control(name="A1 against A2", expected="no gate fails", seen="AIME25 fails", n=960, holds=False),
    ]
    return _document(
        outcome="FAIL",
        line=_line("FAIL"),
        reasons=[f"MRCR: {each}" for each in worse.reasons],
        stamps=[EMULATED],
        gates=[*_GATES[:-2], *open_gates, worse],
        tasks=tasks,
        coverage=[*_COVERAGE, path("gpqa_diamond", BASELINE), path("gpqa_diamond", CANDIDATE, share=None)],
        controls=[*_CONTROLS[:1], *unknown],
        data=[*_DATA, _data("gpqa_diamond", "GPQA-Diamond", 198)],
    )


def without_evals() -> Signoff:
    """Only a replay was measured."""
    missing = "no evals were measured: decodegate eval EXPERIMENT --run k3"
    return _document(
        outcome="INCONCLUSIVE",
        line=_line("INCONCLUSIVE"),
        reasons=[f"Accuracy: {missing}"],
        stamps=[EMULATED],
        parts=[
            _PARTS[0],
            Part(
                name="evals",
                title="Accuracy",
                measured=False,
                measured_utc=None,
                measured_by="",
                decodegate_version=None,
                summary=missing,
            ),
        ],
        data=[],
        registered=None,
        coverage=[],
        controls=[Control(name="A1 against A2", expected="no gate fails", seen="not run", n=None, holds=None)],
        gates=[
            _GATES[0],
            Gate(
                id="accuracy",
                title="Every benchmark within its margin",
                outcome="INCONCLUSIVE",
                said="There is nothing to judge.",
                reasons=[missing],
            ),
        ],
        tasks=[],
        deviations=[],
    )


def _line(outcome: Outcome) -> str:
    return (
        f"{outcome}: Kimi-K3 with decode_backend latency_specialized instead of auto, on 8 x B300; margins AIME25 3.0, "
        "MRCR 3.0 points; measured 2026-12-01 by alex@node-7 with decodegate 0.5.0"
    )


def _document(**changes: Any) -> Signoff:
    return msgspec.structs.replace(_WHOLE, **changes)


def _data(task: str, title: str, items: int) -> Data:
    return Data(
        task=task,
        title=title,
        name=f"{task}.jsonl",
        revision=None,
        sha256=digest(task),
        items=items,
        dropped={"longer than the context": 12} if task == "mrcr" else {},
        licence="MIT: may be shown; left out for its size." if task == "mrcr" else "Not ours: no text may be shown.",
    )


def _plan() -> EvalPlan:
    def task(name: Any, items: int, repeats: int, margin: float, looks: list[float]) -> TaskPlan:
        facts = DataFacts(name=f"{name}.jsonl", sha256=digest(name), items=items)
        return TaskPlan(
            task=name,
            data=facts,
            repeats=repeats,
            seed=1000,
            sampling=_SAMPLING,
            concurrency=1 if name == "mrcr" else 30,
            margin=margin,
            looks=looks,
        )

    return EvalPlan(
        registered_utc="2026-11-30T07:58:12Z",
        tasks=[
            task("aime25", 30, 32, 0.03, [0.25, 0.5, 0.75, 1.0]),
            task("gpqa_diamond", 198, 16, 0.02, [1.0]),
            task("mrcr", 2400, 5, 0.03, [1.0]),
        ],
    )


_PARTS = [
    Part(
        name="replay",
        title="Replay",
        measured=True,
        measured_utc="2026-11-30T22:14:05Z",
        measured_by="alex@node-7",
        decodegate_version="0.5.0",
        summary="Candidate faster: P90 interactivity, candidate / baseline 1.412 (95 % interval 1.381 to 1.446).",
    ),
    Part(
        name="evals",
        title="Accuracy",
        measured=True,
        measured_utc="2026-11-30T08:00:00Z",
        measured_by="alex@node-7",
        decodegate_version="0.5.0",
        summary="AIME25 and MRCR, 27,840 answers.",
    ),
]

_FACTS = {
    "Model": "moonshotai/Kimi-K3",
    "vLLM": "0.33.0 (commit 4e7e0d4)",
    "GPUs": "8 x NVIDIA B300, verified through NVML",
    "Driver": "590.44.01",
    "Layout": "TP 8",
    "KV cache": "fp8",
    "Speculation": "DSpark, 7 draft tokens",
}


def _arm(name: str, backend: str) -> Arm:
    command = (
        "vllm serve moonshotai/Kimi-K3 --tensor-parallel-size 8 --kv-cache-dtype fp8 --enable-prefix-caching "
        f'--reasoning-parser kimi_k3 --additional-config \'{{"decode_backend":"{backend}"}}\''
    )
    return Arm(
        name=name,
        decode_backend=backend,
        facts={**_FACTS, "Fingerprint": f"fp_{digest(backend)[:12]}", "Started as": command},
        files={
            "config.json": digest("config"),
            "model.safetensors.index.json": digest("index"),
            "tokenizer.json": digest("x"),
        },
    )


_DATA = [_data("aime25", "AIME25", 30), _data("mrcr", "MRCR", 2400)]

_COVERAGE = [
    path("aime25", BASELINE),
    path("aime25", CANDIDATE),
    path("mrcr", BASELINE, share=0.99),
    path("mrcr", CANDIDATE, share=0.99),
    *(path("mrcr", CANDIDATE, name, 0.99 - 0.01 * n) for n, name in enumerate(BINS)),
]

_CONTROLS = [
    Control(name="An unknown decode_backend is refused", expected="refused at start", seen="refused", n=1, holds=True),
    Control(name="A1 against A2", expected="no gate fails", seen="none fails; drop 0.2 points", n=960, holds=True),
    Control(name="Faults are found", expected="each fault is seen", seen="20 of 20", n=20, holds=True),
]

_GATES = [
    Gate(
        id="speed",
        title="The candidate is not slower",
        outcome="PASS",
        said="P90 interactivity, candidate / baseline.",
        number=1.412,
        limit=1.0,
    ),
    Gate(
        id="one_deployment",
        title="One deployment",
        outcome="PASS",
        said="Replay and evals saw the same servers.",
        number=0,
        limit=0,
        unit="count",
    ),
    Gate(
        id="differences",
        title="The arms differ in what is under test only",
        outcome="PASS",
        said="One key differs: additional_config.decode_backend.",
        number=1,
        limit=1,
        unit="count",
    ),
    Gate(id="registered", title="Plan registered first", outcome="PASS", said="124 s before the first request."),
    Gate(
        id="coverage",
        title="Specialised path in every benchmark and bin",
        outcome="PASS",
        said="The least is in MRCR, 512k-1M.",
        number=0.92,
        limit=0.9,
        unit="share",
    ),
    Gate(
        id="accuracy_aime25",
        title="AIME25: drop within the margin",
        outcome="PASS",
        said="The drop is 0.3 points, at most 2.1 points.",
        number=2.07,
        limit=3.0,
        unit="points",
    ),
    Gate(
        id="accuracy_mrcr",
        title="MRCR: drop within the margin",
        outcome="PASS",
        said="The drop is 0.1 points, at most 1.2 points.",
        number=1.19,
        limit=3.0,
        unit="points",
    ),
]

_WHOLE = Signoff(
    outcome="PASS",
    line="",
    reasons=[],
    stamps=[],
    name="k3",
    decodegate_version="0.5.0",
    measured_utc="2026-11-30T08:00:00Z",
    measured_by="alex@node-7",
    scope=[
        Fact("Model", "moonshotai/Kimi-K3, revision 9f1c2ab"),
        Fact("Server", "vLLM 0.33.0"),
        Fact("GPUs", "8 x NVIDIA B300, TP 8"),
        Fact("KV cache", "fp8"),
        Fact("Context", "up to 1,048,576 tokens"),
        Fact("Requests at once", "up to 30"),
    ],
    not_covered=[
        "Other GPUs, layouts and KV cache types.",
        "Tool calls: no check of them was run.",
        "More than 30 requests at once.",
    ],
    parts=_PARTS,
    arms=[_arm(BASELINE, "auto"), _arm(CANDIDATE, "latency_specialized")],
    differences=[
        Difference(
            key="additional_config.decode_backend", baseline=None, candidate="latency_specialized", under_test=True
        )
    ],
    unverified=["The image's digest: the server does not tell it."],
    data=_DATA,
    registered=Registered(
        sha256=digest("plan"), unchanged=True, first_candidate_request_utc="2026-11-30T08:00:16Z", plan=_plan()
    ),
    coverage=_COVERAGE,
    controls=_CONTROLS,
    gates=[],
    tasks=[],
    parity=None,
    speed=[
        Fact("P90 interactivity, baseline", "64.1 tokens/s"),
        Fact("P90 interactivity, candidate", "90.5 tokens/s"),
        Fact("candidate / baseline", "1.412 (95 % interval 1.381 to 1.446)"),
    ],
    deviations=["AIME25, specialised: 3 answers took several attempts.", "AIME25, repeat 7: interrupted once."],
    reproduction=[Fact("Command", "decodegate signoff k3"), Fact("Version", "0.5.0"), Fact("Seeds", "1000 to 1031")],
    rollout=[
        "Start with 5 % of the traffic for a day.",
        "Watch acceptance by position, length stops, repetition, corrupted requests.",
        "Go back with decode_backend auto.",
        "Run again for a new image, new weights, another driver.",
    ],
    inputs={
        f"evals/{name}/aime25/r{number:03d}.jsonl": digest(f"{name}{number}")
        for name in (BASELINE, CANDIDATE)
        for number in range(16)
    },
)
