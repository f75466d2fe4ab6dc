"""The reports of all commands but `select`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sewa_cli.direction import Goal
from sewa_cli.report.recipe import OutputFile, Recipe
from sewa_cli.report.shared import (
    GROUPS,
    Candidate,
    Cost,
    Interval,
    LeftOut,
    Lora,
    Measured,
    Motion,
    Part,
    Placement,
    ReportHead,
    Standing,
    TaskHead,
    Word,
)


class AverageReport(ReportHead):
    """An average that needed neither model nor data, with all that `sewa apply` needs."""

    kind: Literal["average"] = "average"
    lora: Lora | None = None
    output: str | None
    files: list[OutputFile] | None = Field(None, description="of the output, for `sewa verify`")
    recipe: Recipe


class Evaluated(Measured):
    """One file, as it is."""

    path: str
    step: int | None


class Evaluation(TaskHead):
    """The report of `sewa evaluate`."""

    kind: Literal["evaluate"] = "evaluate"
    files: list[Evaluated]
    selection_rows: int
    heldout_rows: int | None


class Validation(TaskHead):
    """The findings of `sewa validate`."""

    kind: Literal["validate"] = "validate"
    checkpoints: int
    first_step: int | None
    last_step: int | None
    tensors: int
    parameters: int
    dtypes: list[str]
    batchnorm_layers: int
    batch_rows: int
    loss: float | None = Field(
        description="of the newest checkpoint on the first batch; null: the task has none"
    )
    score: dict[str, float | None] | None = Field(
        None, description="--metric: what score() gives for the first part"
    )
    heldout_data: bool = Field(description="heldout_data, or heldout_parts")
    training_data: bool
    metrics: bool


Role = Literal["output", "source"]


class Checked(Part):
    """A file of the output, or a checkpoint that went into it."""

    path: str
    role: Role
    ok: bool
    fault: str | None = None


class Verification(ReportHead):
    """Whether an output and its sources are what their report says."""

    kind: Literal["verify"] = "verify"
    report: str
    files: list[Checked]
    unchecked: list[str] = Field(description="what could not be checked, or was not to be")


class Gap(Part):
    """Two neighbours that are not the usual spacing apart."""

    after: int
    before: int
    missing: int | None = Field(description="checkpoints that fit between; null: off the grid")


class InspectedFile(Part):
    """One checkpoint. Distances are null where it holds NaN or Inf."""

    path: str
    step: int | None
    size: int
    logged: dict[str, float] = Field({}, description="by the trainer at this step")
    nonfinite: list[str] = Field(description="tensors that hold NaN or Inf")
    same_as: int | None = Field(description="index of the first with the same tensor content")
    to_last: float | None = None
    to_mean: float | None = None
    length: float | None = Field(None, description="of the step from the one before to this one")
    cosine: float | None = Field(None, description="of the step to this one and the next one")


class Inspection(ReportHead):
    """The report of `sewa inspect`."""

    kind: Literal["inspect"] = "inspect"
    checkpoints: list[InspectedFile]
    spacing: int | None = Field(description="between steps, if more than half agree on it")
    gaps: list[Gap]
    tensors: int
    parameters: int = Field(description="floating-point elements")
    dtypes: dict[str, int] = Field(description="elements by dtype")
    motion: Motion | None
    verdict: Word
    explanation: str
    bytes_read: int


class PlannedStage(Part):
    """A stage of the run, under the name that progress shows."""

    name: str
    passes: float = Field(description="forward passes over the selection data")
    heldout: float = Field(description="forward passes over the held-out data")
    training: float = Field(description="forward passes over the data for BatchNorm")
    backward: float = Field(description="backward passes over the selection data")
    reads: float = Field(description="of every checkpoint, besides those for products")
    products: int = Field(description="with all checkpoints; from files, each reads them once")
    at_least: float = Field(description="share of the stage that every run needs")


class Forecast(TaskHead):
    """The cost of a run, by the solver's plan and as if no checkpoint had NaN or Inf."""

    kind: Literal["forecast"] = "forecast"
    solver: str
    K: int | Literal["auto"]
    found: int = Field(description="checkpoints")
    k: int = Field(description="checkpoints that take part")
    parameters: int
    selection_rows: int
    rows_used: int = Field(description="selection rows that the choice is made by")
    placement: Placement
    peak_memory_bytes: int = Field(
        description="of the process with the model and a batch, and what is planned on top"
    )
    bytes_read: int
    is_declared: bool = Field(description="false: what the solver itself takes is not known")
    stages: list[PlannedStage]
    forward_passes: int = Field(description="batches through the model, at most")
    at_least: int = Field(description="batches through the model that every run needs")
    backward_passes: int = Field(description="batches back through the model, at most")
    batch_seconds: float = Field(description="one batch through the model, timed")
    seconds: float = Field(description="in the model: batches times one timed batch")


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


class ComparedRow(Part):
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


class RunHead(TaskHead):
    """The beginning of a report on averages of a run, by `select` or `compare`."""

    k: int
    parameters: int
    candidates: list[Candidate]
    left_out: list[LeftOut]
    selection_rows: int
    heldout_rows: int | None
    selection_groups: int | None = Field(None, description=GROUPS)
    heldout_groups: int | None = Field(None, description=GROUPS)
    standing: Standing | None = Field(None, description="null: too few checkpoints to say")
    placement: Placement
    cost: Cost
    output: str | None
    files: list[OutputFile] | None = Field(None, description="of the output, for `sewa verify`")


class Comparison(RunHead):
    """The report of `sewa compare`."""

    kind: Literal["compare"] = "compare"
    unit: Literal["rows", "groups", "batches", "parts"] | None = Field(
        description="what the bootstrap resamples"
    )
    rows: list[ComparedRow]
    judged: Judged | None = Field(None, description="--metric; null: by the loss")
    best: int | None = Field(description="index of the row with the lowest held-out loss")
    verdict: Literal["winner", "tie", "too few", "equal", "alone", "none"] = Field(
        description="too few: units for intervals; equal: every row scores the same; alone: "
        "there is one average only; none: nothing finite was held out"
    )
    winner: str | None = Field(description="the best row, if no other ties with it")
    batchnorm: str | None = Field(description="what statistics of every row were recomputed on")
    averages_evaluated: int
    recipe: Recipe | None = Field(description="of the best row, if it was written")
