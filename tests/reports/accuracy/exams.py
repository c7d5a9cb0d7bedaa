"""Exams with a known truth: chances of a right answer per item, and answers drawn from them, as frames to judge."""

from __future__ import annotations

from functools import cache
from typing import Literal

import msgspec
import numpy as np
import polars as pl
from scipy import optimize, stats

from evals.records import DataFacts, EvalPlan, TaskPlan
from reports.accuracy.answers import COLUMNS
from reports.accuracy.drop import Floats

TaskName = Literal["aime25", "gpqa_diamond", "mrcr"]

BINS = ["4k-8k", "8k-16k", "16k-32k", "32k-64k", "64k-128k", "128k-256k", "256k-512k", "512k-1M"]
RIGHT_PIECE, WRONG_PIECE = 0.98, 0.13
"""MRCR scores of the piece asked for and of another one."""


class Exam(msgspec.Struct, frozen=True):
    """One task: by item, the chance of a right answer (of the right piece, for MRCR), and its bin."""

    task: TaskName
    repeats: int
    margin: float
    rates: Floats
    bins: list[str] | None = None

    @property
    def scale(self) -> float:
        """What a chance of 1 adds to the mean score."""
        return RIGHT_PIECE - WRONG_PIECE if self.task == "mrcr" else 1.0


def aime(repeats: int = 32, margin: float = 0.03) -> Exam:
    """30 questions of mean 0.96: 22 that are always answered right and 8 that are not."""
    return Exam("aime25", repeats, margin, np.array([1.0] * 22 + [0.97, 0.95, 0.93, 0.90, 0.87, 0.83, 0.75, 0.60]))


def gpqa(repeats: int = 16, margin: float = 0.02) -> Exam:
    """198 questions of mean 0.94, whose variance within questions is half of 0.94 x 0.06."""
    return Exam("gpqa_diamond", repeats, margin, _beta(198, 0.94, 0.94 * 0.06 / 2))


def mrcr(repeats: int = 5, margin: float = 0.03, per_bin: int = 100, within: float = 0.108) -> Exam:
    """``per_bin`` items in each of 8 bins, from 0.80 right pieces in the shortest to 0.50 in the longest, with a
    variance of the score within items of ``within``."""
    rates = _beta(per_bin * len(BINS), 0.65, within / (RIGHT_PIECE - WRONG_PIECE) ** 2)
    # longer contexts get the harder items, loosely: dealt in an order that leans towards easy ones first
    lean = np.random.default_rng(0).normal(rates, 0.8)
    return Exam("mrcr", repeats, margin, rates[np.argsort(-lean)], [name for name in BINS for _ in range(per_bin)])


def _beta(items: int, mean: float, within: float) -> Floats:
    """Quantiles of the beta distribution of this mean for which p (1 - p) is ``within`` on average."""
    at = (np.arange(items) + 0.5) / items

    def rates(size: float) -> Floats:
        found: Floats = stats.beta.ppf(at, mean * size, (1 - mean) * size)
        return found

    size = optimize.brentq(lambda size: float((rates(size) * (1 - rates(size))).mean()) - within, 0.05, 50)
    return rates(size)


def harmed(exam: Exam, drop: float, where: str) -> Floats:
    """Chances with the mean score lower by ``drop``. ``where``: "everywhere" takes the same from each item that has it,
    "uncertain" from those below 1 in proportion, "few" all of the first it can from as few items as possible,
    "tenth" nearly all from a tenth of the items, "long" only from the three bins of most context."""
    take = drop * len(exam.rates) / exam.scale
    rates = exam.rates
    if where == "everywhere":
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if np.minimum(rates, middle).sum() < take else (low, middle)
        return rates - np.minimum(rates, high)
    if where == "few":
        return rates - np.clip(take - np.concatenate([[0], np.cumsum(rates)[:-1]]), 0, rates)
    chosen = {
        "uncertain": rates < 1,
        "tenth": np.arange(len(rates)) % 10 == 0,
        "long": np.array([name in BINS[-3:] for name in exam.bins or []]),
        "proportion": np.ones(len(rates), bool),
    }[where]
    share = take / rates[chosen].sum()
    assert share <= 1, f"{where} cannot lose so much"
    return np.where(chosen, rates * (1 - share), rates)


def plan(*exams: Exam, looks: tuple[float, ...] = (1.0,), limit: int | None = None) -> EvalPlan:
    return EvalPlan(
        registered_utc="2026-12-01T00:00:00Z",
        tasks=[
            TaskPlan(
                task=exam.task,
                data=DataFacts(name="invented", sha256="0" * 64, items=len(exam.rates)),
                repeats=exam.repeats,
                seed=1000,
                sampling={},
                concurrency=1,
                margin=exam.margin,
                looks=list(looks),
            )
            for exam in exams
        ],
        limit=limit,
    )


def sit(exam: Exam, rates: Floats, rng: np.random.Generator) -> pl.DataFrame:
    """Answers of a backend with these chances."""
    right = rng.random((len(rates), exam.repeats)) < rates[:, None]
    score = right.astype(float)
    if exam.task == "mrcr":
        score = np.where(right, RIGHT_PIECE, WRONG_PIECE) + rng.uniform(-0.02, 0.02, right.shape)
    return answers(exam, score, right)


def answers(exam: Exam, score: Floats, right: np.ndarray) -> pl.DataFrame:
    """A whole frame of answers from scores of items x repeats."""
    asked = _asked(len(exam.rates), exam.repeats, tuple(exam.bins) if exam.bins else None)
    return asked.with_columns(
        outcome=pl.Series(np.where(right.ravel(), "right", "wrong"), dtype=pl.String), score=pl.Series(score.ravel())
    ).select(list(COLUMNS))


@cache
def _asked(items: int, repeats: int, bins: tuple[str, ...] | None) -> pl.DataFrame:
    item, repeat = np.divmod(np.arange(items * repeats), repeats)
    text = [str(each) for each in item]
    where = [bins[each] for each in item] if bins else None
    return pl.DataFrame(
        {
            "item": item,
            "item_hash": text,
            "prompt_hash": text,
            "repeat": repeat,
            "seed": 1000 + repeat,
            "attempts": np.ones(len(item), int),
            "bin": where or [None] * len(item),
            "cell": [f"bin {name}" for name in where] if where else [None] * len(item),
        },
        schema={name: kind for name, kind in COLUMNS.items() if name not in ("outcome", "score")},
    )
