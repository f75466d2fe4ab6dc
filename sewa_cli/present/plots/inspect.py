"""How a run moved: distance from the last checkpoint and from the mean, cosine of the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sewa_cli.present.plots import (
    drawable,
    house,
    legend_above,
    name_level,
    name_steps,
    places_of,
    set_margins,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sewa_cli.report.inspect import Inspection


def plot(report: Inspection) -> Figure:
    """Two panels over the same steps; a checkpoint without a value leaves a gap in the line."""
    from matplotlib.figure import Figure

    rows = report.checkpoints
    places, by_step = places_of([row.step for row in rows])
    dot = 3.5 if len(places) <= 200 else 1.5  # an isolated point is a line without length
    with house():
        figure = Figure(figsize=(8, 6))
        set_margins(figure)
        distance, cosine = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        for values, name, line, fill in (
            ([row.to_last for row in rows], "from the last", "-", "black"),
            ([row.to_mean for row in rows], "from the mean", "--", "white"),
        ):
            distance.plot(
                places,
                [drawable(value) for value in values],
                line,
                marker="o",
                ms=dot,
                mfc=fill,
                color="black",
                label=name,
                clip_on=False,  # the last is at distance zero, on the axis
            )
        if broken := [x for x, row in zip(places, rows, strict=True) if row.to_last is None]:
            distance.plot(
                broken, [0.0] * len(broken), "x", color="black", label="left out", clip_on=False
            )
        distance.set_ylim(bottom=0)
        distance.set_ylabel("L2 distance of the weights")
        distance.set_title(report.explanation.partition(":")[0], loc="left", fontsize=10)
        legend_above(distance)

        cosines = [drawable(row.cosine) for row in rows]
        cosine.plot(places, cosines, "-", marker="o", ms=dot, color="black", lw=0.8)
        for level, name in (
            (1, "straight line"),
            (0, "random walk"),
            (-0.5, "noise\naround a point"),
        ):
            cosine.axhline(level, color="0.6", lw=1, ls=":", zorder=1)
            name_level(cosine, name, level)
        cosine.set_ylim(-1.05, 1.05)
        cosine.set_ylabel("cosine of the steps\nbefore and after")
        name_steps(cosine, by_step)
    return figure
