"""What a check records, read back."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.parity import record
from evals.parity.endpoint import TOP, Generation
from evals.parity.record import Recorder, read_case, read_ids
from evals.records import TOKENS, ParityReply


def generation(ids: list[int], logprobs: list[float] | None = None, tops: int = TOP) -> Generation:
    """Each position's top ids are its own id and those after it, ``tops`` of them."""
    count = len(ids)
    top_ids = np.array(ids, np.int32)[:, None] + np.arange(TOP, dtype=np.int32)
    top_logprobs = np.tile(-np.arange(TOP, dtype=np.float32), (count, 1))
    top_ids[:, tops:], top_logprobs[:, tops:] = -1, -np.inf
    told = logprobs is not None
    return Generation(
        ids=np.array(ids, np.int32),
        logprobs=np.array(logprobs or [], np.float32),
        top_ids=top_ids if told else np.empty((0, TOP), np.int32),
        top_logprobs=top_logprobs if told else np.empty((0, TOP), np.float32),
    )


def test_columns_are_those_of_the_records(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.tokens(7, generation([3, 4], [-1.0, float("nan")], tops=2), repeat=1)
        recorder.tokens(2, generation([5]))
    assert tuple(pl.read_parquet_schema(tmp_path / "tokens.parquet")) == TOKENS
    rows = pl.read_parquet(tmp_path / "tokens.parquet").rows()
    assert rows[0] == (7, 1, 0, 3, -1.0, [3, 4], [0.0, -1.0])
    assert rows[1][:4] == (7, 1, 1, 4)
    assert np.isnan(rows[1][4])  # the server said that it is no number
    assert rows[2] == (2, 0, 0, 5, None, None, None)  # it told none
    assert read_ids(tmp_path / "tokens.parquet").keys() == {2}
    (only,) = read_case(tmp_path / "tokens.parquet", 7)
    assert only == 1


@given(
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 9)), max_size=12),
    row_group=st.integers(1, 12),
)
def test_all_positions_come_back_in_bounded_row_groups(
    lengths: list[tuple[int, int, int]], row_group: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("check")
    unique = {(case, repeat): length for case, repeat, length in lengths}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "ROW_GROUP", row_group)
        with Recorder(folder) as recorder:
            for (case, repeat), length in unique.items():
                ids = list(range(100 * case + 10 * repeat, 100 * case + 10 * repeat + length))
                recorder.tokens(case, generation(ids, [-float(each) for each in ids]), repeat=repeat)
                recorder.reply(ParityReply(case=case, repeat=repeat, ids=length, ids_hash=""))
    path = folder / "tokens.parquet"
    assert recorder.positions == sum(unique.values()) == pq.ParquetFile(path).metadata.num_rows
    assert recorder.replies == len((folder / "replies.jsonl").read_bytes().splitlines()) == len(unique)
    groups = pq.ParquetFile(path).metadata
    assert all(groups.row_group(index).num_rows <= row_group for index in range(groups.num_row_groups))
    for (case, repeat), length in unique.items():
        found = read_case(path, case)
        if length:
            ids, logprobs = found[repeat]
            assert ids.tolist() == list(range(100 * case + 10 * repeat, 100 * case + 10 * repeat + length))
            np.testing.assert_array_equal(logprobs, -ids.astype(np.float32))
    first = {case: length for (case, repeat), length in unique.items() if repeat == 0 and length}
    assert {case: len(ids) for case, ids in read_ids(path).items()} == first


def test_a_check_that_fails_leaves_no_whole_file(tmp_path: Path) -> None:
    with suppress(ZeroDivisionError), Recorder(tmp_path) as recorder:
        recorder.tokens(0, generation([1]))
        recorder.reply(ParityReply(case=0, ids=1, ids_hash="x"))
        raise ZeroDivisionError
    assert {path.name for path in tmp_path.iterdir()} == {"replies.jsonl", "tokens.parquet.part"}
    (line,) = (tmp_path / "replies.jsonl").read_bytes().splitlines()
    assert msgspec.json.decode(line, type=ParityReply).ids_hash == "x"


def test_a_reply_is_on_disk_and_told_as_it_comes(tmp_path: Path) -> None:
    seen: list[int] = []

    def heard(reply: ParityReply) -> None:
        seen.append(len((tmp_path / "replies.jsonl").read_bytes().splitlines()))

    with Recorder(tmp_path, heard) as recorder:
        for case in range(3):
            recorder.reply(ParityReply(case=case, ids=0, ids_hash=""))
    assert seen == [1, 2, 3]
