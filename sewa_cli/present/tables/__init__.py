"""Reports as sheets of rows: a function for each kind of report, of its name.

losses   select, compare, evaluate
files    inspect, average, verify
plans    validate, forecast
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sewa_cli.present import kind_of
from sewa_cli.present.contest import sheet as contest
from sewa_cli.present.sheet import Cell, Rows, Sheet
from sewa_cli.present.tables.files import average, inspect, verify, ways
from sewa_cli.present.tables.losses import (
    LOSS,
    compare,
    evaluate,
    select,
)
from sewa_cli.present.tables.plans import forecast, validate
from sewa_cli.report.part import to_json

if TYPE_CHECKING:
    from sewa_cli.report.shared import Head

__all__ = [
    "LOSS",
    "average",
    "compare",
    "contest",
    "evaluate",
    "forecast",
    "inspect",
    "listing",
    "select",
    "show",
    "validate",
    "verify",
    "ways",
]


def show(report: Head, form: str) -> str:
    """By the function here that is named like the report's kind."""
    if form == "json":
        return to_json(report)
    sheet: Sheet = globals()[kind_of(report)](report)
    return sheet.show(form)


def listing(found: Mapping[str, Mapping[str, Any]]) -> Sheet:
    """What there is to choose from: names, a line about each, and what else is known."""
    rows: Rows = []
    seen: Rows = []
    for name, about in found.items():
        options = about.get("options", {})
        given = " ".join(f"{key}={value}" for key, value in options.items())
        row: dict[str, Cell] = {"name": name, **about}
        rows.append({**row, "options": given} if "options" in about else row)
        known = "".join(f" [{key}={value}]" for key, value in options.items())
        seen.append({"name": name, "what it does": f"{about['line']}{known}"})
    return Sheet(rows, [("", seen)])
