"""Charts as data: what a picture shows. `figures` draws them, on a page and for `--plot` alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from math import isfinite, nan
from typing import Final

from sewa_cli.text import number

EXACT: Final = 2**53  # a larger step is a date or a hash in a file's name, and no float holds it
MOST_POINTS: Final = 100_000  # more than these take minutes to draw
DASHES: Final = ("-", "--", ":", "-.")
Ends = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points of one kind. NaN leaves a gap in the line."""

    name: str  # in the legend; "": not there
    x: Sequence[float]
    y: Sequence[float]
    line: str = ""  # one of DASHES; "": none
    marker: str = ""
    color: str = "black"
    size: float = 4.0
    width: float = 1.2
    is_hollow: bool = False
    is_stem: bool = False  # a line from zero up to each point
    intervals: Sequence[Ends | None] = ()
    hints: Sequence[str] = ()  # words for each point, for whoever points at it; "": none


@dataclass(frozen=True)
class Panel:
    series: Sequence[Series]
    x_label: str
    y_label: str
    levels: Mapping[str, float] = field(default_factory=dict)  # lines across, by name
    x_names: Mapping[float, str] = field(default_factory=dict)  # in place of numbers
    rows: Sequence[str] = ()  # names from the top; y is then the row, and x the value
    y_limits: tuple[float | None, float | None] | None = None  # None: around the values
    height: float = 2.9


@dataclass(frozen=True)
class Chart:
    title: str
    alt: str  # what it shows, for whoever does not see it
    panels: Sequence[Panel]

    @property
    def points(self) -> int:
        return sum(len(series.x) for panel in self.panels for series in panel.series)


def drawable(value: float | None) -> float:
    """Return NaN for a value that cannot be drawn."""
    return value if value is not None and isfinite(value) else nan


def ends_of(value: float | None, error: float | None) -> Ends | None:
    """Return a 95 % interval from a standard error."""
    if value is None or error is None:
        return None
    return value - 1.96 * error, value + 1.96 * error


def words_of(ends: Ends | None) -> str:
    return "" if ends is None else f", 95 % CI [{number(ends[0])}, {number(ends[1])}]"


def places_of(steps: Sequence[int | None]) -> tuple[list[float], str]:
    """Return where checkpoints stand on the x axis, and its label: by step, else by index."""
    known = [float(step) for step in steps if step is not None and abs(step) < EXACT]
    if len(set(known)) == len(steps):
        return known, "training step"
    return [float(i) for i in range(len(steps))], "checkpoint, by index"


def name_of(step: int | None, index: int) -> str:
    return f"checkpoint {index}" if step is None else f"step {step:,}"


def weights_panel(
    steps: Sequence[int | None], weights: Sequence[float | None], others: Sequence[Series] = ()
) -> Panel:
    places, x_label = places_of(steps)
    heights = [drawable(weight or 0.0) for weight in weights]
    hints = [
        f"{name_of(step, i)}, coefficient {number(weight)}" if weight else ""
        for i, (step, weight) in enumerate(zip(steps, weights, strict=True))
    ]
    name = "coefficient" if others else ""
    stems = Series(name, places, heights, is_stem=True, hints=hints)
    limits = None if min(heights, default=0.0) < 0 else (0.0, None)
    return Panel([*others, stems], x_label, "coefficient", y_limits=limits)


def logged_panels(
    steps: Sequence[int | None], logged: Sequence[Mapping[str, float] | None]
) -> list[Panel]:
    places, x_label = places_of(steps)
    names = list(dict.fromkeys(name for one in logged for name in one or {} if "loss" in name))
    hints = [
        f"{name_of(steps[i], i)}, {', '.join(f'{n} {number((one or {}).get(n))}' for n in names)}"
        for i, one in enumerate(logged)
    ]
    series: list[Series] = []
    for name, line in zip(names, DASHES, strict=False):
        values = [drawable((one or {}).get(name)) for one in logged]
        own = [] if series else hints  # once for each checkpoint
        series.append(Series(name, places, values, line, color="0.4", hints=own))
    return [Panel(series, x_label, "logged loss", height=1.8)] if series else []


@dataclass(frozen=True)
class Dots:
    """Values of some rows, None where there is none."""

    name: str
    values: Sequence[float | None]
    is_hollow: bool = False
    intervals: Sequence[Ends | None] = ()
    marker: str = "o"


def rows_panel(
    names: Sequence[str], dots: Sequence[Dots], label: str, *, apart: bool = True
) -> Panel:
    """Draw rows of dots; `apart`: each set a little above or below the row, to hide no other."""
    series: list[Series] = []
    for n, one in enumerate(dots):
        shift = 0.36 * (n / (len(dots) - 1) - 0.5) if apart and len(dots) > 1 else 0.0
        hints = [
            f"{name}, {one.name} {number(value)}{words_of(ends)}"
            for name, value, ends in zip_longest(names, one.values, one.intervals)
        ]
        series.append(
            Series(
                one.name,
                [drawable(value) for value in one.values],
                [row + shift for row in range(len(names))],
                marker=one.marker,
                size=12.0 if one.marker == "*" else 6.5,
                is_hollow=one.is_hollow,
                intervals=one.intervals,
                hints=hints,
            )
        )
    return Panel(series, label, "", rows=names, height=1.0 + 0.36 * len(names))


def running_mean(values: Sequence[float], half: int) -> list[float]:
    """Return the mean of the finite values among the 2·half around each; NaN if there are none.

    The number is even, so that batches that alternate between easy and hard leave no ripple.
    """
    sums = [0.0, *accumulate(value if isfinite(value) else 0.0 for value in values)]
    counts = [0, *accumulate(int(isfinite(value)) for value in values)]
    means = []
    for i in range(len(values)):
        low, high = max(0, i - half), min(len(values), i + half)
        near = counts[high] - counts[low]
        means.append((sums[high] - sums[low]) / near if near else nan)
    return means


def half_of(weights: Sequence[float]) -> tuple[int, int]:
    """Return the first and the last of the fewest neighbours that have half of the weight."""
    total, found = sum(weights), (0, len(weights) - 1)
    first, inside = 0, 0.0
    for last, weight in enumerate(weights):
        inside += weight
        while inside - weights[first] >= total / 2 and first < last:
            inside -= weights[first]
            first += 1
        if inside >= total / 2 and last - first < found[1] - found[0]:
            found = first, last
    return found
