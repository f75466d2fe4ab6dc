"""Rows of dots: the losses of some averages or files next to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from sewa_cli.present.plots import LOG_ABOVE, drawable, hint, label, legend_above
from sewa_cli.text import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMES: Final = 34  # letters in a line of a row's name


@dataclass(frozen=True)
class Series:
    """A value for each row, None where there is none; `errors` either way of the first ones."""

    name: str
    values: Sequence[float | None]
    marker: str
    hollow: bool = False
    errors: Sequence[float | None] = ()


def draw_dots(axes: Axes, names: Sequence[str], series: Sequence[Series]) -> None:
    """The first row on top; a thin line joins what belongs to a row."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    every = [[drawable(value) for value in one.values] for one in series]
    drawn: list[float] = []
    for row in range(len(names)):
        here = [values[row] for values in every if isfinite(values[row])]
        if here:
            axes.plot([min(here), max(here)], [row, row], color="0.75", lw=1.2, zorder=1)
    for n, (one, values) in enumerate(zip(series, every, strict=True)):
        # a little above or below the row, so that none hides another
        off = 0.36 * (n / (len(series) - 1) - 0.5) if len(series) > 1 else 0.0
        at = [row + off for row in range(len(values))]
        fill = "white" if one.hollow else "black"
        look: dict[str, Any] = {"ms": 7.0, "mfc": fill, "mec": "black", "linestyle": "none"}
        axes.plot(values, at, one.marker, **look, label=label(one.name), zorder=3)
        for row, value in enumerate(values):
            if isfinite(value):
                hint(axes, value, at[row], names[row], f"{one.name} {number(value)}")
                drawn.append(value)
        for row, error in enumerate(one.errors):
            if error is not None and isfinite(error) and isfinite(values[row]):
                ends = [values[row] - error, values[row] + error]
                axes.plot(ends, [at[row]] * 2, color="black", lw=1.2, marker="|", ms=6, zorder=2)
                drawn += ends
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), [label(name, _NAMES) for name in names])
    axes.tick_params(axis="y", left=False)
    axes.spines["left"].set_visible(False)
    low, high = min(drawn, default=0.0), max(drawn, default=1.0)
    if low > 0 and high / low > LOG_ABOVE:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("loss" if drawn else "nothing finite to draw")
    if drawn:
        legend_above(axes)
