"""The report of `sewa compare`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sewa_cli.direction import Goal
from sewa_cli.report.part import Part
from sewa_cli.report.recipe import OutputFile, Recipe
from sewa_cli.report.shared import (
    GROUPS,
    Candidate,
    Cost,
    Interval,
    LeftOut,
    Placement,
    TaskHead,
)
from sewa_cli.report.standing import Standing


class RowCost(Part):
    """The cost of a row alone: averages that it shares with other rows count in full."""

    forward_passes: int
    backward_passes: int
    bytes_read: int = Field(description="of checkpoints held in memory, by mixing and pulling back")
    seconds: float
    evaluations: int = Field(0, description="--metric: scores of a part, to choose by and held out")


class RowContest(Part):
    """How a row that chooses by the metric came to its choice."""

    confirmed: bool | None = Field(
        description="whether its leader was shown to be better than what is there without the "
        "metric, and taken; null: parts are too few to show anything"
    )
    interrupted: bool


class RowScore(Part):
    """A row by a metric, on held-out parts: scores are the task's own, whichever way is good."""

    heldout: float | None = Field(
        description="mean over the parts that any row has a score for; null: it has no score at all"
    )
    failed: int = Field(
        0, description="parts that it failed on, in any draw, and not all other rows"
    )
    interval: Interval | None = Field(description="95 %, by resampling the parts")
    behind: float | None = Field(description="how much worse than the best row")
    behind_interval: Interval | None = Field(
        description="95 %, paired by part, holding for all pairs of rows at once"
    )


class Row(Part):
    """One method at one K. A method that draws several masks has the mean of their losses."""

    method: str = Field(description="as asked for, options included")
    K: int | None = Field(description="null for a method that takes none")
    size: int = Field(description="checkpoints with a weight other than zero")
    coefficients: list[list[float]] = Field(description="over the candidates, one list a draw")
    selection_loss: float | None
    predicted_loss: float | None = Field(
        None, description="selection loss that the cache of outputs predicts (--fast)"
    )
    surrogate_error: float | None = Field(
        None, description="predicted minus true selection loss, BatchNorm statistics as averaged"
    )
    heldout_loss: float | None
    interval: Interval | None = Field(description="95 % of bootstrapped held-out losses")
    spread: float | None = Field(description="standard deviation of held-out loss over the draws")
    difference: float | None = Field(description="held-out loss minus the best row's")
    difference_interval: Interval | None = Field(
        description="95 %, paired, holding for all pairs of rows at once"
    )
    mark: Literal["best", "tie", "worse"] | None
    score: RowScore | None = Field(None, description="--metric: by that, in place of the loss")
    contest: RowContest | None = Field(None, description="of a method that chooses by the metric")
    metrics: dict[str, float | None] | None
    cost: RowCost

    @property
    def held(self) -> tuple[float | None, Interval | None]:
        """The held-out score that the row is judged by, metric or loss, and its interval."""
        if self.score is not None:
            return self.score.heldout, self.score.interval
        return self.heldout_loss, self.interval


class Judged(Part):
    """The metric that rows were compared by."""

    metric: str
    goal: Goal = Field(description="max: higher is better")
    parts: int = Field(description="held out, that any row has a score for")
    left_out: int = Field(0, description="held-out parts that failed for every row")
    failure_counts_as: float | None = Field(
        None,
        description="the score of a part where a row failed and another did not: worse than all "
        "there are; null: there was none",
    )


class Comparison(TaskHead):
    """The report of `sewa compare`."""

    kind: Literal["compare"] = "compare"
    k: int
    parameters: int
    candidates: list[Candidate]
    left_out: list[LeftOut]
    selection_rows: int
    heldout_rows: int | None
    selection_groups: int | None = Field(None, description=GROUPS)
    heldout_groups: int | None = Field(None, description=GROUPS)
    unit: Literal["rows", "groups", "batches", "parts"] | None = Field(
        description="what the bootstrap resamples"
    )
    rows: list[Row]
    judged: Judged | None = Field(None, description="--metric; null: by the loss")
    best: int | None = Field(description="index of the row with the lowest held-out loss")
    verdict: Literal["winner", "tie", "too few", "equal", "alone", "none"] = Field(
        description="too few: units for intervals; equal: every row scores the same; alone: "
        "there is one average only; none: nothing finite was held out"
    )
    winner: str | None = Field(description="the best row, if no other ties with it")
    batchnorm: str | None = Field(description="what statistics of every row were recomputed on")
    averages_evaluated: int
    standing: Standing | None = Field(None, description="null: too few checkpoints to say")
    placement: Placement
    cost: Cost
    output: str | None
    files: list[OutputFile] | None = Field(None, description="of the output, for `sewa verify`")
    recipe: Recipe | None = Field(description="of the best row, if it was written")
