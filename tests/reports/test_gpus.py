"""GPUs and servers as snapshots show them: joules and cost worked out by hand, and the two gates that read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replay.records import Backend, GpuProcess, GpuReading, Gpus, Snapshot
from reports.analysis import Analysis, analyse
from reports.cli import report
from reports.gates.gate import Gate
from reports.gpus import Edges, energy
from reports.render import html, markdown
from reports.run import load
from tests.reports.make_run import BASELINE, CANDIDATE, make_run, write_snapshots
from workloads.errors import UserError

replace = msgspec.structs.replace
GIB = 2**30
OUTPUT = 6 * (40 + 41 + 42 + 43 + 44)
"""Output tokens of a block of six sessions of five turns, all inside its window."""
FOREIGN = GpuProcess(pid=7, memory_bytes=GIB, ours=False)


def reading(index: int, energy_mj: int | None = 0, **changes: Any) -> GpuReading:
    usual = GpuReading(
        index=index, uuid=f"GPU-{index}", name="NVIDIA GB300", memory_bytes=288 * GIB, power_limit_w=1400.0, mig=False,
        energy_mj=energy_mj, processes=[GpuProcess(pid=100 + index, memory_bytes=GIB, ours=True)],
    )  # fmt: skip
    return replace(usual, **changes)


Show = Callable[[int, str, str, Snapshot], Snapshot]
"""(block from 1, backend, "before" or "after", usual snapshot) -> the one to write."""


def as_usual(_: int, __: str, ___: str, snapshot: Snapshot) -> Snapshot:
    return snapshot


def run_with(path: Path, show: Show = as_usual, price: float | None = None, **options: Any) -> Path:
    """ABBA on the same two GPUs, which take 300 J and 500 J over the 20 s of each block of the baseline, and 150 J and
    250 J of the candidate's."""
    gpus = Gpus(count=2, kind="GB300")
    backends = [
        Backend(
            name=name, decode_backend=decode, url=None, gpus=gpus, emulated=False, served=True, price_per_gpu_hour=price
        )
        for name, decode in ((BASELINE, "auto"), (CANDIDATE, "latency_specialized"))
    ]
    make_run(path, **{"sessions": 6, "turns": 5, "backends": backends, **options})
    for folder in sorted((path / "blocks").iterdir()):
        number, _, name = folder.name.partition("-")
        spent = (300_000, 500_000) if name == BASELINE else (150_000, 250_000)
        both = []
        for edge, start in (("before", 0), ("after", 1)):
            readings = [reading(index, 10**9 + start * joules) for index, joules in enumerate(spent)]
            usual = Snapshot(
                t_ns=start * 20_000_000_000, version="0.33.0", fingerprint=f"vllm-0.33.0-{name}", max_model_len=4096,
                config_digest=name, gpus=readings,
            )  # fmt: skip
            both.append(show(int(number), name, edge, usual))
        write_snapshots(folder, *both)
    return path


def gate(found: Analysis, name: str) -> Gate:
    return next(gate for gate in found.gates if gate.id == name)


def of_gpus(change: Callable[[GpuReading], GpuReading], when: Callable[[int, str, str], bool]) -> Show:
    """Changes GPU 1's reading in the snapshots that are meant."""

    def show(block: int, backend: str, edge: str, snapshot: Snapshot) -> Snapshot:
        if not when(block, backend, edge):
            return snapshot
        assert snapshot.gpus is not None
        return replace(snapshot, gpus=[snapshot.gpus[0], change(snapshot.gpus[1])])

    return show


def changed(when: Callable[[int, str, str], bool], **changes: Any) -> Show:
    return of_gpus(lambda gpu: replace(gpu, **changes), when)


def candidate(_: int, backend: str, __: str) -> bool:
    return backend == CANDIDATE


def always(_: int, __: str, ___: str) -> bool:
    return True


# -- energy and cost


def test_energy_power_and_cost_by_hand(tmp_path: Path) -> None:
    found = analyse(run_with(tmp_path, price=3.6))
    baseline, other = (backend.usage for backend in found.backends)
    assert baseline.energy_per_output_token_j == pytest.approx(800 / OUTPUT)
    assert other.energy_per_output_token_j == pytest.approx(400 / OUTPUT)
    assert (baseline.mean_power_w, other.mean_power_w) == (pytest.approx(40), pytest.approx(20))
    seconds = sum(block.window_s for block in found.blocks if block.backend == BASELINE)
    # 3.6 an hour is 0.001 a second, for each of two GPUs
    assert baseline.cost_per_million_output_tokens == pytest.approx(0.002 * seconds / (2 * OUTPUT / 1e6))
    for text in (html.render([found]), markdown.render([found])):
        for label in ("Energy per output token, J", "Cost per million output tokens", "Mean power of its GPUs, W"):
            assert label in text
        assert "2 x NVIDIA GB300, verified through NVML" in text


