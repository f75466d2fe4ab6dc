"""What `sewa compare` found: loss against K for each method, with intervals.

Methods that take a K are lines over it. Methods that take none, and all of them where only one K
was asked for, are named columns. A star is the best row, a hollow marker a tie with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite, log10
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal

from sewa_cli.present.plots import (
    Picture,
    draw_weights,
    drawable,
    fit_losses,
    hint,
    house,
    label,
    panels,
    set_margins,
)
from sewa_cli.text import few, number, with_K

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from sewa_cli.report.compare import Comparison, Row

# colours of Okabe and Ito that differ for everyone; in grey, markers and dashes tell them apart
_COLOURS: Final = ("black", "#0072B2", "#D55E00", "0.55")
_DASHES: Final = ("-", "--", ":", "-.")
_MARKERS: Final = "os^DvPX<>phd8H"
_LOG_K_ABOVE: Final = 8.0
_LOG_LOSS_ABOVE: Final = 3.0
_OFF_SCALE: Final = 10.0  # times the median loss: such a row would flatten all others
_NAMES: Final = 18  # letters in a line of a column's name
_Style = dict[str, Any]
_PLAIN: Final[_Style] = {"color": "black", "linestyle": "none", "marker": "o"}
_SPREAD: Final[_Style] = {"color": "0.8", "lw": 5.0, "solid_capstyle": "butt"}
_INTERVAL: Final[_Style] = {"lw": 1.0, "marker": "_", "markersize": 5.0, "gid": "interval"}


@dataclass(frozen=True)
class _Point:
    """A row that can be drawn: its loss is finite."""

    row: Row
    loss: float

    @property
    def interval(self) -> tuple[float, ...]:
        found = self.row.held[1]
        return () if found is None else (found.low, found.high)

    @property
    def spread(self) -> tuple[float, ...]:
        found = self.row.spread
        return () if found is None else (self.loss - found, self.loss + found)


def plot(comparison: Comparison) -> Figure:
    """Held-out loss by K and method; selection loss, and it says so, where nothing was held out."""
    from matplotlib.figure import Figure

    judged = comparison.judged
    heldout = comparison.heldout_rows is not None or judged is not None
    points, notes = _points(comparison.rows, heldout)
    taking = [point for point in points if point.row.K is not None]
    taking_none = [point for point in points if point.row.K is None]
    Ks = sorted({point.row.K for point in taking if point.row.K is not None})
    looks = _looks(taking) if len(Ks) > 1 else {}
    parts = [part for part in (taking, taking_none) if part]
    columns = [part for part in parts if part is taking_none or not looks]
    widths = [
        _column_inches(part) if part in columns else _line_inches(len(looks), len(Ks))
        for part in parts
    ]
    # upright names take from the panel's height
    letters = max((len(point.row.method) for part in columns for point in part), default=0)
    height = 4.4 + 0.08 * min(letters, _NAMES)
    keys = [
        *(_key(label(method), **look) for method, look in looks.items()),
        *([_key("")] if looks else []),
        *_explain(points),
        *(_key(label(note, 34)) for note in notes),
    ]
    lines = sum(str(key.get_label()).count("\n") + 1 for key in keys)
    with house():
        figure = Figure(figsize=(max(3.0, sum(widths)) + 3.6, max(height, 0.6 + 0.18 * lines)))
        set_margins(figure)
        panels = figure.subplots(
            1, len(parts) or 1, sharey=True, squeeze=False, width_ratios=widths or None
        )[0]
        what = "loss" if judged is None else judged.metric
        panels[0].set_ylabel(f"held-out {what}" if heldout else "selection loss (nothing held out)")
        if not parts:
            panels[0].set(xticks=[], yticks=[], xlabel="no finite loss to draw")
        for axes, part in zip(panels, parts, strict=False):
            if part in columns:
                _draw_columns(axes, part)
                axes.set_xlabel("methods without K" if part is taking_none else f"K = {Ks[0]}")
            else:
                _draw_lines(axes, part, Ks, looks)
            for point in points:
                if point.row.mark == "best":
                    axes.axhline(point.loss, color="0.85", lw=0.8, zorder=0)
        if parts:
            values = [x for p in points for x in (p.loss, *p.interval, *p.spread)]
            fit_losses(panels[0], values, _LOG_LOSS_ABOVE)
        for axes in panels[1:]:
            axes.tick_params(axis="y", left=False)
            axes.spines["left"].set_visible(False)
        if keys:
            figure.legend(handles=keys, loc="outside right upper", handlelength=3.2)
    return figure


def pictures(comparison: Comparison) -> Iterator[tuple[str, Picture]]:
    """For each part of a page, by its name."""
    rows, best = comparison.rows, comparison.best
    lowest = "" if best is None else f"; {with_K(rows[best].method, rows[best].K)} is best"
    ties = sum(row.mark == "tie" for row in rows)
    yield (
        "scores",
        Picture(
            f"{comparison.judged.metric if comparison.judged else 'Loss'} by method and K",
            f"{len(rows)} rows, each with its 95 % interval{lowest}, and {ties} tie with it.",
            lambda: plot(comparison),
        ),
    )
    both = [row for row in rows if row.heldout_loss is not None and row.selection_loss is not None]
    if len(both) > 1:
        yield (
            "overfit",
            Picture(
                "Held-out against selection loss",
                "A point for each row. Above the diagonal, new rows fare worse than those that "
                "the choice was made by.",
                lambda: panels(lambda axes: _draw_overfit(axes, both), height=3.6, width=5.4),
            ),
        )
    if best is not None and rows[best].coefficients:
        weights = rows[best].coefficients[0]
        steps = [candidate.step for candidate in comparison.candidates]
        name = with_K(rows[best].method, rows[best].K)
        yield (
            "weights",
            Picture(
                f"Weights of {name}",
                f"{rows[best].size} of {comparison.k} checkpoints have one.",
                lambda: panels(lambda axes: draw_weights(axes, steps, weights)),
            ),
        )


def _draw_overfit(axes: Axes, rows: Sequence[Row]) -> None:
    points = [(drawable(row.selection_loss), drawable(row.heldout_loss), row) for row in rows]
    limit = _OFF_SCALE * median(y for _, y, _ in points)
    points = [(x, y, row) for x, y, row in points if isfinite(x) and y <= (limit or inf)]
    for x, y, row in points:
        _draw_mark(axes, x, y, row.mark, _PLAIN)
        said = f"selection {number(x)}", f"held-out {number(y)}"
        hint(axes, x, y, with_K(row.method, row.K), *said, row.mark)
    ends = [end for x, y, _ in points for end in (x, y)]
    if ends:
        axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color="0.6", lw=1, ls=":")
    axes.set_xlabel("selection loss")
    axes.set_ylabel("held-out loss")


def K_scale(Ks: Sequence[int], methods: int) -> Literal["even", "log", "ordinal"]:
    """Ordinal where two K would fall on each other: 10, 11, 100. Many methods need more room."""
    scale: Literal["even", "log"] = "log" if Ks[-1] / Ks[0] > _LOG_K_ABOVE else "even"
    places = [log10(K) if scale == "log" else K for K in Ks]
    mean_gap = (places[-1] - places[0]) / (len(places) - 1)
    least = (0.25 if methods <= 6 else 0.5) * mean_gap
    return "ordinal" if min(b - a for a, b in pairwise(places)) < least else scale


def _points(rows: Sequence[Row], heldout: bool) -> tuple[list[_Point], list[str]]:
    """What can be drawn, and a note on what cannot."""
    losses = [row.held[0] if heldout else row.selection_loss for row in rows]
    finite = [loss for loss in losses if loss is not None and isfinite(loss)]
    by_loss = all(row.score is None for row in rows)
    ceiling = _OFF_SCALE * median(finite) if finite and min(finite) > 0 and by_loss else inf
    points, missing, above = [], [], []
    for row, loss in zip(rows, losses, strict=True):
        name = row.method if row.K is None else f"{row.method} at K={row.K}"
        if loss is None or not isfinite(loss):
            missing.append(name)
        elif loss > ceiling:
            above.append(f"{name} {loss:.4g}")
        else:
            points.append(_Point(row, loss))
    notes = []
    if missing:
        notes.append(f"not drawn, no finite loss: {few(missing, 6)}")
    if above:
        notes.append(f"off the scale: {few(above, 6)}")
    return points, notes


def _looks(points: Sequence[_Point]) -> dict[str, _Style]:
    """A colour, dashes and a marker for each method: no two alike among the first sixteen."""
    return {
        method: {
            "color": _COLOURS[i % len(_COLOURS)],
            "linestyle": _DASHES[(i + i // len(_COLOURS)) % len(_DASHES)],
            "marker": _MARKERS[i % len(_MARKERS)],
        }
        for i, method in enumerate(dict.fromkeys(point.row.method for point in points))
    }


def _draw_lines(
    axes: Axes, points: Sequence[_Point], Ks: Sequence[int], looks: dict[str, _Style]
) -> None:
    """A line for each method; at each K they stand a little beside each other."""
    from matplotlib.ticker import NullLocator

    scale = K_scale(Ks, len(looks))
    if scale == "log":
        place = {K: log10(K) for K in Ks}
    elif scale == "even":
        place = {K: float(K) for K in Ks}
    else:
        place = {K: float(i) for i, K in enumerate(Ks)}
    across = place[Ks[-1]] - place[Ks[0]]
    gap = min(b - a for a, b in pairwise(place.values()))
    six_points = 6 / 72 / _line_inches(len(looks), len(Ks)) * across
    dodge = min(0.7 * gap / len(looks), six_points)
    edge = dodge * len(looks) / 2 + 0.03 * across

    def x(u: float) -> float:
        return 10**u if scale == "log" else u

    for j, (method, look) in enumerate(looks.items()):
        mine = sorted(
            (point.row.K, n, x(place[point.row.K] + (j - (len(looks) - 1) / 2) * dodge), point)
            for n, point in enumerate(points)
            if point.row.method == method and point.row.K is not None
        )
        losses = [point.loss for *_, point in mine]
        line = {**look, "marker": "none", "lw": 1.2, "gid": "method", "zorder": 2}
        axes.plot([at for _, _, at, _ in mine], losses, **line)
        for _, _, at, point in mine:
            _draw_point(axes, at, point, look)
    if scale == "log":
        axes.set_xscale("log")
    ticks: list[int] = []
    for K in Ks:  # as many labels as there is room for
        if not ticks or place[K] - place[ticks[-1]] >= 0.055 * across:
            ticks.append(K)
    axes.set_xticks([x(place[K]) for K in ticks], [str(K) for K in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(x(place[Ks[0]] - edge), x(place[Ks[-1]] + edge))
    axes.set_xlabel("K" if scale != "ordinal" else "K, not to scale")


def _line_inches(methods: int, Ks: int) -> float:
    return max(5.0, 0.08 * (methods + 4) * Ks)


def _draw_columns(axes: Axes, points: Sequence[_Point]) -> None:
    for at, point in enumerate(points):
        _draw_point(axes, at, point, _PLAIN)
    names = [label(point.row.method, _NAMES) for point in points]
    axes.set_xticks(range(len(points)), names, rotation=90)
    axes.set_xlim(-0.6, len(points) - 0.4)


def _column_inches(points: Sequence[_Point]) -> float:
    deepest = max(label(point.row.method, _NAMES).count("\n") + 1 for point in points)
    return max(1.4, len(points) * max(0.3, 0.2 * deepest))


def _draw_point(axes: Axes, at: float, point: _Point, look: _Style) -> None:
    colour = look["color"]
    if point.spread:
        axes.plot([at, at], point.spread, **_SPREAD, gid="spread", zorder=1)
    if point.interval:
        axes.plot([at, at], point.interval, **_INTERVAL, color=colour)
    _draw_mark(axes, at, point.loss, point.row.mark, look)
    ends = "" if not point.interval else f"95 %: {' .. '.join(map(number, point.interval))}"
    name = with_K(point.row.method, point.row.K)
    word = "loss" if point.row.score is None else "score"
    hint(axes, at, point.loss, name, f"{word} {number(point.loss)}", ends, point.row.mark)


def _draw_mark(axes: Axes, x: float, y: float, mark: str | None, look: _Style) -> None:
    style = {"marker": look["marker"], "ms": 5.5, "mfc": look["color"], "zorder": 4}
    if mark == "best":
        style |= {"marker": "*", "ms": 13, "zorder": 5}
    elif mark == "tie":
        style |= {"mfc": "white"}
    gid = mark or "unmarked"
    axes.plot([x], [y], linestyle="none", mec=look["color"], gid=gid, **style)


def _key(text: str, **style: Any) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=text, **{"linestyle": "none", "ms": 5.5, "lw": 1.2, **style})


def _explain(points: Sequence[_Point]) -> list[Line2D]:
    """The marks that occur, and what they mean."""
    marks = {point.row.mark for point in points}
    keys = []
    if "best" in marks:
        by_loss = all(point.row.score is None for point in points)
        best = "lowest held-out loss" if by_loss else "best held out"
        keys.append(_key(best, color="black", marker="*", ms=11))
    if "tie" in marks:
        keys.append(_key("hollow: a tie with it", **_PLAIN, mfc="white"))
    if "worse" in marks:
        keys.append(_key("filled: worse (paired comparison)", **_PLAIN))
    if any(point.interval for point in points):
        keys.append(_key("95 % interval", color="black", marker="|", ms=11))
    if any(point.spread for point in points):
        keys.append(_key("± standard deviation over draws", **{**_SPREAD, "linestyle": "-"}))
    return keys
