"""The weights of an average by step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sewa_cli.present.plots import Picture, draw_weights, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sewa_cli.report.average import AverageReport


def plot(report: AverageReport) -> Figure:
    found = report.recipe.sources
    steps, weights = [one.step for one in found], [one.coefficient for one in found]
    return panels(lambda axes: draw_weights(axes, steps, weights))


def pictures(report: AverageReport) -> Iterator[tuple[str, Picture]]:
    """For each part of a page, by its name."""
    alt = f"A line for each of {len(report.recipe.sources)} checkpoints."
    yield "weights", Picture("Weights by step", alt, lambda: plot(report))
