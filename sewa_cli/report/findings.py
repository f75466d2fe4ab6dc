"""The findings of a solver on the way to its choice: a record for each kind, as reports store it.

A new kind is a record here and an entry in Findings. If people should see it, a function in
`present/views/findings` shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field

from sewa_cli.direction import Goal
from sewa_cli.report.shared import Interval, Part
from sewa_cli.text import finite


class Finding(Part):
    """A record of something that a solver found."""

    def misfits(self, k: int) -> Iterator[str]:  # noqa: ARG002
        """Yield contradictions with a run of k checkpoints."""
        yield from ()

    def says(self) -> Iterable[str]:
        """Return lines for people, of a finding of the user's own kind."""
        return ()


class Details(Finding):
    """Anything else that is worth reporting; a user's own kind of finding is stored as this."""

    kind: Literal["details"] = "details"
    found: dict[str, Any]
    name: str | None = Field(None, description="of the user's class; null: it is no class")
    lines: list[str] = Field([], description="shown with -v and on the page")

    def says(self) -> Iterable[str]:
        return self.lines


class History(Finding):
    """The loss or score by iteration: the mean over the M samples; null: not finite."""

    kind: Literal["history"] = "history"
    values: list[Annotated[float | None, BeforeValidator(finite)]]
    at_most: int | None = Field(None, description="iterations that were planned")


class Mask(Finding):
    """The final s of each candidate."""

    kind: Literal["mask"] = "mask"
    probabilities: list[float]

    def misfits(self, k: int) -> Iterator[str]:
        if len(self.probabilities) != k:
            yield f"{len(self.probabilities)} probabilities for {k} checkpoints"


class Predicted(Finding):
    """Predictions: numbers for each checkpoint, and their error, predicted minus true loss."""

    kind: Literal["predicted"] = "predicted"
    numbers: int
    dtype: str
    bytes: int
    rows: int
    of_rows: int
    surrogate_error: float | None = None
    loss: float | None = None
    units: int | None = None
    by_row: bool | None = Field(None, description="whether the loss splits into examples")


class Expected(Finding):
    """The expected loss on new data, by nested cross-validation.

    It is compared with the baseline that the other folds would have chosen.
    """

    kind: Literal["expected"] = "expected"
    loss: float
    error: float | None = Field(
        description="standard error of that loss, over examples; null: too few"
    )
    by: float | None = Field(
        description="expected loss of the best baseline minus this one's; null: not all of "
        "them could be run under --memory"
    )
    interval: Interval | None = Field(description="95 % of `by`, paired; null: too few examples")

    def shifted(self, by: float) -> Expected:
        return self.model_copy(update={"loss": self.loss + by})


class Share(Part):
    """An average with its share in the blend."""

    name: str
    K: int | None
    share: float


class Validated(Part):
    """A way to average, cross-validated on the selection examples; null: not finite."""

    loss: float | None
    behind: float | None = Field(description="mean over examples of its loss minus the best's")
    error: float | None = Field(description="standard error of `behind`")


class Pulled(Validated):
    """Coefficients learned with a regularisation strength; null: the prior itself."""

    strength: float | None
    share: float


class Blend(Finding):
    """The prior and the path that the default's coefficients are made of."""

    UNMOVED: ClassVar[float] = 0.005  # of all weight: who has learned less has learned nothing
    FEW: ClassVar[int] = 100  # rows: by fewer, nothing is learned on top of the prior

    kind: Literal["blend"] = "blend"
    prior: list[Share] = Field(
        min_length=1, description="moving averages, weighed by the selection examples"
    )
    path: list[Pulled] = Field(
        min_length=1, description="what was learned from there, weighed alike"
    )
    weights: list[float] = Field(description="of the prior, by candidate")
    effective: float = Field(description="1/Σc²: as many equal weights would average as much")
    learned: float = Field(description="half of Σ|c − prior|: the weight that learning has moved")

    def misfits(self, k: int) -> Iterator[str]:
        if len(self.weights) != k:
            yield f"the blend's prior has {len(self.weights)} weights for {k} checkpoints"

    def shifted(self, by: float) -> Blend:
        """Return the blend with all losses higher by so much."""
        path = [
            one.model_copy(update={"loss": None if one.loss is None else one.loss + by})
            for one in self.path
        ]
        return self.model_copy(update={"path": path})


class BudgetOption(Validated):
    name: str = Field(description="learned, or a baseline")
    K: int | None = Field(description="of a mask its size; of a baseline as in its name")
    chosen: bool


class Budget(Finding):
    """The options that --sparse has compared: masks of K checkpoints, and baselines."""

    kind: Literal["budget"] = "budget"
    options: list[BudgetOption]

    def misfits(self, k: int) -> Iterator[str]:  # noqa: ARG002
        if not any(option.chosen for option in self.options):
            yield "budget: nothing is chosen"


State = Literal["taken", "overruled", "leading", "dropped", "set aside", "failed"]


class ContestEntry(Part):
    """An average in the contest, by the parts that it was asked on."""

    name: str
    K: int | None
    size: int = Field(description="checkpoints with a coefficient other than zero")
    selected: list[int] = Field([], description="these checkpoints, as indices of `candidates`")
    selected_steps: list[int | None] | None = Field(None, description="their steps")
    coefficients: list[float] = Field([], description="theirs: `sewa average --weights`")
    parts: int
    score: float | None = Field(description="mean over those parts; null: one has failed")
    error: float | None = Field(description="standard error of that mean; null: too few parts")
    ahead: float | None = Field(
        description="how much better than the incumbent, in the mean over the parts that both were "
        "asked on, those that it came to lead by too; null: none, or the incumbent itself"
    )
    evidence: float | None = Field(
        None, description="of the leader: e-value of the duel, by parts that no search has seen"
    )
    state: State | None = Field(
        None,
        description="overruled: the choice, worse than `last`, which was taken; dropped: shown to "
        "be worse by the test; set aside: behind when the budget was needed for others",
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


class ContestFinding(Finding):
    """A choice by a metric: who led, and whether that was luck; scores are the task's own."""

    kind: Literal["contest"] = "contest"
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
        None, description="the contest's choice; `last` was written, as it is significantly better"
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
    entries: list[ContestEntry] = Field(description="best first; of many masks, the best")
    scores: dict[str, MetricScores] = Field(
        min_length=1, description="the written average is the first"
    )

    @property
    def heldout_used(self) -> int:
        """Held-out parts that the scores are means over."""
        return (self.heldout_parts or 0) - self.heldout_left_out


Findings = Annotated[
    Details | History | Mask | Predicted | Expected | Blend | Budget | ContestFinding,
    Field(discriminator="kind"),
]


def as_stored(found: Finding) -> Finding:
    """Return a finding as reports have it: of a user's own kind, its fields and its lines."""
    if type(found) in get_args(get_args(Findings)[0]):
        return found
    content, name = found.model_dump(mode="json"), type(found).__name__
    return Details(found=content, name=name, lines=[str(line) for line in found.says()])
