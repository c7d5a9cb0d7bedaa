"""The plan: workload + seed + lanes + limits, expanded into who sends what after what.

Built in one pass over the traces, one trace in memory at a time; saved as plan.json and sessions.jsonl; the same bytes
for the same input on every platform. Nothing here knows a server or a clock.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from replay import source
from replay.experiment import Experiment, Replay, Workload
from replay.records import Plan, Play, Session, Stream, Turn
from workloads import trace as traces
from workloads.content import stable_bytes, stable_random
from workloads.errors import UserError


class _Sketch(msgspec.Struct):
    """What stays in memory of a planned session while the others are read."""

    id: str
    estimated_s: float
    main_turns: int
    """Turns of the main agent that will be sent."""
    turns: dict[str, int]
    """Turns by fate."""
    pause_recorded_s: float
    """Pauses of turns that will be sent, as recorded."""
    pause_kept_s: float
    """The same as planned."""
    intervals: list[tuple[float, float]]
    """Open loop: [start, end) of each turn on the session's own clock."""


def build_plan(
    workload: Iterable[traces.Trace],
    experiment: Experiment,
    *,
    max_context: int | None,
    rendering_digest: str,
    folder: Path,
    notes: traces.Notes | None = None,
) -> Plan:
    """Write plan.json and sessions.jsonl into ``folder`` and return the plan.

    ``max_context``: largest prompt + output of a turn, tokens, or None. ``notes``: what reading the workload met; taken
    into ``Plan.lost``. Raises UserError when nothing is left to send.
    """
    replay, cuts = experiment.replay, source.described(experiment)
    lost: dict[str, int] = {}
    sketches = []
    sessions_file = folder / "sessions.jsonl"
    with sessions_file.open("wb") as file:
        for trace in workload:
            session = _planned(trace, cuts, replay, max_context, lost)
            if session is None:
                continue
            file.write(msgspec.json.encode(session) + b"\n")
            sketches.append(_sketch(trace, session, replay))
    if not sketches:
        reasons = ", ".join(f"{kind}: {count}" for kind, count in lost.items()) or "no session was read"
        raise UserError(f"nothing to send ({reasons}); check workload.path and workload.max_context")
    chosen = _chosen(sketches, cuts.sessions, replay.seed)
    lanes = _dealt(sketches, chosen, replay)
    plays = [play for entries in lanes for play in entries]
    if replay.mode == "open":
        recorded_s, kept_s = _place_on_the_clock(sessions_file, sketches, lanes, replay)
    else:
        recorded_s = sum(sketches[play.session].pause_recorded_s for play in plays)
        kept_s = sum(sketches[play.session].pause_kept_s for play in plays)
    with sessions_file.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if len(chosen) < len(sketches):
        beyond = set(range(len(sketches))) - set(chosen)
        lost["session beyond workload.sessions"] = len(beyond)
        lost["turns of a session beyond workload.sessions"] = sum(sum(sketches[n].turns.values()) for n in beyond)
    plan = Plan(
        seed=replay.seed,
        mode=replay.mode,
        end=replay.end,
        duration_s=replay.duration_s,
        drain_s=replay.drain_s,
        lanes=lanes,
        lane_start_s=[round(replay.ramp_s * lane / len(lanes), 6) for lane in range(len(lanes))],
        sessions=len(sketches),
        sessions_digest=digest,
        api=experiment.api,
        rendering_digest=rendering_digest,
        pause_cap_s=replay.pause_cap_s if replay.mode == "closed" else replay.idle_cap_s,
        pause_removed_share=_share(recorded_s - kept_s, recorded_s),
        estimated_s=round(max(sum(sketches[p.session].estimated_s for p in entries) for entries in lanes), 1),
        turns=_turns_by_fate(sessions_file, sketches, plays),
        lost=dict(sorted({**(notes.counts if notes else {}), **lost}.items())),
    )
    (folder / "plan.json").write_bytes(plan_bytes(plan))
    return msgspec.json.decode(plan_bytes(plan), type=Plan)  # as anyone will read it: 1 may have become 1.0


