"""Rows for people and programs: an aligned table, Markdown, CSV, JSON lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence

from sewa_cli.errors import ConfigError

FORMATS = ("table", "markdown", "csv", "jsonl", "json")
Cell = str | int | float | bool | None


def check_format(name: str) -> str:
    if name not in FORMATS:
        raise ConfigError(f"--format: must be one of {', '.join(FORMATS)}, found {name!r}")
    return name


def even(rows: Sequence[Mapping[str, Cell]]) -> list[dict[str, Cell]]:
    """Every row with every column that any row has, in the order of their first appearance."""
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


def render(rows: Sequence[Mapping[str, Cell]], form: str) -> str:
    """`json` is left to the caller, who has more to say than rows."""
    columns = list(rows[0]) if rows else []
    if form == "jsonl":
        return "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
    if form == "csv":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([["" if row[c] is None else row[c] for c in columns] for row in rows])
        return text.getvalue()
    shown = [[" ".join(show(row[column]).split()) for column in columns] for row in rows]
    numeric = [all(not isinstance(row[c], str) for row in rows) for c in columns]
    if form == "markdown":
        escaped = [[cell.replace("|", "\\|") for cell in line] for line in [columns, *shown]]
        rule = ["---:" if right else "---" for right in numeric]
        return "".join(
            "| " + " | ".join(line) + " |\n" for line in [escaped[0], rule, *escaped[1:]]
        )
    widths = [max(len(line[i]) for line in [columns, *shown]) for i in range(len(columns))]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in [columns, *shown]
    ]
    return "".join(line + "\n" for line in lines)


def show(value: Cell) -> str:
    """A number as people read it."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.5g}" if abs(value) < 1e6 else f"{value:.4e}"
    return str(value)
