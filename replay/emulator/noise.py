"""Repeatable noise: the same numbers in every process, on every platform, in every order of asking."""

from __future__ import annotations

import hashlib

MASK = (1 << 64) - 1


def mix(a: int, b: int, c: int = 0, d: int = 0) -> int:
    """Return 64 evenly spread bits that depend on all four numbers (multiply and xor-shift, as in SplitMix64)."""
    x = (a * 0x9E3779B97F4A7C15 + b * 0xC2B2AE3D27D4EB4F + c * 0x165667B19E3779F9 + d * 0xD6E8FEB86659FD93) & MASK
    x = ((x ^ (x >> 32)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 29)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def unit(a: int, b: int, c: int = 0, d: int = 0) -> float:
    """Return a number in [0, 1) that depends on all four numbers."""
    return (mix(a, b, c, d) >> 11) / (1 << 53)


def text_number(text: str) -> int:
    """Return 64 bits that stand for a text, to be mixed with others."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
