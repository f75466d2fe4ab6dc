"""The base of all reports, and parts that several of them have."""

from __future__ import annotations

import platform
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from sewa_cli import __version__

if TYPE_CHECKING:
    from sewa_cli.config import Config
    from sewa_cli.events import Events

SCHEMA_VERSION: Final = 3


class Part(BaseModel):
    # validators are built when first used: `sewa average` writes no report, and need not wait
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


def to_json(report: BaseModel) -> str:
    return report.model_dump_json(indent=2) + "\n"


def schema(of: type[BaseModel]) -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **of.model_json_schema(mode="serialization"),
    }


GROUPS = "groups that the examples are of, by groups(batch); null: each stands for itself"


class Versions(Part):
    sewa: str
    python: str
    torch: str
    safetensors: str


class Candidate(Part):
    """A checkpoint that took part."""

    index: int
    path: str
    step: int | None
    mean_steps: int | None = Field(
        None, description="the number of steps it is the mean of; null: a snapshot"
    )
    weight: float | None = Field(None, description="in the average that was written, by `select`")
    logged: dict[str, float] | None = Field(
        None, description="what the trainer logged at this step, where it did"
    )


class LeftOut(Part):
    path: str
    step: int | None
    reason: str


class Measured(Part):
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


class ReportHead(Part):
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


class TaskHead(ReportHead):
    """The head of a report of a command that runs the user's model."""

    task: str
    code: str | None = Field(
        None, description="SHA-256 of the task's file; null: it has none of its own"
    )
    device: str
    seed: int


class Named(Protocol):
    """A task, or a command in its place."""

    @property
    def source(self) -> str: ...
    @property
    def sha256(self) -> str | None: ...


def heading(
    config: Config, events: Events, task: Named | None = None, device: object = None
) -> dict[str, Any]:
    """Return values for `Head`; with a task and its device, for `TaskHead`."""
    head: dict[str, Any] = {
        "versions": Versions(
            sewa=__version__,
            python=platform.python_version(),
            torch=version("torch"),  # without importing it: `average` goes without
            safetensors=version("safetensors"),
        ),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": events.command,
        "config": config.model_dump(mode="json"),
        "warnings": list(events.warnings),
    }
    if task is not None:
        about = {"task": task.source, "code": task.sha256, "device": str(device)}
        head |= {**about, "seed": config.seed}
    return head


# ---- the verdict: is the choice better than the baselines on held-out data? ----


class Interval(Part):
    low: float
    high: float

    def has_zero(self) -> bool:
        return self.low <= 0 <= self.high

    def turned(self) -> Interval:
        """Return the interval of the same difference the other way round."""
        return Interval(low=0.0 - self.high, high=0.0 - self.low)


MORE: Final = Field(
    None,
    description="more held-out parts to make it significant; null: it is, none would, or no metric",
)


class Rival(Part):
    """A baseline next to the choice."""

    name: str
    score: float
    difference: float | None = Field(description="the choice's score minus this; null: no number")
    interval: Interval | None = Field(None, description="95 %, paired; null: too few examples")
    more: int | None = MORE


class Verdict(Part):
    """The choice compared with the best baseline, on the same held-out examples or parts.

    Which baseline is the best was found on the selection data, as the choice was. By a metric it is
    the incumbent; where that was written, the leader or the best baseline.
    """

    kind: Literal[
        "better",
        "worse",
        "not significant",
        "too few",
        "baseline",
        "not finite",
        "baseline not finite",
        "no held-out data",
    ] = Field(
        description="better, worse, not significant: by the interval; too few: examples for one; "
        "baseline: the choice is one"
    )
    baseline: str | None = None
    difference: float | None = Field(
        None, description="held-out score of the choice minus the baseline's"
    )
    interval: Interval | None = Field(None, description="95 % of `difference`, paired")
    n: int | None = Field(None, description="units that were compared: examples, groups, parts")
    more: int | None = MORE
    last: Rival | None = Field(
        None, description="--metric: the last checkpoint; null: it was written, or is `baseline`"
    )
    beaten_by: list[Rival] = Field([], description="the best first; any is exit code 5 (--strict)")


# ---- how the weights of a run moved ----


Word = Literal["moving", "drifting", "wandering", "settled", "unknown"]
Way = Literal["line", "walk", "noise"]


class Signs(Part):
    """Three numbers without a unit that tell the ways of moving apart; null where undefined."""

    net_to_path: float | None = Field(description="net displacement by the length of the path")
    cosine: float | None = Field(description="mean, of successive steps")
    trend: float | None = Field(description="part of the spread that a line in time explains")


class Motion(Part):
    """Lengths over all floating-point elements of the finite checkpoints."""

    checkpoints: int
    norm: float = Field(description="of the mean")
    radius: float = Field(description="root mean square distance from the mean")
    late_radius: float = Field(description="the same of the later half, from its own mean")
    net: float = Field(description="distance from the first to the last")
    path: float = Field(description="sum of the steps' lengths")
    run: Signs
    expected: dict[Way, Signs] | None = Field(description="line, walk, noise; null if too few")


class Standing(Part):
    """The verdict of `inspect`, by weights drawn while the checkpoints were read."""

    weights: int = Field(description="the number of each checkpoint's weights that were used")
    motion: Motion
    verdict: Word
    explanation: str
