"""The report of `sewa select --dry-run`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sewa_cli.report.shared import Placement, TaskHead


class Forecast(TaskHead):
    """What a run will cost; true if no checkpoint is left out for NaN or Inf."""

    kind: Literal["forecast"] = "forecast"
    k: int
    K: int | Literal["auto"]
    parameters: int
    placement: Placement
    bytes_read: int
    forward_passes: int
    backward_passes: int
    at_most: bool = Field(
        description="what it costs depends on what is found: K auto, exact swaps, a fallback"
    )
    seconds: float
