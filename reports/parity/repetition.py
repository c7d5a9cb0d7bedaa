"""Loops (L2, D7): answers that repeat themselves, from their token ids.

An answer loops if at least half of the n-grams at its end are repeated. Sound answers do not, so that counting those
that do sees few loops among few answers: the runs of both arms are exchanged within their prompt (exact, as for right
answers in accuracy/harm.py). Smaller changes are seen by the mean measure of a prompt's runs, by signs.
"""

from __future__ import annotations

import zlib

import msgspec
import numpy as np

from reports.accuracy.harm import sign_flip, stratified
from reports.parity.divergences import Flags, Floats, Ids
from reports.parity.result import Finding

GRAM = 32
LAST = 2_048
LONGEST_PERIOD = 512
LOOPS = 0.5
"""Share of repeated n-grams from which on an answer loops."""


class Loop(msgspec.Struct, frozen=True):
    """The longest stretch in which every token is that of ``period`` tokens before: ``tokens`` long with its first
    period; 0 without one."""

    period: int
    tokens: int


def repeated_share(tokens: Ids, gram: int = GRAM, last: int = LAST) -> float | None:
    """Of the n-grams in the last tokens, those that were there before; null for answers shorter than two n-grams."""
    tail = tokens[-last:]
    if len(tail) < 2 * gram:
        return None
    grams = np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(tail, gram))
    distinct = len({row.tobytes() for row in grams})
    return 1 - distinct / len(grams)


def longest_loop(tokens: Ids, last: int = LAST) -> Loop:
    """In the last tokens, of periods up to LONGEST_PERIOD that fit twice; of equally long ones the shortest period."""
    tail = tokens[-last:]
    best = Loop(0, 0)
    for period in range(1, min(LONGEST_PERIOD, len(tail) // 2) + 1):
        run = _longest_true(tail[period:] == tail[:-period])
        if run >= period and run + period > best.tokens:
            best = Loop(period, run + period)
    return best


def longest_run(tokens: Ids) -> int:
    """Of one token, anywhere (D7's ``!!!!``)."""
    return 1 + _longest_true(tokens[1:] == tokens[:-1]) if len(tokens) else 0


def compressed_share(tokens: Ids, last: int = LAST) -> float | None:
    """Bytes of the last tokens' ids after deflation, as a share of those before; null without tokens."""
    raw = tokens[-last:].astype("<i4").tobytes()
    return len(zlib.compress(raw, 6)) / len(raw) if raw else None


def loops(candidate: Flags, baseline: Flags) -> Finding:
    """Answers that loop, [prompts, runs] of both arms, as many runs of each: shares, the baseline's as the floor."""
    n = len(candidate)
    if not candidate.size:
        return Finding(n=n, unit="prompts", reason="No answer was long enough.")
    sound, candidate_sound = (1 - each.astype(np.float64) for each in (baseline, candidate))
    return Finding(
        n=n,
        unit="prompts",
        statistic=float(candidate.mean()),
        floor=float(baseline.mean()),
        p=stratified(sound, candidate_sound),
    )


def more_repetition(candidate: Floats, baseline: Floats) -> Finding:
    """Any of the measures, larger where answers repeat more, [prompts, runs] of both arms: means, the baseline's as the
    floor."""
    n = len(candidate)
    if not candidate.size:
        return Finding(n=n, unit="prompts", reason="No answer was long enough.")
    return Finding(
        n=n,
        unit="prompts",
        statistic=float(candidate.mean()),
        floor=float(baseline.mean()),
        p=sign_flip(candidate.mean(axis=1) - baseline.mean(axis=1)),
    )


def _longest_true(flags: Flags) -> int:
    ends = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return int((ends[1::2] - ends[::2]).max()) if len(ends) else 0
