"""Rows of anything: an aligned table or Markdown for people, CSV or JSON lines for programs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from sewa_cli.text import markdown, number, shown, size

Cell = str | int | float | bool | None
Rows = list[dict[str, Cell]]


class Ordered(str):
    """Words for a number, and the number to sort them by."""

    __slots__ = ("key",)
    key: float

    def __new__(cls, words: str, key: float) -> Ordered:
        found = super().__new__(cls, words)
        found.key = key
        return found


def render(rows: Sequence[Mapping[str, Cell]], form: str) -> str:
    """All rows with the columns that any row has, in the order of their first appearance."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[row.get(column) for column in columns] for row in rows]
    if form == "jsonl":
        dicts = (dict(zip(columns, line, strict=True)) for line in cells)
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in dicts)
    if form == "csv":
        return _csv(columns) + "".join(map(_csv, cells))
    lines = [[*map(shown, columns)], *([shown(plain(cell)) for cell in line] for line in cells)]
    right = [not any(isinstance(line[i], str) for line in cells) for i in range(len(columns))]
    if form == "markdown":
        rule = ["---:" if is_right else "---" for is_right in right]
        lines = [[markdown(cell) for cell in line] for line in lines]
        return "".join(f"| {' | '.join(line)} |\n" for line in [lines[0], rule, *lines[1:]])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "".join(
        "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, right, strict=True)
        ).rstrip()
        + "\n"
        for line in lines
    )


def _csv(cells: Sequence[Cell]) -> str:
    """None is an empty cell. The writer quotes what is in its own line's end: \\r and \\n."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow(cells)
    return line.getvalue().removesuffix("\r\n") + "\n"


def plain(value: Cell) -> str:
    return number(value) if value is None or isinstance(value, float) else str(value)


def sized(count: int) -> Ordered:
    return Ordered(size(count), count)


def beside(found: Mapping[str, float | None] | None, taken: Container[str]) -> dict[str, Cell]:
    """A metric that is named like a column of ours must not take its place."""
    named: dict[str, Cell] = {}
    for metric, value in (found or {}).items():
        name = metric
        while name in taken or (name != metric and name in (found or {})):
            name = f"metric_{name}"
        named[name] = value
    return named


@dataclass(frozen=True)
class Sheet:
    """The data of a report."""

    rows: Rows  # for programs: flat, every number as it is
    # for people: titles ("" for none) and tables, facts with names, or words; none: the rows
    parts: list[tuple[str, Rows | dict[str, str] | str]] = field(default_factory=list)

    def show(self, form: str) -> str:
        if form in ("csv", "jsonl"):
            return render(self.rows, form)
        return "\n".join(
            _part(title, found, form) for title, found in self.parts or [("", self.rows)]
        )


def _part(title: str, found: Rows | dict[str, str] | str, form: str) -> str:
    if isinstance(found, str):
        text = f"{markdown(found) if form == 'markdown' else shown(found)}\n"
    elif isinstance(found, list):
        text = render(found, form)
    elif form == "markdown":
        text = render([{"": name, " ": value} for name, value in found.items()], form)
    else:
        facts = {shown(name): shown(value) for name, value in found.items()}
        width = max(map(len, facts))
        text = "".join(f"{name:>{width}}  {value}\n" for name, value in facts.items())
    if not title:
        return text
    return f"**{markdown(title)}**\n\n{text}" if form == "markdown" else f"{shown(title)}\n{text}"
