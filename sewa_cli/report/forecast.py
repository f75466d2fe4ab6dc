"""The report of `sewa select --dry-run`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sewa_cli.report.part import Part
from sewa_cli.report.shared import Placement, TaskHead


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
