"""Rows to draw, and what a figure must be: every word can be read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING

from sewa_cli.report.kinds import ComparedRow, RowCost
from sewa_cli.report.shared import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox


def row(
    method: str,
    K: int | None,
    loss: float | None,
    half: float | None = 0.01,
    spread: float | None = None,
) -> ComparedRow:
    interval = None
    if loss is not None and half is not None:
        interval = Interval(low=loss - half, high=loss + half)
    return ComparedRow(
        method=method,
        K=K,
        size=K or 1,
        coefficients=[],
        selection_loss=loss,
        heldout_loss=loss,
        interval=interval,
        spread=spread,
        difference=None,
        difference_interval=None,
        mark=None,
        metrics=None,
        cost=RowCost(forward_passes=1, backward_passes=0, bytes_read=0, seconds=0.1),
    )


def drawn_texts(figure: Figure) -> Iterator[Text]:
    """Every text that can be seen; ticks outside the view are kept by matplotlib, but not drawn."""
    from matplotlib.text import Text

    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks() + axis.get_minor_ticks():
                if not low <= tick.get_loc() <= high:
                    hidden |= {tick.label1, tick.label2}
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if text.get_visible() and text.get_text().strip() and text not in hidden:
            yield text


def assert_readable(figure: Figure) -> None:
    """No two texts overlap, none leaves the figure, no legend covers a panel."""
    figure.draw_without_rendering()
    boxes = [(text.get_text(), text.get_window_extent()) for text in drawn_texts(figure)]
    assert boxes
    for text, box in boxes:
        inside = figure.bbox.padded(0.5)
        assert inside.x0 <= box.x0, text
        assert inside.y0 <= box.y0, text
        assert inside.x1 >= box.x1, text
        assert inside.y1 >= box.y1, text
    for (one, a), (other, b) in combinations(boxes, 2):
        assert not overlap(a, b), f"{one!r} lies on {other!r}"
    legends = [*figure.legends, *(legend for a in figure.axes if (legend := a.get_legend()))]
    for legend in legends:
        for axes in figure.axes:
            assert not overlap(legend.get_window_extent(), axes.get_window_extent())


def overlap(a: Bbox, b: Bbox) -> bool:
    wide = min(a.x1, b.x1) - max(a.x0, b.x0)
    high = min(a.y1, b.y1) - max(a.y0, b.y0)
    return bool(wide > 0.5 and high > 0.5)
