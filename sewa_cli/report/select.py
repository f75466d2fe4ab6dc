"""The report of `sewa select`."""

from __future__ import annotations

from typing import Literal, TypeVar

from pydantic import Field

from sewa_cli.report.findings import Finding, Findings
from sewa_cli.report.kinds import RunHead
from sewa_cli.report.recipe import Recipe
from sewa_cli.report.shared import Lora, Measured, Part, Verdict

F = TypeVar("F", bound=Finding)


class BatchNorm(Part):
    """`data`: what the statistics were recomputed on; null if they were averaged and left so."""

    layers: int
    mode: Literal["auto", "on", "off"]
    data: Literal["training_data", "selection_data"] | None = None
    rows: int | None = None
    before: Measured | None = None
    after: Measured | None = None


class Guard(Part):
    """Held-out data that were taken from the selection data."""

    share: float
    rows: int


class Simple(Part):
    """A baseline, and its loss on the examples that choose."""

    name: str
    K: int | None
    selection_loss: float | None = Field(
        description="as the choice was made by: of weights that are not rounded, BatchNorm on each "
        "batch's own statistics; `references` have the losses of files"
    )


class Report(RunHead):
    """The report of `sewa select`; the best baseline is the first of `references`."""

    kind: Literal["select"] = "select"
    K: int
    selected: list[int]
    selected_steps: list[int | None]
    selected_paths: list[str]
    average: Measured
    references: dict[str, Measured]
    verdict: Verdict
    written: str = Field("learned", description="learned, or the baseline that was taken")
    instead_of: str | None = Field(
        None, description="--fallback: what was chosen, where a baseline was written instead"
    )
    learned: Measured | None = Field(None, description="scores of what was chosen, in that case")
    guard: Guard | None = None
    findings: list[Findings] = Field([], description="on the way to the choice, by the solver")
    simple: list[Simple] = Field(
        [], description="the baselines that were looked at, lowest selection loss first"
    )
    simple_rows: int | None = Field(
        None, description="selection examples that the losses in `simple` are over; null: all"
    )
    batchnorm: BatchNorm | None
    lora: Lora | None = None
    recipe: Recipe | None = Field(description="null: from Python, with output=None")

    def find(self, kind: type[F]) -> F | None:
        return next((one for one in self.findings if isinstance(one, kind)), None)
