"""A choice by a metric: held-out scores with their intervals, and who was asked how often."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sewa_cli.direction import comparative
from sewa_cli.present.plots import Picture, hint, house, label, panels, set_margins
from sewa_cli.present.plots.dots import Series, draw_dots
from sewa_cli.present.plots.select import weights_picture
from sewa_cli.text import number, with_K

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sewa_cli.report.metric import Contest
    from sewa_cli.report.select import Report


def plot(report: Report) -> Figure:
    from matplotlib.figure import Figure

    found = report.contest
    assert found is not None
    with house():
        figure = Figure(figsize=(8, 7))
        set_margins(figure)
        scores, entries = figure.subplots(2, 1)
        draw_scores(scores, found)
        draw_entries(entries, found)
    return figure


def pictures(report: Report) -> Iterator[tuple[str, Picture]]:
    found = report.contest
    assert found is not None
    yield (
        "scores",
        Picture(
            f"{found.metric}, held out and to choose by",
            f"A row for each average with its {found.metric} on held-out parts, with the 95 % "
            "interval, and on those it was chosen by, as in the table.",
            lambda: panels(
                lambda axes: draw_scores(axes, found), height=1.0 + 0.42 * len(found.scores)
            ),
        ),
    )
    yield (
        "entries",
        Picture(
            f"{found.metric} by the number of parts that each was asked on",
            "Each point is an average: many were asked on few parts, the best on many.",
            lambda: panels(lambda axes: draw_entries(axes, found)),
        ),
    )
    yield "weights", weights_picture(report)


def draw_scores(axes: Axes, found: Contest) -> None:
    scores = list(found.scores.values())
    half = [None if s.interval is None else (s.interval.high - s.interval.low) / 2 for s in scores]
    held = Series("held out", [s.heldout for s in scores], "o", errors=half)
    chosen = Series("to choose by", [s.selection for s in scores], "s", hollow=True)
    draw_dots(axes, list(found.scores), [held, chosen] if found.heldout_parts else [chosen])
    axes.set_xlabel(f"{found.metric} ({comparative(found.goal)} is better)")


def draw_entries(axes: Axes, found: Contest) -> None:
    """Draw means by parts, on a log scale, and name the one that was written and the leader."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    states = ("taken", "leading")
    named = [e for e in found.entries if e.state in states and e.score is not None]
    named.sort(key=lambda entry: -(entry.score or 0.0))  # one above its point, one below
    for entry in found.entries:
        if entry.score is None:
            continue
        is_taken = entry.state == "taken"
        fill = "black" if is_taken else "white"
        if entry.error is not None:
            ends = [entry.score - 1.96 * entry.error, entry.score + 1.96 * entry.error]
            axes.plot([entry.parts] * 2, ends, color="0.75", lw=1, zorder=1)
        look: dict[str, Any] = {"mfc": fill, "mec": "black", "ms": 5, "zorder": 3 + is_taken}
        axes.plot([entry.parts], [entry.score], "D" if is_taken else "o", **look)
        name = with_K(entry.name, entry.K)
        hint(axes, entry.parts, entry.score, name, f"{found.metric} {number(entry.score)}")
        if entry in named:
            is_above = entry is named[0]
            axes.annotate(
                label(name),
                (entry.parts, entry.score),
                (6, 8 if is_above else -8),
                textcoords="offset points",
                fontsize="small",
                ha="right",
                va="bottom" if is_above else "top",
            )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("parts that it was asked on")
    axes.set_ylabel(f"{found.metric} ({comparative(found.goal)} is better)")
