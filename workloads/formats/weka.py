"""The Weka / kv-cache-tester format: one JSON object a session, with block hashes, lengths, times and no text.

Both layouts are read: a folder with one object a .json file, and .jsonl with one object a line. What differs between
writers is settled per session from its own content:

* the clock of a subagent's inner requests (from the session's start or from the subagent's) by where they fit;
* the stream of a request that starts while the request before it is still in service: a call that does not
  continue the busy one runs in a parallel stream of its own, one that does is sent after it;
* a request that cannot be read, or that asks for more than MOST_TOKENS, is skipped and noted; the time it took becomes
  part of the pause before the next one, whose blocks count as a difference against the request before it. If more than
  a fifth of a session's requests are like that, the session is skipped;
* the id of a partial last block, which the format leaves out: prompts grow at their end, so a partial block is the
  beginning of the block that the next prompt has in its place; where there is none, an id below zero is minted.
"""

from __future__ import annotations

import hashlib
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from workloads.formats.files import not_json, records, sample
from workloads.trace import Notes, Stream, Trace, Turn, prompts, shared_blocks

NAME = "weka"

Clock = Literal["auto", "relative", "absolute"]
"""What the times of a subagent's requests count from: its own start ("relative") or the session's ("absolute")."""

BLOCK_SIZE = 64
"""Tokens of a block where a session does not say."""

CLOCK_SLACK_S = 1.0
"""Most recorders write whole seconds, so that times up to this far out of place may be rounding."""

SECONDS_PER_TOKEN = 1 / 38.3
"""Service time per output token where a session records no service time at all: the median of 45,003 recorded ones."""

PARALLEL = "parallel"
"""Ending of the agent name of a stream that was split off because it overlapped its own agent's."""

MOST_TOKENS = 100_000_000
"""Longest prompt or answer, in tokens, that is taken for one: a hundred times what any model reads."""

MOST_MINTED = 20_000_000
"""Most ids minted for one session: about 1 GB of them."""

MOST_BAD = 1 / 5
"""A session is skipped if a larger share of its requests cannot be read."""

DAY_S = 86_400.0
NOTED_GAP_S = 7 * DAY_S
"""A session that rests for longer is kept, and noted."""

ORIGIN_GAP_S = 365 * DAY_S
"""Two times of a session that are further apart, with none between, do not count from the same origin."""

