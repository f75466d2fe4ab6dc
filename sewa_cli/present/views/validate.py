"""The view of `validate`: everything but the head of the report, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sewa_cli.present.view import Cell, Facts, View
from sewa_cli.report.shared import TaskHead
from sewa_cli.text import number

if TYPE_CHECKING:
    from sewa_cli.report.kinds import Validation


def view(report: Validation) -> View:
    kept = {"task", "device"}
    found = report.model_dump(exclude={*TaskHead.model_fields} - kept)
    row: dict[str, Cell] = {
        name: ", ".join(value) if isinstance(value, list) else value
        for name, value in found.items()
    }
    facts = Facts({name.replace("_", " "): _word(value) for name, value in found.items()})
    said = "everything fits together"
    return View(
        headline="Everything fits together",
        caveat=f"{report.checkpoints} checkpoints, {report.parameters:,} parameters",
        says=[said],
        rows=[row],
        tables=[facts],
    )


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if value is None:
        return number(None)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
