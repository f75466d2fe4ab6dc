"""How a run moved: distance from the last checkpoint and from the mean, cosine of the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sewa_cli.present.plots import house, set_margins

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_inspection(
    steps: Sequence[int | None],
    to_last: Sequence[float | None],
    to_mean: Sequence[float | None],
    cosines: Sequence[float | None],
    title: str,
) -> Figure:
    """Two panels over the same steps, one value a checkpoint; None leaves a gap in the line."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    known = [float(step) for step in steps if step is not None and abs(step) < 2**53]
    by_step = len(known) == len(steps)
    places = known if by_step else [float(i) for i in range(len(steps))]
    dot = 3.5 if len(places) <= 200 else 1.5  # an isolated point is a line without length
    with house():
        figure = Figure(figsize=(8, 6))
        set_margins(figure)
        distance, cosine = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        for values, name, line, fill in (
            (to_last, "from the last", "-", "black"),
            (to_mean, "from the mean", "--", "white"),
        ):
            distance.plot(
                places,
                _nan_for_none(values),
                line,
                marker="o",
                ms=dot,
                mfc=fill,
                color="black",
                label=name,
                clip_on=False,  # the last is at distance zero, on the axis
            )
        if broken := [x for x, value in zip(places, to_last, strict=True) if value is None]:
            distance.plot(
                broken, [0.0] * len(broken), "x", color="black", label="left out", clip_on=False
            )
        distance.set_ylim(bottom=0)
        distance.set_ylabel("L2 distance of the weights")
        distance.set_title(title, loc="left", fontsize=10)
        distance.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3)

        cosine.plot(places, _nan_for_none(cosines), "-", marker="o", ms=dot, color="black", lw=0.8)
        for level, name in (
            (1, "straight line"),
            (0, "random walk"),
            (-0.5, "noise\naround a point"),
        ):
            cosine.axhline(level, color="0.6", lw=1, ls=":", zorder=1)
            cosine.annotate(
                name,
                (1, level),
                xycoords=("axes fraction", "data"),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                annotation_clip=False,
            )
        cosine.set_ylim(-1.05, 1.05)
        cosine.set_ylabel("cosine of the steps\nbefore and after")
        cosine.set_xlabel("training step" if by_step else "checkpoint, by index")
        cosine.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        cosine.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return figure


def _nan_for_none(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]
