"""Parts that several reports have, and what each of them begins with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from pydantic import Field

from sewa_cli.report.part import SCHEMA_VERSION, Part
from sewa_cli.report.verdict import Interval as Interval

GROUPS = "groups that the rows are of, by groups(batch); null: each row stands for itself"


class Versions(Part):
    sewa: str
    python: str
    torch: str
    safetensors: str


class Candidate(Part):
    """A checkpoint that took part. `probability` is its final s, where one was learned."""

    index: int
    path: str
    step: int | None
    weight: float | None = Field(None, description="in the average that was written, by `select`")
    probability: float | None = None
    logged: dict[str, float] | None = Field(
        None, description="what the trainer logged at this step, where it did"
    )


class LeftOut(Part):
    path: str
    step: int | None
    reason: str


class Scores(Part):
    """Losses (null where not finite) and the task's metrics of one set of weights."""

    selection_loss: float | None
    heldout_loss: float | None = None
    metrics: dict[str, float | None] | None = None


class Placement(Part):
    """The place where checkpoints were held while learning, and why."""

    tier: str
    reason: str
    cap_bytes: int
    planned_bytes: int = Field(description="on top of Python, torch, the model and the data")


class Seconds(Part):
    total: float
    read: float
    learn: float
    evaluate: float
    write: float


class Cost(Part):
    """Passes are counted in batches, bytes as tensor data read from checkpoints."""

    seconds: Seconds
    forward_passes: int
    backward_passes: int
    bytes_read: int
    peak_memory_bytes: int
    peak_device_memory_bytes: int | None = None
    recalled: int | None = Field(
        None, description="results that were in --cache, and not worked out again"
    )


class Lora(Part):
    """An average of LoRA adapters. Errors are relative to the mean of the products B·A.

    merged: of the truncation to the adapters' rank; factors: of averaging A and B apart.
    """

    mode: Literal["factors", "merged"]
    pairs: int
    largest: float
    mean: float


class Head(Part):
    """The beginning of every report: what was run, by which versions, when and how."""

    in_a_notebook: ClassVar[Callable[[Any], str] | None] = None  # `commands` says how

    schema_version: Literal[3] = SCHEMA_VERSION
    kind: str
    versions: Versions
    created: str
    command: str | None = Field(None, description="as it was typed, if it was")
    config: dict[str, Any]
    warnings: list[str]

    def _repr_html_(self) -> str | None:
        make = type(self).in_a_notebook
        return None if make is None else make(self)


class TaskHead(Head):
    """The head of a report of a command that runs the user's model."""

    task: str
    code: str | None = Field(
        None, description="SHA-256 of the task's file; null: it has none of its own"
    )
    device: str
    seed: int
