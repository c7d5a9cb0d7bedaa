"""Simulated A/B experiments at the level of measures, with a known true ratio, for the coverage of the interval.

Run it (`python -m tests.reports.experiments`) to print the table that stands in reports/intervals.py.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from reports.intervals import Estimate, effects, resample

Floats = npt.NDArray[np.float64]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulated experiment looks like. Noise terms are standard deviations of the logarithm of seconds per
    token."""

    sessions: int = 24
    ratio: float = 1.3
    """True candidate/baseline ratio of P90 interactivity."""
    order: str = "ABBA"
    median_turns: float = 45.0
    length_spread: float = 1.2
    """Of log session length: 1.2 gives the measured p10 7, p50 45, p90 157 turns."""
    session_effect: float = 0.15
    turn_noise: float = 0.1
    session_block_noise: float = 0.05
    """One draw per session and block, shared by its turns: what makes turns of a session not independent."""
    context_slope: float = 0.3
    """Share by which 100k tokens of context slow a token down."""
    heavy_tails: bool = False
    """Turn noise from Student's t with 3 degrees of freedom, and one turn in twenty hit by an exponential stall."""
    drift_per_minute: float = 0.0
    """Linear growth of token time, as a share of its first value; blocks are ten minutes."""


CASES = {
    "24 sessions, ratio 1.3": Case(),
    "49 sessions, ratio 1.3": Case(sessions=49),
    "A against A, drift 1 %/min, 24 sessions": Case(ratio=1.0, drift_per_minute=0.01),
    "A against A, drift 1 %/min, 49 sessions": Case(sessions=49, ratio=1.0, drift_per_minute=0.01),
    "24 sessions, heavy tails": Case(heavy_tails=True),
    "24 sessions, session-by-block noise 15 %": Case(session_block_noise=0.15),
    "24 sessions, no session-by-block noise": Case(session_block_noise=0.0),
    "12 sessions": Case(sessions=12),
    "12 sessions, heavy tails": Case(sessions=12, heavy_tails=True),
    "12 short sessions (about 6 turns)": Case(sessions=12, median_turns=6.0, length_spread=0.5),
    "8 sessions": Case(sessions=8),
}


def experiment(case: Case, seed: int) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Seconds per token, blocks x turns, and each turn's session."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(math.log(case.median_turns), case.length_spread, case.sessions))
    turns = np.clip(np.round(lengths), 3, 561).astype(int)
    session = np.repeat(np.arange(case.sessions), turns)
    progress = np.concatenate([np.arange(n) / n for n in turns])
    context = np.exp(rng.normal(0, 0.5, case.sessions))[session] * (0.3 + progress)  # in units of 100k tokens
    start = rng.uniform(0, 0.3, case.sessions)[session]
    minute = 10 * (start + (1 - start) * progress)  # inside its block; pauses are the same in every block
    base = (
        0.005 * np.exp(rng.normal(0, case.session_effect, case.sessions))[session] * (1 + case.context_slope * context)
    )
    blocks = []
    for index, backend in enumerate(case.order):
        noise = case.turn_noise * (
            rng.standard_t(3, len(session)) if case.heavy_tails else rng.normal(size=len(session))
        )
        if case.heavy_tails:
            noise += (rng.random(len(session)) < 0.05) * rng.exponential(1, len(session))
        shared = rng.normal(0, case.session_block_noise, case.sessions)[session]
        seconds = base * np.exp(noise + shared) / (case.ratio if backend == "B" else 1.0)
        blocks.append(seconds * (1 + case.drift_per_minute * (10 * index + minute)))
    return np.array(blocks), session


def ratio(case: Case, seed: int, weights: Floats) -> Estimate:
    """The estimated ratio of P90 interactivity of one simulated experiment."""
    values, session = experiment(case, seed)
    candidate = np.array([backend == "B" for backend in case.order])
    return effects(values, session, candidate, weights, [0.9], rate=True)[0].ratio


def coverage(case: Case, seeds: range, **options: Any) -> float:
    """Share of the seeds whose interval covers the true ratio."""
    weights = resample(case.sessions, **options)
    found = (ratio(case, seed, weights) for seed in seeds)
    return float(np.mean([e.low is not None and e.high is not None and e.low <= case.ratio <= e.high for e in found]))


if __name__ == "__main__":
    for name, case in CASES.items():
        print(f"{name:42} {100 * coverage(case, range(2000)):5.1f} %", flush=True)
