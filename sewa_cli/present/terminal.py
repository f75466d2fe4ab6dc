"""Tables of a view: aligned or Markdown for people, CSV or JSON lines for programs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sewa_cli.present.view import Cell, Facts, Rows, Table, View, Words
from sewa_cli.text import markdown, number, shown


def show(view: View, form: str) -> str:
    """Return what standard output gets, in one of the forms but json."""
    if form in ("csv", "jsonl"):
        return render(view.rows, form)
    parts = view.tables or [Table("", view.rows)]
    return "\n".join(_part(part, form) for part in parts)


def render(rows: Sequence[Mapping[str, Cell]], form: str) -> str:
    """Show all rows with the columns that any row has, in the order of their first appearance."""
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


def listing(found: Mapping[str, Mapping[str, Any]], form: str) -> str:
    """Show what there is to choose from: names, a line about each, and their options."""
    rows: Rows = []
    for name, about in found.items():
        options = [f"{key}={value}" for key, value in about.get("options", {}).items()]
        if form in ("csv", "jsonl"):
            row: dict[str, Cell] = {"name": name, **about}
            rows.append({**row, "options": " ".join(options)} if "options" in about else row)
        else:
            known = "".join(f" [{option}]" for option in options)
            rows.append({"name": name, "what it does": f"{about['line']}{known}"})
    return render(rows, form)


def _csv(cells: Sequence[Cell]) -> str:
    """Return a line in which None is an empty cell; cells with \\r or \\n are quoted."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow(cells)
    return line.getvalue().removesuffix("\r\n") + "\n"


def plain(value: Cell) -> str:
    return number(value) if value is None or isinstance(value, float) else str(value)


def _part(part: Table | Facts | Words, form: str) -> str:
    if isinstance(part, Table):
        hidden = part.details if form == "table" else ()
        rows = [{k: cell for k, cell in row.items() if k not in hidden} for row in part.rows]
        return render(rows, form)
    if isinstance(part, Words):
        return "".join(f"{(markdown if form == 'markdown' else shown)(x)}\n" for x in part.lines)
    if form == "markdown":
        return render([{"": name, " ": value} for name, value in part.found.items()], form)
    facts = {shown(name): shown(value) for name, value in part.found.items()}
    width = max(map(len, facts))
    return "".join(f"{name:>{width}}  {value}\n" for name, value in facts.items())
