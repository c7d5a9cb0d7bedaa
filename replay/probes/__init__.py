"""Probes of one backend: a handful of small requests that show whether it can be measured, and how.

Each module asks one question; `probe` asks them all, in the order in which answers are needed. replay/preflight.py
makes both backends' answers fit one rendering, since both get the same bytes.
"""

from __future__ import annotations

import msgspec
from tokenizers import Tokenizer

from replay.outcomes import Outcome
from replay.probes.caching import OFF_MEND, OFF_WHY, check_caching
from replay.probes.capacity import check_capacity
from replay.probes.chunking import check_chunks
from replay.probes.connections import check_connections
from replay.probes.facts import KvCache, ServerFacts
from replay.probes.length_control import check_usage, find_length_control, with_control
from replay.probes.lengths import check_conversation, check_lengths
from replay.probes.pages import look_at_pages
from replay.probes.served import Version, look_for_model, version
from replay.probes.template import measure_template
from replay.probes.tokenizer import tokenizer_digest
from replay.progress import Finding
from replay.wire import Wire
from workloads.rendering import Rendering

__all__ = ["KvCache", "ServerFacts", "Version", "check_capacity", "probe", "version", "with_control"]


async def probe(
    wire: Wire,
    rendering: Rendering,
    *,
    control: int = 0,
    tokenizer: Tokenizer | None = None,
    idle_s: float = 0.0,
) -> ServerFacts:
    """Ask one backend, with about 20 small requests. ``control``: the first way to ask for a length that is still
    open. ``tokenizer``: the experiment's own. ``idle_s``: how long to wait to see whether idle connections last.

    Raises UserError for what makes a measurement impossible, in words that say what to change.
    """
    max_model_len, findings = await look_for_model(wire, rendering.model)
    said = await version(wire)
    shown = await look_at_pages(wire)
    digest = await tokenizer_digest(wire, rendering.model, tokenizer)
    control, first, found = await find_length_control(wire, rendering, control)
    findings += found
    rendering = with_control(rendering, control)
    findings += check_usage(wire, rendering, first)
    template, found = await measure_template(wire, rendering)
    findings += found
    rendering = msgspec.structs.replace(rendering, template=template)
    short = [first]
    cached, reported = None, False
    if first.input_tokens is not None:
        replies, found = await check_lengths(wire, rendering, max_model_len)
        findings += found
        short += replies.values()
        findings += await check_conversation(wire, rendering, max_model_len)
        cached, reported, found = await check_caching(wire, rendering, replies)
        findings += found
    findings.append(check_chunks(wire, short, shown.speculative))
    if cached is None and shown.prefix_caching is False:
        findings.append(Finding("warning", f"{wire.url}: prefix caching is off", OFF_MEND, why=OFF_WHY))
    findings += await check_connections(wire, rendering, idle_s)
    offers = shown.offers + _offers(first, digest, reported)
    findings += _missing(wire, offers, emulated=said.emulated)
    return ServerFacts(
        url=wire.url,
        control=control,
        template=template,
        max_model_len=max_model_len,
        emulated=said.emulated,
        time_scale=said.time_scale,
        server={
            "version": said.version,
            "fingerprint": first.server_fingerprint,
            "max_model_len": max_model_len,
        },
        findings=findings,
        tokenizer_digest=digest,
        offers=offers,
        kv_cache=shown.kv_cache,
        prefix_caching=cached if cached is not None else shown.prefix_caching,
        speculative=shown.speculative,
    )


def _offers(first: Outcome, digest: str | None, reported: bool) -> list[str]:
    has = {
        "tokenize": digest is not None,
        "cached_tokens": reported,
        "request_metrics": first.server_first_token_s is not None,
    }
    return [name for name, offered in has.items() if offered]


_USEFUL = {
    "metrics": ("/metrics", "the server's own counters cannot be set beside the client's", "let its /metrics through"),
    "server_info": (
        "/server_info",
        "of servers that we start only the commands can be compared, of others nothing",
        "start vLLM with VLLM_SERVER_DEV_MODE=1 (in a closed network)",
    ),
    "reset_prefix_cache": (
        "/reset_prefix_cache",
        "the cache is not emptied between blocks: salts keep blocks apart, but old blocks take room until evicted",
        "start vLLM with VLLM_SERVER_DEV_MODE=1 (in a closed network)",
    ),
    "request_metrics": (
        "server-side times in replies",
        "the client's TTFT and ITL cannot be checked against the server's request by request",
        "start vLLM with --enable-per-request-metrics",
    ),
    "tokenize": ("/tokenize", "equal tokenizers are taken on trust", "let its /tokenize through"),
}
"""Name in ``ServerFacts.offers`` -> what it is, why it is missed, what to change."""


def _missing(wire: Wire, offers: list[str], *, emulated: bool) -> list[Finding]:
    """What a real server could offer and does not."""
    return [
        Finding("note", f"{wire.url}: no {what}", mend, why=why)
        for name, (what, why, mend) in _USEFUL.items()
        if name not in offers and not emulated
    ]
