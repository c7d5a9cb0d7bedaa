"""Which tokens does the server make of a text?"""

from __future__ import annotations

import hashlib

import msgspec
from tokenizers import Tokenizer

from replay.pages import page
from replay.wire import Wire
from workloads.errors import UserError

TEXT = (
    "The quick brown fox jumps over 13 lazy dogs, naïvely.\n\n"
    "def f(x: int) -> str:\n    return f'{x:>08.3f}'  # 3.14159e-10\n\t\t}\r\n"
    "Übergrößenträger; Привет, мир; 你好，世界; こんにちは; مرحبا; 🦊👩‍💻.   1234567890 https://example.org/?q=a%20b"
)
"""Words, code, white space, digits and scripts: where tokenizers differ."""


class _Tokens(msgspec.Struct):
    tokens: list[int]


async def tokenizer_digest(wire: Wire, model: str, own: Tokenizer | None) -> str | None:
    """SHA-256 (hex) over the ids that the server's /tokenize gives for a fixed text; None if it has no such page.

    ``own``: the experiment's tokenizer. Raises UserError if it gives other ids.
    """
    asked = {"model": model, "prompt": TEXT, "add_special_tokens": False}
    reply = await page(wire, "/tokenize", msgspec.json.encode(asked), method="POST")
    if reply.failure is not None or reply.http_status != 200:
        return None
    try:
        ids = msgspec.json.decode(reply.body, type=_Tokens).tokens
    except msgspec.MsgspecError:
        return None
    if own is not None and (ours := own.encode(TEXT, add_special_tokens=False).ids) != ids:
        raise UserError(
            f"{wire.url}: the server makes other tokens of a text than the experiment's tokenizer ({len(ids)} and "
            f"{len(ours)} of a test text): give tokenizer of the served model"
        )
    return hashlib.sha256(msgspec.json.encode(ids)).hexdigest()
