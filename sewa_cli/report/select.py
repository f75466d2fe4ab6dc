"""The report of `sewa select`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from sewa_cli.report.metric import Contest
from sewa_cli.report.part import Part
from sewa_cli.report.recipe import OutputFile, Recipe
from sewa_cli.report.shared import (
    GROUPS,
    Candidate,
    Cost,
    Interval,
    LeftOut,
    Lora,
    Placement,
    Scores,
    TaskHead,
)
from sewa_cli.report.standing import Standing
from sewa_cli.report.verdict import Verdict


class BatchNorm(Part):
    """`data`: what the statistics were recomputed on; null if they were averaged and left so."""

    layers: int
    mode: Literal["auto", "on", "off"]
    data: Literal["training_data", "selection_data"] | None = None
    rows: int | None = None
    before: Scores | None = None
    after: Scores | None = None


class Guard(Part):
    """Held-out data that were taken from the selection data."""

    share: float
    rows: int


class BudgetOption(Part):
    """A way to average, cross-validated on the selection examples."""

    name: str = Field(description="learned, or a baseline")
    K: int | None
    loss: float | None
    behind: float | None = Field(
        description="mean over rows of its loss minus the best option's; null: not finite"
    )
    error: float | None = Field(description="standard error of `behind`")
    chosen: bool


class Simple(Part):
    """A baseline, and its loss on the examples that choose."""

    name: str
    K: int | None
    selection_loss: float | None = Field(
        description="as the choice was made by: of weights that are not rounded, BatchNorm on each "
        "batch's own statistics; `references` have the losses of files"
    )


class Expected(Part):
    """The expected loss on new data, by nested cross-validation.

    It is compared with the baseline that the other folds would have chosen.
    """

    loss: float
    error: float | None = Field(
        description="standard error of that loss, over examples; null: too few"
    )
    by: float | None = Field(
        description="expected loss of the best baseline minus this one's; null: not all of "
        "them could be run under --memory"
    )
    interval: Interval | None = Field(description="95 % of `by`, paired; null: too few examples")


class Share(Part):
    """An average with its share in the blend."""

    name: str
    K: int | None
    share: float


class Pulled(Part):
    """Coefficients learned with a regularisation strength; null: the prior itself."""

    strength: float | None
    loss: float | None = Field(description="cross-validated, predicted")
    behind: float | None = Field(description="mean over rows of its loss minus the best's")
    error: float | None = Field(description="standard error of `behind`")
    share: float


class Blend(Part):
    """The prior and the path that the default's coefficients are made of."""

    UNMOVED: ClassVar[float] = 0.005  # of all weight: who has learned less has learned nothing
    FEW: ClassVar[int] = 100  # rows: by fewer, nothing is learned on top of the prior

    prior: list[Share] = Field(description="moving averages, weighed by the selection examples")
    path: list[Pulled] = Field(description="what was learned from there, weighed alike")
    weights: list[float] = Field(description="of the prior, by candidate")
    effective: float = Field(description="1/Σc²: as many equal weights would average as much")
    learned: float = Field(description="half of Σ|c − prior|: the weight that learning has moved")


class Report(TaskHead):
    """The report of `sewa select`; the best baseline is the first of `references`."""

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
    selection_groups: int | None = Field(None, description=GROUPS)
    heldout_groups: int | None = Field(None, description=GROUPS)
    average: Scores
    references: dict[str, Scores]
    verdict: Verdict
    written: str = Field("learned", description="learned, or the baseline that was taken")
    instead_of: str | None = Field(
        None, description="--fallback: what was chosen, where a baseline was written instead"
    )
    learned: Scores | None = Field(None, description="scores of what was chosen, in that case")
    guard: Guard | None = None
    details: dict[str, Any] | None = Field(
        None, description="what the solver found out besides, as it gives it"
    )
    budget: list[BudgetOption] | None = Field(None, description="--sparse: the options it had")
    blend: Blend | None = Field(None, description="of the solver `aggregate`")
    expected: Expected | None = None
    simple: list[Simple] = Field(
        [], description="the baselines that were looked at, lowest selection loss first"
    )
    contest: Contest | None = Field(None, description="--metric: how it was chosen by that")
    standing: Standing | None = Field(None, description="null: too few checkpoints to say")
    placement: Placement
    batchnorm: BatchNorm | None
    lora: Lora | None = None
    cost: Cost
    output: str | None
    files: list[OutputFile] | None = Field(None, description="of the output, for `sewa verify`")
    recipe: Recipe | None = Field(description="null: from Python, with output=None")
