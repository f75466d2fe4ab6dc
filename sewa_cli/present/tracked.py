"""Numbers, curves and names for trackers, under tags that all runs share.

A tag has no space, and never the name of an average that another run may not have: the loss of
the best baseline is `baseline_loss` in every run, and its name is under `names`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING

from sewa_cli.present import view_of

if TYPE_CHECKING:
    from sewa_cli.present.charts import Chart
    from sewa_cli.report.shared import Head


def numbers(report: Head) -> dict[str, float]:
    """Return every finite number by its tag, such as `sewa/heldout_loss`."""
    found = view_of(report).numbers.items()
    return {
        _tag(report, name): float(value)
        for name, value in found
        if value is not None and isfinite(value)
    }


def curves(report: Head) -> dict[str, list[tuple[int, float]]]:
    """Return points by tag: the history by iteration, weights and losses by step."""
    found = {}
    for name, points in view_of(report).curves.items():
        known = [(at, value) for at, value in points if value is not None and isfinite(value)]
        if known:
            found[_tag(report, name)] = known
    return found


def names(report: Head) -> dict[str, str]:
    """Return the names that tags leave out: what was written, the best baseline, the metric."""
    found = view_of(report).names.items()
    return {_tag(report, name): text for name, text in found if text is not None}


def charts(report: Head) -> Iterator[Chart]:
    """Yield every chart; `present.figures.figure_of` draws it."""
    yield from view_of(report).charts


def _tag(report: Head, name: str) -> str:
    root = "sewa" if report.kind == "select" else f"sewa/{report.kind}"
    plain = re.sub(r"[^\w.,:=/-]+", "_", name)
    return f"{root}/{plain}"
