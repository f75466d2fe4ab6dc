"""The report of `sewa compare --windows`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sewa_cli.report.compare import Row
from sewa_cli.report.part import Part
from sewa_cli.report.shared import Candidate, Cost, LeftOut, Placement, TaskHead


class Window(Part):
    """Some checkpoints in a row, and what each method makes of them."""

    at: int = Field(description="training that it has seen: see `by`")
    first_step: int | None
    last_step: int | None
    candidates: list[int] = Field(description="indices; coefficients of its rows are over these")
    rows: list[Row] = Field(description="`mark`: the best of the window; no intervals")
    placement: Placement


class Level(Part):
    """What the run's last checkpoint does: the level that averages are to reach."""

    measure: Literal["heldout_loss", "selection_loss"]
    value: float | None = Field(description="null: not finite, and nothing can be said to reach it")
    at: int
    metrics: dict[str, float | None] | None


class Reach(Part):
    """From when on a method does as well as the run's last checkpoint."""

    method: str
    K: int | None
    window: int | None = Field(
        description="the first that is at the level or better, with all that follow; null: never"
    )
    at: int | None = Field(description="training seen by then")
    share: float | None = Field(
        description="of all the training; null if never, or if the checkpoints have no steps"
    )
    loss: float | None = Field(description="there")
    metrics: dict[str, float | None] | None = Field(description="there")
    touched: int | None = Field(
        description="the first window at the level or better, even if a later one is worse"
    )


class Windows(TaskHead):
    """The report of `sewa compare --windows`."""

    kind: Literal["windows"] = "windows"
    size: int = Field(description="checkpoints in a window")
    stride: int = Field(description="checkpoints from one window to the next")
    parameters: int
    candidates: list[Candidate]
    left_out: list[LeftOut]
    in_no_window: int = Field(description="checkpoints, mostly the oldest, that no window holds")
    selection_rows: int
    heldout_rows: int | None
    by: Literal["step", "checkpoint"] = Field(
        description="what `at` counts: training steps; checkpoints, if they have no steps"
    )
    windows: list[Window] = Field(description="oldest first; the last ends with the run")
    level: Level
    reaches: list[Reach]
    batchnorm: str | None = Field(description="what statistics of every row were recomputed on")
    averages_evaluated: int
    cost: Cost
