"""What one backend showed of itself."""

from __future__ import annotations

import msgspec

from replay.progress import Finding
from workloads.rendering import Template


class KvCache(msgspec.Struct, frozen=True, kw_only=True):
    """Room for contexts, by /metrics."""

    tokens: int
    """Of one engine."""
    engines: int
    exact: bool
    """The server's own count. Else blocks times tokens a block, which hybrid models and context parallelism change."""


class ServerFacts(msgspec.Struct, kw_only=True):
    """What one backend showed of itself. Null: it does not show it."""

    url: str
    control: int
    """Index into the ways to ask for a length."""
    template: Template
    max_model_len: int | None
    emulated: bool
    """It says itself that it is an emulator, also when it is named by a URL."""
    time_scale: float
    """Of an emulator; 1 for a real server."""
    server: dict[str, str | int | float | bool | None]
    """version, fingerprint, max_model_len: for the manifest."""
    findings: list[Finding]
    tokenizer_digest: str | None = None
    """SHA-256 over the token ids of a fixed text."""
    offers: list[str] = []
    """Of: metrics, server_info, reset_prefix_cache, tokenize, cached_tokens, request_metrics."""
    kv_cache: KvCache | None = None
    prefix_caching: bool | None = None
    speculative: bool | None = None
