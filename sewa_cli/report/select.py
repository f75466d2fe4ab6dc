"""The report of `sewa select`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from sewa_cli.report.part import Part
from sewa_cli.report.recipe import OutputFile, Recipe
from sewa_cli.report.shared import (
    Candidate,
    Cost,
    Interval,
    LeftOut,
    Lora,
    Placement,
    Scores,
    TaskHead,
)


class Better(Part):
    """A simple average that did better than the chosen one on held-out data."""

    name: str
    heldout_loss: float
    by: float | None = Field(
        description="held-out loss of the chosen average minus this one's; null: that is not finite"
    )


class BatchNorm(Part):
    """`data`: what the statistics were recomputed on; null if they were averaged and left so."""

    layers: int
    mode: Literal["auto", "on", "off"]
    data: Literal["training_data", "selection_data"] | None = None
    rows: int | None = None
    before: Scores | None = None
    after: Scores | None = None


class Gained(Part):
    """What choosing was worth on held-out data, against the best of the references."""

    over: str
    by: float = Field(description="held-out loss of that reference minus the learned average's")
    interval: Interval | None = Field(
        description="95 %, paired by row, holding for all references at once; null: too few rows"
    )


class Guard(Part):
    """Held-out data that were taken from the selection data."""

    share: float
    rows: int


class BudgetOption(Part):
    """A way to average, cross-validated on the selection rows."""

    name: str = Field(description="learned, or a simple average")
    K: int | None
    loss: float | None
    behind: float | None = Field(
        description="mean over rows of its loss minus the best option's; null: not finite"
    )
    error: float | None = Field(description="standard error of `behind`")
    chosen: bool


class ResampledGain(Part):
    mean: float
    low: float
    high: float


class StabilityReport(Part):
    """The choice made anew on resampled rows, and judged on the rows that were not drawn."""

    resamples: int
    gains: dict[str, ResampledGain] = Field(description="over a simple average; 95 % of resamples")
    rows: int
    rows_needed: int | None = Field(
        description="selection rows from which choosing beats the mean of all; null: none would do"
    )


class Report(TaskHead):
    """The report of `sewa select`."""

    kind: Literal["select"] = "select"
    K: int
    k: int
    parameters: int
    candidates: list[Candidate]
    left_out: list[LeftOut]
    selected: list[int]
    selected_steps: list[int | None]
    selected_paths: list[str]
    history: list[float | None] = Field(
        description="by iteration: mean loss over the M samples, or predicted; null: not finite"
    )
    selection_rows: int
    heldout_rows: int | None
    average: Scores
    references: dict[str, Scores]
    beaten_by: list[Better]
    written: str = Field("learned", description="learned, or the simple average that was taken")
    instead_of: str | None = Field(
        None, description="--fallback: what was chosen, where a simple average was written instead"
    )
    learned: Scores | None = Field(None, description="scores of what was chosen, in that case")
    labels: Literal["matter", "noise", "unseen"] | None = Field(
        None, description="noise: mixed-up rows fit as well; unseen: loss() ignores the batch"
    )
    gained: Gained | None = None
    guard: Guard | None = None
    details: dict[str, Any] | None = Field(
        None, description="what the solver found out besides, as it gives it"
    )
    budget: list[BudgetOption] | None = Field(None, description="K: auto: the options it had")
    stability: StabilityReport | None = None
    placement: Placement
    batchnorm: BatchNorm | None
    lora: Lora | None = None
    cost: Cost
    output: str | None
    files: list[OutputFile] | None = Field(None, description="of the output, for `sewa verify`")
    recipe: Recipe
