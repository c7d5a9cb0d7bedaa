"""A prefix cache of whole blocks: what is cached is known by the hash of a block's tokens and of all before it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ROOT = b""
DIGEST_BYTES = 16


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """Return the hash of one block (its int32 tokens as bytes) that follows the block with hash ``parent``."""
    return hashlib.blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest()


def block_hashes(tokens: NDArray[np.int32], block_size: int, salt: bytes = ROOT) -> list[bytes]:
    """Return the hash of each full block of a prompt; a last partial block has none. Prompts of another ``salt`` have
    other ones."""
    data = tokens.tobytes()
    width = block_size * tokens.itemsize
    hashes = []
    parent = salt
    for end in range(width, len(data) + 1, width):
        parent = block_hash(parent, data[end - width : end])
        hashes.append(parent)
    return hashes


class PrefixCache:
    """Blocks of the KV cache. A block is private (being filled by one request), held (full, shared by the requests that
    count on it), idle (full, nobody's: kept until its room is needed, the longest unused first) or free."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.private = 0
        self.held: dict[bytes, int] = {}
        self.idle: OrderedDict[bytes, None] = OrderedDict()

    @property
    def used(self) -> int:
        """Blocks that requests count on."""
        return self.private + len(self.held)

    def hits(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks are cached."""
        held, idle = self.held, self.idle
        for count, block in enumerate(hashes):
            if block not in held and block not in idle:
                return count
        return len(hashes)

    def allocate(self, cached: Sequence[bytes], fresh: int) -> bool:
        """Take ``cached`` blocks (all present) and ``fresh`` private ones, evicting idle ones as needed.

        False: there is no room, and nothing was done.
        """
        waking = sum(block not in self.held for block in cached)
        if self.used + waking + fresh > self.capacity:
            return False
        for block in cached:
            self.idle.pop(block, None)
            self.held[block] = self.held.get(block, 0) + 1
        self.private += fresh
        while self.used + len(self.idle) > self.capacity:
            self.idle.popitem(last=False)
        return True

    def publish(self, block: bytes) -> None:
        """Turn one private block into a held one that others can share. Content that is already there is kept once."""
        self.private -= 1
        self.idle.pop(block, None)
        self.held[block] = self.held.get(block, 0) + 1

    def release(self, blocks: Sequence[bytes], private: int) -> None:
        """Give back a request's held ``blocks`` (in prompt order) and ``private`` ones.

        The end of a prompt becomes idle before its start, so that a prefix outlives what builds on it.
        """
        self.private -= private
        for block in reversed(blocks):
            if self.held[block] > 1:
                self.held[block] -= 1
            else:
                del self.held[block]
                self.idle[block] = None

    def reset(self) -> None:
        """Forget all idle blocks."""
        self.idle.clear()
