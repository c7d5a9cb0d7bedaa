"""A tiny deterministic language: 4,096 words, a tokenizer, a chat template, and what word follows.

Ids: specials first, then one token per byte (fallback for any text), printable ASCII characters, words without a space
(as at the start of a text), words. A word token is a space and two syllables (" bado"), so a text of words has exactly
one tokenization, wherever it is cut or joined between words.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from replay.emulator.noise import mix

SPECIALS = [f"<|{name}|>" for name in ("unk", "bos", "eos", "end", "think", "system", "user", "assistant", "tool")]
BOS, EOS, END, THINK = 1, 2, 3, 4
ROLES = {role: SPECIALS.index(f"<|{role}|>") for role in ("system", "user", "assistant", "tool")}
ROLES["developer"] = ROLES["system"]

_SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstv" for vowel in "aeio"]
WORDS = [f" {first}{second}" for first in _SYLLABLES for second in _SYLLABLES]

TOKENS = [
    *SPECIALS,
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *map(chr, range(32, 127)),
    *(word[1:] for word in WORDS),
    *WORDS,
]
"""Text of each token id; byte tokens in the notation that tokenizers' byte fallback uses."""
IDS = {token: index for index, token in enumerate(TOKENS)}
VOCAB_SIZE = len(TOKENS)
FIRST_BYTE = len(SPECIALS)
FIRST_CHARACTER = FIRST_BYTE + 256
FIRST_WORD = VOCAB_SIZE - len(WORDS)

PIECE = r" ?[a-z]+|[\s\S]"
_PIECE = re.compile(PIECE)

MEAN_REPLY = 256
"""Tokens after which a reply ends by itself, on average."""

MESSAGE_OVERHEAD = 2
"""Template tokens around the content of each chat message: its role, its end."""
CHAT_OVERHEAD = 2
"""Template tokens of a whole chat prompt: start of text, and the role that is to speak (one more with thinking)."""


@cache
def tokenizer() -> Tokenizer:
    """Return the tokenizer. ``encode(decode(ids)) == ids`` for word tokens, ``decode(encode(text)) == text`` for any
    text without special tokens. Nothing is added at the start or end of a text."""
    built = Tokenizer(models.BPE(IDS, [], unk_token=SPECIALS[0], byte_fallback=True, ignore_merges=True))
    built.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), "isolated")
    built.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    built.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return built


def write_tokenizer(path: Path) -> None:
    """Write ``tokenizer.json`` at ``path`` (a folder is completed with that name)."""
    tokenizer().save(str(path / "tokenizer.json" if path.is_dir() else path))


def encode(text: str) -> list[int]:
    """Return what ``tokenizer().encode(text).ids`` returns, about ten times faster for words."""
    if "<|" in text:
        return list(tokenizer().encode(text, add_special_tokens=False).ids)
    pieces = _PIECE.findall(text)
    try:
        return list(map(IDS.__getitem__, pieces))
    except KeyError:
        return [token for piece in pieces for token in _spell(piece)]


def _spell(piece: str) -> list[int]:
    if piece in IDS:
        return [IDS[piece]]
    ids: list[int] = []
    for character in piece:
        if character in IDS:
            ids.append(IDS[character])
        else:
            ids.extend(FIRST_BYTE + byte for byte in character.encode("utf-8", "replace"))
    return ids


def decode(ids: Iterable[int]) -> str:
    """Return the text of token ids, special tokens left out."""
    return str(tokenizer().decode(list(ids), skip_special_tokens=True))


@lru_cache(maxsize=4096)
def _encode_message(text: str) -> array[int]:
    return array("i", encode(text))  # kept, since the next turn of a session sends its history again


def chat_prompt(messages: Iterable[tuple[str, str]], *, thinking: bool = False) -> array[int]:
    """Return the prompt of a chat: int32 ids of ``(role, content)`` messages in the template.

    ``<|bos|>``, then for each message ``<|role|> content <|end|>``, then ``<|assistant|>`` (and ``<|think|>``). Raises
    ValueError for an unknown role.
    """
    prompt = array("i", [BOS])
    for role, content in messages:
        if role not in ROLES:
            raise ValueError(f"unknown message role {role!r}; known: {', '.join(ROLES)}")
        prompt.append(ROLES[role])
        prompt.extend(_encode_message(content))
        prompt.append(END)
    prompt.append(ROLES["assistant"])
    if thinking:
        prompt.append(THINK)
    return prompt


def next_token(before: tuple[int, int, int], position: int, seed: int, may_end: bool) -> int:
    """Return the token at ``position`` (counted from the start of the prompt) after the three tokens ``before`` it.

    A pure function of its arguments: batches, speculation and backends cannot change a reply. ``may_end`` allows
    ``EOS``.
    """
    x = mix((before[0] << 40) ^ (before[1] << 20) ^ before[2], position, seed, 0x1A96)
    if may_end and (x >> 32) % MEAN_REPLY == 0:
        return EOS
    return FIRST_WORD + (x & 0xFFFFF) % len(WORDS)
