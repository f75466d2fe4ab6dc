"""What a page is made of; the template shows each by its `kind`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final

from sewa_cli.present.plots import Picture
from sewa_cli.present.sheet import Cell, Rows

MOST_ROWS: Final = 2000  # of a table; the report has all of them


@dataclass(frozen=True)
class Table:
    """Rows under a title; folded away where they are many, marked where some stand out."""

    kind: ClassVar = "table"
    title: str
    rows: Rows
    folded: bool = False
    marks: Sequence[str | None] = ()

    @cached_property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    @property
    def shown(self) -> Rows:
        return self.rows[:MOST_ROWS]

    @cached_property
    def texts(self) -> set[str]:
        """The columns that hold words."""
        return {name for row in self.shown for name, cell in row.items() if isinstance(cell, str)}

    def mark(self, place: int) -> str:
        return (self.marks[place] if place < len(self.marks) else None) or ""


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    kind: ClassVar = "facts"
    found: Mapping[str, Cell]


@dataclass(frozen=True)
class Words:
    kind: ClassVar = "words"
    lines: Sequence[str]


@dataclass(frozen=True)
class Code:
    """To be typed: what it does, and the line."""

    kind: ClassVar = "code"
    found: Mapping[str, str]


@dataclass(frozen=True)
class Drawing:
    kind: ClassVar = "picture"
    picture: Picture


Part = Table | Facts | Words | Code | Drawing


@dataclass(frozen=True)
class Section:
    title: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Tile:
    """A number that people ask for first."""

    name: str
    value: Cell
    note: str = ""


@dataclass(frozen=True)
class Chapter:
    """A report: the answer first, then all else in the order in which people ask."""

    headline: str
    answer: str
    sections: Sequence[Section]
    tiles: Sequence[Tile] = ()
    warnings: Sequence[str] = ()
    about: str = ""  # which report of which run
    command: str | None = None
