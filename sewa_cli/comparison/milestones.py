"""From when on does an average do as well as the run's last checkpoint?

Judged by loss alone, as nobody has said whether more or less of a metric is better. One window may
be lucky, so a method has reached the level only where all windows that follow are at it as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sewa_cli.report.compare import Row
from sewa_cli.report.windows import Level, Reach, Window

LAST = "last"  # the method whose row in the last window is the run's last checkpoint
Measure = Literal["heldout_loss", "selection_loss"]


def find_reach(losses: Sequence[float | None], level: float | None) -> int | None:
    """The first window from which on every loss is at most `level`. None is no loss to speak of."""
    at = _at(losses, level)
    return next((i for i in range(len(at)) if all(at[i:])), None)


def find_touch(losses: Sequence[float | None], level: float | None) -> int | None:
    """The first window with a loss of at most `level`, whatever comes after it."""
    at = _at(losses, level)
    return at.index(True) if any(at) else None


def _at(losses: Sequence[float | None], level: float | None) -> list[bool]:
    return [loss is not None and level is not None and loss <= level for loss in losses]


def loss_of(row: Row, measure: Measure) -> float | None:
    return row.heldout_loss if measure == "heldout_loss" else row.selection_loss


def level_of(newest: Window, measure: Measure) -> Level:
    last = next(row for row in newest.rows if row.method == LAST)
    value = loss_of(last, measure)
    return Level(measure=measure, value=value, at=newest.at, metrics=last.metrics)


def find_reaches(
    windows: Sequence[Window], measure: Measure, by: Literal["step", "checkpoint"] = "step"
) -> list[Reach]:
    """For each method at each K; `last` among them, which may reach its own level early, too.

    Without steps nobody knows how much training came before the first checkpoint.
    """
    level = level_of(windows[-1], measure)
    found = []
    for i, row in enumerate(windows[-1].rows):
        losses = [loss_of(window.rows[i], measure) for window in windows]
        reached = find_reach(losses, level.value)
        there = None if reached is None else windows[reached]
        found.append(
            Reach(
                method=row.method,
                K=row.K,
                window=reached,
                at=there and there.at,
                share=there.at / level.at if there and level.at and by == "step" else None,
                loss=there and loss_of(there.rows[i], measure),
                metrics=there and there.rows[i].metrics,
                touched=find_touch(losses, level.value),
            )
        )
    return found


def mark_best(rows: Sequence[Row], measure: Measure) -> list[Row]:
    """The lowest loss of a window; of equals, all."""
    known = [loss for row in rows if (loss := loss_of(row, measure)) is not None]
    return [
        row.model_copy(update={"mark": "best"})
        if known and loss_of(row, measure) == min(known)
        else row
        for row in rows
    ]
