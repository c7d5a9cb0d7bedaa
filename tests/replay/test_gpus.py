"""GPUs as NVML shows them, and what is seen against what is declared."""

from __future__ import annotations

from typing import Any

import msgspec
import pynvml
import pytest

from replay import gpus, nvml
from replay.records import Backend, GpuProcess, GpuReading, Gpus, Snapshot
from tests.replay.fake_nvml import GIB, gpu, install, process

replace = msgspec.structs.replace
OURS = {100, 101}


# -- readings


def test_a_reading_has_every_field_in_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, gpu(0, ComputeRunningProcesses_v3=[process(101), process(7, None)]))
    assert nvml.readings(None, OURS) == [
        GpuReading(
            index=0, uuid="GPU-00000000-aaaa", name="NVIDIA H200", memory_bytes=141 * GIB, memory_used_bytes=2 * GIB,
            sm_clock_mhz=1980, sm_clock_max_mhz=1980, memory_clock_mhz=3201, power_w=350.5, power_limit_w=700.0,
            temperature_c=41, energy_mj=123_456_789, throttling=[], mig=False,
            processes=[
                GpuProcess(pid=101, memory_bytes=GIB, ours=True), GpuProcess(pid=7, memory_bytes=None, ours=False)
            ],
        )
    ]  # fmt: skip
    assert fake.open == 0


def test_what_nvml_refuses_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"Index": 0, "UUID": "GPU-0", "Name": "NVIDIA GB10"})
    assert nvml.readings(None, set()) == [GpuReading(index=0, uuid="GPU-0", name="NVIDIA GB10")]


def test_an_older_driver_shows_processes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, gpu(ComputeRunningProcesses_v3=None, ComputeRunningProcesses_v2=[process(5)]))
    assert nvml.readings(None, set())[0].processes == [GpuProcess(pid=5, memory_bytes=GIB, ours=False)]


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (pynvml.nvmlClocksEventReasonGpuIdle, []),
        (pynvml.nvmlClocksEventReasonSwPowerCap, ["power cap"]),
        (
            pynvml.nvmlClocksEventReasonHwSlowdown | pynvml.nvmlClocksEventReasonHwThermalSlowdown,
            ["hardware slowdown", "thermal (hardware)"],
        ),
        (pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown, ["power brake"]),
        (pynvml.nvmlClocksEventReasonSwThermalSlowdown, ["thermal (software)"]),
        (pynvml.nvmlClocksEventReasonSyncBoost, ["sync boost"]),
        (pynvml.nvmlClocksEventReasonApplicationsClocksSetting, ["set clocks"]),
    ],
)
def test_throttling_in_words(monkeypatch: pytest.MonkeyPatch, bits: int, words: list[str]) -> None:
    install(monkeypatch, gpu(CurrentClocksEventReasons=bits))
    assert nvml.readings(None, set())[0].throttling == words


@pytest.mark.parametrize(
    ("devices", "environment", "indices"),
    [
        (None, {}, [0, 1, 2, 3]),
        ([3, 1], {"CUDA_VISIBLE_DEVICES": "0"}, [3, 1]),
        (None, {"CUDA_VISIBLE_DEVICES": "2, 0"}, [2, 0]),
        (None, {"CUDA_VISIBLE_DEVICES": "GPU-00000003,1"}, [3, 1]),
        (None, {"CUDA_VISIBLE_DEVICES": "1,-1,2"}, [1]),
        (None, {"CUDA_VISIBLE_DEVICES": "MIG-1"}, [17]),
    ],
)
def test_visible_gpus(
    monkeypatch: pytest.MonkeyPatch, devices: list[int] | None, environment: dict[str, str], indices: list[int]
) -> None:
    slices = [{"Index": 17, "UUID": "MIG-1", "Name": "NVIDIA H200 MIG 1g.18gb"}]
    install(monkeypatch, gpu(0, slices=slices, MigMode=[1, 1]), *map(gpu, (1, 2, 3)))
    found = nvml.readings(devices, set(), environment)
    assert [reading.index for reading in found] == indices
    assert all(reading.mig == (reading.index == 0) for reading in found if reading.index != 17)


@pytest.mark.parametrize(
    ("devices", "visible", "why"),
    [
        ([4], "", "there is no GPU 4: this host has 1"),
        (None, "", "no GPU is visible here"),
        (None, "GPU-ffff", "NVML does not show the GPUs: "),
        (None, "7", "there is no GPU 7: this host has 1"),
    ],
)
def test_gpus_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, devices: list[int] | None, visible: str, why: str
) -> None:
    fake = install(monkeypatch, gpu(0))
    with pytest.raises(nvml.Unseen, match=why):
        nvml.readings(devices, set(), {"CUDA_VISIBLE_DEVICES": visible})
    assert fake.open == 0


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (pynvml.NVMLError_LibraryNotFound, "no NVIDIA driver on this host"),
        (pynvml.NVMLError_DriverNotLoaded, "no NVIDIA driver on this host"),
        (pynvml.NVMLError_NoPermission, "NVML does not start: "),
    ],
)
def test_no_nvml(monkeypatch: pytest.MonkeyPatch, error: Any, why: str) -> None:
    install(monkeypatch, gpu(), starts=error())
    with pytest.raises(nvml.Unseen, match=why):
        nvml.readings(None, set())


