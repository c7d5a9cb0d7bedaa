"""Reading a large Kineto trace: seconds, and the memory that it takes."""

from __future__ import annotations

import gzip
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.wire_cases import Row

GIGABYTE = 10**9
LAYERS, STEPS_AT_ONCE = 64, 10
KERNEL_NAMES = [
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>>(P)",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0",
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<{lambda(int)#1}>>(int, {lambda(int)#1})",
    "nvjet_tst_64x8_64x16_4x1_v_bz_TNT",
]

READ = """
import resource, sys, time
from pathlib import Path
from reports.kernels.kineto import read
started = time.perf_counter()
activity = read(Path(sys.argv[1]))
print(time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, len(activity.start_us))
"""


def read() -> list[Row]:
    """A synthetic trace of 1 GB (uncompressed; half of its events are kernels), gzip and plain, in a new process."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, opened in (("gzip", gzip.GzipFile), ("plain", open)):
            path = Path(folder) / name
            with opened(path, "wb", *([1] if name == "gzip" else [])) as file:  # type: ignore[operator]
                kernels = write(file)
            said = subprocess.run(
                [sys.executable, "-c", READ, str(path)], check=True, capture_output=True, text=True
            ).stdout
            path.unlink()
            seconds, memory, found = said.split()
            assert int(found) == kernels
            rows += [
                Row(f"1 GB Kineto trace, {name}", float(seconds), "s", target=60, better="less"),
                Row("  memory at most", float(memory) / 2**20, "MiB", target=1024, better="less"),
            ]
    return rows


def write(file: gzip.GzipFile) -> int:
    """Write a trace of GIGABYTE bytes; how many kernels it holds."""
    written = file.write(
        b'{\n  "schemaVersion": 1,\n  "deviceProperties": [\n    {\n      "id": 0, "name": "NVIDIA H200"\n    }\n  ],\n'
        b'  "traceEvents": [\n'
    )
    step = "".join(_launch(index) + _kernel(index) for index in range(LAYERS * len(KERNEL_NAMES) * STEPS_AT_ONCE))
    kernels, at = 0, 0
    while written < GIGABYTE:
        # "@" stands for the time's leading digits: one replacement a piece instead of one format an event
        written += file.write(step.replace("@", str(1_000 + at)).encode())
        at += 1
        kernels += LAYERS * len(KERNEL_NAMES) * STEPS_AT_ONCE
    file.write(b'  {\n    "name": "process_name", "ph": "M", "ts": 1, "pid": 0, "tid": 0,\n    "args": {\n')
    file.write(b'      "name": "python"\n    }\n  }\n  ],\n  "traceName": "synthetic"\n}\n')
    return kernels


def _launch(index: int) -> str:
    return (
        '  {\n    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernelExC", "pid": 4242, "tid": 4242,\n'
        f'    "ts": @{index * 5:07d}.125, "dur": 3.842,\n    "args": {{\n'
        f'      "External id": {index}, "cbid": 430, "correlation": {index}\n    }}\n  }},\n'
    )


def _kernel(index: int) -> str:
    name = KERNEL_NAMES[index % len(KERNEL_NAMES)]
    return (
        f'  {{\n    "ph": "X", "cat": "kernel", "name": "{name}", "pid": 0, "tid": 7,\n'
        f'    "ts": @{index * 5:07d}.250, "dur": 3.904,\n    "args": {{\n'
        f'      "External id": {index}, "queued": 0, "device": 0, "context": 1,\n      "stream": 7, '
        f'"correlation": {index},\n      "registers per thread": 168, "shared memory": 213248,\n'
        '      "blocks per SM": 0.969697, "warps per SM": 11.636364,\n      "grid": [128, 1, 1],\n'
        '      "block": [384, 1, 1],\n      "est. achieved occupancy %": 0, "graph node id": 21474836481\n'
        "    }\n  },\n"
    )
