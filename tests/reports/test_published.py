"""Published rows: their figures are the source's, and none stands beside a figure of another setting."""

from __future__ import annotations

import math
import re
from typing import Any, get_args

import msgspec
import pytest

from reports.published import ROWS, Metric, Row, Setting, beside
from tests.shared import SHARED

TABLE = SHARED / "reference" / "decode-path.md"
BY_ID = {row.id: row for row in ROWS}
HEADLINE = Setting(
    model="kimi-k3",
    gpu_kind="NVIDIA GB300",
    gpus=16,
    layout={"tp": 16},
    batch=1,
    method="dspark",
    draft_tokens=7,
    acceptance_length=6.0,
    input_tokens=1,
    output_tokens=1000,
)
NO_DRAFTS = msgspec.structs.replace(HEADLINE, method=None, draft_tokens=0, acceptance_length=None)
RATE: Metric = "total decode tokens/s"


def differs(row: str, own: Setting, **changes: Any) -> list[str]:
    """What keeps an own figure from standing beside the row."""
    own = msgspec.structs.replace(own, **changes)
    return next(each.differs for each in beside(own, BY_ID[row].metric) if each.row.id == row)


@pytest.mark.parametrize("row", [row for row in ROWS if row.ratio is not None], ids=lambda row: row.id)
def test_a_printed_ratio_is_that_of_its_two_figures(row: Row) -> None:
    pair = (row.standard, row.specialised) if row.metric == "µs per layer" else (row.specialised, row.standard)
    decimals = len(str(row.ratio).partition(".")[2])
    assert round(pair[0] / pair[1], decimals) == row.ratio


@pytest.mark.skipif(not TABLE.exists(), reason=f"needs {TABLE}")
def test_the_figures_are_those_of_the_table() -> None:
    """Both ways: each figure of a row is in its line of the table, and the line holds no others."""
    lines = {
        cells[0]: cells[3:6]
        for line in TABLE.read_text().splitlines()
        if line.startswith("| ") and len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 7
    }
    del lines["id"]
    assert lines.keys() == {"headline", "headline-pr", "nospec-b1", "nospec-b64", "agentx", "layer"}
    printed = {name: re.findall(r"\d+(?:\.\d+)?", " ".join(cells)) for name, cells in lines.items()}
    own = {
        name: [
            number
            for row in ROWS
            if (row.id.removesuffix("-kernels") if row.id.startswith("layer") else row.id) == name
            for number in (row.specialised, row.standard, row.ratio)
            if number is not None
        ]
        for name in lines
    }
    own["headline-pr"].append(1.71)  # worked out by the table's author
    for name in ("nospec-b1", "nospec-b64"):  # how the table's author worked it out
        assert BY_ID[name].standard_derived
        own[name] += [BY_ID[name].specialised, BY_ID[name].ratio]
    own["agentx"] += [16, 8]
    assert {name: sorted(map(float, numbers)) for name, numbers in printed.items()} == {
        name: sorted(numbers) for name, numbers in own.items()
    }


def test_the_headline_stands_beside_its_two_rows_and_no_other() -> None:
    found = {each.row.id: each for each in beside(HEADLINE, RATE)}
    assert [name for name, each in found.items() if not each.differs] == ["headline", "headline-pr"]
    assert found["headline"].unstated == []
    assert found["nospec-b1"].differs == ["draft tokens: 7 here, 0 published"]
    assert found["nospec-b64"].differs == ["batch: 1 here, 64 published", "draft tokens: 7 here, 0 published"]


def test_without_drafts_method_and_acceptance_mean_nothing() -> None:
    assert differs("nospec-b1", NO_DRAFTS) == []
    assert differs("nospec-b64", NO_DRAFTS, batch=64) == []
    assert differs("headline", NO_DRAFTS) == [
        "draft tokens: 0 here, 7 published",
        "method: none here, dspark published",
        "synthetic acceptance length: none here, 6 published",
    ]
    (found,) = (each for each in beside(NO_DRAFTS, RATE) if each.row.id == "nospec-b1")
    assert found.unstated == ["input tokens", "output tokens"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "qwen3-8b"}, "model: qwen3-8b here, Kimi K3 published"),
        ({"model": None}, "model: not known here, Kimi K3 published"),
        ({"gpu_kind": "NVIDIA B300"}, "GPU kind: NVIDIA B300 here, GB300 published"),
        ({"gpus": 8}, "GPUs: 8 here, 16 published"),
        ({"layout": {"TP": 8}}, "tp: 8 here, 16 published"),
        ({"layout": {}}, "tp: not known here, 16 published"),
        ({"layout": {"dp": 16}}, "tp: 1 here, 16 published"),
        ({"batch": 2}, "batch: 2 here, 1 published"),
        ({"method": "mtp"}, "method: mtp here, dspark published"),
        ({"draft_tokens": 3}, "draft tokens: 3 here, 7 published"),
        ({"acceptance_length": 3.84}, "synthetic acceptance length: 3.84 here, 6 published"),
        ({"acceptance_length": None}, "synthetic acceptance length: none here, 6 published"),
        ({"input_tokens": 1024}, "input tokens: 1024 here, 1 published"),
        ({"output_tokens": 512}, "output tokens: 512 here, 1000 published"),
    ],
)
def test_one_other_setting_is_one_difference_in_words(changes: dict[str, Any], words: str) -> None:
    assert differs("headline", HEADLINE, **changes) == [words]


def test_an_axis_that_the_source_does_not_state_is_unstated() -> None:
    for layout, unstated in (({"tp": 16, "dcp": 16}, ["dcp"]), ({"tp": 16, "dcp": 1}, [])):
        (found,) = (
            each for each in beside(msgspec.structs.replace(HEADLINE, layout=layout), RATE) if each.row.id == "headline"
        )
        assert (found.differs, found.unstated) == ([], unstated)


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("Kimi-K3", True),
        ("moonshotai/kimi_k3", True),
        ("/models/Kimi K3 Instruct", True),
        ("default Kimi K3 on NVIDIA", True),
        ("kimi-k2", False),
        ("kimi-k3.5", False),
        ("kimi-k30", False),
    ],
)
def test_names_of_the_model(name: str, same: bool) -> None:
    assert (differs("headline", HEADLINE, model=name) == []) == same


def test_nothing_stands_beside_the_pair_on_16_and_8_gpus() -> None:
    """Not even a figure that states nothing else than that row does."""
    for own in (HEADLINE, Setting(model="Kimi K3")):
        (found,) = beside(own, "P90 interactivity")
        (reason,) = found.differs
        assert "16 GPUs against 8" in reason


def test_each_metric_has_rows_and_only_its_own() -> None:
    found = {metric: [each.row for each in beside(HEADLINE, metric)] for metric in get_args(Metric)}
    assert all(rows and {row.metric for row in rows} == {metric} for metric, rows in found.items())
    assert sum(map(len, found.values())) == len(ROWS) == len(BY_ID)
    assert all(math.isfinite(value) for row in ROWS for value in (row.specialised, row.standard))
