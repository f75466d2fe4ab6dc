"""A view says everything that a report has to say; terminal, page, card and trackers render it.

A module in `views` makes it for each kind of report. It is data: no renderer parses a sentence.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from sewa_cli.present.charts import Chart

Cell = str | int | float | bool | None
Rows = list[dict[str, Cell]]
Points = Sequence[tuple[int, float | None]]


@dataclass(frozen=True)
class Table:
    """Rows under a title; folded on a page if they are many, marked if some stand out."""

    kind: ClassVar = "table"
    title: str
    rows: Rows
    is_folded: bool = False
    marks: Sequence[str | None] = ()
    details: Container[str] = ()  # columns that an aligned table leaves out, to fit a terminal

    @cached_property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    @cached_property
    def texts(self) -> set[str]:
        return {name for row in self.rows for name, cell in row.items() if isinstance(cell, str)}

    def mark(self, place: int) -> str:
        return (self.marks[place] if place < len(self.marks) else None) or ""


@dataclass(frozen=True)
class Facts:
    kind: ClassVar = "facts"
    found: Mapping[str, Cell]


@dataclass(frozen=True)
class Words:
    """Sentences, without their first capital and their end."""

    kind: ClassVar = "words"
    lines: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Lines to be typed, by what they do."""

    kind: ClassVar = "code"
    found: Mapping[str, str]


@dataclass(frozen=True)
class Picture:
    kind: ClassVar = "picture"
    chart: Chart


Part = Table | Facts | Words | Code | Picture


@dataclass(frozen=True)
class Section:
    title: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class View:
    headline: str  # what was gained, as a title
    caveat: str  # its subtitle: how sure that is
    says: Sequence[str] = ()  # the terminal's lines
    details: Sequence[str] = ()  # more of them, with -v
    rows: Rows = field(default_factory=list)  # for programs: flat, every number as it is
    tables: Sequence[Table | Facts | Words] = ()  # for people on a terminal; none: the rows
    sections: Sequence[Section] = ()  # of a page; none: the tables
    plot: Chart | None = None
    numbers: Mapping[str, float | None] = field(default_factory=dict)  # for trackers
    curves: Mapping[str, Points] = field(default_factory=dict)
    names: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def charts(self) -> Iterator[Chart]:
        for section in self.sections:
            for part in section.parts:
                if isinstance(part, Picture):
                    yield part.chart


def metrics_of(
    found: Mapping[str, float | None] | None, taken: Container[str | None]
) -> dict[str, Cell]:
    """Return metrics as cells; a metric with the name of a column gets another name."""
    named: dict[str, Cell] = {}
    for metric, value in (found or {}).items():
        name = metric
        while name in taken or (name != metric and name in (found or {})):
            name = f"metric_{name}"
        named[name] = value
    return named


def titled(rows: Rows, titles: Mapping[str, str | None]) -> Rows:
    """Return rows for people: columns with titles, without those whose title is None."""
    return [
        {title: cell for name, cell in row.items() if (title := titles.get(name, name)) is not None}
        for row in rows
    ]
