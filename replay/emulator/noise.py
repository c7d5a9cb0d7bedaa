"""Repeatable noise: the same numbers in every process, on every platform, in every order of asking."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


Numbers = int | NDArray[Any]
"""An integer, or an array of integers."""


def mixed(a: Numbers, b: Numbers, c: Numbers = 0, d: Numbers = 0) -> NDArray[np.uint64]:
    """What ``mix`` returns, for arrays that broadcast together (one dimension at least)."""
    x = _scaled(a, 0x9E3779B97F4A7C15) + _scaled(b, 0xC2B2AE3D27D4EB4F)
    if not (isinstance(c, int) and isinstance(d, int) and c == d == 0):
        x = x + (_scaled(c, 0x165667B19E3779F9) + _scaled(d, 0xD6E8FEB86659FD93))
    x ^= x >> np.uint64(32)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(29)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _scaled(x: Numbers, factor: int) -> NDArray[np.uint64]:
    whole = np.array([x & MASK], np.uint64) if isinstance(x, int) else np.atleast_1d(x).astype(np.uint64)
    return whole * np.uint64(factor)


def units(x: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return numbers in [0, 1) made of 64 bits each, as ``unit`` makes them."""
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


_PER_SD = float((3 / (65536**2 - 1)) ** 0.5)  # of the sum of four 16-bit numbers


def normals(x: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return numbers of mean 0 and variance 1 made of 64 bits each: the sum of four uniform ones, so within 3.5."""
    pairs = (x & np.uint64(0x0000FFFF0000FFFF)) + (x >> np.uint64(16) & np.uint64(0x0000FFFF0000FFFF))
    total = (pairs & np.uint64(0xFFFFFFFF)) + (pairs >> np.uint64(32))
    return (total.astype(np.float64) - 2.0 * 65535) * _PER_SD
