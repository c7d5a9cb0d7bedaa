"""From a run of profiles, or two traces, to what is printed and the three files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cyclopts
import msgspec
import pytest

from replay.records import Backend, Cell, Difference, Gpus, Profile, ProfileManifest, Setup, Speculation
from reports.cli import report
from reports.kernels.analysis import analyse
from reports.kernels.cli import layers
from tests.reports.kernels.traces import Kernel, event, model, write
from workloads.errors import UserError

HEAD, TAIL = [Kernel("embedding", 0, 1)], [Kernel("gemm", 0, 5), Kernel("argmax", 6, 1)]
STANDARD = [Kernel(f"standard {number}", 5.0 if number else 0, 4) for number in range(23)]
FUSED = [Kernel("fused<attention>|", 0, 20), Kernel("fused experts", 21, 40), Kernel("shared", -10, 10, 8)]
FRONT_END = "host_4242.async_llm.7.pt.trace.json.gz"


def backend(name: str, decode_backend: str, **changes: Any) -> Backend:
    values: dict[str, Any] = {
        "url": None,
        "gpus": Gpus(count=16, kind="GB300", layout={"tp": 16}),
        "emulated": False,
        "settings": {"model": "moonshotai/Kimi-K3"},
        "served": True,
        "command": ["vllm", "serve", "model"],
    }
    return Backend(name=name, decode_backend=decode_backend, **{**values, **changes})


def make_run(path: Path, *, step_s: float | None = None, **changes: Any) -> Path:
    """A finished run: the baseline's layers take 130 µs, the candidate's 69; there are 22 of them in a step, head and
    tail included."""
    both = changes.pop("backends", [backend("standard", "auto"), backend("special", "latency_specialized")])
    setup = Setup(
        speculation=Speculation(draft_tokens=7, method="dspark", acceptance_length=6.0),
        backends=both,
        matched_gpus=True,
        unmatched_reasons=[],
    )
    facts: dict[str, Any] = {
        "name": "kimi-k3-layers",
        "created_utc": "2026-11-30T12:00:00Z",
        "decodegate_version": "0.1.0",
        "versions": {"vllm": "0.33.0"},
        "host": {"name": "h"},
        "matched_gpus": True,
        "unmatched_reasons": [],
        "differences": [
            Difference(key="decode_backend", baseline=None, candidate="latency_specialized", under_test=True)
        ],
        "emulated": False,
        "setup": setup,
        "cell": Cell(batch=1, input_tokens=1, output_tokens=1000, setup=0),
        "layers": 20,
        "backends": both,
    }
    path.mkdir()
    (path / "manifest.json").write_bytes(msgspec.json.encode(ProfileManifest(**{**facts, **changes})))
    for each, layer, us in zip(both, (STANDARD, FUSED), (130.0, 69.0), strict=True):
        folder = path / "profiles" / each.name
        folder.mkdir(parents=True)
        runs = model([layer] * 20, steps=8, head=HEAD, tail=TAIL, layer_us=us)
        write(folder / FRONT_END, [])
        rank = "dp0_pp0_tp0_dcp0_ep0_rank0.7.pt.trace.json.gz"
        write(folder / rank, [event(run) for run in runs])
        profile = Profile(backend=each.name, opened_ns=1, closed_ns=2, step_s=step_s, traces=[FRONT_END, rank])
        (folder / "profile.json").write_bytes(msgspec.json.encode(profile))
    return path


def rows(path: Path) -> dict[str, tuple[Any, Any, Any]]:
    found = json.loads((path / "report.json").read_text())
    return {row["label"]: (row["baseline"], row["candidate"], row["ratio"]) for row in found["rows"]}


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    assert report(run) == 0
    printed = capsys.readouterr().out
    assert "Per layer: standard 23 kernels and 130 µs, special 3 kernels and 69.0 µs" in printed
    found = rows(run)
    assert found["Kernels per layer"] == (23, 3, pytest.approx(3 / 23))
    wall = found["µs per layer, wall"]
    assert (wall[0]["median"], wall[1]["median"], wall[2]) == pytest.approx((130, 69, 69 / 130))
    assert found["µs per layer, busy"][1]["median"] == pytest.approx(61)
    assert found["µs per layer, overlap"][1]["median"] == pytest.approx(20 + 40 + 10 - 61)
    assert found["Units per step"] == (20, 20, None)
    for name in ("report.md", "report.html"):
        text = (run / name).read_text()
        assert "batch 1, 1 input and 1,000 output tokens each, dspark, 7 draft tokens" in text
        assert "rank0.7.pt.trace.json.gz, of 2" in text
        assert "not set against latency_specialized" in text
    assert "`experts`" in (run / "report.md").read_text()
    html = (run / "report.html").read_text()
    assert html.count("<svg") == 1
    assert "standard: 23 kernels, 130.0 µs" in html


def test_a_step_that_the_profiler_slowed_is_told_of(tmp_path: Path) -> None:
    """Profiled, steps take 22 x 130 and 22 x 69 µs; without, 1400 on both."""
    analysis = analyse(make_run(tmp_path / "known", step_s=1400e-6))
    (row,) = (row for row in analysis.rows if row.label == "µs per step, without the profiler")
    assert (row.baseline, row.candidate, row.ratio) == pytest.approx((1400, 1400, 1))
    (note,) = analysis.notes
    assert note.startswith("standard: the profiler made a step 2.0 times as long")
    assert analyse(make_run(tmp_path / "unknown")).notes == []


def test_two_reports_of_one_run_are_byte_equal(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for name in ("first", "second"):
        report(run, output=tmp_path / name)
    for name in ("report.json", "report.md", "report.html"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_published_rows_stand_beside_the_same_setting_only(tmp_path: Path) -> None:
    same = analyse(make_run(tmp_path / "same")).published
    assert [(each.row.metric, each.own_baseline, each.own_candidate) for each in same] == [
        ("kernels per layer", 23, 3),
        ("µs per layer", pytest.approx(130), pytest.approx(69)),
    ]
    h200 = {"gpus": Gpus(count=1, kind="H200"), "settings": {"model": "Qwen/Qwen3-8B"}}
    others = [backend("standard", "auto", **h200), backend("special", "latency_specialized", **h200)]
    for each in analyse(make_run(tmp_path / "other", backends=others)).published:
        assert (each.own_baseline, each.own_candidate) == (None, None)
        assert {difference.split(":")[0] for difference in each.differs} >= {"model", "GPU kind"}
    alike = [backend("one", "auto"), backend("two", "auto")]
    for each in analyse(make_run(tmp_path / "alike", backends=alike)).published:
        assert each.own_candidate is None
        assert any("decode backends" in difference for difference in each.differs)


def test_every_page_is_stamped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", matched_gpus=False, emulated=True)
    report(run)
    assert "EMULATED" in capsys.readouterr().out
    for name in ("report.md", "report.html"):
        text = (run / name).read_text()
        assert text.count("EMULATED") > 5
        assert "not matched: does not isolate the decode path" in text


def test_models_that_repeat_differently_are_told_of(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", layers=None)
    runs = model([FUSED] * 12, steps=8, head=HEAD, tail=TAIL, layer_us=69.0)
    [trace] = (run / "profiles" / "special").glob("*rank0*")
    write(trace, [event(each) for each in runs])
    notes = " ".join(analyse(run).notes)
    assert "20 against 12" in notes
    assert "number of layers is not known" in notes


def test_runs_without_a_result(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    [trace] = (run / "profiles" / "special").glob("*rank0*")
    write(trace, [])
    with pytest.raises(UserError, match="holds no events"):
        report(run)
    (run / "profiles" / "special" / "profile.json").unlink()
    with pytest.raises(UserError, match="no finished profile of special"):
        report(run)


def test_two_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    [baseline] = (run / "profiles" / "standard").glob("*rank0*")
    [candidate] = (run / "profiles" / "special").glob("*rank0*")
    assert layers(baseline, candidate, layers=20, output=tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert "not matched" in printed
    assert rows(tmp_path / "out")["Kernels per layer"][0] == 23
    before = {path.name for path in baseline.parent.iterdir()}
    assert layers(baseline, candidate) == 0
    assert {path.name for path in baseline.parent.iterdir()} == before
    with pytest.raises(UserError, match="20 units repeat in a step, more than a model of 7 layers has: give --layers"):
        layers(baseline, candidate, layers=7)


@pytest.mark.parametrize("number", ["0", "-3"])
def test_layers_are_at_least_one(number: str) -> None:
    app = cyclopts.App()
    app.command(layers)
    with pytest.raises(cyclopts.ValidationError, match=">= 1"):
        app.parse_args(["layers", "a", "b", "--layers", number], exit_on_error=False, print_error=False)
