"""The report of `sewa validate`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sewa_cli.report.shared import TaskHead


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
