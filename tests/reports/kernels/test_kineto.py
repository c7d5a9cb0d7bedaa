"""A trace gives its GPU activity, wherever its blocks end and however it is laid out; others are refused in words."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports.kernels import kineto
from reports.kernels.kineto import NoKernels, display_name, read, read_first
from tests.reports.kernels.traces import Run, event, write
from workloads.errors import UserError

LAMBDAS = 'void at::native::loop<{lambda(int)#1}, {lambda(int)#2},{lambda()#1}>("}, {", \\)'
RUNS = [Run(LAMBDAS, 30.5, 2.0), Run("Memset (Device)", 20.25, 1.0, 9, "gpu_memset"), Run("gemm", 10.125, 3.5)]
LAUNCH = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 42, "tid": 42, "ts": 1, "dur": 2}
NESTED = {
    "ph": "M",
    "name": "labels",
    "pid": "Spans",
    "tid": "x",
    "ts": 0,
    "args": {"list": [{"a": 1}, {"b": [{}, {}]}]},
}
AFTER = {"traceName": "x", "more": [{"a": 1}, {"name": "gemm", "cat": "kernel"}, {"b": 2}]}


@given(
    block=st.integers(32, 1200),
    indent=st.sampled_from([None, 0, 2]),
    after=st.sampled_from([{}, AFTER]),
    zipped=st.booleans(),
    copies=st.integers(1, 6),
)
@settings(deadline=None)
def test_every_layout_and_block_size(
    tmp_path_factory: pytest.TempPathFactory, block: int, indent: int | None, after: Any, zipped: bool, copies: int
) -> None:
    events = [NESTED, *(event(run) for run in RUNS), LAUNCH, NESTED] * copies
    path = write(tmp_path_factory.mktemp("trace") / "trace.json.gz", events, indent=indent, after=after, zipped=zipped)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kineto, "_BLOCK", block)
        activity = read(path)
    in_order = sorted(RUNS * copies, key=lambda run: run.start_us)
    assert [activity.names[name] for name in activity.name] == [run.name for run in in_order]
    assert activity.start_us.tolist() == [run.start_us - 10.125 for run in in_order]
    assert activity.dur_us.tolist() == [run.dur_us for run in in_order]
    assert activity.stream.tolist() == [run.stream for run in in_order]
    assert activity.kernel.tolist() == [run.category == "kernel" for run in in_order]
    assert activity.other_events == 3 * copies
    assert activity.gpus == ["NVIDIA H200", "NVIDIA H200"]


def test_the_busiest_device(tmp_path: Path) -> None:
    events = [event(Run("a", 1, 1)), event(Run("b", 2, 1)), event(Run("c", 3, 5), device=1)]
    activity = read(write(tmp_path / "trace", events))
    assert activity.busiest_device == 1
    assert activity.on(1).start_us.tolist() == [2.0]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.97, 0.9999])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_trace_that_is_cut_off(tmp_path: Path, share: float, zipped: bool) -> None:
    path = write(tmp_path / "trace", [event(run) for run in RUNS] * 50, indent=2, zipped=zipped)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(UserError, match=r"is cut off: .* Profile again, and wait" if share > 0.1 else "trace"):
        read(path)


def test_a_trace_that_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto, "_BLOCK", 4096)
    monkeypatch.setattr(kineto, "_MOST_UNSPLIT", 16384)
    path = write(tmp_path / "trace", [event(run) for run in RUNS] * 500, zipped=False)
    text = path.read_text()
    path.write_text(text[:1000] + '"' + text[1000:])
    with pytest.raises(UserError, match="is damaged"):
        read(path)
    path.write_bytes(gzip.compress(text.encode())[:200] + b"x" * 100)
    with pytest.raises(UserError, match=r"is damaged|is cut off"):
        read(path)


@pytest.mark.parametrize("change", [{"ts": "soon"}, {"name": 7}, {"pid": "GPU", "args": {}}])
def test_gpu_activity_of_another_kind(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="none of Kineto's"):
        read(write(tmp_path / "trace", [{**event(RUNS[0]), **change}]))


def test_no_gpu_kernels(tmp_path: Path) -> None:
    for events in ([LAUNCH] * 3, [event(RUNS[1])]):
        with pytest.raises(UserError, match=r"no GPU kernels, .* with CUDA among the profiler's activities"):
            read(write(tmp_path / "trace", events))
    with pytest.raises(NoKernels, match="holds no events"):
        read(write(tmp_path / "trace", []))


def test_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    for text in ("", "hello", json.dumps({"events": []}), json.dumps({"in": {"traceEvents": [{}]}})):
        path.write_text(text)
        with pytest.raises(UserError, match="no trace of torch's profiler"):
            read(path)
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "missing")


def test_of_several_traces_rank_0s_is_read(tmp_path: Path) -> None:
    front = write(tmp_path / "a_host_4242.async_llm.17.pt.trace.json.gz", [LAUNCH])
    ranks = [
        write(tmp_path / f"dp0_pp0_tp{rank}_dcp0_ep0_rank{rank}.17.pt.trace.json.gz", [event(Run(f"of {rank}", 0, 1))])
        for rank in (10, 2, 0)
    ]
    assert read_first([front, *ranks]).names == ["of 0"]
    assert read_first([front, ranks[0]]).names == ["of 10"]
    with pytest.raises(UserError, match=r"async_llm.*no GPU kernels"):
        read_first([front])
    ranks[2].write_bytes(ranks[2].read_bytes()[:-20])
    with pytest.raises(UserError, match=r"rank0.* is cut off"):
        read_first([front, *ranks])
    with pytest.raises(UserError, match="no traces"):
        read_first([])


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (LAMBDAS, "loop"),
        ("_fwd_kernel", "_fwd_kernel"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        ("void f<(a)1, (b->c)>(int)", "f"),
        ("void at::native::(anonymous namespace)::foo<float>(int)", "foo"),
        ("std::enable_if<!(false), void>::type internal::gemvx::run<int, 7>(x)", "run"),
        ("void cutlass::Kernel2<cutlass_80_bf16>(cutlass_80_bf16::Params)", "Kernel2<cutlass_80_bf16>"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::Fwd<2>>>(P)", "device_kernel<enable_sm90>"),
        ("void at::native::elementwise_kernel<4, at::native::Add_op<float>>(int)", "elementwise_kernel<Add_op>"),
        ("", ""),
    ],
)  # fmt: skip
def test_short_names(name: str, short: str) -> None:
    assert display_name(name) == short
