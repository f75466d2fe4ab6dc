"""How a run moved: distance from the last checkpoint and from the mean, cosine of the steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sewa_cli.present.plots import (
    Picture,
    draw_logged,
    drawable,
    hint,
    house,
    legend_above,
    losses_of,
    name_level,
    name_of,
    name_steps,
    panels,
    places_of,
    set_margins,
)
from sewa_cli.text import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sewa_cli.report.inspect import Inspection


def pictures(report: Inspection) -> Iterator[tuple[str, Picture]]:
    """For each part of a page, by its name."""
    yield (
        "run",
        Picture(
            "Distances along the run",
            "Above, each checkpoint's distance from the last and from the mean; below, the cosine "
            f"of the steps before and after it. {report.explanation}.",
            lambda: plot(report),
        ),
    )
    steps = [row.step for row in report.checkpoints]
    logged = [row.logged for row in report.checkpoints]
    if names := losses_of(logged):
        yield (
            "run",
            Picture(
                "What the trainer logged",
                f"{', '.join(names)} by step.",
                lambda: panels(lambda axes: draw_logged(axes, steps, logged)),
            ),
        )


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
        for i, (x, row) in enumerate(zip(places, rows, strict=True)):
            name = name_of(row.step, i)
            away = number(row.to_last), number(row.to_mean)
            hint(distance, x, None, name, f"{away[0]} from the last, {away[1]} from the mean")
            hint(cosine, x, None, name, f"cosine {number(row.cosine)}")
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
