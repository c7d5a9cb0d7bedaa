"""Decode tables from the verb to the report, on the emulator, against its own log of what it emitted when."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import yaml

import replay.cli
from replay import presets
from replay.emulator.truth import read_emissions
from replay.experiment import experiment_of
from replay.records import RequestRecord
from reports.decode.analysis import analyse
from reports.decode.window import Stream, common


def test_rates_are_those_of_the_emission_log(tmp_path: Path) -> None:
    experiment = experiment_of(
        {
            "name": "tables",
            "model": "kimi-k3",
            "decode": {
                "output_tokens": [300],
                "repeats": 1,
                "batch": [1, 4],
                "speculation": ["none", {"method": "dspark", "draft_tokens": 7, "acceptance_length": 6, "batch": [2]}],
            },
            "backends": {
                "both": {
                    "emulator": {"profile": "kimi-k3-tp16"},
                    "gpus": {"count": 16, "kind": "GB300", "layout": {"tp": 16}},
                },
                "baseline": {"decode_backend": "auto"},
                "candidate": {"decode_backend": "latency_specialized"},
            },
        }
    )
    run = replay.cli.decode(experiment, run=tmp_path / "run", resume=False, dry_run=False, allow_unmatched=False)
    assert run is not None
    analysis = analyse(run)
    assert len(analysis.windows) == 12
    judged = [window for window in analysis.windows if window.figures]
    assert judged  # on a busy machine some have no result, by the client's lag
    for window in judged:
        assert window.figures is not None
        assert window.figures.decode_tokens_per_s == pytest.approx(
            emitted_rate(run / "windows" / window.name), rel=0.01
        )
        assert window.from_counters == pytest.approx(window.from_usage, rel=0.01)
    for cell in analysis.cells:
        if cell.candidate.windows:
            assert (cell.candidate.path.status, cell.candidate.path.share) == ("specialised", 1.0)
        if cell.baseline.windows:
            assert cell.baseline.path.share == 0.0


@pytest.mark.slow
def test_the_published_rows_come_out(tmp_path: Path) -> None:
    """Of the preset that emulates them: the headline and both rows without speculation, both backends, within 1 %."""
    preset = yaml.safe_load(presets.read("smoke-emulator"))
    preset["decode"]["repeats"] = 1
    preset["decode"]["speculation"][1]["batch"] = [1]
    run = replay.cli.decode(experiment_of(preset), run=tmp_path / "run")
    assert run is not None
    beside = {
        shown.row.id: (shown.row, shown.own_baseline, shown.own_candidate)
        for shown in analyse(run).published
        if not shown.differs
    }
    assert {"headline", "nospec-b1", "nospec-b64"} <= beside.keys()
    measured = 0
    for row, standard, specialised in beside.values():
        if row.id == "headline-pr":
            continue  # another run of the authors, 0.5 % from the headline
        for own, published in ((standard, row.standard), (specialised, row.specialised)):
            if own is not None and own.value is not None:  # on a busy machine some have no result
                assert own.value == pytest.approx(published, rel=0.01), row.id
                measured += 1
    if not measured:
        pytest.skip("this machine is too busy to measure anything")


def emitted_rate(window: Path) -> float:
    """Tokens/s over the common decode window, of what the emulator wrote."""
    lines = (window / "w0.requests.jsonl").read_bytes().splitlines()
    records = [msgspec.json.decode(line, type=RequestRecord) for line in lines]
    measured = {record.request_id for record in records if record.phase == "measured"}
    streams = []
    for truth in read_emissions(window / "server"):
        if truth.request_id in measured:
            t_ns, tokens = zip(*truth.emissions, strict=True)
            streams.append(Stream(truth.arrived_ns, np.array(t_ns, np.int64), np.array(tokens, np.int64)))
    found = common(streams)
    assert found is not None
    return found.tokens / (found.length_ns * 1e-9)