def test_what_is_not_known_is_not_shown(tmp_path: Path) -> None:
    found = analyse(make_run(tmp_path, sessions=6, turns=5))
    for backend in found.backends:
        assert msgspec.structs.astuple(backend.usage) == (None, None, None)
        assert backend.gpus_verified == "not verified"
    for text in (html.render([found]), markdown.render([found])):
        table = text[text.index("Decode throughput, tokens/s") : text.index("Every turn accounted for")]
        assert "Energy" not in table
        assert "Cost" not in table
        assert "8 x GB300 (TP8); not verified" in text


def test_an_emulator_takes_no_energy_and_costs_nothing(tmp_path: Path) -> None:
    run_with(tmp_path, price=3.6)
    manifest = json.loads((tmp_path / "manifest.json").read_bytes())
    for backend in manifest["backends"]:
        backend["emulated"] = True
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"emulated": True, "time_scale": 4.0}))
    for backend in analyse(tmp_path).backends:
        assert msgspec.structs.astuple(backend.usage) == (None, None, None)
        assert backend.gpus_verified is None


@pytest.mark.parametrize(
    "show",
    [
        changed(lambda block, *_: block == 1, energy_mj=None),
        changed(lambda block, _, edge: block == 1 and edge == "after", energy_mj=5),
        changed(lambda block, _, edge: block == 1 and edge == "after", uuid="GPU-9"),
        lambda block, _, __, snapshot: replace(snapshot, gpus=None) if block == 1 else snapshot,
    ],
    ids=["unknown", "backwards", "another", "unseen"],
)
def test_energy_of_a_backend_needs_all_of_it(tmp_path: Path, show: Show) -> None:
    baseline, other = (backend.usage for backend in analyse(run_with(tmp_path, show)).backends)
    assert msgspec.structs.astuple(baseline) == (None, None, None)
    assert other.energy_per_output_token_j == pytest.approx(400 / OUTPUT)


def test_energy_is_joules_and_seconds(tmp_path: Path) -> None:
    block = load(run_with(tmp_path)).blocks[0]
    before = Snapshot(t_ns=10**9, gpus=[reading(0, 1_000), reading(1, 2_000)])
    after = Snapshot(t_ns=3 * 10**9, gpus=[reading(1, 5_000), reading(0, 1_500)])
    assert energy(Edges(block, before, after)) == (3.5, 2.0)
    assert energy(Edges(block, before, None)) is None
    assert energy(Edges(block, Snapshot(t_ns=0), Snapshot(t_ns=1))) is None


def test_a_damaged_snapshot_is_said(tmp_path: Path) -> None:
    run_with(tmp_path)
    (tmp_path / "blocks" / "01-baseline" / "after.json").write_text("{")
    with pytest.raises(UserError, match=r"after\.json is damaged"):
        analyse(tmp_path)


def test_usage_is_in_the_json(tmp_path: Path) -> None:
    report(run_with(tmp_path))
    backends = json.loads((tmp_path / "report.json").read_bytes())["backends"]
    assert backends[0]["usage"]["energy_per_output_token_j"] == pytest.approx(800 / OUTPUT)
    assert backends[0]["usage"]["cost_per_million_output_tokens"] is None


# -- matched GPUs


def test_the_same_gpus_are_said_to_be(tmp_path: Path) -> None:
    matched = gate(analyse(run_with(tmp_path)), "matched_gpus")
    assert matched.status == "pass"
    assert matched.explanation == (
        "Same count, kind and layout, as declared. NVML showed the same GPUs for both, 2 x NVIDIA GB300."
    )


@pytest.mark.parametrize(
    ("show", "problem"),
    [
        (
            changed(candidate, name="NVIDIA B300"),
            "GPU name: baseline NVIDIA GB300, candidate NVIDIA B300 and NVIDIA GB300",
        ),
        (
            changed(candidate, memory_bytes=180 * GIB),
            "GPU memory: baseline 288.0 GiB, candidate 180.0 GiB and 288.0 GiB",
        ),
        (changed(candidate, power_limit_w=900.0), "GPU power limit: baseline 1400 W, candidate 1400 W and 900 W"),
        (changed(candidate, mig=True), "MIG: baseline off, candidate off and on"),
        (
            changed(lambda _, __, edge: edge == "after", power_limit_w=900.0),
            "baseline: the power limit of its GPUs changed while it was measured",
        ),
        (
            changed(candidate, processes=[FOREIGN]),
            "candidate: somebody else used its GPUs: GPU 1 by process 7",
        ),
        (
            changed(candidate, throttling=["thermal (hardware)", "power cap"]),
            "GPUs of candidate were throttled, those of baseline were not: thermal (hardware)",
        ),
        (
            lambda _, __, ___, snapshot: replace(snapshot, gpus=snapshot.gpus[:1]),
            "baseline: 2 GPUs declared, 1 seen; candidate: 2 GPUs declared, 1 seen",
        ),
        (
            lambda _, backend, __, snapshot: (
                replace(snapshot, gpus=snapshot.gpus[:1]) if backend == CANDIDATE else snapshot
            ),
            "GPU count: baseline 2, candidate 1",
        ),
    ],
)
def test_gpus_that_are_not_matched(tmp_path: Path, show: Any, problem: str) -> None:
    found = analyse(run_with(tmp_path, show))
    matched = gate(found, "matched_gpus")
    assert matched.status == "fail"
    assert matched.explanation.startswith(problem)
    assert found.conclusion.outcome == "INCONCLUSIVE"


