"""NVML with GPUs from a table; whatever a GPU's row lacks is not supported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from replay import nvml

GIB = 2**30


def gpu(number: int = 0, **changes: Any) -> dict[str, Any]:
    """A row: what each call answers, after nvmlDeviceGet. None takes a call away."""
    row = {
        "Index": number,
        "UUID": f"GPU-{number:08d}-aaaa",
        "Name": "NVIDIA H200",
        "MemoryInfo": SimpleNamespace(total=141 * GIB, used=2 * GIB, free=139 * GIB),
        "ClockInfo": {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201},
        "MaxClockInfo": {pynvml.NVML_CLOCK_SM: 1980},
        "PowerUsage": 350_500,
        "EnforcedPowerLimit": 700_000,
        "Temperature": {pynvml.NVML_TEMPERATURE_GPU: 41},
        "TotalEnergyConsumption": 123_456_789,
        "CurrentClocksEventReasons": 1,
        "MigMode": [0, 0],
        "ComputeRunningProcesses_v3": [],
    }
    return row | changes


def process(pid: int, memory: int | None = GIB) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=memory)


class FakeNvml:
    def __init__(self, rows: list[dict[str, Any]], starts: Exception | None = None) -> None:
        self.rows, self.starts, self.open = rows, starts, 0

    def nvmlInit(self) -> None:
        if self.starts:
            raise self.starts
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.rows)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.rows[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> dict[str, Any]:
        for row in self.rows:
            for mine in (row, *row.get("slices", [])):
                if mine["UUID"] == uuid.decode():
                    return mine
        raise pynvml.NVMLError_NotFound

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDeviceGet"):
            return getattr(pynvml, name)

        def ask(row: dict[str, Any], *which: int) -> Any:
            assert self.open, "NVML is not open"
            answer = row.get(name.removeprefix("nvmlDeviceGet"))
            if answer is None:
                raise pynvml.NVMLError_NotSupported
            return answer[which[0]] if which else answer

        return ask


def install(patch: pytest.MonkeyPatch, *rows: dict[str, Any], starts: Exception | None = None) -> FakeNvml:
    """Put it in the place of the real one."""
    fake = FakeNvml(list(rows), starts)
    patch.setattr(nvml, "pynvml", fake)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake
