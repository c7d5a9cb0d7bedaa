"""Per-request measures. Each is one function whose docstring is the formula that the report prints.

Names in the formulas: `due` is when the plan said to send, `sent` when the request was handed to the connection,
`first` and `last` the arrivals of the first and last output of any kind, `answer` the first that is answer text or a
tool call, `O` the output tokens (reasoning included), `c1` the tokens of the first chunk, `I` the input tokens.
Seconds are the client's, times `time_scale` (1 unless an emulator ran faster than the hardware that it stands for).

A request whose status is not ok is +infinity. One that is ok with impossible times (IMPOSSIBLE) has no measure at all.
Null means that an ok request has no such value; those are counted, never guessed. A turn recorded without output, for
which one token was asked, has no measure per token whatever became of it.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Literal

import msgspec
import polars as pl

from replay.records import RequestRecord

KEY = ["session", "play", "stream", "turn"]
"""What a planned turn is known by, in every block."""

INFINITY = float("inf")

_EARLY_NS = 1_000_000
"""A timer may fire this much early."""
_IN_ORDER = ("sent_ns", "first_token_ns", "last_token_ns", "end_ns")

IMPOSSIBLE = pl.any_horizontal(
    pl.col("due_ns") > pl.col("sent_ns") + _EARLY_NS,
    *((pl.col(a) > pl.col(b)).fill_null(False) for a, b in itertools.combinations(_IN_ORDER, 2)),
)
"""Rows whose times no turn can have: not due ≤ sent (to 1 ms) ≤ first ≤ last ≤ end, as far as it has them."""

CountSource = Literal["server", "client", "events"]
"""Whose token counts a backend offers. server: usage or token ids. client: the text, counted with a tokenizer; how many
tokens each chunk had is not known then. events: one for each event, which is no count of tokens."""


class Measure(msgspec.Struct, frozen=True):
    """A time per request or per token, in seconds; lower is better. ``rate`` names its inverse where that is what
    people read."""

    id: str
    label: str
    formula: str
    column: pl.Expr
    rate: str = ""


MEASURES: dict[str, Measure] = {}


def _measure(
    label: str, rate: str = "", *, per_token: bool = False
) -> Callable[[Callable[[], pl.Expr]], Callable[[], pl.Expr]]:
    def register(formula: Callable[[], pl.Expr]) -> Callable[[], pl.Expr]:
        name = formula.__name__
        possible = pl.when(~pl.col("impossible")).then(formula())
        column = pl.when(pl.col("status") == "ok").then(possible).otherwise(pl.lit(INFINITY))
        if per_token:
            column = pl.when(~pl.col("zero_output")).then(column)
        text = " ".join(inspect.cleandoc(formula.__doc__ or "").split())
        MEASURES[name] = Measure(name, label, text, column.alias(name), rate)
        return formula

    return register


def _seconds(later: str, earlier: str) -> pl.Expr:
    return (pl.col(later) - pl.col(earlier)) * 1e-9 * pl.col("time_scale")


def _end_from(start: str) -> pl.Expr:
    return pl.coalesce(_seconds("last_token_ns", start), _seconds("end_ns", start))


def _streamed(value: pl.Expr) -> pl.Expr:
    return pl.when(pl.col("streamed")).then(value)


@_measure("ITL (decode time per token)", rate="Interactivity (decode rate)", per_token=True)
def itl() -> pl.Expr:
    """(last − first) / (O − c1). The time after the first chunk, over the tokens after the first chunk. Its inverse
    is the decode rate, called interactivity. Needs a streamed reply, the server's token count, and tokens after
    the first chunk that took time."""
    tokens = pl.col("output") - pl.col("first_chunk_tokens")
    span = _seconds("last_token_ns", "first_token_ns")
    return pl.when(pl.col("streamed") & (tokens > 0) & (span > 0)).then(span / tokens)


@_measure("E2E per token", rate="Output rate (end-to-end-normalised interactivity)", per_token=True)
def e2e_per_token() -> pl.Expr:
    """(last − due) / O. Waiting and prefill included. Its inverse is the output rate over the whole request, also
    called end-to-end-normalised interactivity."""
    return pl.when(pl.col("output") > 0).then(_end_from("due_ns") / pl.col("output"))


@_measure("TTFT")
def ttft() -> pl.Expr:
    """first − due. From the scheduled time, so that waiting inside the client counts (no coordinated omission)."""
    return _streamed(_seconds("first_token_ns", "due_ns"))


@_measure("TTFT from sent")
def ttft_from_sent() -> pl.Expr:
    """first − sent. Leaves out what the request waited for in the client; shown beside TTFT, never instead of it."""
    return _streamed(_seconds("first_token_ns", "sent_ns"))


@_measure("TTFO")
def ttfo() -> pl.Expr:
    """answer − due. Time to the first answer text or tool call, thinking skipped; null for a reply that only
    thought."""
    return _streamed(_seconds("first_answer_ns", "due_ns"))


@_measure("TPOT (n−1 rule)", per_token=True)
def tpot() -> pl.Expr:
    """(last − first) / (O − 1). The field's other convention: where the first chunk holds several tokens it is too
    low."""
    return pl.when(pl.col("streamed") & (pl.col("output") > 1)).then(
        _seconds("last_token_ns", "first_token_ns") / (pl.col("output") - 1)
    )


@_measure("E2E")
def e2e() -> pl.Expr:
    """last − due (end of the exchange − due where no token came)."""
    return _end_from("due_ns")


@_measure("E2E from sent")
def e2e_from_sent() -> pl.Expr:
    """last − sent (end of the exchange − sent where no token came)."""
    return _end_from("sent_ns")


def measured(requests: pl.DataFrame, time_scale: float, count_source: CountSource | None) -> pl.DataFrame:
    """The measured requests (warm-up left out) with `output`, `impossible`, every measure, and
    `why_no_itl`.

    ``count_source`` says whose token counts are used: server's and client's are never mixed in one statistic, so a row
    that has only the other kind has no `output`. A client's count of the text leaves c1 unknown; counts of events are
    not used at all, since tokens per time would be a gap between chunks by another name.
    """
    unknown = pl.lit(None, pl.Int64)
    output, first_chunk = {
        "server": (pl.col("output_tokens"), pl.col("first_chunk_tokens")),
        "client": (pl.col("output_tokens_client"), unknown),
    }.get(count_source or "", (unknown, unknown))
    frame = requests.filter(pl.col("phase") == "measured").with_columns(
        time_scale=pl.lit(time_scale),
        output=pl.when(~pl.col("zero_output")).then(output),
        first_chunk_tokens=first_chunk,
        impossible=IMPOSSIBLE,
    )
    return frame.with_columns(measure.column for measure in MEASURES.values()).with_columns(
        why_no_itl=pl.when(pl.col("itl").is_null()).then(
            pl.when(pl.col("impossible"))
            .then(pl.lit("impossible times"))
            .when(~pl.col("streamed"))
            .then(pl.lit("not streamed"))
            .when(pl.col("zero_output"))
            .then(pl.lit("recorded without output"))
            .when(pl.col("output").is_null())
            .then(pl.lit("no token count"))
            .when(pl.col("first_chunk_tokens").is_null() | pl.col("first_token_ns").is_null())
            .then(pl.lit("first chunk unknown"))
            .when(pl.col("output") <= pl.col("first_chunk_tokens"))
            .then(pl.lit("single chunk"))
            .otherwise(pl.lit("all output at one instant"))
        )
    )


def count_source(requests: pl.DataFrame) -> CountSource | None:
    """Whose token counts a backend's rows offer: "server" if any ok row has one; None if none has any. A client's count
    that is the number of chunks in every row is taken for one of events."""
    ok = requests.filter((pl.col("phase") == "measured") & (pl.col("status") == "ok"))
    if ok["output_tokens"].count():
        return "server"
    counted = ok.filter(pl.col("output_tokens_client").is_not_null())
    if not len(counted):
        return None
    return "events" if (counted["output_tokens_client"] == counted["chunk_count"]).all() else "client"


def uncached_input(requests: pl.DataFrame) -> int | None:
    """Σ (I − cached tokens) over ok requests that report both; null if none does. Null is unknown, not 0."""
    known = requests.filter(
        (pl.col("status") == "ok") & pl.col("input_tokens").is_not_null() & pl.col("cached_tokens").is_not_null()
    )
    return int((known["input_tokens"] - known["cached_tokens"]).sum()) if len(known) else None


assert set(KEY) <= set(RequestRecord.__struct_fields__)