def plan_bytes(plan: Plan) -> bytes:
    """The plan as saved; its SHA-256 is the plan digest."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n"


def plan_digest(plan: Plan) -> str:
    """SHA-256 of plan.json, hex: with the digests inside it, of everything that will be sent."""
    return hashlib.sha256(plan_bytes(plan)).hexdigest()


def read_plan(folder: Path) -> Plan:
    """Load plan.json and check that sessions.jsonl is the one it was made with."""
    try:
        plan = msgspec.json.decode((folder / "plan.json").read_bytes(), type=Plan)
        with (folder / "sessions.jsonl").open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{folder}: no readable plan here: {error}") from None
    if digest != plan.sessions_digest:
        raise UserError(f"{folder}/sessions.jsonl was changed after the plan was made; start a new run")
    return plan


class SessionFile:
    """Random access to sessions.jsonl by session number, one session decoded at a time."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("rb")
        self._offsets = [0]
        for line in self._file:
            self._offsets.append(self._offsets[-1] + len(line))
        self._decoder = msgspec.json.Decoder(Session)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Session:
        if not 0 <= number < len(self):
            raise IndexError(number)
        self._file.seek(self._offsets[number])
        return self._decoder.decode(self._file.read(self._offsets[number + 1] - self._offsets[number]))

    def __iter__(self) -> Iterator[Session]:
        return (self[number] for number in range(len(self)))

    def close(self) -> None:
        self._file.close()


def first_turns(session: Session, start_turn: int) -> list[int]:
    """For each stream the index of the first turn that is not history when the main agent starts at ``start_turn``.

    A turn of another stream is history if it was recorded before the main agent's start turn.
    """
    if start_turn == 0:
        return [0] * len(session.streams)
    start_s = session.streams[0].turns[start_turn].offset_s
    firsts = [start_turn]
    for stream in session.streams[1:]:
        later = (k for k, turn in enumerate(stream.turns) if turn.offset_s >= start_s)
        firsts.append(next(later, len(stream.turns)))
    return firsts


# -- one session


def _planned(
    trace: traces.Trace, workload: Workload, replay: Replay, max_context: int | None, lost: dict[str, int]
) -> Session | None:
    if max_context is not None and workload.over_context == "drop":
        over = any(
            _context(turn, workload) > max_context
            for stream in trace.streams
            for turn in stream.turns[: workload.max_turns]
        )
        if over:
            _lose(lost, "session over max_context", trace)
            return None
    streams: list[Stream] = []
    for stream in trace.streams:
        turns = _planned_turns(stream, workload, replay, max_context)
        parent = streams[stream.parent] if stream.parent is not None else None
        if parent is not None and stream.spawn_turn is not None and parent.turns[stream.spawn_turn].fate == "cut":
            for turn in turns:
                turn.fate, turn.cut_reason = "cut", turn.cut_reason or "spawn turn was cut"
        streams.append(
            Stream(
                agent=stream.agent,
                turns=turns,
                parent=stream.parent,
                spawn_turn=stream.spawn_turn,
                join_turn=stream.join_turn,
                background=stream.background,
            )
        )
    if all(turn.fate == "cut" for turn in streams[0].turns):
        _lose(lost, "session with its first turn over a limit", trace)
        return None
    _note_ideal_cached(trace, streams)
    key = trace.id if trace.scope == "local" else "global"
    return Session(
        id=trace.id,
        content_key=f"{replay.seed}/{key}",
        block_size=trace.block_size,
        streams=streams,
        system_tokens=trace.system_tokens,
    )


def _lose(lost: dict[str, int], reason: str, trace: traces.Trace) -> None:
    """Count a session that is left out as a whole, and its turns, so that every recorded turn stays accounted for."""
    turns = sum(len(stream.turns) for stream in trace.streams)
    lost[reason] = lost.get(reason, 0) + 1
    lost[f"turns of a {reason}"] = lost.get(f"turns of a {reason}", 0) + turns


def _planned_turns(stream: traces.Stream, workload: Workload, replay: Replay, max_context: int | None) -> list[Turn]:
    turns = []
    ended = ""
    cap = replay.pause_cap_s if replay.mode == "closed" else None
    for number, turn in enumerate(stream.turns):
        reason = ended
        if not reason and workload.max_turns is not None and number >= workload.max_turns:
            reason = ended = "over max_turns"
        if not reason and max_context is not None and _context(turn, workload) > max_context:
            reason = "over max_context"
            if workload.over_context == "cut":
                ended = "after a turn over max_context"
        turns.append(
            Turn(
                input_tokens=turn.input_tokens,
                output_tokens=_output(turn, workload),
                keep=turn.keep,
                new_blocks=turn.new_blocks,
                joins=turn.joins,
                pause_s=round(turn.pause_s if cap is None else min(turn.pause_s, cap), 6),
                recorded_pause_s=round(turn.pause_s, 6),
                recorded_service_s=round(turn.service_s, 6),
                offset_s=round(turn.start_s, 6),
                fate="cut" if reason else "send",
                cut_reason=reason,
                zero_output=turn.zero_output,
            )
        )
    return turns


