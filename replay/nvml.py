"""The GPUs of this host, as NVML shows them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pynvml

from replay.records import GpuProcess, GpuReading

THROTTLING = {
    0x002: "set clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "thermal (software)",
    0x040: "thermal (hardware)",
    0x080: "power brake",
    0x100: "display clocks",
}
"""Bits of NVML's clock event reasons in words. Bit 1 is idle: no clock is held down by it."""

_FREED_BYTES = 512 * 2**20
"""Memory in use may lie so much above what it was before a server started: contexts of others come and go."""

T = TypeVar("T")


class Unseen(Exception):
    """Why no GPU can be read, in words."""


def readings(
    devices: Sequence[int] | None, ours: set[int], environment: Mapping[str, str] = os.environ
) -> list[GpuReading]:
    """One reading of each GPU; a field that NVML refuses is null. Raises Unseen.

    ``devices``: by index, in NVML's order (that of the PCI bus, which CUDA keeps to with CUDA_DEVICE_ORDER=PCI_BUS_ID,
    and anyway where all GPUs are of one kind); None: those that CUDA_VISIBLE_DEVICES in ``environment`` leaves visible.
    ``ours``: process ids of the server that we started.
    """
    with _nvml():
        return [_reading(handle, ours) for handle in _handles(devices, environment)]


def memory_free_again(devices: Sequence[int] | None, before: Sequence[GpuReading]) -> bool:
    """Whether the GPUs use no more memory than in ``before``, read before a server started, give or take 512 MiB. True
    where NVML shows nothing: there is nothing to wait for."""
    used = {reading.uuid: reading.memory_used_bytes for reading in before}
    try:
        now = readings(devices, set())
    except Unseen:
        return True
    return all(
        reading.memory_used_bytes is None or reading.memory_used_bytes <= (used.get(reading.uuid) or 0) + _FREED_BYTES
        for reading in now
    )


@contextmanager
def _nvml() -> Iterator[None]:
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        raise Unseen("no NVIDIA driver on this host") from None
    except pynvml.NVMLError as error:
        raise Unseen(f"NVML does not start: {error}") from None
    try:
        yield
    except pynvml.NVMLError as error:
        raise Unseen(f"NVML does not show the GPUs: {error}") from None
    finally:
        pynvml.nvmlShutdown()


def _handles(devices: Sequence[int] | None, environment: Mapping[str, str]) -> list[Any]:
    count = pynvml.nvmlDeviceGetCount()
    if devices is None:
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        entries = [str(index) for index in range(count)] if visible is None else visible.split(",")
    else:
        entries = [str(index) for index in devices]
    handles = []
    for entry in map(str.strip, entries):
        if entry.isdigit() and int(entry) < count:
            handles.append(pynvml.nvmlDeviceGetHandleByIndex(int(entry)))
        elif entry.startswith(("GPU-", "MIG-")):
            handles.append(_by_uuid(entry, count))
        elif devices is None and entry in ("", "-1", "NoDevFiles"):
            break  # CUDA's own words for: no more
        else:
            raise Unseen(f"there is no GPU {entry}: this host has {count}")
    if not handles:
        raise Unseen("no GPU is visible here" if count else "no GPU on this host")
    return handles


def _by_uuid(uuid: str, count: int) -> Any:
    """CUDA takes the first digits of a whole GPU's UUID for it, NVML does not."""
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    begun = [handle for handle in handles if pynvml.nvmlDeviceGetUUID(handle).startswith(uuid)]
    return begun[0] if len(begun) == 1 else pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())


def _reading(handle: Any, ours: set[int]) -> GpuReading:
    memory = _known(pynvml.nvmlDeviceGetMemoryInfo, handle)
    power = _known(pynvml.nvmlDeviceGetPowerUsage, handle)
    limit = _known(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    reasons = _known(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
    mig = _known(pynvml.nvmlDeviceGetMigMode, handle)
    processes = _known(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
    if processes is None:  # older drivers
        processes = _known(pynvml.nvmlDeviceGetComputeRunningProcesses_v2, handle)
    return GpuReading(
        index=pynvml.nvmlDeviceGetIndex(handle),
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=memory.total if memory else None,
        memory_used_bytes=memory.used if memory else None,
        sm_clock_mhz=_known(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        sm_clock_max_mhz=_known(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
        memory_clock_mhz=_known(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
        power_w=power / 1e3 if power is not None else None,
        power_limit_w=limit / 1e3 if limit is not None else None,
        temperature_c=_known(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        energy_mj=_known(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle),
        throttling=[words for bit, words in THROTTLING.items() if reasons & bit],
        mig=bool(mig[0]) if mig is not None else None,
        processes=[
            GpuProcess(pid=each.pid, memory_bytes=each.usedGpuMemory, ours=each.pid in ours) for each in processes
        ]
        if processes is not None
        else None,
    )


def _known(ask: Callable[..., T], *arguments: Any) -> T | None:
    try:
        return ask(*arguments)
    except pynvml.NVMLError:  # not supported by this GPU or driver, or not allowed here
        return None
