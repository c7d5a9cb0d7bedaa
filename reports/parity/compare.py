"""Two arms, position by position: how far apart they are wherever both computed the same thing.

Where ids were forced, that is every position. Free replies are compared up to their first unlike token, that one
included: there both still had the same tokens before them. What was decoded alike says how far the logprob of the first
arm's token is from the second's; of an unlike free token, by the second's list of likely tokens, where one that is not
listed is at most as likely as the last that is. An unlike token where both were forced is infinitely far.

Lists are read slice by slice of cases. What stays are about 20 bytes a position and pair of arms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from evals.records import ArmName, Case
from reports.parity.divergences import Flags, Floats, deltas, gaps, kl, same_top
from reports.parity.load import Positions, Records, Sheet

Ints = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]


class Ends(msgspec.Struct, frozen=True):
    """Free replies of both arms: how many tokens they share, and whether they then differ."""

    case: Ints
    repeat: Ints
    steps: Ints
    diverged: Flags
    gap: Floats
    """Of the first arm's two likeliest tokens at the difference; NaN where it is not told, or there is none."""


class Pair(msgspec.Struct, frozen=True):
    """``one`` against ``other``, over the positions that can be compared, by case, repeat and position."""

    one: str
    other: str
    case: npt.NDArray[np.int32]
    repeat: npt.NDArray[np.int16]
    position: npt.NDArray[np.int32]
    delta: Float32s
    """As divergences.deltas; only of positions whose logprob both arms told: NaN elsewhere."""
    kl: Float32s
    """Empty where lists of likely tokens were not told."""
    differs: Flags
    """The likeliest tokens differ; empty likewise."""
    shifts: Float32s
    """By how much the gap between the two likeliest tokens differs, where free replies still agree."""
    ends: Ends

    @property
    def name(self) -> str:
        """ "B1-A1": the second arm is the one that is judged."""
        return f"{self.other}-{self.one}"

    @property
    def told(self) -> Flags:
        """Positions with a delta."""
        found: Flags = ~np.isnan(self.delta)
        return found


Forced = Callable[[Ints], Flags]
"""Whether the ids of cases were forced."""


def forced_in(cases: Mapping[int, Case]) -> Forced:
    """Of a check's cases."""
    forced = np.array([number for number, each in cases.items() if each.trace is not None and each.cut is None])
    return lambda numbers: np.isin(numbers, forced)


def compare(
    records: Records, check: str, pairs: Sequence[tuple[ArmName, ArmName]], *, lists: bool = True
) -> list[Pair]:
    """Pairs of arms of one check, all of which it has ended on. Without ``lists`` by the tokens' own logprobs alone."""
    arms = sorted({arm for pair in pairs for arm in pair})
    sheets = {arm: records.sheets[arm, check] for arm in arms}
    forced = forced_in(records.case[check])
    parts: list[list[Pair]] = [[] for _ in pairs]
    for first, last in _together(list(sheets.values())):
        read = {arm: sheet.positions(first, last, lists=lists) for arm, sheet in sheets.items()}
        for (one, other), found in zip(pairs, parts, strict=True):
            found.append(pair(one, other, read[one], read[other], forced))
    if not parts or not parts[0]:
        nothing = sheets[arms[0]].positions(0, 0, lists=lists).of({})
        return [pair(one, other, nothing, nothing, forced) for one, other in pairs]
    return [_joined(each) for each in parts]


def _together(sheets: list[Sheet]) -> list[tuple[int, int]]:
    """Slices by the arm with the most positions, that hold every case of the others."""
    ranges = list(max(sheets, key=lambda each: each.run.positions).slices())
    last = max((reply.case for sheet in sheets for reply in sheet.replies), default=-1)
    if ranges and last > ranges[-1][1]:
        ranges[-1] = (ranges[-1][0], last)
    return ranges