Size = Annotated[int, msgspec.Meta(ge=0)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
Fields = dict[str, msgspec.Raw]
Value = Fields | list[msgspec.Raw] | str | int | float | bool | None


class _Session(msgspec.Struct):
    requests: list[Value]
    id: str | int | None = ""
    block_size: Annotated[int, msgspec.Meta(gt=0, le=MOST_TOKENS)] | None = BLOCK_SIZE
    hash_id_scope: str | None = "local"
    tool_tokens: Tokens | None = None
    system_tokens: Tokens | None = None
    models: msgspec.Raw = msgspec.Raw()
    totals: msgspec.Raw = msgspec.Raw()


class _KnownSession(_Session, forbid_unknown_fields=True):
    """A session without surprises: the usual case, in one pass over the bytes."""


class _Row(msgspec.Struct, rename={"input": "in", "output": "out"}):
    """One entry of a "requests" list: a model call, or a subagent with calls of its own."""

    type: str
    t: float
    input: Tokens | None = None
    input_length: Tokens | None = None
    output: Tokens | None = None
    output_length: Tokens | None = None
    cached_tokens: Size | None = None
    model: str | None = None
    stop: str | None = None
    input_types: list[str] | None = None
    api_time: float | None = None
    ttft: float | None = None
    agent_id: str | int | None = None
    subagent_type: str | None = None
    duration_ms: float | None = None
    status: str | None = None


SESSION_KEYS = frozenset(_Session.__struct_encode_fields__)
ROW_KEYS = frozenset(
    {*_Row.__struct_encode_fields__, "hash_ids", "requests", "output_types", "think_time"}
    | {"total_tokens", "tool_use_count", "models", "tool_tokens", "system_tokens", "totals"}
)
CALLS = frozenset({"n", "s"})

_decode_known_session = msgspec.json.Decoder(_KnownSession).decode
_decode_session = msgspec.json.Decoder(_Session).decode
_decode_row = msgspec.json.Decoder(_Row).decode
_decode_fields = msgspec.json.Decoder(Fields).decode
_decode_rows = msgspec.json.Decoder(list[Value] | None).decode
_decode_kind = msgspec.json.Decoder(str).decode
_decode_ids = msgspec.json.Decoder(list[Size]).decode


class _Node(msgspec.Struct):
    """A row with its place in the file and, for a subagent, the rows inside it."""

    row: _Row
    raw_ids: bytes
    index: int
    path: str
    inner: list[_Node]


class _Place(NamedTuple):
    """Where a row stands: in its list, and in the file."""

    number: int
    path: str


class _Call(msgspec.Struct):
    """A model call on the session's clock."""

    row: _Row
    index: int
    path: str
    start: float
    service: float
    estimated: bool
    input: int
    output: int
    ids: list[int]
    keep: int = 0

    @property
    def end(self) -> float:
        return self.start + self.service


class _Agent(msgspec.Struct):
    """An agent as recorded: its calls in order of start, and the subagents in its list."""

    kind: str
    start: float
    index: int
    path: str
    end: float | None
    background: bool
    calls: list[_Call]
    children: list[_Agent]


class _Line(msgspec.Struct):
    """A stream in the making."""

    agent: str
    calls: list[_Call]
    parent: _Line | None
    spawn: int | None
    end: float
    background: bool
    order: float


class _TwoOriginsError(msgspec.ValidationError):
    """Times of one session that count from different origins: which are right cannot be told."""


class _Reading:
    """The session being read: where it stands, what to note, and the hash list before the current one."""

    def __init__(self, where: str, notes: Notes) -> None:
        self.where = where
        self.notes = notes
        self.raw_ids = b""
        self.ids: list[int] = []
        self.agent_ids: set[str | int] = set()
        self.calls: set[tuple[object, ...]] = set()
        self.rows = 0
        self.bad = 0
        self.first_bad = ""

    def skip(self, error: msgspec.DecodeError, count: int = 1) -> None:
        """Count requests that cannot be read; noted by ``settle``, once it is clear that the session is kept."""
        self.bad += count
        self.first_bad = self.first_bad or str(error)

    def settle(self) -> None:
        """Note the skipped requests. Raises msgspec.ValidationError if they are too many."""
        if self.bad > MOST_BAD * self.rows:
            raise msgspec.ValidationError(
                f"{self.first_bad} ({self.bad} of {self.rows} requests cannot be read: above a fifth, "
                "the session is skipped)"
            )
        if self.bad:
            self.note("request that cannot be read skipped", self.first_bad, self.bad)

    def note(self, kind: str, place: str = "", count: int = 1) -> None:
        self.notes.add(kind, f"{self.where} {place}".strip(), count)


def detect(path: Path) -> bool:
    """Whether one of the first records is an object with "requests" and something that only this format has."""
    for record in sample(path):
        try:
            keys = _decode_fields(record.data).keys()
        except (msgspec.MsgspecError, RecursionError):
            continue
        if "requests" in keys and keys & {"hash_id_scope", "block_size", "tool_tokens", "totals"}:
            return True
    return False


def read(path: Path, notes: Notes, *, clock: Clock = "auto") -> Iterator[Trace]:
    """Yield the sessions of a file or folder. One that cannot be read is noted with its position and passed over."""
    for record in records(path, notes):
        try:
            yield trace(record.data, record.where, notes, clock=clock)
        except _TwoOriginsError as error:
            notes.add("session with two origins of time skipped", f"{record.where}: {error}")
        except msgspec.ValidationError as error:
            notes.add("unreadable session skipped", f"{record.where}: {error}")
        except (msgspec.MsgspecError, RecursionError) as error:
            notes.add("unreadable session skipped", f"{record.where}: {not_json(record.data) or error}")


def trace(data: bytes, where: str, notes: Notes, *, clock: Clock = "auto") -> Trace:
    """One session from its JSON. ``where`` names it in ``notes``, and in place of a missing id.

    Raises msgspec.MsgspecError, with the byte or the JSON path at fault, if it is not a session of this format.
    """
    reading = _Reading(where, notes)
    session: _Session
    try:
        session = _decode_known_session(data)
    except msgspec.ValidationError:
        session = _tolerant(reading, data)
    block_size = session.block_size or BLOCK_SIZE
    nodes = _nodes(reading, session.requests, "$.requests")
    relative = clock == "relative" or (clock == "auto" and _relative(nodes))
    main = _agent(
        reading, nodes, _Row(type="subagent", t=0.0, subagent_type="main"), 0.0, _Place(0, "$"), block_size, relative
    )
    reading.settle()
    if not main.calls and main.children:
        reading.note("main agent without calls: first subagent taken as main")
        first, *others = sorted(main.children, key=lambda child: child.start)
        main = first
        main.children += others
    if not main.calls:
        raise msgspec.ValidationError("the session holds no model call - at `$.requests`")
    name = str("" if session.id is None else session.id) or Path(where).stem
    _check_times(reading, main, name)
    _estimate_service(reading, main)

    scope = session.hash_id_scope or "local"
    if scope not in ("local", "global"):
        reading.note("unknown hash_id_scope taken as local", f"{scope!r}")
        scope = "local"
    lines = _lines(reading, main)
    # Sorted by start, but never before the parent: its key is not above the child's, and it stands first.
    lines.sort(key=lambda line: line.order)
    _complete_ids(reading, lines, block_size, _minted(name, scope))
    return Trace(
        id=name,
        block_size=block_size,
        scope=scope,
        system_tokens=(session.tool_tokens or 0) + (session.system_tokens or 0),
        streams=_streams(lines),
    )


def _tolerant(reading: _Reading, data: bytes) -> _Session:
    """A session that has unknown keys, which are ignored, or wrong values where it can do without."""
    fields = _decode_fields(data)
    for key in fields.keys() - SESSION_KEYS:
        reading.note(f"unknown session key {key!r} ignored")
    try:
        return _decode_session(data)
    except msgspec.ValidationError:
        for key in sorted(fields.keys() & {"id", "hash_id_scope", "tool_tokens", "system_tokens"}):
            try:
                _decode_session(msgspec.json.encode({"requests": [], key: fields[key]}))
            except msgspec.ValidationError as error:
                reading.note(f"unusable session key {key!r} ignored", str(error))
                del fields[key]
    return _decode_session(msgspec.json.encode(fields))


# ---------------------------------------------------------------- from JSON to agents


def _nodes(reading: _Reading, rows: list[Value], path: str) -> list[_Node]:
    nodes = []
    for index, fields in enumerate(rows):
        at = f"{path}[{index}]"
        rows_before, bad_before = reading.rows, reading.bad
        reading.rows += 1
        try:
            if not isinstance(fields, dict):
                raise msgspec.ValidationError(f"Expected `object`, got `{_kind(fields)}`")
            kind = _decode_kind(fields.get("type", b'""'))
            if kind not in CALLS and kind != "subagent":
                reading.note(f"request of unknown type {kind!r} skipped", at)
                reading.rows -= 1
                continue
            for key in fields.keys() - ROW_KEYS:
                reading.note(f"unknown request key {key!r} ignored", at)
            raw_ids = bytes(fields.pop("hash_ids", b"null"))
            raw_rows = fields.pop("requests", b"null")
            inner: list[_Node] = []
            if kind == "subagent":
                try:
                    inner_rows = _decode_rows(raw_rows) or []
                except msgspec.DecodeError as error:
                    raise _placed(error, "$.requests") from None
                inner = _nodes(reading, inner_rows, f"{at}.requests")
            row = _decode_row(msgspec.json.encode(fields))  # small, now that the lists are out
            if kind in CALLS and (_input(row) is None or _output(row) is None):
                raise msgspec.ValidationError("A request needs `in` and `out` - at `$`")
        except msgspec.DecodeError as error:
            lost = reading.rows - rows_before  # a subagent, with all that is in it
            reading.skip(_placed(error, at), lost - (reading.bad - bad_before))
            continue
        nodes.append(_Node(row, raw_ids, index, at, inner))
    return nodes


def _kind(value: Value) -> str:
    """What JSON calls it."""
    names = {list: "array", str: "str", bool: "bool", int: "int", float: "float", type(None): "null"}
    return names.get(type(value), "object")


def _placed(error: msgspec.DecodeError, path: str) -> msgspec.ValidationError:
    """The error met in a part of the session, naming its place in the whole."""
    text = str(error)
    return msgspec.ValidationError(text.replace("`$", f"`{path}") if "`$" in text else f"{text} - at `{path}`")


def _input(row: _Row) -> int | None:
    return row.input if row.input is not None else row.input_length


def _output(row: _Row) -> int | None:
    return row.output if row.output is not None else row.output_length


def _relative(nodes: list[_Node]) -> bool:
    """Whether inner times count from each subagent's own start: decided for the whole session by how many inner spans
    lie inside [0, duration] against [t, t + duration]; if as many, by which reading starts nearer to the spawn."""
    fits = {"relative": 0, "absolute": 0}
    distance = {"relative": 0.0, "absolute": 0.0}
    waiting = [node for node in nodes if node.inner]
    while waiting:
        node = waiting.pop()
        duration = float("inf") if node.row.duration_ms is None else node.row.duration_ms / 1000
        waiting += [child for child in node.inner if child.inner]
        for clock, base in (("relative", 0.0), ("absolute", node.row.t)):
            distance[clock] += abs(min(child.row.t for child in node.inner) - base)
            for child in node.inner:
                start = child.row.t - base
                end = start + (child.row.api_time or 0.0)
                fits[clock] += start >= -CLOCK_SLACK_S and end <= duration + CLOCK_SLACK_S
    return (fits["relative"], -distance["relative"]) >= (fits["absolute"], -distance["absolute"])


def _agent(
    reading: _Reading, nodes: list[_Node], row: _Row, base: float, place: _Place, block_size: int, relative: bool
) -> _Agent:
    """The agent of ``row`` with everything below it. ``base`` is what the times in ``nodes`` count from."""
    start = base if relative else row.t
    background = (row.status or "").startswith("async") or (row.duration_ms is None and row.status != "completed")
    agent = _Agent(row.subagent_type or "subagent", start, place.number, place.path, None, background, [], [])
    if row.duration_ms is not None:
        agent.end = start + row.duration_ms / 1000
    name = row.agent_id if row.agent_id is not None else f"{start} {place.number}"
    times = [node.row.t for node in nodes if node.row.type in CALLS]
    backwards = sum(after < before for before, after in pairwise(times))
    if backwards:
        reading.note("out-of-order requests sorted", count=backwards)
    for node in sorted(nodes, key=lambda node: node.row.t):  # stable: equal times stay in file order
        if node.row.type in CALLS:
            call = _call(reading, node, base, name, block_size)
            if call is not None:
                agent.calls.append(call)
            continue
        child_start = base + node.row.t
        inner_base = child_start if relative else 0.0
        place = _Place(node.index, node.path)
        child = _agent(reading, node.inner, node.row, inner_base, place, block_size, relative)
        if child.calls:
            if node.row.agent_id is not None and node.row.agent_id in reading.agent_ids:
                reading.note("repeated agent id kept apart by its place", f"{node.path} {node.row.agent_id!r}")
            reading.agent_ids.add(node.row.agent_id or node.path)
            agent.children.append(child)
        else:  # no call of its own: its parent's pause already holds its duration; its children move up
            if not node.inner:
                reading.note("subagent without requests kept as a pause", node.path)
            for grandchild in child.children:
                grandchild.index = node.index
            agent.children += child.children
    return agent


def _call(reading: _Reading, node: _Node, base: float, agent: object, block_size: int) -> _Call | None:
    """The model call of a row; None if it repeats another, has no prompt, or has ids that cannot be read."""
    row = node.row
    tokens, output = _input(row) or 0, _output(row) or 0
    identity = (agent, base + row.t, row.model, tokens, output, row.api_time)
    if identity in reading.calls:
        reading.note("exact duplicate request dropped", node.path)
        return None
    if not tokens:
        reading.calls.add(identity)
        reading.note("request without input tokens skipped", node.path)
        return None
    try:
        ids = _hash_ids(reading, node.raw_ids)
    except msgspec.DecodeError as error:
        reading.skip(_placed(error, f"{node.path}.hash_ids"))
        return None
    reading.calls.add(identity)
    whole, part = divmod(tokens, block_size)
    if len(ids) > whole + bool(part):
        reading.note("hash_ids longer than the input cut", node.path)
        ids = ids[: whole + bool(part)]
    elif len(ids) < whole and ids:
        reading.note("hash_ids shorter than the input: new content minted", node.path)
    elif len(ids) < whole:
        known = row.cached_tokens is not None
        reading.note(f"no hash_ids: {'sharing from cached_tokens' if known else 'no sharing assumed'}", node.path)
    recorded = row.api_time if row.api_time is not None and row.api_time > 0 else None
    if recorded is not None and recorded > NOTED_GAP_S:
        reading.note("api_time above 7 days taken as missing", f"{recorded:g} s - at `{node.path}`")
        recorded = None
    return _Call(row, node.index, node.path, base + row.t, recorded or 0.0, recorded is None, tokens, output, ids)


def _hash_ids(reading: _Reading, raw: bytes) -> list[int]:
    """Decode a list of ids. Most lists begin with the bytes of the list before them, and only the rest is parsed:
    several times faster than parsing it all, for sessions that are nearly nothing else."""
    if raw == b"null":
        return []
    before, known = reading.raw_ids, reading.ids
    comma = raw.rfind(b",", 0, _common_bytes(before, raw))
    if comma < 0:
        rest = ids = _decode_ids(raw)
    else:
        try:
            rest = _decode_ids(b"[" + raw[comma + 1 :])
        except msgspec.MsgspecError:
            rest = _decode_ids(raw)  # raises again, now with the right index
        ids = known[: raw.count(b",", 0, comma + 1)]
        ids += rest
    if rest and max(rest) >> 64:
        raise msgspec.ValidationError("An id has at most 64 bits - at `$`")
    reading.raw_ids, reading.ids = raw, ids
    return ids


def _common_bytes(first: bytes, second: bytes) -> int:
    """Length of the common prefix, by bisection on comparisons at C speed."""
    if first and second.startswith(first[:-1]):
        return len(first) - 1  # all but the closing bracket: the common case (one byte short of it if both are equal)
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _agents(agent: _Agent) -> Iterator[_Agent]:
    yield agent
    for child in agent.children:
        yield from _agents(child)


def _check_times(reading: _Reading, main: _Agent, name: str) -> None:
    """Note long rests. Raises _TwoOriginsError if the session's times cannot all be on one clock."""
    starts = [(call.start, call.path) for agent in _agents(main) for call in agent.calls]
    starts += [(agent.start, agent.path) for agent in _agents(main) if agent is not main]
    for (before, _), (after, path) in pairwise(sorted(starts)):
        days = (after - before) / DAY_S
        if not after - before <= ORIGIN_GAP_S:
            raise _TwoOriginsError(
                f"session {name!r}: {after:g} s comes next after {before:g} s, {days:.3g} days before: "
                f"its times count from two origins - at `{path}`"
            )
        if after - before > NOTED_GAP_S:
            reading.note("gap above 7 days between requests", f"{days:.3g} days - at `{path}`")


def _estimate_service(reading: _Reading, main: _Agent) -> None:
    """Give calls without a service time the session's median seconds per output token, at most until the next start."""
    rates = [
        call.service / call.output
        for agent in _agents(main)
        for call in agent.calls
        if not call.estimated and call.output
    ]
    rate = statistics.median(rates) if rates else SECONDS_PER_TOKEN
    for agent in _agents(main):
        for place, call in enumerate(agent.calls):
            if call.estimated:
                reading.note("missing api_time estimated from the output length", f"{call.start:g} s")
                call.service = max(call.output, 1) * rate
                if place + 1 < len(agent.calls):
                    call.service = min(call.service, agent.calls[place + 1].start - call.start)


# ---------------------------------------------------------------- from agents to streams


def _lines(reading: _Reading, agent: _Agent, parent: _Line | None = None) -> list[_Line]:
    """The streams of an agent and of everything below it, parents before their children."""
    own, *parallel = _chains(reading, agent.calls)
    spawn = None
    if parent is not None:  # the last of the parent's calls that stands before the subagent's entry
        spawn = bisect_left([(call.start, call.index) for call in parent.calls], (agent.start, agent.index)) - 1
    end = agent.end if agent.end is not None else max(call.end for call in agent.calls)
    line = _line(agent.kind, own, parent, spawn, end, agent.background)
    lines = [line]
    for calls in parallel:
        ended = sum(call.end <= calls[0].start + CLOCK_SLACK_S and call.start < calls[0].start for call in own)
        end = max(call.end for call in calls)
        lines.append(_line(f"{agent.kind}/{PARALLEL}", calls, line, ended - 1, end, False))
    for child in agent.children:
        lines += _lines(reading, child, line)
    return lines


def _line(agent: str, calls: list[_Call], parent: _Line | None, spawn: int | None, end: float, back: bool) -> _Line:
    order = calls[0].start if parent is None else max(parent.order, calls[0].start)
    return _Line(agent, calls, parent, None if spawn is None or spawn < 0 else spawn, end, back, order)


def _chains(reading: _Reading, calls: list[_Call]) -> list[list[_Call]]:
    """One agent's calls as streams: its own first, then those that ran beside it.

    Calls that never overlap are one stream, whatever they share. If any overlap, the list holds several conversations
    (or a clock that contradicts itself): a call joins the stream whose last prompt it shares most with, one that
    shares nothing opens a new stream, and so does one whose stream is still in service. But a call that continues the
    busy prompt to its end can only be later than it, and one without ids shows no relation: these are sent in turn.
    """
    slack = CLOCK_SLACK_S if all(call.start.is_integer() for call in calls) else 0.0
    if not any(after.start + slack < before.end for before, after in pairwise(calls)):
        return [calls]
    chains: list[list[_Call]] = []
    for call in calls:
        chosen = chains[0] if chains and not call.ids else None
        free = chosen is None or chosen[-1].end <= call.start + slack
        if chains and call.ids:
            ranks = []
            for place, chain in enumerate(chains):
                shared = shared_blocks(chain[-1].ids, call.ids)
                ranks.append((shared, chain[-1].end <= call.start + slack, shared - len(chain[-1].ids), -place))
            shared, free, unshared, place = max(ranks)
            if shared and (free or not unshared):
                chosen = chains[-place]
        if chosen is None:
            chosen = []
            chains.append(chosen)
        elif not free:
            reading.note("overlapping requests of one stream serialised", f"{call.start:g} s")
        chosen.append(call)
    if len(chains) > 1:
        split = sum(map(len, chains[1:]))
        reading.note("overlapping requests split into parallel streams", f"{chains[1][0].start:g} s", split)
    return chains


def _minted(name: str, scope: str) -> Callable[[], int]:
    """A source of ids below zero: -1, -2, ...; where ids mean the same in all sessions, from this session's range."""
    first = 1
    if scope == "global":
        first += int.from_bytes(hashlib.sha256(name.encode()).digest()[:5], "big") << 22
    numbers = count(first)
    return lambda: -next(numbers)


def _complete_ids(reading: _Reading, lines: list[_Line], block_size: int, mint: Callable[[], int]) -> None:
    """Give every call ids for all of its blocks, the partial last one included, and count those it keeps."""
    missing = sum(max(0, call.input // block_size - len(call.ids)) for line in lines for call in line.calls)
    if missing > MOST_MINTED:
        raise msgspec.ValidationError(
            f"its prompts hold {missing:,} blocks of {block_size} tokens without an id, and at most {MOST_MINTED:,} "
            "are made up for one session: record hash_ids, or larger blocks - at `$.requests`"
        )
    for line in lines:
        before: _Call | None = None
        for call in line.calls:
            whole = call.input // block_size
            if len(call.ids) < whole:
                if not call.ids and before is not None:
                    kept = min((call.row.cached_tokens or 0) // block_size, before.input // block_size, whole)
                    call.ids = before.ids[:kept]
                call.ids += [mint() for _ in range(whole - len(call.ids))]
            before = call
        after: _Call | None = None
        for call in reversed(line.calls):
            whole, part = divmod(call.input, block_size)
            shared = 0 if after is None else shared_blocks(call.ids, after.ids)
            if part and len(call.ids) == whole:
                if after is not None and after.input >= call.input and shared == whole < len(after.ids):
                    call.ids.append(after.ids[whole])
                    shared += 1
                else:
                    call.ids.append(mint())
            if after is not None:
                after.keep = shared
            after = call


def _streams(lines: list[_Line]) -> list[Stream]:
    origin = min(call.start for line in lines for call in line.calls)
    places = {id(line): place for place, line in enumerate(lines)}
    joins: dict[tuple[int, int], list[int]] = {}
    streams = []
    for place, line in enumerate(lines):
        parent = None if line.parent is None else places[id(line.parent)]
        join = None
        if line.parent is not None and not line.background:
            # By time: the first later turn that starts once the child has ended. (A format that records which tool
            # result or notification a turn holds should look for that first: a busy parent may start turns between.)
            later = range(0 if line.spawn is None else line.spawn + 1, len(line.parent.calls))
            join = next((turn for turn in later if line.parent.calls[turn].start >= line.end), None)
            if parent is not None and join is not None:
                joins.setdefault((parent, join), []).append(place)
        streams.append(
            Stream(
                agent=line.agent,
                turns=[],
                parent=parent,
                spawn_turn=line.spawn,
                join_turn=join,
                background=line.background and line.parent is not None,
            )
        )
    for place, line in enumerate(lines):
        ready = origin
        if line.parent is not None and line.spawn is not None:
            ready = line.parent.calls[line.spawn].end
        before: _Call | None = None
        for turn, call in enumerate(line.calls):
            children = joins.get((place, turn), [])
            ready = max([ready, *(lines[child].calls[-1].end for child in children)])
            pause = max(0.0, call.start - ready)
            streams[place].turns.append(_turn(call, before, call.start - origin, pause, children))
            ready = call.end
            before = call
    return streams


def _turn(call: _Call, before: _Call | None, start_s: float, pause_s: float, joins: list[int]) -> Turn:
    row = call.row
    return Turn(
        start_s=round(start_s, 6),
        service_s=round(call.service, 6),
        pause_s=round(pause_s, 6),
        input_tokens=call.input,
        output_tokens=max(call.output, 1),
        keep=call.keep,
        new_blocks=call.ids[call.keep :],
        joins=joins,
        model=row.model or "",
        stop=row.stop or "",
        input_types=row.input_types or [],
        service_estimated=call.estimated,
        zero_output=not call.output,
        retry=before is not None and before.input == call.input and before.ids == call.ids,
        ttft_s=row.ttft if row.ttft is not None and row.ttft >= 0 else None,
    )


# ---------------------------------------------------------------- and back


def session(trace: Trace) -> dict[str, Any]:
    """A trace as an object of this format, for our own reader and for other tools that read it.

    Partial last blocks go without an id, as the format has it; whole blocks whose ids were minted get ids above all
    others. Inner times count from the session's start, the reading that no tool mistakes. Reading it again gives the
    same trace, provided that no whole block was minted and that joins follow the time rule.
    """
    top = max((block for stream in trace.streams for turn in stream.turns for block in turn.new_blocks), default=0)
    if trace.scope == "global":
        top = 1 << 62  # above what any session recorded or minted, so that sessions do not meet
    lists: list[list[dict[str, Any]]] = []
    for stream in trace.streams:
        calls = []
        for turn, blocks in zip(stream.turns, prompts(stream), strict=True):
            call: dict[str, Any] = {
                "t": turn.start_s,
                "type": "n" if turn.ttft_s is None else "s",
                "model": turn.model,
                "in": turn.input_tokens,
                "out": 0 if turn.zero_output else turn.output_tokens,
                "hash_ids": [b if b >= 0 else top - b for b in blocks[: turn.input_tokens // trace.block_size]],
                "input_types": turn.input_types,
                "output_types": ["tool_use" if turn.stop == "tool_use" else "text"],
                "stop": turn.stop,
                "api_time": None if turn.service_estimated else turn.service_s,
                "think_time": turn.pause_s,
            }
            if turn.ttft_s is not None:
                call["ttft"] = turn.ttft_s
            calls.append(call)
        lists.append(calls)
    for place in range(len(trace.streams) - 1, 0, -1):  # children first: an entry is complete when it is placed
        stream = trace.streams[place]
        if stream.parent is None:
            raise ValueError(f"{trace.id}: stream {place} has no parent, but only stream 0 may have none")
        start = stream.turns[0].start_s
        end = max(turn.start_s + turn.service_s for turn in stream.turns)
        if stream.join_turn is not None and stream.join_turn > 0:  # not over before a turn that did not wait for it
            end = max(end, trace.streams[stream.parent].turns[stream.join_turn - 1].start_s + 0.001)
        lists[stream.parent].append(
            {
                "t": start,
                "type": "subagent",
                "agent_id": f"agent_{place:03d}",
                "subagent_type": stream.agent,
                "duration_ms": None if stream.background else round((end - start) * 1000),
                "total_tokens": sum(turn.input_tokens + turn.output_tokens for turn in stream.turns),
                "tool_use_count": sum(turn.stop == "tool_use" for turn in stream.turns),
                "status": "async_launched" if stream.background else "completed",
                "models": sorted({turn.model for turn in stream.turns}),
                "tool_tokens": 0,
                "system_tokens": 0,
                "requests": lists[place],
            }
        )
    for entries in lists:
        entries.sort(key=lambda entry: (entry["t"], entry["type"] == "subagent"))
    return {
        "id": trace.id,
        "models": sorted({turn.model for stream in trace.streams for turn in stream.turns}),
        "block_size": trace.block_size,
        "hash_id_scope": trace.scope,
        "tool_tokens": 0,
        "system_tokens": trace.system_tokens,
        "requests": lists[0],
    }


def write(traces: Iterable[Trace], path: Path) -> int:
    """Write sessions to a file, one a line, as they come; returns how many."""
    encoder = msgspec.json.Encoder()
    written = 0
    with path.open("wb") as file:
        for written, trace in enumerate(traces, 1):  # noqa: B007 (counts)
            file.write(encoder.encode(session(trace)) + b"\n")
    return written
