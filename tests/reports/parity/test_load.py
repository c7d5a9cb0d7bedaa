"""Records read back: slices of cases, lists of likely tokens, rows in any order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from reports.parity import load as loading
from reports.parity.load import load
from reports.parity.verdict import judge
from tests.reports.parity import made
from workloads.errors import UserError


def test_slices_hold_every_position_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "SLICE", 500)
    sheet = load(made.write(tmp_path, checks=["P1"])).sheets["B1", "P1"]
    slices = list(sheet.slices())
    assert len(slices) > 2
    keys = np.concatenate([sheet.positions(*each).key for each in slices])
    assert len(keys) == sheet.run.positions
    assert (np.diff(keys) > 0).all()


def test_judging_in_slices_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = load(made.write(tmp_path, checks=["P1", "P3", "P6"]))
    whole = judge(records)
    monkeypatch.setattr(loading, "SLICE", 300)
    assert judge(records) == whole


def test_rows_may_come_in_any_order(tmp_path: Path) -> None:
    folder = made.write(tmp_path, checks=["P3"])
    whole = judge(load(folder))
    for arm in ("B1", "B2"):
        path = folder / arm / "P3" / "tokens.parquet"
        frame = pl.read_parquet(path)
        frame.sample(fraction=1.0, shuffle=True, seed=1).write_parquet(path)
    assert judge(load(folder)).checks == whole.checks


def test_short_lists_are_filled_up(tmp_path: Path) -> None:
    folder = made.write(tmp_path, checks=["P3"])
    path = folder / "B1" / "P3" / "tokens.parquet"
    frame = pl.read_parquet(path).with_columns(
        pl.when(pl.col("position") == 1).then(pl.col(name).list.head(2)).otherwise(name).alias(name)
        for name in ("top_ids", "top_logprobs")
    )
    frame.write_parquet(path)
    found = load(folder).sheets["B1", "P3"].positions(0, 0)
    assert found.top_ids[1, 2:].tolist() == [-1] * 18
    assert np.isneginf(found.top_logprobs[1, 2:]).all()
    assert (found.top_ids[0] >= 0).all()


def test_a_folder_without_a_battery_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"manifest\.json"):
        load(tmp_path)


def test_a_line_that_is_damaged_is_named(tmp_path: Path) -> None:
    folder = made.write(tmp_path, checks=["D7"])
    path = folder / "cases" / "D7.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"{\n", *lines[2:]]))
    with pytest.raises(UserError, match=r"D7\.jsonl:2 is damaged"):
        load(folder)
