"""All faults by name, with what is expected to catch them (shared/reference/accuracy.md, section (f))."""

from __future__ import annotations

import msgspec

from evals.faults import events, requests, tokens
from evals.faults.events import Reply, on_tokens
from evals.faults.requests import Ask
from evals.faults.tokens import WRONG, Place, noisy, sometimes
from workloads.errors import UserError

GRAPH_SIZES = (1, 2, 4, *range(8, 65, 8))
"""Batch sizes that decode graphs are captured for by default; other ones up to the largest are padded."""


class ProxyFault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. ``argument`` names the number that may follow the name after a colon (empty: it takes none)."""

    name: str
    number: int | None
    """In section (f); None: harmless, a control that no check may take for a fault."""
    summary: str
    caught_by: tuple[str, ...] = ()
    """Ids of checks, the main one first."""
    n: int | None = None
    """With so much, in ``unit``s, they see it with power .9."""
    unit: str = ""
    argument: str = ""
    default: float = 0.0
    low: float = 0.0
    high: float = float("inf")
    ask: Ask | None = None
    reply: Reply | None = None
    stores: bool = False
    """Requests that were answered before are answered from memory."""
    delays: bool = False
    """Every piece of a reply waits for the fault's number of seconds."""


def _beyond(number: float) -> tokens.Strike:
    return sometimes(lambda at: WRONG if (at.prompt_tokens or 0) + at.index > number else 0.0)


def _padded(at: Place) -> float:
    return WRONG if at.batch <= GRAPH_SIZES[-1] and at.batch not in GRAPH_SIZES else 0.0


