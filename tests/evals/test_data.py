"""The users' files: read in every format, checked whole, never quoted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import decodegate
from evals import invented
from evals.data import SUBSET, inspect, load
from tests.evals import fixtures
from workloads.errors import UserError

SECRET = "zanzibar"
ROWS: dict[str, Callable[[], list[invented.Row]]] = {
    "aime25": invented.aime25,
    "gpqa_diamond": invented.gpqa_diamond,
    "mrcr": lambda: invented.mrcr(12, characters=80),
}


def _write(task: str, path: Path, rows: list[invented.Row] | None = None) -> Path:
    rows = ROWS[task]() if rows is None else rows
    fixtures.write(rows, path)
    if task == "mrcr":
        fixtures.write_lengths(path, hashlib.sha256(path.read_bytes()).hexdigest(), [5000 * (n + 1) for n in range(99)])
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
@pytest.mark.parametrize("task", ROWS)
def test_every_format_gives_the_same_items(task: str, suffix: str, tmp_path: Path) -> None:
    path = _write(task, tmp_path / f"data{suffix}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    data = load(task, str(path), sha256=digest, subset=task == "mrcr")
    assert data.items == load(task, str(_write(task, tmp_path / "same.jsonl")), subset=task == "mrcr").items
    assert [item.row for item in data.items] == list(range(len(ROWS[task]())))
    assert (data.facts.name, data.facts.sha256, data.facts.items) == (path.name, digest, len(data.items))
    assert data.facts.dropped == ({SUBSET: 2388} if task == "mrcr" else {})


def test_a_folder_of_files_is_one_data_set(tmp_path: Path) -> None:
    rows = invented.mrcr(12, characters=80)
    folder = tmp_path / "mrcr"
    folder.mkdir()
    for needles in (8, 2, 4):
        part = folder / f"{needles}needle.parquet"
        fixtures.write([row for row in rows if row["n_needles"] == needles], part)
        fixtures.write_lengths(part, "of this file alone", [1])  # no data
    names = ["2needle.parquet", "4needle.parquet", "8needle.parquet"]
    sums = "".join(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    digest = hashlib.sha256(sums.encode()).hexdigest()
    fixtures.write_lengths(folder, digest, [5000] * 12)
    data = load("mrcr", str(folder), sha256=digest, subset=True)
    assert [item.needles for item in data.items] == [2] * 4 + [4] * 4 + [8] * 4  # type: ignore[attr-defined]
    assert [item.row for item in data.items] == list(range(12))
    assert (data.facts.name, data.facts.sha256) == ("mrcr", digest)
    with pytest.raises(UserError, match="holds no file"):
        load("mrcr", str(tmp_path / "mrcr" / ".."), subset=True)


def test_other_data_than_agreed_stop(tmp_path: Path) -> None:
    path = _write("aime25", tmp_path / "aime.jsonl")
    agreed = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_text(path.read_text().replace("pears", "plums", 1))
    with pytest.raises(UserError, match=f"not {agreed}: these are other data"):
        inspect("aime25", str(path), sha256=agreed)


@pytest.mark.parametrize(
    ("rows", "subset", "fault"),
    [
        (29, False, r"29 items; aime25 has 30 \(--subset"),
        (31, False, "31 items; aime25 has 30"),
        (31, True, "31 items; aime25 has 30"),
        (0, True, "no items"),
        (29, True, None),
    ],
)
def test_a_question_missing_stops_unless_a_subset_is_meant(
    rows: int, subset: bool, fault: str | None, tmp_path: Path
) -> None:
    path = _write("aime25", tmp_path / "aime.jsonl", invented.aime25(rows))
    if fault is None:
        assert load("aime25", str(path), subset=subset).facts.dropped == {SUBSET: 1}
        return
    with pytest.raises(UserError, match=fault):
        load("aime25", str(path), subset=subset)


def _changed(change: dict[str, Any], row: int = 6) -> list[invented.Row]:
    rows = invented.aime25()
    rows[row] |= change
    return rows


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        (_changed({"answer": f"{SECRET}"}), ":7: answer is not an integer from 0 to 999"),
        (_changed({"answer": "1000"}), ":7: answer is not an integer from 0 to 999"),
        (_changed({"problem": None}), ":7: Expected `str`, got `null` - at `$.problem`"),
        (_changed({"problem": " "}), ":7: problem is empty"),
        (_changed({"id": "2"}), ":7: the same item as"),
        ([{"id": "1", "question": SECRET, "answer": "3"}], ":1: Object missing required field `problem`"),
    ],
)
def test_faults_name_their_line_and_quote_nothing(rows: list[invented.Row], fault: str, tmp_path: Path) -> None:
    found = inspect("aime25", str(_write("aime25", tmp_path / "aime.jsonl", rows)), subset=True).faults
    assert len(found) == 1
    assert fault in found[0]
    assert SECRET not in found[0]


def test_places_in_other_formats(tmp_path: Path) -> None:
    rows = invented.aime25(4)
    rows[1]["problem"] = "Two\nlines."
    rows[2]["answer"] = "x"
    for suffix, place in ((".csv", "data.csv:5: answer"), (".parquet", "row 2: answer"), (".json", "row 2: answer")):
        (fault,) = inspect("aime25", str(_write("aime25", tmp_path / f"data{suffix}", rows)), subset=True).faults
        assert place in fault


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("data.jsonl", f'{{"id": "{SECRET}"', "1: not JSON"),
        ("data.jsonl", f'["{SECRET}"]', "1: not a JSON object"),
        ("data.json", f'{{"id": "{SECRET}"}}', "not a JSON list"),
        ("data.json", f'["{SECRET}"', "not JSON"),
        ("data.csv", f"id,problem,answer\n1,{SECRET},3,4\n", ":2: more cells than columns"),
        ("data.csv", f'id,problem,answer\n1,"{SECRET}', ":2: not CSV"),
        ("data.csv", f"id,problem\n1,{SECRET}\n", "missing required field `answer`"),
        ("data.parquet", SECRET, "cannot be read as Parquet"),
        ("data.txt", SECRET, "named for what it is"),
    ],
)
def test_files_that_are_something_else(name: str, content: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=fault) as caught:
        load("aime25", str(path), subset=True)
    assert SECRET not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        load("aime25", str(tmp_path / "none.jsonl"))


def test_the_hub_is_asked_for_one_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*args: object, **kwargs: object) -> object:
        asked.append((args, kwargs))
        return datasets.Dataset.from_list(invented.aime25())

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    revision = "0123456789" * 4
    data = load("aime25", f"hub:math-ai/aime25@{revision}")
    assert asked == [(("math-ai/aime25", None), {"split": "test", "revision": revision})]
    assert (data.facts.name, data.facts.revision) == ("math-ai/aime25", revision)
    lines = "".join(json.dumps(row, sort_keys=True) + "\n" for row in invented.aime25())
    assert data.facts.sha256 == hashlib.sha256(lines.encode()).hexdigest()
    with pytest.raises(UserError, match="40 hex digits"):
        load("aime25", "hub:math-ai/aime25@main")


def _check(*words: str) -> None:
    decodegate.app(["eval", "data", "check", *words], result_action="return_value", exit_on_error=False)


def test_the_verb_says_what_the_data_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write("mrcr", tmp_path / "mrcr.jsonl")
    _check("mrcr", str(path), "--subset")
    told = capsys.readouterr().out
    assert "mrcr: 12 of 2,400 items in mrcr.jsonl" in told
    assert "2 needles: 4k-8k 1, 16k-32k 1, 32k-64k 2" in told  # 5,000, 20,000, 35,000 and 50,000 tokens
    assert "2,388 not in the data (a subset)" in told
    assert "fit for use" in told
    path = _write("gpqa_diamond", tmp_path / "gpqa.csv")
    _check("gpqa_diamond", str(path))
    told = capsys.readouterr().out
    assert f"SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()}" in told
    assert "melts" not in told


def test_the_verb_shows_the_first_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row | {"Question": SECRET, "Incorrect Answer 1": row["Correct Answer"]} for row in invented.gpqa_diamond()]
    path = _write("gpqa_diamond", tmp_path / "gpqa.jsonl", rows)
    with pytest.raises(UserError, match="198 faults"):
        _check("gpqa_diamond", str(path))
    told = capsys.readouterr().out
    assert told.count("two options are the same") == 10
    assert f"{path}:10: two options" in told
    assert SECRET not in told
