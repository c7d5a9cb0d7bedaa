"""Lengths of items in o200k_base tokens, kept in a table beside the data.

tiktoken downloads an encoding that it does not have, so it is asked only where TIKTOKEN_CACHE_DIR holds it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from evals.tasks.items import Item
from workloads.errors import UserError

ENCODING = "o200k_base"
_URL = "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"
"""tiktoken names its copy by the hash of this address."""


class Table(msgspec.Struct, kw_only=True):
    """The file beside the data."""

    encoding: Literal["o200k_base"] = "o200k_base"
    data_sha256: str
    tokens: dict[int, int]
    """By row."""


def add_tokens(items: Sequence[Item], texts: Callable[[Item], Iterable[str]], table: Path, data_sha256: str) -> None:
    """Set the tokens of every item: all its ``texts`` together.

    They come from ``table``, or, if it is of other data or missing, from the encoding; then it is written. Raises
    UserError if there is neither.
    """
    known = _read(table)
    if known is None or known.data_sha256 != data_sha256 or not {item.row for item in items} <= known.tokens.keys():
        count = _counter(table)
        counted = {item.row: sum(map(count, texts(item))) for item in items}
        known = Table(data_sha256=data_sha256, tokens=counted)
        with suppress(OSError):  # a folder that may not be written to costs time only
            table.write_bytes(msgspec.json.encode(known))
    for item in items:
        item.tokens = known.tokens[item.row]


def _read(path: Path) -> Table | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Table)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{path} is no table of lengths ({error}): remove it, and it is made again") from None


def _counter(table: Path) -> Callable[[str], int]:
    folder = os.environ.get("TIKTOKEN_CACHE_DIR")
    if not folder or not (Path(folder) / hashlib.sha1(_URL.encode()).hexdigest()).is_file():
        raise UserError(
            f"lengths are counted in {ENCODING} tokens, and neither {table} nor a copy of the encoding is there. Where "
            "there is a network, run: TIKTOKEN_CACHE_DIR=FOLDER python -c 'import tiktoken; "
            f'tiktoken.get_encoding("{ENCODING}")\'; then bring FOLDER here and set TIKTOKEN_CACHE_DIR to it, once: '
            "the lengths are kept beside the data"
        )
    import tiktoken  # an extra, and needed once

    encode = tiktoken.get_encoding(ENCODING).encode_ordinary
    return lambda text: len(encode(text))
