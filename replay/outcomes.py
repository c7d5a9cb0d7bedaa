"""What an exchange came to: from raw bytes and their arrival to tokens, times and an honest status.

Statuses are those of `replay.records.Status`. The classes of failure (``Outcome.error``), with their status:

    class                   status     meaning
    ----------------------  ---------  ---------------------------------------------------------------------------
    http NNN                failed     refused with this status code
    context overflow        failed     refused because prompt and answer do not fit the model's context
    no connection           failed     see replay.wire, as for the next five
    client limit            failed
    disconnected            failed
    connection lost         failed
    bad http                failed
    reply too large         failed
    event too large         failed     one event is above ``max_event_bytes``
    error in stream         failed     the server reported an error under status 200, in the stream or instead of it
    aborted by server       failed     finish reason "abort" or "error"
    unreadable reply        failed     status 200, but neither events nor JSON, or an event that cannot be understood
    empty reply             failed     complete, but without one token
    truncated               truncated  ended without its terminal event and without a finish reason
    closed early            truncated  the same, and without the end of the HTTP body
    no first byte           stalled    see replay.wire, as for the next two
    stalled                 stalled
    too slow                stalled
    too long                failed     more tokens than asked: other work than planned
    short                   short      fewer tokens than asked, although the server was told not to stop
    cut                     cut        given up when the drain time ended
    cancelled               cancelled  given up by the user

A reply whose terminal event ([DONE], message_stop) came is complete whatever happened to the connection after it.
What came before a failure is kept: it counts where tokens are counted by arrival, never in statistics of speed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import numpy.typing as npt

from replay.records import CHUNK, Status, TokenSource
from replay.replies import Facts, refusal, stream, whole
from replay.wire import Exchange, Limits
from workloads.rendering import Api

Tokens = npt.NDArray[np.int64]
CountTokens = Callable[[str], int]
"""Tokens of a text, special tokens not added (tokenizers: ``len(t.encode(text, add_special_tokens=False))``)."""

_STATUS: dict[str, Status] = {
    "truncated": "truncated",
    "closed early": "truncated",
    "no first byte": "stalled",
    "stalled": "stalled",
    "too slow": "stalled",
    "short": "short",
    "cut": "cut",
    "cancelled": "cancelled",
}
"""Status of a class of failure; "failed" for all others."""

_SLICE_NS = 500_000
"""Longest piece of decoding in one turn of the event loop. Bytes that arrive meanwhile are stamped that much late."""


class Outcome(msgspec.Struct, kw_only=True):
    """The facts of one reply. Fields that `replay.records.RequestRecord` has too mean the same there."""

    status: Status
    error: str | None = None
    detail: str | None = None
    streamed: bool = True
    finish_reason: str | None = None
    first_token_ns: int | None = None
    first_answer_ns: int | None = None
    last_token_ns: int | None = None
    chunks: npt.NDArray[np.void]
    """Shape (chunks,), dtype CHUNK: the token-bearing events, in order of arrival."""
    first_chunk_tokens: int | None = None
    token_source: TokenSource | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    output_tokens_client: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    server_fingerprint: str | None = None
    server_first_token_s: float | None = None
    server_queue_s: float | None = None
    server_itl_s: float | None = None
    notes: list[str] = []
    answer: str = ""
    """Visible text, tool calls not included."""
    reasoning: str = ""


def outcome(
    exchange: Exchange,
    *,
    api: Api,
    asked_output: int,
    exact_length: bool,
    limits: Limits,
    count_tokens: CountTokens | None = None,
) -> Outcome:
    """What ``exchange`` came to. Pure.

    ``exact_length``: the server was told not to stop before ``asked_output`` tokens (ignore_eos, min_tokens).
    ``count_tokens`` is used, on the joined text, only where the server counted nothing.
    """
    steps = outcome_steps(
        exchange,
        api=api,
        asked_output=asked_output,
        exact_length=exact_length,
        limits=limits,
        count_tokens=count_tokens,
    )
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Outcome = end.value
            return result
        except Exception as error:
            return _unreadable(error)


async def outcome_sliced(
    exchange: Exchange,
    *,
    api: Api,
    asked_output: int,
    exact_length: bool,
    limits: Limits,
    count_tokens: CountTokens | None = None,
) -> Outcome:
    """As `outcome`, giving way to the event loop after each half millisecond of work. However many callers wait, the
    loop does that much decoding in one turn and no more; they are served in the order in which they came."""
    loop = asyncio.get_running_loop()
    waiting = _waiting.setdefault(loop, deque())
    steps = outcome_steps(
        exchange,
        api=api,
        asked_output=asked_output,
        exact_length=exact_length,
        limits=limits,
        count_tokens=count_tokens,
    )
    done: asyncio.Future[Outcome] = loop.create_future()
    waiting.append((steps, done))
    if len(waiting) == 1:
        loop.call_soon(_decode_some, loop, waiting)
    return await done


_Waiting = deque[tuple[Generator[None, None, Outcome], "asyncio.Future[Outcome]"]]
_waiting: WeakKeyDictionary[asyncio.AbstractEventLoop, _Waiting] = WeakKeyDictionary()


def _decode_some(loop: asyncio.AbstractEventLoop, waiting: _Waiting) -> None:
    until = time.perf_counter_ns() + _SLICE_NS
    while waiting and time.perf_counter_ns() < until:
        steps, done = waiting[0]
        try:
            next(steps)
            continue
        except StopIteration as end:
            if not done.done():  # else the caller was cancelled
                done.set_result(end.value)
        except Exception as error:
            if not done.done():
                done.set_result(_unreadable(error))
        waiting.popleft()
    if waiting:
        loop.call_soon(_decode_some, loop, waiting)


def outcome_steps(
    exchange: Exchange,
    *,
    api: Api,
    asked_output: int,
    exact_length: bool,
    limits: Limits,
    count_tokens: CountTokens | None = None,
) -> Generator[None, None, Outcome]:
    """`outcome` in steps of well below a millisecond (a single event of megabytes is one step)."""
    facts = Facts()
    streamed = True
    status = exchange.http_status
    if exchange.failure in ("cut", "cancelled") and status in (429, 503):
        pass  # given up in the wait before a retry
    elif status is not None and 300 <= status < 400:
        facts.fail(f"http {status}", f"redirects to {exchange.headers.get('location')}, which is not followed: use it")
    elif status is not None and not 200 <= status < 300:
        refusal(facts, status, exchange.body)
    elif exchange.body:
        encoding = exchange.headers.get("content-encoding", "identity")
        if encoding != "identity":
            facts.fail("unreadable reply", f"compressed with {encoding!r}, although identity was asked for")
        elif exchange.body.lstrip()[:1] in (b"{", b"["):  # no line of an event stream that matters begins so
            streamed = False
            whole(facts, exchange.body, api)
        else:
            yield from stream(facts, exchange, api, limits)
    if exchange.failure is not None:
        if facts.terminal:
            facts.note(f"{exchange.failure} after the terminal event")
        elif facts.error is None:
            facts.fail(exchange.failure, exchange.detail)
    return _conclude(facts, streamed, asked_output, exact_length, count_tokens)


def _unreadable(error: Exception) -> Outcome:
    """A reply so odd that decoding it failed: one failed turn, not the end of a run."""
    detail = f"{type(error).__name__}: {error}"[:300]
    return Outcome(status="failed", error="unreadable reply", detail=detail, chunks=np.empty(0, CHUNK))


_MOST_TOKENS = 10**8
"""No prompt or reply has more; a count beyond it, or below 0, is none."""


def _drop_impossible(facts: Facts) -> None:
    for name in ("input_tokens", "output_tokens", "total_tokens", "cached_tokens", "reasoning_tokens"):
        count = getattr(facts, name)
        if count is not None and not 0 <= count <= _MOST_TOKENS:
            setattr(facts, name, None)
            facts.note(f"impossible usage: {name} {count}"[:80])
    if any(count is not None and not 0 <= count <= _MOST_TOKENS for count in facts.counts):
        facts.counts = [None] * len(facts.counts)
        facts.note("impossible usage on a chunk")


def _conclude(
    facts: Facts, streamed: bool, asked_output: int, exact_length: bool, count_tokens: CountTokens | None
) -> Outcome:
    _drop_impossible(facts)
    _correct_usage(facts)
    if not facts.output and facts.output_tokens and facts.silent:  # as from a model with random weights
        facts.note("output without text")
        facts.output, facts.sizes = facts.silent, [0] * len(facts.silent)
        facts.counts, facts.ids = [None] * len(facts.silent), [None] * len(facts.silent)
    answer, reasoning = "".join(facts.answer), "".join(facts.reasoning)
    tokens, source = _tokens_by_chunk(facts)
    total = facts.output_tokens
    if total is None and source == "ids":
        total = int(tokens.sum())
        facts.note("output tokens counted from the server's token ids")
    client: int | None = None
    if total is None and (facts.output or (answer + reasoning)):
        client = count_tokens(reasoning + answer) if count_tokens is not None else len(facts.output) or None
        facts.note(
            "output tokens are a client estimate: "
            + ("the text, tokenised" if count_tokens is not None else "one for each event")
        )
        if source is None and client is not None:
            tokens, source = _spread(facts.sizes, client), "estimated"
    times = np.concatenate(facts.times) if facts.times else np.empty(0, np.int64)
    chunks = np.empty(len(facts.output), dtype=CHUNK)
    chunks["t_ns"] = times[np.array(facts.output, dtype=np.intp)]
    chunks["tokens"] = tokens
    if facts.error is None:
        _judge(facts, streamed, total, asked_output, exact_length)
    return Outcome(
        status=_STATUS.get(facts.error, "failed") if facts.error is not None else "ok",
        error=facts.error,
        detail=facts.detail,
        streamed=streamed,
        finish_reason=facts.finish_reason,
        first_token_ns=int(times[facts.output[0]]) if facts.output else None,
        first_answer_ns=int(times[facts.first_answer]) if facts.first_answer is not None else None,
        last_token_ns=int(times[facts.output[-1]]) if facts.output else None,
        chunks=chunks,
        first_chunk_tokens=int(tokens[0]) if facts.output and source is not None else None,
        token_source=source if facts.output else None,
        input_tokens=facts.input_tokens,
        output_tokens=total,
        output_tokens_client=client,
        cached_tokens=facts.cached_tokens,
        reasoning_tokens=facts.reasoning_tokens,
        server_fingerprint=facts.fingerprint,
        server_first_token_s=facts.server_first_token_s,
        server_queue_s=facts.server_queue_s,
        server_itl_s=facts.server_itl_s,
        notes=facts.notes,
        answer=answer,
        reasoning=reasoning,
    )


def _judge(facts: Facts, streamed: bool, total: int | None, asked_output: int, exact_length: bool) -> None:
    """Whether a reply that ended without an error is what was asked for."""
    if not facts.terminal and facts.finish_reason is None:
        facts.fail("truncated", "ended without a terminal event and without a finish reason")
    elif facts.finish_reason in ("abort", "error"):
        facts.fail("aborted by server", f"finish reason {facts.finish_reason!r}")
    elif not total and not facts.output and (streamed or not (facts.answer or facts.reasoning)):
        facts.fail("empty reply", f"finish reason {facts.finish_reason!r}")
    elif exact_length and total is not None and total < asked_output:
        facts.fail("short", f"{total} of {asked_output} tokens, finish reason {facts.finish_reason!r}")
    elif exact_length and total is not None and total > asked_output + max(1, asked_output // 100):
        facts.fail("too long", f"{total} tokens, asked for {asked_output}")
    elif exact_length and total is None and facts.finish_reason in _NATURAL_ENDS:
        facts.fail("short", f"finish reason {facts.finish_reason!r}, tokens not counted by the server")
    else:
        if not facts.terminal:
            facts.note("no terminal event")
        if facts.finish_reason is None:
            facts.note("no finish reason")
        if total is not None and total > asked_output:
            facts.note("more tokens than asked")
        if facts.output and facts.first_answer is None:
            facts.note("no answer, only reasoning")


_NATURAL_ENDS = (
    "stop",
    "tool_calls",
    "function_call",
    "content_filter",
    "end_turn",
    "stop_sequence",
    "tool_use",
    "refusal",
)


def _correct_usage(facts: Facts) -> None:
    """Bring the counts of servers that count in their own ways to one meaning."""
    output, thought = facts.output_tokens, facts.reasoning_tokens
    if output is not None and thought:
        both = output + thought
        outside = (
            thought > output
            or (facts.total_tokens is not None and facts.total_tokens - (facts.input_tokens or 0) == both)
            or (facts.reasoning and both in (len(facts.output), _sum(facts.ids)))
        )
        if outside:
            facts.output_tokens = both
            facts.note("reasoning tokens counted outside completion tokens; added")
    if facts.cached_tokens is not None and facts.input_tokens is not None and facts.cached_tokens > facts.input_tokens:
        facts.note(f"cached tokens ({facts.cached_tokens}) above input tokens; clamped")
        facts.cached_tokens = facts.input_tokens


def _sum(counts: Sequence[int | None]) -> int | None:
    """None if one is unknown, or if there are none."""
    return sum(count or 0 for count in counts) if counts and None not in counts else None


def _tokens_by_chunk(facts: Facts) -> tuple[Tokens, TokenSource | None]:
    """Tokens in each output event, and where that is known from. Without a source all are 0."""
    total, found = facts.output_tokens, len(facts.output)
    if not found:
        return np.zeros(0, np.int64), None
    counts, ids = facts.counts, facts.ids
    # The same count on all events is a total that is repeated, and no continuous usage, unless there is one event.
    if None not in counts and (found == 1 or counts[0] != counts[-1]):
        so_far = np.maximum.accumulate(np.array(counts, np.int64))
        return _settle(facts, np.diff(so_far, prepend=0), total), "usage"
    if None not in ids:
        return _settle(facts, np.array(ids, np.int64), total), "ids"
    if total is None:
        return np.zeros(found, np.int64), None
    if total == found:
        return np.ones(found, np.int64), "inferred"
    if total == found + 1 and facts.finish_reason in ("stop", "end_turn"):  # the end-of-text token has no text
        return np.append(np.ones(found - 1, np.int64), 2), "inferred"
    return _spread(facts.sizes, total), "estimated"


def _settle(facts: Facts, tokens: Tokens, total: int | None) -> Tokens:
    """Make the tokens of the chunks sum to the server's total; a rest has come with the last one at the latest."""
    rest = total - int(tokens.sum()) if total is not None else 0
    if rest:
        tokens[-1] = max(int(tokens[-1]) + rest, 0)
        facts.note("tokens of the events do not sum to usage; the rest is put on the last")
    return tokens


def _spread(sizes: Sequence[int], total: int) -> Tokens:
    """Share ``total`` out in proportion to ``sizes``, the sum exact and no prefix off by more than half."""
    marks = np.cumsum(sizes if any(sizes) else [1] * len(sizes), dtype=np.int64)
    whole = marks[-1]
    shares: Tokens = np.diff((2 * total * marks + whole) // (2 * whole), prepend=0)
    return shares
