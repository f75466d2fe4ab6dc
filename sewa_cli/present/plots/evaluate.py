"""Losses of files beside each other: rows of dots, or lines by step where there are many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from sewa_cli.present.plots import (
    Picture,
    drawable,
    fit_losses,
    hint,
    legend_above,
    name_of,
    name_steps,
    panels,
    places_of,
)
from sewa_cli.present.plots.dots import Series, draw_dots
from sewa_cli.text import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sewa_cli.report.evaluate import Evaluation

_MOST_ROWS: Final = 24


def pictures(report: Evaluation) -> Iterator[tuple[str, Picture]]:
    """For each part of a page, by its name."""
    yield (
        "scores",
        Picture(
            "Loss of each file",
            f"{len(report.files)} files with the losses of the table.",
            lambda: plot(report),
        ),
    )


def plot(report: Evaluation) -> Figure:
    if len(report.files) > _MOST_ROWS:
        return panels(lambda axes: _draw_lines(axes, report))
    names = [PurePath(file.path).name for file in report.files]
    if len(set(names)) < len(names):
        names = [file.path for file in report.files]
    return panels(
        lambda axes: draw_dots(axes, names, _series(report)), height=1.0 + 0.34 * len(names)
    )


def _series(report: Evaluation) -> list[Series]:
    found = [Series("selection", [file.selection_loss for file in report.files], "o", hollow=True)]
    if report.heldout_rows is not None:
        found.append(Series("held-out", [file.heldout_loss for file in report.files], "o"))
    return found


def _draw_lines(axes: Axes, report: Evaluation) -> None:
    places, by_step = places_of([file.step for file in report.files])
    drawn: list[float] = []
    for one in _series(report):
        values: Sequence[float] = [drawable(value) for value in one.values]
        fill = "white" if one.hollow else "black"
        axes.plot(places, values, "--o" if one.hollow else "-o", ms=3, mfc=fill, color="black")
        axes.lines[-1].set_label(one.name)
        for i, (x, value) in enumerate(zip(places, values, strict=True)):
            if value == value:
                name = name_of(report.files[i].step, i, report.files[i].path)
                hint(axes, x, value, name, f"{one.name} {number(value)}")
                drawn.append(value)
    fit_losses(axes, drawn)
    name_steps(axes, by_step)
    axes.set_ylabel("loss")
    legend_above(axes)
