"""What does the server show of itself, beside replies?"""

from __future__ import annotations

import msgspec

from replay.metrics import parse
from replay.pages import page
from replay.probes.facts import KvCache
from replay.wire import Wire


class Pages(msgspec.Struct, kw_only=True):
    """Null: the server does not show it."""

    offers: list[str] = []
    """Of: metrics, server_info, reset_prefix_cache."""
    kv_cache: KvCache | None = None
    prefix_caching: bool | None = None
    speculative: bool | None = None


async def look_at_pages(wire: Wire) -> Pages:
    """Ask for each page. /reset_prefix_cache is only looked for, not used: a GET shows whether it is there."""
    found = Pages()
    metrics = await page(wire, "/metrics")
    if metrics.failure is None and metrics.http_status == 200:
        _read_metrics(found, metrics.body.decode("utf-8", "replace"))
    if (await page(wire, "/server_info?config_format=json")).http_status == 200:
        found.offers.append("server_info")
    if (await page(wire, "/reset_prefix_cache")).http_status == 405:
        found.offers.append("reset_prefix_cache")
    return found


def _read_metrics(found: Pages, text: str) -> None:
    try:
        samples = parse(text)
    except ValueError:
        return
    if not samples:
        return
    found.offers.append("metrics")
    found.speculative = any(name.startswith("vllm:spec_decode") for name, _, _ in samples)
    engines = [labels for name, labels, _ in samples if name == "vllm:cache_config_info"]
    if not engines:
        return
    config = engines[0]
    found.prefix_caching = {"True": True, "False": False}.get(config.get("enable_prefix_caching", ""))
    names = ("kv_cache_size_tokens", "num_gpu_blocks", "block_size")
    tokens, blocks, block_size = [_count(config.get(name)) for name in names]
    if tokens:
        found.kv_cache = KvCache(tokens=tokens, engines=len(engines), exact=True)
    elif blocks and block_size:
        found.kv_cache = KvCache(tokens=blocks * block_size, engines=len(engines), exact=False)


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
