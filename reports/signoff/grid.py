"""Tables in words."""

from __future__ import annotations

import msgspec


class Row(msgspec.Struct, frozen=True):
    """Cells are (text, what stands below it in smaller print). ``mark``: the row's class in HTML."""

    cells: list[tuple[str, str]]
    mark: str = ""


class Grid(msgspec.Struct, frozen=True):
    """A table in words. ``right``: columns of figures."""

    head: list[str]
    rows: list[Row]
    right: tuple[int, ...] = ()


def plain(head: list[str], rows: list[list[str]], right: tuple[int, ...] = ()) -> Grid:
    """A table whose cells have nothing below their text."""
    return Grid(head, [Row([(text, "") for text in cells]) for cells in rows], right)