_ALL = [
    ProxyFault(
        name="flip-token",
        number=1,
        summary="this share of tokens is wrong",
        caught_by=("P2", "P3"),
        n=2_000,
        unit="replayed tokens",
        argument="RATE",
        default=1 / 500,
        high=1.0,
        reply=on_tokens(lambda number: sometimes(lambda at: number)),
    ),
    ProxyFault(
        name="truncate-at",
        number=2,
        summary="replies end at this many tokens",
        caught_by=("D2", "L1"),
        n=1,
        unit="requests",
        argument="TOKENS",
        default=4096,
        low=1,
        ask=requests.truncate,
    ),
    ProxyFault(
        name="drop-last-chunk",
        number=3,
        summary="the tokens of a stream's last chunk are lost",
        caught_by=("D1",),
        n=5,
        unit="requests",
        reply=events.drop_last_chunk,
    ),
    ProxyFault(
        name="repeat-after",
        number=4,
        summary=f"after this many tokens a reply repeats its last {tokens.LOOP}",
        caught_by=("L2", "L1", "P1"),
        n=5,
        unit="outputs beyond it",
        argument="TOKENS",
        default=8192,
        low=1,
        reply=on_tokens(tokens.repeating),
    ),
    ProxyFault(
        name="kv-beyond",
        number=5,
        summary="tokens are often wrong beyond this context (known from ids in the request, or from the reply)",
        caught_by=("P5",),
        n=5 * 256,
        unit="replayed tokens beyond it",
        argument="TOKENS",
        default=131_072,
        reply=on_tokens(_beyond),
    ),
    ProxyFault(
        name="prefix-off-by-one",
        number=6,
        summary="tokens are often wrong after a prefix hit (reported, or guessed from prompts seen)",
        caught_by=("D5", "P4"),
        n=20 * 16,
        unit="tokens after cut points",
        reply=on_tokens(lambda number: sometimes(lambda at: WRONG if at.warm else 0.0)),
    ),
    ProxyFault(
        name="ignore-temperature",
        number=7,
        summary="sampling is greedy",
        caught_by=("D3",),
        n=300,
        unit="tokens",
        ask=requests.ignore_temperature,
    ),
    ProxyFault(
        name="ignore-top-p",
        number=8,
        summary="sampling is from the whole vocabulary",
        caught_by=("D3",),
        n=500,
        unit="tokens",
        ask=requests.ignore_top_p,
    ),
    ProxyFault(
        name="batch-corrupts",
        number=9,
        summary="with more replies than this in flight one of them is wrong in each step",
        caught_by=("P6",),
        n=2_000,
        unit="tokens per batch size",
        argument="ROWS",
        default=32,
        reply=on_tokens(lambda number: sometimes(lambda at: 1 / at.batch if at.batch > number else 0.0)),
    ),
    ProxyFault(
        name="race",
        number=10,
        summary="in this share of steps one reply's token is wrong",
        caught_by=("P7", "P2"),
        n=73_000,
        unit="steps",
        argument="RATE",
        default=1e-4,
        high=1.0,
        reply=on_tokens(lambda number: sometimes(lambda at: number / at.batch)),
    ),
    ProxyFault(
        name="ignore-seed",
        number=11,
        summary="seeds are not passed on",
        caught_by=("D4", "D3"),
        n=20,
        unit="pairs",
        ask=requests.ignore_seed,
    ),
    ProxyFault(
        name="shared-seed",
        number=11,
        summary="all requests are sampled with one seed",
        caught_by=("D4", "D3"),
        n=20,
        unit="pairs",
        ask=requests.share_seed,
    ),
    ProxyFault(
        name="stale-replies",
        number=12,
        summary="a request that was answered before gets that answer again (also another server's: see `proxy`)",
        caught_by=("V4", "V1"),
        n=1,
        unit="replies",
        stores=True,
    ),
    ProxyFault(
        name="never-specialised",
        number=13,
        summary="nothing changes: in front of the baseline, a candidate that never runs its path",
        caught_by=("V2", "V1"),
        n=1,
        unit="log intervals",
    ),
    ProxyFault(
        name="neighbour-leak",
        number=14,
        summary="when a request comes or leaves, the next token of each other reply is wrong with this chance",
        caught_by=("P6",),
        n=200,
        unit="joins",
        argument="RATE",
        default=0.25,
        high=1.0,
        reply=on_tokens(lambda number: sometimes(lambda at: min(at.joins, 1.0) * number)),
    ),
    ProxyFault(
        name="state-drift",
        number=15,
        summary="logits have noise whose sd grows by this much in 1,000 tokens",
        caught_by=("P1",),
        n=20,
        unit="traces of 16k",
        argument="SD",
        default=0.05,
        reply=on_tokens(lambda number: noisy(lambda at: number * at.index / 1000)),
    ),
    ProxyFault(
        name="early-stop",
        number=16,
        summary="replies that may end do so with chance 1/TOKENS more at each token",
        caught_by=("L1", "P1"),
        n=100,
        unit="outputs",
        argument="TOKENS",
        default=512,
        low=1,
        ask=requests.stop_early,
        reply=events.stopped,
    ),
    ProxyFault(
        name="nan-zero",
        number=17,
        summary='this share of replies is token 0, "!", throughout',
        caught_by=("D7",),
        n=460,
        unit="requests",
        argument="RATE",
        default=1 / 200,
        high=1.0,
        reply=on_tokens(tokens.zeros),
    ),
    ProxyFault(
        name="cut-tools",
        number=18,
        summary="in this share of requests the arguments of tool calls are cut",
        caught_by=("D6",),
        n=1_293,
        unit="requests",
        argument="RATE",
        default=0.01,
        high=1.0,
        reply=events.cut_tools,
    ),
    ProxyFault(
        name="padded-batch",
        number=19,
        summary="tokens are often wrong while 3, 5, 6, 7, 9, ... replies are in flight",
        caught_by=("P6",),
        n=2_000,
        unit="tokens per batch size",
        reply=on_tokens(lambda number: sometimes(_padded)),
    ),
    ProxyFault(
        name="low-precision",
        number=20,
        summary="logits have noise of this sd",
        caught_by=("P1", "F1"),
        n=105,
        unit="prompts",
        argument="SD",
        default=0.1,
        reply=on_tokens(lambda number: noisy(lambda at: number)),
    ),
    ProxyFault(name="identity", number=None, summary="nothing changes"),
    ProxyFault(
        name="bf16-noise",
        number=None,
        summary="logits have noise of this sd, as rounding makes it",
        argument="SD",
        default=0.02,
        reply=on_tokens(lambda number: noisy(lambda at: number)),
    ),
    ProxyFault(name="renamed", number=None, summary="replies name another model", reply=events.rename),
    ProxyFault(
        name="slower",
        number=None,
        summary="every piece of a reply comes this many seconds later",
        argument="SECONDS",
        default=0.005,
        delays=True,
    ),
]

FAULTS: dict[str, ProxyFault] = {fault.name: fault for fault in _ALL}


def parse(text: str) -> tuple[ProxyFault, float]:
    """Read ``NAME`` or ``NAME:NUMBER``: the fault and its number. Raises UserError for an unknown name or a number that
    does not fit."""
    name, colon, number = text.partition(":")
    fault = FAULTS.get(name)
    if fault is None:
        raise UserError(f"unknown fault {name!r}; known: {', '.join(FAULTS)}")
    if not colon:
        return fault, fault.default
    if not fault.argument:
        raise UserError(f"fault {name} takes no number; write just {name}")
    try:
        value = float(number)
    except ValueError:
        raise UserError(f"fault {name}: {fault.argument} is {number!r}, which is no number") from None
    if not fault.low <= value <= fault.high:
        raise UserError(f"fault {name}: {fault.argument} is {number}; it must lie in {fault.low:g}..{fault.high:g}")
    return fault, value
