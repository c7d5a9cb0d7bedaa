"""A speculative setting in words."""

from __future__ import annotations

from replay.records import Speculation


def label(speculation: Speculation) -> str:
    """ "dspark, 7 draft tokens, synthetic acceptance length 6"."""
    if not speculation.draft_tokens:
        return "no speculation"
    parts = [speculation.method or "speculation", f"{speculation.draft_tokens} draft tokens"]
    if speculation.acceptance_length is not None:
        parts.append(f"synthetic acceptance length {speculation.acceptance_length:g}")
    if speculation.acceptance_rates is not None:
        parts.append(f"synthetic acceptance rates {' '.join(f'{rate:g}' for rate in speculation.acceptance_rates)}")
    return ", ".join(parts)
