"""Synthetic agent sessions whose lengths, pauses and reuse follow those measured on recorded coding sessions.

Every quantity is drawn by inverse-CDF interpolation through the measured quantiles, from random.Random seeded by
SHA-256 of (seed, session), and rounded to whole tokens and milliseconds: the same settings give the same sessions on
every platform. Asking for more sessions does not change the first ones.
"""

from __future__ import annotations

import hashlib
import math
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import msgspec

from workloads.errors import UserError
from workloads.formats import weka
from workloads.trace import Notes, Trace

Table = tuple[tuple[float, float], ...]
"""A measured distribution: (percentile / 100, value), both rising, values above 0."""

MODEL = "synthetic-agent"


def _table(*values: float, tail: tuple[float, float] | None = None) -> Table:
    """A table from the values at 0, 1, 5, 10, 25, 50, 75, 90, 95, 99 and 100 %, with one more point in the tail."""
    shares = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
    return tuple(sorted([*zip(shares, values, strict=True), *([tail] if tail else [])]))


# Measured on 710 kv-cache-tester sessions, 49,334 requests.
TURNS = _table(3, 3, 4, 7, 18, 45.5, 94, 157, 233, 341, 561)
FIRST_INPUT = _table(6343, 10245, 13048, 15458, 18600, 24454, 104058, 258903, 374960, 708057, 851858)
PEAK_CONTEXT = _table(11145, 19595, 48809, 67098, 112195, 148473, 186216, 341042, 468434, 791262, 895166)
PREFIX = _table(4210, 8641, 10068, 11898, 12901, 14948, 15457, 15930, 16799, 21131, 23081)
GROWTH = _table(18, 71.6, 149, 185, 326, 655, 1567, 3615, 6345, 16815, 91670, tail=(0.999, 58450))
OUTPUT = _table(20, 58, 89, 105, 137, 216, 426, 898, 1554, 3686, 18195)
TOOL_PAUSE_S = _table(0.2, 2.27, 3.33, 3.91, 5.3, 8.58, 19.2, 72.2, 167, 914, 77590, tail=(0.9995, 20000))
USER_PAUSE_S = _table(0.2, 2.97, 6, 7, 10, 21, 129, 610, 1590, 6854, 72013)
TTFT_S = _table(0.45, 0.98, 1.45, 1.61, 1.96, 2.51, 3.81, 6.58, 9.84, 19.6, 59.5)
DECODE_TOK_S = _table(2.92, 26.3, 40, 43.2, 49.2, 57.8, 70.1, 85.1, 96.5, 147, 531)
CALLS = _table(2, 3.24, 4, 5, 7, 11, 13, 17, 21.7, 24, 24)
# Measured on the 32 subagents (348 requests) of the 49 sessions that the tests read.
AGENT_FIRST_INPUT = _table(8974, 8985, 9014, 9047, 9487, 10340, 11430, 11750, 14680, 18260, 18260)
AGENT_GROWTH = _table(159, 188, 343, 482, 955, 2637, 5777, 14540, 22260, 59410, 71830)
AGENT_PAUSE_S = _table(0.68, 1.06, 1.9, 2.29, 2.94, 3.75, 6.09, 22.3, 38.2, 65, 125)

USER_TURN_SHARE = 6486 / 48561
REWIND_SHARE = 3321 / 48561
REWIND_BLOCKS = ((0.5935, 1, 1), (0.7194, 2, 16), (0.776, 17, 512))
"""Blocks lost by a rewind: cumulative share, least, most; log-uniform between. The rest go back to the prefix."""
REWIND_TO_ZERO = 83 / 744
"""Share of those that lose the prefix too."""
GROWTH_FOLLOWS_OUTPUT = 0.37
"""Rank correlation of a prompt's growth with the answer before it."""
LIMIT_SHARES = (0.35, 1.0)
"""Where in the distribution of peak contexts a session's limit is drawn: short sessions end before they reach one."""
FIRST_OPPOSES_TURNS = 0.18
"""Rank correlation, negated, of a session's number of turns with its first input."""
UNSTREAMED = 0.82
"""TTFT and decode speed were recorded for streamed requests only (8 %). The service times of all are shorter than
those two make them, by this factor at the 10th, 50th and 90th percentile alike."""
COMPACTED = (0.2, 0.9)
"""What compaction leaves of a context that has reached the session's limit, as shares of its length."""
AGENT_KINDS = ((55 / 63, "Explore"), (61 / 63, "general-purpose"), (1.0, "Plan"))


