"""Prompts of parity checks, made again from their seeds: on any machine the same ids, and never text of anybody's."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from workloads.content import Vocabulary, block_tokens

_BLOCK = 512


def prompt(seed: int, tokens: int, vocabulary: Vocabulary) -> list[int]:
    """Ids of ``tokens`` words of the vocabulary, drawn by ``seed``. A shorter prompt of the same seed is its start."""
    blocks = range(-(-tokens // _BLOCK))
    indices = block_tokens(f"parity/{seed}", blocks, _BLOCK, len(vocabulary.ids)).ravel()[:tokens]
    return [vocabulary.ids[index] for index in indices.tolist()]


def cut(before: Sequence[int], trace: Sequence[int], at: int) -> list[int]:
    """The prompt of a cut-point probe: a prompt and the first ``at`` tokens of a reply to it."""
    return [*before, *map(int, trace[:at])]


def digest(ids: Sequence[int]) -> str:
    """16 hex digits over ids: of SHA-256 over 4 little-endian bytes of each."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()[:16]
