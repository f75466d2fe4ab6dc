"""The report of `sewa inspect`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sewa_cli.report.part import Part
from sewa_cli.report.shared import Head
from sewa_cli.report.standing import Motion, Word


class Gap(Part):
    """Two neighbours that are not the usual spacing apart."""

    after: int
    before: int
    missing: int | None = Field(description="checkpoints that fit between; null: off the grid")


class Found(Part):
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


class Inspection(Head):
    """The report of `sewa inspect`."""

    kind: Literal["inspect"] = "inspect"
    checkpoints: list[Found]
    spacing: int | None = Field(description="between steps, if more than half agree on it")
    gaps: list[Gap]
    tensors: int
    parameters: int = Field(description="floating-point elements")
    dtypes: dict[str, int] = Field(description="elements by dtype")
    motion: Motion | None
    verdict: Word
    explanation: str
    bytes_read: int