@dataclass(frozen=True, kw_only=True)
class GeneratorSettings:
    """What to generate. The defaults follow the recorded sessions; limits cut a distribution off, they do not pile
    values up at its end."""

    sessions: int = 100
    """How many sessions."""
    seed: int = 42
    """Another seed gives other sessions of the same kind."""
    input_scale: float = 1.0
    """Factor on prompt lengths: first inputs, growth, prefixes, rewinds."""
    output_scale: float = 1.0
    """Factor on answer lengths."""
    pause_scale: float = 1.0
    """Factor on the pauses between an answer and the next request."""
    max_turns: int | None = None
    """Most turns of any stream."""
    max_context: int | None = None
    """Most tokens of a prompt and its answer together; a longer conversation is compacted."""
    max_output: int | None = None
    """Longest answer, tokens."""
    max_pause_s: float | None = None
    """Longest pause, seconds."""
    subagent_share: float = 0.024
    """Share of sessions with subagents."""
    subagents: float = 3.7
    """Mean number of subagents in a session that has any."""
    background_share: float = 0.063
    """Share of subagents that nothing waits for."""
    blocking_share: float = 0.175
    """Share of subagents whose parent does nothing else until they have ended (and had more turns to do)."""
    block_size: int = 64
    """Tokens of a block, the unit in which prompts share content."""


DEMO = GeneratorSettings(
    sessions=12,
    seed=936,
    input_scale=0.15,
    output_scale=0.6,
    pause_scale=0.05,
    max_turns=8,
    max_context=16_000,
    max_output=250,
    max_pause_s=2.0,
    subagent_share=0.4,
    subagents=1.5,
    background_share=0.3,
    blocking_share=0.6,
)
"""The workload packaged as demo.jsonl: small enough for a minute on an emulated server."""


LONGEST_PAUSE_S = 90 * 86_400.0
"""Longest pause that may be asked for: sessions that rest for a year are not taken for one session."""
MOST_BLOCKS = 500_000
"""Most blocks of a prompt: a session holds the ids of all of its prompts while it is made."""
MOST_SUBAGENTS = 1000.0


def generate(settings: GeneratorSettings) -> Iterator[Trace]:
    """Yield synthetic sessions, one at a time. Raises UserError for settings that no session can meet."""
    _check(settings)
    for number in range(settings.sessions):
        seed = hashlib.sha256(f"decodegate workload {settings.seed} {number}".encode()).digest()
        session = _Session(settings, random.Random(int.from_bytes(seed[:8], "big"))).session(f"synthetic-{number:05d}")
        yield weka.trace(msgspec.json.encode(session), session["id"], Notes())


def _check(settings: GeneratorSettings) -> None:
    for name in ("input_scale", "output_scale", "pause_scale"):
        if not 0 < getattr(settings, name) < math.inf:
            raise UserError(f"{name} must be above 0, not {getattr(settings, name)}")
    for name in ("subagent_share", "background_share", "blocking_share"):
        if not 0 <= getattr(settings, name) <= 1:
            raise UserError(f"{name} is a share from 0 to 1, not {getattr(settings, name)}")
    if settings.sessions < 1 or settings.block_size < 1 or not settings.subagents >= 1:
        raise UserError("sessions, block_size and subagents must be at least 1")
    if settings.subagents > MOST_SUBAGENTS:
        raise UserError(f"subagents must be at most {MOST_SUBAGENTS:g}, not {settings.subagents:g}")
    context = max(PEAK_CONTEXT[-1][1], 1.2 * FIRST_INPUT[-1][1])
    for name, longest, most, cut, bound in (
        ("input_scale", context, settings.max_context, "max_context", weka.MOST_TOKENS),
        ("output_scale", OUTPUT[-1][1], settings.max_output, "max_output", weka.MOST_TOKENS),
        ("pause_scale", max(TOOL_PAUSE_S[-1][1], USER_PAUSE_S[-1][1]), settings.max_pause_s, "max_pause_s",
         LONGEST_PAUSE_S),
    ):  # fmt: skip
        if min(longest * getattr(settings, name), math.inf if most is None else most) > bound:
            unit = "s" if name == "pause_scale" else "tokens"
            raise UserError(
                f"{name} must be at most {math.floor(bound / longest)}, not {getattr(settings, name):g}, or {cut} be "
                f"set, to at most {bound:,.0f} {unit}: nothing longer is generated"
            )
    tokens = min(context * settings.input_scale, settings.max_context or math.inf)
    if tokens / settings.block_size > MOST_BLOCKS:
        raise UserError(
            f"block_size must be at least {math.ceil(tokens / MOST_BLOCKS)} for prompts of up to {tokens:,.0f} tokens, "
            f"not {settings.block_size}: a prompt has at most {MOST_BLOCKS:,} blocks "
            "(or lower input_scale or max_context)"
        )
    for name, table, scale, least in (
        ("max_turns", TURNS, 1.0, "the shortest sessions have that many turns"),
        ("max_output", OUTPUT, settings.output_scale, "lower output_scale for shorter answers"),
        ("max_pause_s", USER_PAUSE_S, settings.pause_scale, "lower pause_scale for shorter pauses"),
        ("max_context", FIRST_INPUT, settings.input_scale, "lower input_scale for shorter prompts"),
    ):
        most = getattr(settings, name)
        floor = table[0][1] * scale * (2 if name == "max_context" else 1)
        if most is not None and most < floor:
            raise UserError(f"{name} must be at least {floor:g}, not {most:g}: {least}")


