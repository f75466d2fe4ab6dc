"""The report of `sewa select`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from sewa_cli.direction import Goal
from sewa_cli.report.kinds import RunHead
from sewa_cli.report.recipe import Recipe
from sewa_cli.report.shared import (
    Interval,
    Lora,
    Part,
    Scores,
    Verdict,
)

# ---- a choice by a metric; scores are the task's own, in either direction ----

State = Literal["taken", "overruled", "leading", "dropped", "set aside", "failed"]


class Entry(Part):
    """An average in the contest, by the parts that it was asked on."""

    name: str
    K: int | None
    size: int = Field(description="checkpoints with a coefficient other than zero")
    selected: list[int] = Field([], description="these checkpoints, as indices of `candidates`")
    selected_steps: list[int | None] | None = Field(None, description="their steps")
    coefficients: list[float] = Field(
        [], description="their coefficients: `sewa average --weights`"
    )
    parts: int
    score: float | None = Field(description="mean over those parts; null: one has failed")
    error: float | None = Field(description="standard error of that mean; null: too few parts")
    ahead: float | None = Field(
        description="how much better than the incumbent, in the mean over the parts that both were "
        "asked on, those that it came to lead by too; null: none, or the incumbent itself"
    )
    evidence: float | None = Field(
        description="e-value of the duel, by parts that no search has seen: of the leader; null: "
        "there was none"
    )
    state: State | None = Field(
        None,
        description="overruled: the choice, worse than `last`, which was taken; dropped: the test "
        "has shown it to be worse; set aside: behind when the budget "
        "was needed for others",
    )


class MetricScores(Part):
    """One average's scores: where it was chosen by, and on held-out parts."""

    selection: float | None
    selection_parts: int | None = Field(
        None, description="that `selection` is a mean over; others were asked on others"
    )
    heldout: float | None = Field(
        None,
        description="mean over the held-out parts that any of these averages has a score for; a "
        "failure is a `failure_counts_as`; null: it has no score at all",
    )
    failed: int = Field(0, description="held-out parts that it failed on, and not all others")
    interval: Interval | None = Field(None, description="95 % of `heldout`; null: too few parts")
    others: dict[str, float | None] | None = Field(
        None, description="what else score() gives, over the held-out parts that did not fail"
    )


class Contest(Part):
    """A choice by a metric: what was asked, who led, and whether that was luck."""

    metric: str
    goal: Goal = Field(description="max: higher is better")
    budget: int | str
    evaluations: int = Field(description="scores of a part that the choice was made by")
    heldout_evaluations: int
    failures: list[str] = Field(description="of parts to choose by; the first hundred")
    interrupted: bool
    parts: int = Field(description="there are to choose by")
    heldout_parts: int | None = Field(description="there are; null: none are held out")
    heldout_left_out: int = Field(
        0, description="held-out parts that failed for all of `scores`: they count for none"
    )
    failure_counts_as: float | None = Field(
        None,
        description="the score of a held-out part where an average failed and another did not: "
        "worse than all there are; null: there was none",
    )
    incumbent: str = Field(
        description="what another had to be shown to be better than: the choice by the loss, the "
        "one named by --incumbent, or the better of `last` and the best baseline"
    )
    overruled: str | None = Field(
        None,
        description="the contest's choice; `last` was written, as it is significantly better",
    )
    unspent: str | None = Field(None, description="why evaluations of the budget are left")
    leader: str = Field(description="the best on the parts to choose by")
    asked: int | None = Field(None, description="averages that were asked on any part")
    confirmed: bool | None = Field(
        description="whether the leader was shown to be better than the incumbent, by parts that "
        "had no say in its lead too; null: parts are too few to show anything"
    )
    evidence: float = Field(description="e-value of that; 100 is asked for")
    ahead: float | None = Field(
        None,
        description="how much better than the incumbent the leader was, in the mean over these "
        "parts; null: none was met by both",
    )
    duel_parts: int | None = Field(None, description="such parts that both have met")
    entries: list[Entry] = Field(description="best first; of many masks, the best")
    scores: dict[str, MetricScores] = Field(description="the written average is the first")

    @property
    def heldout_used(self) -> int:
        """Held-out parts that the scores are means over."""
        return (self.heldout_parts or 0) - self.heldout_left_out


# ---- the report, and what solvers find ----


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
        description="mean over examples of its loss minus the best option's; null: not finite"
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
    behind: float | None = Field(description="mean over examples of its loss minus the best's")
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


class Report(RunHead):
    """The report of `sewa select`; the best baseline is the first of `references`."""

    kind: Literal["select"] = "select"
    K: int
    selected: list[int]
    selected_steps: list[int | None]
    selected_paths: list[str]
    history: list[float | None] = Field(
        description="by iteration: mean loss over the M samples, or predicted; null: not finite"
    )
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
    simple_rows: int | None = Field(
        None, description="selection examples that the losses in `simple` are over; null: all"
    )
    contest: Contest | None = Field(None, description="--metric: how it was chosen by that")
    batchnorm: BatchNorm | None
    lora: Lora | None = None
    recipe: Recipe | None = Field(description="null: from Python, with output=None")