def _output(turn: traces.Turn, workload: Workload) -> int:
    return turn.output_tokens if workload.max_output is None else min(turn.output_tokens, workload.max_output)


def _context(turn: traces.Turn, workload: Workload) -> int:
    return turn.input_tokens + _output(turn, workload)


def _note_ideal_cached(trace: traces.Trace, planned: list[Stream]) -> None:
    """Set each turn's ``ideal_cached``: leading prompt tokens that the session's turns sent before it (by recorded
    start) had in theirs.

    A prefix tree over the blocks, as chained digests. Per turn only blocks beyond the stream's own known prefix are
    looked up, so that the work grows with the unique content.
    """
    size = trace.block_size
    seen: set[bytes] = set()
    chains: list[list[bytes]] = [[] for _ in trace.streams]
    known = [0] * len(trace.streams)
    """For each stream: tokens at the front of its current prompt that were sent before."""
    order = sorted(
        (turn.start_s, index, number)
        for index, stream in enumerate(trace.streams)
        for number, turn in enumerate(stream.turns)
    )
    for _, index, number in order:
        turn, plan = trace.streams[index].turns[number], planned[index].turns[number]
        chain = chains[index][: turn.keep]
        for block in turn.new_blocks:
            chain.append(hashlib.blake2b((chain[-1] if chain else b"") + b"%d" % block, digest_size=12).digest())
        chains[index] = chain
        known[index] = min(known[index], turn.keep * size, turn.input_tokens)
        if plan.fate == "cut":
            continue
        first_new = known[index] // size
        if known[index] % size == 0:
            for link in chain[first_new:]:
                if link not in seen:
                    break
                known[index] += size
        plan.ideal_cached = min(known[index], turn.input_tokens)
        seen.update(chain[first_new : turn.input_tokens // size])
        known[index] = turn.input_tokens


def _sketch(trace: traces.Trace, session: Session, replay: Replay) -> _Sketch:
    sketch = _Sketch(
        id=session.id,
        estimated_s=0.0,
        main_turns=sum(turn.fate == "send" for turn in session.streams[0].turns),
        turns={},
        pause_recorded_s=0.0,
        pause_kept_s=0.0,
        intervals=[],
    )
    for planned, recorded in zip(session.streams, trace.streams, strict=True):
        for turn, was in zip(planned.turns, recorded.turns, strict=True):
            fate = _fate(turn)
            sketch.turns[fate] = sketch.turns.get(fate, 0) + 1
            if turn.fate == "cut":
                continue
            sketch.pause_recorded_s += turn.recorded_pause_s
            sketch.pause_kept_s += turn.pause_s
            if planned.parent is None:
                sketch.estimated_s += turn.pause_s + was.service_s
            if replay.mode == "open":
                sketch.intervals.append((was.start_s, was.start_s + was.service_s))
    return sketch


def _fate(turn: Turn) -> str:
    return "send" if turn.fate == "send" else f"cut: {turn.cut_reason}"


def _turns_by_fate(sessions_file: Path, sketches: list[_Sketch], plays: list[Play]) -> dict[str, int]:
    """Turns by fate over all plays; turns before a play's start turn are history."""
    turns: dict[str, int] = {}
    sessions = SessionFile(sessions_file)
    for play in plays:
        for fate, count in sketches[play.session].turns.items():
            turns[fate] = turns.get(fate, 0) + count
        if play.start_turn:
            session = sessions[play.session]
            for stream, first in zip(session.streams, first_turns(session, play.start_turn), strict=True):
                for turn in stream.turns[:first]:
                    turns[_fate(turn)] -= 1
                    turns["history"] = turns.get("history", 0) + 1
    sessions.close()
    return dict(sorted((fate, count) for fate, count in turns.items() if count))


# -- lanes


def _chosen(sketches: list[_Sketch], limit: int | None, seed: int) -> list[int]:
    """Session numbers in the seeded order, cut to the wanted number. The order depends on ids, not on file order."""
    order = sorted(range(len(sketches)), key=lambda number: stable_bytes("order", seed, sketches[number].id))
    return order[:limit]


def _dealt(sketches: list[_Sketch], order: list[int], replay: Replay) -> list[list[Play]]:
    """Deal sessions to lanes; a lane never starts empty, so with fewer sessions than lanes some are played again.

    Fixed work: longest first onto the least loaded lane, so that lanes end about together; then each lane's list is
    put back into the seeded order. Fixed duration: in turn, since every lane starts over at its end.
    """
    plays: dict[int, int] = {}

    def play(number: int) -> Play:
        count = plays.get(number, 0)
        plays[number] = count + 1
        return Play(number, count)

    lanes: list[list[Play]] = [[] for _ in range(replay.lanes)]
    if replay.end == "duration":
        for position in range(max(len(order), replay.lanes)):
            lanes[position % replay.lanes].append(play(order[position % len(order)]))
    else:
        loads = [0.0] * replay.lanes
        wanted = order + [order[i % len(order)] for i in range(replay.lanes - len(order))]
        rank = {number: position for position, number in enumerate(order)}
        for number in sorted(wanted, key=lambda n: (-sketches[n].estimated_s, rank[n])):
            lane = min(range(replay.lanes), key=lambda i: (loads[i], len(lanes[i]), i))
            lanes[lane].append(play(number))
            loads[lane] += sketches[number].estimated_s
        for entries in lanes:
            entries.sort(key=lambda p: (p.number, rank[p.session]))
    low, high = replay.start
    for lane, entries in enumerate(lanes):
        first = entries[0]
        turns = sketches[first.session].main_turns
        draw = low + (high - low) * stable_random("start", replay.seed, lane, sketches[first.session].id).random()
        entries[0] = Play(first.session, first.number, min(int(draw * turns), turns - 1))
    return lanes


def _place_on_the_clock(
    sessions_file: Path, sketches: list[_Sketch], lanes: list[list[Play]], replay: Replay
) -> tuple[float, float]:
    """Open loop: give every turn its send time from the start of the block, and take out shared idle time.
    Returns seconds of shared idle time as recorded, and as kept.

    A lane's sessions follow one another on the recorded clock. Only time in which no session at all is active is
    shortened (to idle_cap_s), so the order of everything stays as recorded.
    """
    starts: dict[int, float] = {}
    for lane, entries in enumerate(lanes):
        at = replay.ramp_s * lane / len(lanes)
        for play in entries:
            if play.session in starts:
                raise UserError(f"mode: open needs at least as many sessions as lanes ({len(sketches)} < {len(lanes)})")
            starts[play.session] = at
            at += max((end for _, end in sketches[play.session].intervals), default=0.0)
    busy = sorted((starts[n] + low, starts[n] + high) for n in starts for low, high in sketches[n].intervals)
    cuts = _idle_cuts(busy, replay.idle_cap_s)
    ends = [end for end, _, _ in cuts]
    removed = list(itertools.accumulate((part for _, _, part in cuts), initial=0.0))
    rewritten = sessions_file.with_suffix(".tmp")
    source = SessionFile(sessions_file)
    with rewritten.open("wb") as file:
        for number, session in enumerate(source):
            for stream in session.streams:
                for turn in stream.turns:
                    recorded = starts.get(number, 0.0) + turn.offset_s
                    turn.offset_s = round(recorded - removed[bisect.bisect_right(ends, recorded + 1e-9)], 6)
            file.write(msgspec.json.encode(session) + b"\n")
    source.close()
    rewritten.replace(sessions_file)
    return sum(idle for _, idle, _ in cuts), sum(idle - part for _, idle, part in cuts)


def _idle_cuts(busy: list[tuple[float, float]], cap: float | None) -> list[tuple[float, float, float]]:
    """(end of the idle stretch, its length, what is removed of it) for each stretch with nothing active, seconds."""
    cuts = []
    active_until = 0.0
    for start, end in busy:
        if start > active_until:
            idle = start - active_until
            cuts.append((start, idle, max(0.0, idle - cap) if cap is not None else 0.0))
        active_until = max(active_until, end)
    return cuts


def _share(part: float, whole: float) -> float:
    return round(part / whole, 6) if whole > 0 else 0.0