def value_at(table: Table, share: float) -> float:
    """The value below which ``share`` (0 to 1) of the distribution lies: log-linear between the table's points."""
    place = min(max(bisect_right(table, share, key=lambda point: point[0]), 1), len(table) - 1)
    (share_0, value_0), (share_1, value_1) = table[place - 1], table[place]
    return float(value_0 * (value_1 / value_0) ** ((share - share_0) / (share_1 - share_0)))


def share_below(table: Table, value: float) -> float:
    """The share (0 to 1) of the distribution that lies below ``value``; the inverse of ``value_at``."""
    for (share_0, value_0), (share_1, value_1) in pairwise(table):
        if value < value_1:
            return share_0 + (share_1 - share_0) * max(0.0, math.log(value / value_0) / math.log(value_1 / value_0))
    return 1.0


class _Session:
    """One session in the making: the settings, its source of chance, and the next unused block id."""

    def __init__(self, settings: GeneratorSettings, chance: random.Random) -> None:
        self.settings = settings
        self.chance = chance.random
        self.ids = count(1)

    def draw(self, table: Table, scale: float = 1.0, most: float | None = None, share: float | None = None) -> float:
        """A value of the scaled distribution, given that it is at most ``most``."""
        share = self.chance() if share is None else share
        if most is not None:
            share *= share_below(table, most / scale)
        return value_at(table, share) * scale

    def session(self, name: str) -> dict[str, Any]:
        """A whole session in the Weka format."""
        settings = self.settings
        share = self.chance()
        turns = round(self.draw(TURNS, most=settings.max_turns, share=share))
        share = 1 - share if self.chance() < FIRST_OPPOSES_TURNS else self.chance()
        room = None if settings.max_context is None else 0.5 * settings.max_context
        first = self.draw(FIRST_INPUT, settings.input_scale, room, share)
        prefix = min(self.draw(PREFIX, settings.input_scale), 0.9 * first)
        requests = self.calls(0.0, turns, first, prefix, GROWTH, (TOOL_PAUSE_S, USER_PAUSE_S))
        if self.chance() < settings.subagent_share:
            more = 1 - 1 / settings.subagents
            agents = 1 + (int(math.log(1 - self.chance()) / math.log(more)) if more > 0 else 0)
            spawns = sorted(int(self.chance() * (turns - 1)) for _ in range(agents))
            children = [self.subagent(requests, spawn, number) for number, spawn in enumerate(spawns, 1)]
            requests = sorted(requests + children, key=lambda request: float(request["t"]))
        return {
            "id": name,
            "models": [MODEL],
            "block_size": settings.block_size,
            "hash_id_scope": "local",
            "tool_tokens": 0,
            "system_tokens": round(prefix),
            "requests": requests,
        }

    def subagent(self, parent: list[dict[str, Any]], spawn: int, number: int) -> dict[str, Any]:
        """A subagent started by the reply of call ``spawn`` of its parent, whose later calls it may put off."""
        settings = self.settings
        reply = parent[spawn]["t"] + parent[spawn]["api_time"]
        start = round(reply + min(0.1 + self.chance(), 0.5 * (parent[spawn + 1]["t"] - reply)), 3)
        turns = round(self.draw(CALLS, most=settings.max_turns))
        room = None if settings.max_context is None else 0.5 * settings.max_context
        first = self.draw(AGENT_FIRST_INPUT, settings.input_scale, room)
        calls = self.calls(start, turns, first, 0.9 * first, AGENT_GROWTH, (AGENT_PAUSE_S, AGENT_PAUSE_S))
        background = self.chance() < settings.background_share
        kind = self.chance()
        end = calls[-1]["t"] + calls[-1]["api_time"]
        if not background and self.chance() < settings.blocking_share:
            pause = self.draw(TOOL_PAUSE_S, settings.pause_scale, settings.max_pause_s)
            late = max(0.0, end + pause - parent[spawn + 1]["t"])
            for call in parent[spawn + 1 :]:
                call["t"] = round(call["t"] + late, 3)
        return {
            "t": start,
            "type": "subagent",
            "agent_id": f"agent_{number:03d}",
            "subagent_type": next(name for share, name in AGENT_KINDS if kind < share),
            "duration_ms": None if background else round((end - start) * 1000),
            "total_tokens": sum(call["in"] + call["out"] for call in calls),
            "tool_use_count": turns - 1,
            "status": "async_launched" if background else "completed",
            "models": [MODEL],
            "tool_tokens": 0,
            "system_tokens": 0,
            "requests": calls,
        }

    def calls(
        self, start: float, turns: int, first: float, prefix: float, growth: Table, pauses: tuple[Table, Table]
    ) -> list[dict[str, Any]]:
        """One agent's calls from ``start`` seconds on: ``first`` and ``prefix`` in tokens, already scaled."""
        settings = self.settings
        size = settings.block_size
        low, high = LIMIT_SHARES
        limit = max(
            self.draw(PEAK_CONTEXT, settings.input_scale, share=low + (high - low) * self.chance()), 1.2 * first
        )
        if settings.max_context is not None:
            limit = min(limit, settings.max_context)
        tool_pause, user_pause = pauses
        calls: list[dict[str, Any]] = []
        ids: list[int] = []
        length, now, share_before, kind = first, start, 0.0, "text"
        for turn in range(turns):
            output_share = self.chance()
            most_output = min(settings.max_output or math.inf, 0.4 * limit)
            drawn = self.draw(OUTPUT, settings.output_scale, most_output, output_share)
            output = max(1, round(min(drawn, most_output)))
            if turn:
                share = share_before if self.chance() < GROWTH_FOLLOWS_OUTPUT else self.chance()
                grown = length + max(1.0, self.draw(growth, settings.input_scale, share=share))
                kept = len(ids)
                if grown + output > limit:
                    low, high = COMPACTED
                    grown = max(prefix, (low + (high - low) * self.chance()) * min(length, limit - output))
                    kept = int(prefix / size)
                elif self.chance() < REWIND_SHARE:
                    kept = self.rewound(kept, int(prefix / size))
                length = grown
                ids = ids[: min(kept, int(length) // size)]
            tokens = max(1, round(length))
            ids = ids + [next(self.ids) for _ in range(tokens // size - len(ids))]
            ttft = round(UNSTREAMED * self.draw(TTFT_S), 3)
            service = round(ttft + UNSTREAMED * (output - 1) / self.draw(DECODE_TOK_S), 3)
            user_next = self.chance() < USER_TURN_SHARE
            stop = "end_turn" if user_next or turn == turns - 1 else "tool_use"
            calls.append(
                {
                    "t": now,
                    "type": "s",
                    "model": MODEL,
                    "in": tokens,
                    "out": output,
                    "hash_ids": ids,
                    "input_types": [kind],
                    "output_types": ["tool_use" if stop == "tool_use" else "text"],
                    "stop": stop,
                    "api_time": service,
                    "ttft": ttft,
                }
            )
            share_before = output_share
            pause = self.draw(user_pause if user_next else tool_pause, settings.pause_scale, settings.max_pause_s)
            now = round(now + service + pause, 3)
            kind = "text" if user_next else "tool_result"
        return calls

    def rewound(self, blocks: int, prefix: int) -> int:
        """How many of ``blocks`` a rewind leaves; the larger ones scale with the prompts."""
        chance = self.chance()
        for share, least, most in REWIND_BLOCKS:
            if chance < share:
                lost = least * (most / least) ** self.chance()
                return max(0, blocks - (1 if most == 1 else max(1, round(lost * self.settings.input_scale))))
        return 0 if self.chance() < REWIND_TO_ZERO else min(prefix, blocks)
