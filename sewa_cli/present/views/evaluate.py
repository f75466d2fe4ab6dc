"""The view of `evaluate`: the losses of files as they are."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from sewa_cli.present.charts import Chart, Dots, rows_panel
from sewa_cli.present.parts import section
from sewa_cli.present.view import Cell, Picture, Rows, Table, View, metrics_of, titled
from sewa_cli.text import number

if TYPE_CHECKING:
    from sewa_cli.report.kinds import Evaluated, Evaluation

MOST_ROWS: Final = 60  # of a chart
_TITLES: Final = {"heldout_loss": "held-out loss", "selection_loss": "selection loss"}


def view(report: Evaluation) -> View:
    measure = "selection_loss" if report.heldout_rows is None else "heldout_loss"
    known = [one for one in report.files if getattr(one, measure) is not None]
    ranked = sorted(known, key=lambda one: float(getattr(one, measure)))
    count = report.heldout_rows or report.selection_rows
    headline, caveat = "No file has a finite loss", f"{len(report.files)} files"
    if ranked:
        best, *others = ranked
        name, loss = PurePath(best.path).name, getattr(best, measure)
        headline = f"{name} has the lowest {_TITLES[measure]}"
        caveat = f"{number(loss)} on {count:,} examples"
        if others:
            second = number(getattr(others[0], measure))
            caveat += f"; the second is {others[0].path} with {second}"
            caveat += "; `sewa compare` says whether such a difference is significant"
    rows: Rows = [_cells(report, file) for file in report.files]
    seen = titled(rows, _TITLES)
    marks = ["best" if ranked and file is ranked[0] else None for file in report.files]
    table = Table("Losses and metrics", seen, len(rows) > 60, marks)
    chart = _chart(report, ranked)
    steps = [i if one.step is None else one.step for i, one in enumerate(report.files)]
    metrics = dict.fromkeys(name for one in report.files for name in one.metrics or {})
    return View(
        headline=headline,
        caveat=caveat,
        rows=rows,
        sections=section("Each file as it is", Picture(chart), table),
        plot=chart,
        curves={
            name: [(at, getattr(one, name)) for at, one in zip(steps, report.files, strict=True)]
            for name in _TITLES
        }
        | {
            f"metrics/{name}": [
                (at, (one.metrics or {}).get(name))
                for at, one in zip(steps, report.files, strict=True)
            ]
            for name in metrics
        },
    )


def _cells(report: Evaluation, file: Evaluated) -> dict[str, Cell]:
    row: dict[str, Cell] = {"path": file.path, "step": file.step}
    if report.selection_rows:  # a task that is scored by a metric may have no loss
        row["selection_loss"] = file.selection_loss
    if report.heldout_rows is not None:
        row["heldout_loss"] = file.heldout_loss
    return {**row, **metrics_of(file.metrics, row)}


def _chart(report: Evaluation, ranked: list[Evaluated]) -> Chart:
    files = report.files if len(report.files) <= MOST_ROWS else ranked[:MOST_ROWS]
    dots = [Dots("selection", [one.selection_loss for one in files], is_hollow=True)]
    if report.heldout_rows is not None:
        dots.append(Dots("held-out", [one.heldout_loss for one in files]))
    which = "" if files is report.files else f" The {MOST_ROWS} with the lowest loss are drawn."
    alt = f"{len(report.files)} files with the losses of the table.{which}"
    return Chart("Loss of each file", alt, [rows_panel(_names(files), dots, "loss")])


def _names(files: list[Evaluated]) -> list[str]:
    names = [PurePath(one.path).name for one in files]
    return names if len(set(names)) == len(names) else [one.path for one in files]