@pytest.mark.parametrize(
    ("show", "said"),
    [
        (
            changed(always, throttling=["thermal (software)"]),
            "Clocks were held down: baseline thermal (software) (4 x); candidate thermal (software) (4 x).",
        ),
        (changed(candidate, throttling=["power cap"]), "Clocks were held down: candidate power cap (4 x)."),
        (
            of_gpus(lambda gpu: replace(gpu, uuid="GPU-5", index=5), candidate),
            "NVML showed 2 x NVIDIA GB300 for baseline. NVML showed 2 x NVIDIA GB300 for candidate.",
        ),
    ],
)
def test_what_does_not_decide_is_said(tmp_path: Path, show: Show, said: str) -> None:
    matched = gate(analyse(run_with(tmp_path, show)), "matched_gpus")
    assert matched.status == "pass"
    assert said in matched.explanation


def test_without_a_process_of_the_server_nobody_is_accused(tmp_path: Path) -> None:
    """In a container NVML gives the host's process numbers, or none."""

    def unknown(_: int, __: str, ___: str, snapshot: Snapshot) -> Snapshot:
        return replace(snapshot, gpus=[replace(gpu, processes=[FOREIGN]) for gpu in snapshot.gpus or []])

    assert gate(analyse(run_with(tmp_path, unknown)), "matched_gpus").status == "pass"


def test_what_is_not_verified_is_said(tmp_path: Path) -> None:
    unverified = ["candidate: 8 x GB300 is as declared: another host", "baseline: the parallel layout is as declared"]
    found = analyse(make_run(tmp_path, sessions=6, turns=5, unverified=unverified))
    assert gate(found, "matched_gpus").explanation == (
        f"Same count, kind and layout, as declared. Not verified: {unverified[0]}; {unverified[1]}."
    )


# -- one deployment


def differs(when: Callable[[int, str, str], bool], **changes: Any) -> Show:
    return lambda block, backend, edge, usual: replace(usual, **changes) if when(block, backend, edge) else usual


def test_a_server_that_stays_the_same(tmp_path: Path) -> None:
    assert gate(analyse(run_with(tmp_path)), "server_unchanged").status == "pass"


@pytest.mark.parametrize(
    ("show", "finding"),
    [
        (
            differs(lambda block, _, edge: block == 2 and edge == "after", version="0.34.0"),
            "candidate: version changed by 02-candidate: 0.33.0, then 0.34.0: not one deployment.",
        ),
        (
            differs(lambda block, *_: block == 4, fingerprint="other"),
            "baseline: fingerprint changed by 04-baseline: vllm-0.33.0-baseline, then other: not one deployment.",
        ),
        (
            differs(lambda block, *_: block == 3, max_model_len=2048),
            "candidate: max_model_len changed by 03-candidate: 4096, then 2048: not one deployment.",
        ),
        (
            differs(lambda block, *_: block == 3, config_digest="f" * 64),
            "candidate: settings (/server_info) changed by 03-candidate: not one deployment.",
        ),
        (
            changed(lambda block, _, edge: block == 1 and edge == "after", uuid="GPU-9"),
            "baseline: GPUs changed by 01-baseline: not one deployment.",
        ),
    ],
)
def test_a_server_that_changes(tmp_path: Path, show: Show, finding: str) -> None:
    unchanged = gate(analyse(run_with(tmp_path, show)), "server_unchanged")
    assert (unchanged.status, unchanged.explanation) == ("fail", finding)


@pytest.mark.parametrize(
    ("changes", "status"), [({"config_digest": "f" * 64}, "pass"), ({"gpus": None}, "pass"), ({"version": "1"}, "fail")]
)
def test_another_start_is_still_the_same_deployment(tmp_path: Path, changes: dict[str, Any], status: str) -> None:
    """Settings hold what differs from start to start; version and fingerprint do not."""
    run_with(tmp_path, differs(lambda block, *_: block == 3, **changes))
    for folder in (tmp_path / "blocks").iterdir():
        block = json.loads((folder / "block.json").read_bytes())
        (folder / "block.json").write_text(json.dumps(block | {"server": f"servers/{folder.name}"}))
    assert gate(analyse(tmp_path), "server_unchanged").status == status


def test_without_snapshots_it_is_unknown_and_a_caveat(tmp_path: Path) -> None:
    run_with(tmp_path)
    (tmp_path / "blocks" / "02-candidate" / "after.json").unlink()
    found = analyse(tmp_path)
    unchanged = gate(found, "server_unchanged")
    assert (unchanged.status, unchanged.explanation) == ("unknown", "Not looked at before and after: 02-candidate.")
    assert any(caveat.startswith("Servers unchanged: unknown") for caveat in found.conclusion.caveats)
    silent = run_with(tmp_path / "b", differs(candidate, version=None, fingerprint=None, max_model_len=None))
    assert gate(analyse(silent), "server_unchanged").explanation == "candidate told neither version nor fingerprint."
