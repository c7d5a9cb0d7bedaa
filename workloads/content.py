"""Content: block id -> exactly N tokens, the same in every process and on every platform.

The tokens of a block come from SHA-256 over (content key, block id), stretched with splitmix64 (Steele, Lea, Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014) over unsigned 64-bit integers, and taken modulo a
vocabulary of tokens that survive decoding and encoding again at any join. Nothing depends on Python's ``hash``.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from workloads.errors import UserError

CONTENT_VERSION = 1
"""Raised whenever the same block id would give other tokens than before."""

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

_FEWEST_WORDS = 256
"""Below this many usable words a vocabulary is too small to look like text; single characters are tried instead."""


def stable_bytes(*parts: object) -> bytes:
    """SHA-256 of the parts' text, each preceded by its length, so that no two lists of parts run together."""
    digest = hashlib.sha256()
    for part in parts:
        text = str(part).encode()
        digest.update(b"%d:" % len(text) + text)
    return digest.digest()


def stable_random(*parts: object) -> random.Random:
    """A generator seeded by its purpose. Use ``.random()`` only: the other methods may change between Pythons."""
    return random.Random(int.from_bytes(stable_bytes(*parts)[:8], "little"))


class Vocabulary(msgspec.Struct, frozen=True):
    """Tokens that prompts are made of.

    ``ids`` are token ids, ``words`` their texts (empty if there is no tokenizer). Each word's text begins with one
    space unless ``characters``, in which case each is one letter and words are joined without any separator.
    """

    ids: list[int]
    words: list[str] = []
    characters: bool = False

    def digest(self) -> str:
        """SHA-256 over ids and texts, hex."""
        return hashlib.sha256(msgspec.json.encode([self.ids, self.words, self.characters])).hexdigest()


def vocabulary_of_range(low: int, high: int) -> Vocabulary:
    """Token ids ``low`` <= id < ``high``, for servers whose tokenizer is not at hand (token-id prompts only)."""
    if not 0 <= low < high:
        raise UserError(f"token_ids: [{low}, {high}] is not a range: give [low, high] with 0 <= low < high")
    return Vocabulary(ids=list(range(low, high)))


def load_tokenizer(path: Path) -> Tokenizer:
    """Read ``tokenizer.json`` (given itself, or its folder). Raises UserError if it is not there or not readable."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"tokenizer: no tokenizer.json at {path}; give the model's folder or its tokenizer.json")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"tokenizer: {file} is not a tokenizers file: {error}") from error


def vocabulary_of_tokenizer(tokenizer: Tokenizer) -> Vocabulary:
    """The tokens that are safe to write as text: encoding any sequence of them gives the same number of tokens back.

    Lower-case ASCII words that are one token with a space before them *and* one token without it (a chat template
    may trim the first space of a message). Failing that, single letters, for byte-level tokenizers without merges.
    Raises UserError if neither survives a round trip.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    words = sorted({_bare(token) for token in vocabulary if _is_word(_bare(token))})
    spaced = _single_tokens(tokenizer, [" " + word for word in words])
    bare = _single_tokens(tokenizer, words)
    usable = [(spaced[" " + word], " " + word) for word in words if " " + word in spaced and word in bare]
    usable = _surviving(tokenizer, usable)
    if len(usable) >= _FEWEST_WORDS:
        return Vocabulary(ids=[i for i, _ in usable], words=[w for _, w in usable])
    letters = _single_tokens(tokenizer, [chr(c) for c in range(ord("a"), ord("z") + 1)])
    usable = _surviving(tokenizer, [(i, w) for w, i in letters.items()])
    if len(usable) >= 8:
        return Vocabulary(ids=[i for i, _ in usable], words=[w for _, w in usable], characters=True)
    raise UserError(
        "tokenizer: found neither words nor letters that stay one token each when text is encoded; "
        "use api: completions with token_ids: [low, high] instead of text prompts"
    )


def _bare(token: str) -> str:
    return token.removeprefix("Ġ").removeprefix("▁").removeprefix(" ")


def _is_word(text: str) -> bool:
    return 3 <= len(text) <= 12 and text.isascii() and text.isalpha() and text.islower()


def _single_tokens(tokenizer: Tokenizer, texts: list[str]) -> dict[str, int]:
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return {text: e.ids[0] for text, e in zip(texts, encoded, strict=True) if len(e.ids) == 1}


def _surviving(tokenizer: Tokenizer, usable: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Drop words that change their token next to others; order is shuffled twice so that joins differ."""
    for trial in range(2):
        order = sorted(usable, key=lambda item: stable_bytes("join", trial, item[1]))
        kept: list[tuple[int, str]] = []
        for start in range(0, len(order), 32):
            part = order[start : start + 32]
            # the first token of a text is left out of the comparison: some tokenizers add a space of their own there
            ids = tokenizer.encode("".join(w for _, w in [part[0], *part]), add_special_tokens=False).ids
            if ids[1:] == [i for i, _ in part]:
                kept += part
        usable = kept
    return sorted(usable)


def block_tokens(
    content_key: str, block_ids: Sequence[int], block_size: int, vocabulary_size: int
) -> npt.NDArray[np.uint32]:
    """Vocabulary *indices* of whole blocks, shape (len(block_ids), block_size)."""
    prefix = hashlib.sha256(stable_bytes("block", CONTENT_VERSION, content_key))
    seeds = np.empty(len(block_ids), dtype=np.uint64)
    for row, block_id in enumerate(block_ids):
        digest = prefix.copy()
        digest.update(b"%d" % block_id)
        seeds[row] = int.from_bytes(digest.digest()[:8], "little")
    return _stretch(seeds, block_size, vocabulary_size)


def salt_tokens(seed: int, block_salt: str, session: str, play: int, length: int, vocabulary_size: int) -> list[int]:
    """Vocabulary indices of the salt at the start of a session's prompts: the same for all its streams and turns,
    another for each (seed, block, session, play)."""
    digest = stable_bytes("salt", CONTENT_VERSION, seed, block_salt, session, play)
    row = _stretch(np.array([int.from_bytes(digest[:8], "little")], dtype=np.uint64), length, vocabulary_size)
    return [int(index) for index in row[0]]


def _stretch(seeds: npt.NDArray[np.uint64], length: int, vocabulary_size: int) -> npt.NDArray[np.uint32]:
    """splitmix64 from each seed: ``length`` values, each taken modulo the vocabulary's size."""
    steps = np.arange(1, length + 1, dtype=np.uint64) * _GAMMA
    z = seeds[:, None] + steps[None, :]
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    z ^= z >> np.uint64(31)
    indices: npt.NDArray[np.uint32] = ((z >> np.uint64(32)) % np.uint64(vocabulary_size)).astype(np.uint32)
    return indices