def test_memory_is_free_again_when_it_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, gpu(0), gpu(1))
    before = nvml.readings([1], set())
    assert nvml.memory_free_again([1], before)
    fake.rows[0]["MemoryInfo"].used = 100 * GIB  # another's
    assert nvml.memory_free_again([1], before)
    fake.rows[1]["MemoryInfo"].used = 3 * GIB
    assert not nvml.memory_free_again([1], before)
    fake.starts = pynvml.NVMLError_LibraryNotFound()
    assert nvml.memory_free_again([1], before)


# -- against what is declared


def backend(count: int = 2, kind: str = "H200") -> Backend:
    declared = Gpus(count=count, kind=kind)
    return Backend(name="candidate", decode_backend="auto", url=None, gpus=declared, emulated=False)


def snapshot(*readings: GpuReading) -> Snapshot:
    return Snapshot(t_ns=0, gpus=list(readings))


def reading(index: int = 0, **changes: Any) -> GpuReading:
    usual = GpuReading(
        index=index, uuid=f"GPU-{index}", name="NVIDIA H200", memory_bytes=141 * GIB, power_limit_w=700.0, mig=False,
        processes=[GpuProcess(pid=100 + index, memory_bytes=GIB, ours=True)],
    )  # fmt: skip
    return replace(usual, **changes)


FOREIGN = GpuProcess(pid=7, memory_bytes=GIB, ours=False)


def test_what_is_declared_is_seen() -> None:
    assert gpus.verified(backend(), snapshot(reading(0), reading(1))) == ([], [])


@pytest.mark.parametrize(
    ("declared", "seen", "problem"),
    [
        (backend(4), [reading(0), reading(1)], "candidate: gpus.count says 4, NVML shows 2"),
        (backend(kind="GB300"), [reading(0), reading(1)], "candidate: gpus.kind says GB300, NVML shows NVIDIA H200"),
        (backend(kind="H20"), [reading(0), reading(1)], "candidate: gpus.kind says H20, NVML shows NVIDIA H200"),
        (backend(), [reading(0), reading(1, name="NVIDIA H100")], "gpus.kind says H200, NVML shows NVIDIA H100"),
        (
            backend(),
            [reading(0), reading(1, processes=[FOREIGN])],
            "candidate: GPU 1 is used by process 7 too: end it first",
        ),
        (
            backend(),
            [reading(0), reading(1, throttling=["power cap", "thermal (hardware)"])],
            "candidate: GPU 1 is throttled now: thermal (hardware)",
        ),
    ],
)
def test_what_is_declared_is_not_seen(declared: Backend, seen: list[GpuReading], problem: str) -> None:
    problems, unverified = gpus.verified(declared, snapshot(*seen))
    assert len(problems) == 1
    assert problem in problems[0]
    assert unverified == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("H200", "NVIDIA H200"),
        ("GB300", "NVIDIA GB300"),
        ("gb300", "NVIDIA GB300"),
        ("H100 80GB", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
    ],
)
def test_kinds_are_words_of_names(kind: str, name: str) -> None:
    assert gpus.verified(backend(1, kind), snapshot(reading(name=name))) == ([], [])


def test_what_cannot_be_seen_is_said() -> None:
    nothing = Snapshot(t_ns=0, gpus_unseen="another host")
    assert gpus.verified(backend(), nothing) == ([], ["candidate: 2 x H200 is as declared: another host"])
    in_container = [reading(0, processes=[FOREIGN]), reading(1, processes=[], power_limit_w=None)]
    problems, unverified = gpus.verified(backend(), snapshot(*in_container))
    assert problems == []
    assert "NVML shows no process of its server" in unverified[0]
    assert unverified[1] == "candidate: NVML does not tell of its GPUs: GPU power limit"


def test_power_cap_and_set_clocks_are_no_fault() -> None:
    assert gpus.verified(backend(1), snapshot(reading(throttling=["power cap", "set clocks"]))) == ([], [])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, []),
        ({"name": "NVIDIA H100"}, ["GPU name: baseline NVIDIA H200, candidate NVIDIA H100"]),
        ({"memory_bytes": 80 * GIB}, ["GPU memory: baseline 141.0 GiB, candidate 80.0 GiB"]),
        ({"memory_bytes": 141 * GIB + 1}, []),
        ({"power_limit_w": 500.0}, ["GPU power limit: baseline 700 W, candidate 500 W"]),
        ({"power_limit_w": None}, []),
        ({"mig": True}, ["MIG: baseline off, candidate on"]),
    ],
)
def test_gpus_that_differ(changes: dict[str, Any], reason: list[str]) -> None:
    one, other = snapshot(reading(0)), snapshot(reading(1, **changes))
    assert gpus.unequal(one, other) == reason
    assert gpus.unequal(one, Snapshot(t_ns=0)) == []


def test_the_same_gpus_are_told_as_such() -> None:
    one, same, other = snapshot(reading(0), reading(1)), snapshot(reading(1), reading(0)), snapshot(reading(2))
    assert gpus.told(one, same) == "both backends run on the same GPUs: 2 x NVIDIA H200 (index 0, 1)"
    assert (
        gpus.told(one, other) == "baseline runs on 2 x NVIDIA H200 (index 0, 1), candidate on 1 x NVIDIA H200 (index 2)"
    )
    assert gpus.told(one, Snapshot(t_ns=0)) is None