def pair(one: str, other: str, mine: Positions, theirs: Positions, forced: Forced) -> Pair:
    """Two arms' positions of the same cases."""
    _, at, other_at = np.intersect1d(mine.key, theirs.key, assume_unique=True, return_indices=True)
    key = mine.key[at]
    reply = key >> 32
    same = mine.token[at] == theirs.token[other_at]
    free = ~forced(mine.case[at])
    kept = ~free | (_before(~same, reply) == 0)
    ends = _ends(mine, theirs, same, free, at)
    at, other_at, same, free = at[kept], other_at[kept], same[kept], free[kept]
    logprob, other_logprob = mine.logprob[at], theirs.logprob[other_at]
    delta = deltas(logprob, other_logprob)
    told = mine.told[at] & theirs.told[other_at]
    width = min(mine.top_ids.shape[1], theirs.top_ids.shape[1])
    divergence, differs, shifts = np.empty(0, np.float32), np.empty(0, np.bool_), np.empty(0, np.float32)
    unlike = np.flatnonzero(~same)
    delta[unlike] = np.inf
    told[unlike[free[unlike]]] = False
    if width > 1 and len(at):
        lists = [_wide(each, rows, width) for each, rows in ((mine, at), (theirs, other_at))]
        (ids, logprobs), (other_ids, other_logprobs) = lists
        divergence = kl(ids, logprobs, other_ids, other_logprobs).astype(np.float32)
        differs = ~same_top(ids, other_ids)
        agreeing = free & same
        with np.errstate(invalid="ignore"):
            shift = gaps(logprobs[agreeing]) - gaps(other_logprobs[agreeing])
        shifts = shift[np.isfinite(shift)].astype(np.float32)
        rows = unlike[free[unlike]]
        delta[rows] = _of_unlike(mine.token[at[rows]], logprob[rows], other_ids[rows], other_logprobs[rows])
        told[rows] = True
    return Pair(
        one=one,
        other=other,
        case=mine.case[at].astype(np.int32),
        repeat=mine.repeat[at].astype(np.int16),
        position=mine.position[at].astype(np.int32),
        delta=np.where(told, delta, np.nan).astype(np.float32),
        kl=divergence,
        differs=differs,
        shifts=shifts,
        ends=ends,
    )


def _before(flags: Flags, reply: Ints) -> Ints:
    """How many flags a reply has before each of its positions."""
    through = flags.cumsum()
    starts = np.searchsorted(reply, reply)
    before: Ints = through - flags - (through - flags)[starts]
    return before


def _ends(mine: Positions, theirs: Positions, same: Flags, free: Flags, at: Ints) -> Ends:
    """``same`` and ``free`` are of the positions that both have, ``at`` in the first arm's."""
    replies, lengths = np.unique(mine.key >> 32, return_counts=True)
    others, other_lengths = np.unique(theirs.key >> 32, return_counts=True)
    both, index, other_index = np.intersect1d(replies, others, assume_unique=True, return_indices=True)
    reply = mine.key[at] >> 32
    start = np.searchsorted(reply, both)
    common = np.minimum(lengths[index], other_lengths[other_index])
    bad = np.flatnonzero(~same)
    next_bad = np.append(bad, len(same))[np.searchsorted(bad, start)] - start
    steps = np.minimum(next_bad, common)
    diverged = (steps < common) | (lengths[index] != other_lengths[other_index])
    kept = free[np.minimum(start, max(len(free) - 1, 0))] if len(free) else np.zeros(len(both), np.bool_)
    gap = np.full(len(both), np.nan)
    if mine.top_logprobs.shape[1] > 1:
        differing = np.flatnonzero(steps < common)
        gap[differing] = gaps(mine.top_logprobs[at[start[differing] + steps[differing]]])
    return Ends(
        case=(both >> 16)[kept],
        repeat=(both & (2**16 - 1))[kept],
        steps=steps[kept].astype(np.int64),
        diverged=diverged[kept],
        gap=gap[kept],
    )


def _wide(positions: Positions, rows: Ints, width: int) -> tuple[Any, Any]:
    return positions.top_ids[rows, :width], positions.top_logprobs[rows, :width]


def _of_unlike(token: Any, logprob: Any, other_ids: Any, other_logprobs: Any) -> Floats:
    """How far the second arm's logprobs of the first arm's tokens are, at least."""
    listed = other_ids == token[:, None]
    with np.errstate(invalid="ignore"):
        last = np.where(np.isfinite(other_logprobs), other_logprobs, np.inf).min(axis=1, initial=np.inf)
        least = np.where(np.isfinite(last), np.maximum(logprob - last, 0.0), np.inf)
        found = np.abs(logprob - np.where(listed, other_logprobs, 0.0).sum(axis=1))
    return np.where(listed.any(axis=1), found, least).astype(np.float64)


def _joined(parts: list[Pair]) -> Pair:
    if len(parts) == 1:
        return parts[0]
    names = [name for name in Pair.__struct_fields__ if name not in ("one", "other", "ends")]
    ends = [np.concatenate([getattr(each.ends, name) for each in parts]) for name in Ends.__struct_fields__]
    return Pair(
        one=parts[0].one,
        other=parts[0].other,
        ends=Ends(*ends),
        **{name: np.concatenate([getattr(each, name) for each in parts]) for name in names},
    )
