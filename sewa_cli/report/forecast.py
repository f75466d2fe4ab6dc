"""The report of `sewa select --dry-run`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sewa_cli.report.part import Part
from sewa_cli.report.shared import Placement, TaskHead


class Plan(Part):
    """What one solver will cost; true if no checkpoint is left out for NaN or Inf."""

    solver: str
    K: int | Literal["auto"]
    rows_used: int = Field(description="selection rows that the choice is made by")
    placement: Placement
    bytes_read: int
    forward_passes: int
    backward_passes: int
    at_most: bool = Field(
        description="what it costs depends on what is found: K auto, exact swaps, a fallback"
    )
    peak_memory_bytes: int = Field(
        description="of the whole process, but for mapped files, which are given up on demand"
    )
    fits: bool = Field(description="under --memory, or half of what is free; else what it needs")
    too_few: bool = Field(description="rows: it would stop before any work")
    seconds: float


class Forecast(TaskHead, Plan):
    """What a run will cost, by the solver that was asked for and by the others."""

    kind: Literal["forecast"] = "forecast"
    how: Literal["measured", "from headers"] = Field(
        description="one batch and one checkpoint timed, or no weight read: shapes and rates alone"
    )
    why: str
    k: int
    ranks: int = Field(
        1, description="bytes, memory and seconds are each rank's; what they send is not in them"
    )
    parameters: int
    selection_rows: int
    says_targets: bool = Field(description="the task has targets()")
    heldout_rows: int | None
    tokens: int | None = Field(description="of the selection rows, where they are of tokens")
    model_bytes: int
    batch_bytes: int = Field(description="tensors of one batch on its way through the model")
    alternatives: list[Plan]
