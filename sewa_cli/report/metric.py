"""What a report says of a choice by a metric. Scores are the task's own, whichever way is good."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sewa_cli.report.part import Part
from sewa_cli.report.shared import Interval

State = Literal["taken", "leading", "dropped", "set aside", "failed"]


class Entry(Part):
    """An average in the contest, by the parts that it was asked on."""

    name: str
    K: int | None
    size: int = Field(description="checkpoints with a weight other than zero")
    parts: int
    score: float | None = Field(description="mean over those parts; null: one has failed")
    error: float | None = Field(description="standard error of that mean; null: too few parts")
    ahead: float | None = Field(
        description="how much better than the incumbent, in the mean over the parts that both were "
        "asked on; null: none, or the incumbent itself"
    )
    evidence: float | None = Field(
        description="e-value of `ahead`: 20 or more turns up by luck in one of 20 cases at most, "
        "for one that was not picked for its lead"
    )
    state: State | None = Field(
        None,
        description="dropped: the test has shown it to be worse; set aside: behind when the budget "
        "was needed for others",
    )


class MetricScores(Part):
    """One average's scores: where it was chosen by, and on held-out parts."""

    selection: float | None
    heldout: float | None = None
    interval: Interval | None = Field(None, description="95 % of `heldout`; null: too few parts")
    others: dict[str, float | None] | None = Field(
        None, description="what else score() gives, held out"
    )


class MetricGain(Part):
    """What choosing by the metric was worth on held-out parts."""

    over: str
    by: float = Field(description="how much better than that average; negative: worse")
    interval: Interval | None = Field(description="95 %, paired by part; null: too few parts")
    more: int | None = Field(
        None, description="held-out parts besides these that would tell; null: it is told, or never"
    )


class Contest(Part):
    """A choice by a metric: what was asked, who led, and whether that was luck."""

    metric: str
    goal: Literal["max", "min"]
    budget: int | str
    evaluations: int = Field(description="scores of a part that the choice was made by")
    heldout_evaluations: int
    failures: list[str] = Field(description="of parts; the first hundred")
    interrupted: bool
    parts: int = Field(description="there are to choose by")
    heldout_parts: int | None
    incumbent: str = Field(
        description="what is taken unless another is shown to be better: the choice by the loss, "
        "or a simple average where there is no loss"
    )
    leader: str = Field(description="the best on the parts to choose by")
    crowned: bool | None = Field(
        description="whether the leader was shown to be better than the incumbent, by parts that "
        "had no say in its lead too; null: parts are too few to show anything"
    )
    evidence: float = Field(description="e-value of that; 100 is asked for")
    entries: list[Entry] = Field(description="best first; of many masks, the best")
    scores: dict[str, MetricScores] = Field(description="the one that was written is the first")
    gained: MetricGain | None = None
