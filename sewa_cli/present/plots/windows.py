"""What `sewa compare --windows` found: loss and metrics against training, a line for each method.

A method has one colour and one marker, its K are told apart by dashes. The run's last checkpoint is
a dashed level across; a ring is where a line has reached it for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Final

from sewa_cli.present.plots import (
    EXACT,
    LOG_ABOVE,
    Picture,
    drawable,
    fit_losses,
    hint,
    house,
    label,
    set_margins,
)
from sewa_cli.text import number, with_K

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sewa_cli.report.compare import Row
    from sewa_cli.report.windows import Windows

# of Okabe and Ito, without the yellow that white paper swallows; black is for the run itself
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "0.55")
_MARKERS: Final = "s^DvPX<>phd8H*"
_DASHES: Final = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)), (0, (9, 3)))
_LAST: Final = "last"
_LEVEL: Final[dict[str, Any]] = {"color": "black", "linestyle": (0, (5, 4)), "lw": 0.9}
_RING: Final[dict[str, Any]] = {"marker": "o", "mfc": "none", "mew": 1.3}


@dataclass(frozen=True)
class _Panel:
    """A measure: its name, its value of a row, and the last checkpoint's."""

    title: str
    value: Callable[[Row], float | None]
    level: float | None
    is_loss: bool


def pictures(found: Windows) -> Iterator[tuple[str, Picture]]:
    """For each part of a page, by its name."""
    yield (
        "scores",
        Picture(
            "Along the run",
            f"A line for each of {len(found.windows[-1].rows)} averages over {len(found.windows)} "
            "windows, and the last checkpoint's level, as in the tables.",
            lambda: plot(found),
        ),
    )


def plot(found: Windows) -> Figure:
    """A panel for the loss that windows are judged by, and one for each metric."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    panels = _panels(found)
    has_places = all(window.at < EXACT for window in found.windows)
    places = [float(w.at if has_places else i) for i, w in enumerate(found.windows, 1)]
    looks = _looks(found)
    height = 0.6 + (3.4 if len(panels) == 1 else 2.6) * len(panels)
    with house():
        figure = Figure(figsize=(9, max(height, 1.4 + 0.18 * _lines(found))))
        set_margins(figure)
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, panel in zip(all_axes, panels, strict=True):
            _draw(axes, panel, found, places, looks)
        bottom = all_axes[-1]
        bottom.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10], integer=True))
        bottom.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        unit = "training step" if found.by == "step" else "checkpoint, by index,"
        where = f"at the end of a window of {found.size} checkpoints"
        bottom.set_xlabel(f"{unit} {where}" if has_places else "window, by index")
        handles, names = _ordered(all_axes[0], found, panels[0])
        figure.legend(handles, names, loc="outside right upper", handlelength=3.2)
    return figure


def _lines(found: Windows) -> int:
    """Of the legend's names."""
    return sum(_name(row).count("\n") + 1 for row in found.windows[-1].rows)


def _name(row: Row) -> str:
    return label(with_K(row.method, row.K))


def _panels(found: Windows) -> list[_Panel]:
    level, rows = found.level, [row for window in found.windows for row in window.rows]
    if level.measure == "heldout_loss":
        loss = _Panel("held-out loss", lambda row: row.heldout_loss, level.value, True)
    else:
        title = "selection loss (nothing held out)"
        loss = _Panel(title, lambda row: row.selection_loss, level.value, True)

    def metric(name: str) -> _Panel:
        known = (level.metrics or {}).get(name)
        return _Panel(label(name), lambda row: (row.metrics or {}).get(name), known, False)

    return [loss, *map(metric, dict.fromkeys(name for row in rows for name in row.metrics or {}))]


def _looks(found: Windows) -> list[dict[str, Any]]:
    """For each row of a window: colour and marker by method, dashes by K."""
    rows = found.windows[-1].rows
    averages = [name for name in dict.fromkeys(row.method for row in rows) if name != _LAST]
    Ks = sorted({row.K for row in rows if row.K is not None})
    looks: list[dict[str, Any]] = []
    for row in rows:
        if row.method == _LAST:
            looks.append({"color": "black", "marker": "o", "lw": 1.8, "zorder": 4})
            continue
        i = averages.index(row.method)
        dashes = _DASHES[Ks.index(row.K) % len(_DASHES)] if row.K is not None else _DASHES[0]
        colour, marker = _COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)]
        style = {"color": colour, "marker": marker, "linestyle": dashes}
        looks.append({**style, "lw": 1.3, "zorder": 3})
    return looks


def _draw(
    axes: Axes,
    panel: _Panel,
    found: Windows,
    places: Sequence[float],
    looks: Sequence[dict[str, Any]],
) -> None:
    drawn = []
    size = 4.5 if len(places) <= 40 else 2.5
    for i, (row, look) in enumerate(zip(found.windows[-1].rows, looks, strict=True)):
        values = [drawable(panel.value(window.rows[i])) for window in found.windows]
        drawn += [value for value in values if isfinite(value)]
        axes.plot(places, values, ms=size, label=_name(row), gid="method", **look)
        for window, x, value in zip(found.windows, places, values, strict=True):
            if isfinite(value):
                where = f"{'step' if found.by == 'step' else 'checkpoint'} {window.at:,}"
                hint(axes, x, value, with_K(row.method, row.K), where, number(value))
        reached = found.reaches[i].window
        if reached is not None and panel.is_loss and len(places) > 1:
            ring = {**_RING, "color": look["color"], "ms": size + 6, "zorder": 5}
            at, value = places[reached], values[reached]
            axes.plot(at, value, linestyle="none", gid="reached", label="_ring", **ring)
    level = drawable(panel.level)
    if isfinite(level):
        drawn.append(level)
        axes.axhline(level, **_LEVEL, gid="level", zorder=2)
    fit_losses(axes, drawn, LOG_ABOVE if panel.is_loss else inf)
    axes.set_ylabel(panel.title if drawn else f"{panel.title}\n(nothing finite to draw)")


def _ordered(axes: Axes, found: Windows, panel: _Panel) -> tuple[list[Any], list[str]]:
    """A legend in the order in which the lines end, and what the marks mean."""
    from matplotlib.lines import Line2D

    lines = [line for line in axes.lines if line.get_gid() == "method"]
    rows = found.windows[-1].rows
    ends = [drawable(panel.value(row)) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: -ends[i] if isfinite(ends[i]) else -inf)
    handles: list[Any] = [lines[i] for i in order]
    names = [str(line.get_label()) for line in handles]
    if panel.level is not None:
        unit = "step" if found.by == "step" else "checkpoint"
        handles += [Line2D([], [], linestyle="none"), Line2D([], [], **_LEVEL)]
        where = f", {unit} {found.level.at:,}" if found.level.at < EXACT else ""
        names += ["", f"the last checkpoint{where}"]
    if any(line.get_gid() == "reached" for line in axes.lines):
        handles += [Line2D([], [], linestyle="none", ms=10.5, color="black", **_RING)]
        names += ["at its level from here on"]
    return handles, names
