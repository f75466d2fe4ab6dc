"""The JSON report: what was chosen, from what, how good it is, what it cost, and how to rebuild it.

`sewa schema` prints the JSON Schema of `Report`. A change that drops or renames a key raises
SCHEMA_VERSION.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION: Final = 1


class _Part(BaseModel):
    # validators are built when first used: `sewa average` writes no report, and need not wait
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Versions(_Part):
    sewa: str
    python: str
    torch: str
    safetensors: str


class Candidate(_Part):
    """A checkpoint that took part. `probability` is its final s, where one was learned."""

    index: int
    path: str
    step: int | None
    probability: float | None = None
    frequency: float | None = Field(
        None, description="share of the resamples of the selection rows that chose it"
    )
    logged: dict[str, float] | None = Field(
        None, description="what the trainer logged at this step, where it did"
    )


class LeftOut(_Part):
    path: str
    step: int | None
    reason: str


class Scores(_Part):
    """Losses (null where not finite) and the task's metrics of one set of weights."""

    selection_loss: float | None
    heldout_loss: float | None = None
    metrics: dict[str, float | None] | None = None


class Better(_Part):
    """A simple average that did better than the chosen one on held-out data."""

    name: str
    heldout_loss: float
    by: float | None = Field(
        description="held-out loss of the chosen average minus this one's; null: that is not finite"
    )


class BatchNorm(_Part):
    """`data`: what the statistics were recomputed on; null if they were averaged and left so."""

    layers: int
    mode: Literal["auto", "on", "off"]
    data: Literal["training_data", "selection_data"] | None = None
    rows: int | None = None
    before: Scores | None = None
    after: Scores | None = None


class Seconds(_Part):
    total: float
    read: float
    learn: float
    evaluate: float
    write: float


class Placement(_Part):
    """Where the checkpoints were held while learning, and why."""

    tier: Literal["memory", "bf16", "host", "files"]
    reason: str
    cap_bytes: int
    planned_bytes: int = Field(description="on top of Python, torch, the model and the data")


class Cost(_Part):
    """Passes are counted in batches, bytes as tensor data read from checkpoints."""

    seconds: Seconds
    forward_passes: int
    backward_passes: int
    bytes_read: int
    peak_memory_bytes: int
    peak_device_memory_bytes: int | None = None


class Lora(_Part):
    """An average of LoRA adapters. Errors are relative to the mean of the products B·A.

    merged: of the truncation to the adapters' rank; factors: of averaging A and B apart.
    """

    mode: Literal["factors", "merged"]
    pairs: int
    largest: float
    mean: float


class Source(_Part):
    """An input of the averaged file, and its weight in it."""

    path: str
    coefficient: float
    size: int
    sha256: str = Field(
        description="of several files (a sharded set, a folder): of what `sha256sum` lists for them"
    )


class Recipe(_Part):
    """All that `sewa apply` needs to write the same bytes again."""

    working_directory: str = Field(description="what relative paths in `sources` are relative to")
    sources: list[Source] = Field(
        min_length=1, description="in step order; integer tensors come from the last"
    )
    tensors: dict[str, str] = Field(description="name in the output → name in the checkpoints")
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = Field(
        description="of floating-point tensors; null: as in the checkpoints"
    )
    metadata: dict[str, str]
    replaced: str | None = Field(
        None, description="recomputed tensors, as base64 of a safetensors file"
    )
    shard_size: int | None = Field(
        None, ge=1, description="bytes by which the output was split into a set; null: one file"
    )
    state_key: str | None = Field(None, description="--state-key, with which the sources were read")
    lora: Literal["factors", "merged"] | None = Field(
        None, description="of adapters: merged if the products were averaged; null: no adapters"
    )


class Interval(_Part):
    low: float
    high: float


class Gained(_Part):
    """What choosing was worth on held-out data, against the best of the references."""

    over: str
    by: float = Field(description="held-out loss of that reference minus the learned average's")
    interval: Interval | None = Field(
        description="95 %, paired by row, holding for all references at once; null: too few rows"
    )


class Guard(_Part):
    """Held-out data that were taken from the selection data."""

    share: float
    rows: int


class Round(_Part):
    """One linearisation: where, its true loss there, and the choice: predicted, and true."""

    base: str
    base_loss: float
    predicted: float
    loss: float


class Cache(_Part):
    """The outputs that the linear solver worked on, for each checkpoint."""

    numbers: int
    dtype: str
    bytes: int
    rows: int
    of_rows: int = Field(description="selection rows; more than `rows` if not all would fit")


class Linear(_Part):
    rounds: list[Round]
    cache: Cache
    surrogate_error: float | None = Field(
        description="predicted minus true selection loss of what was chosen"
    )
    exact_swaps: int = Field(description="tried with true weights")


class BudgetOption(_Part):
    """A way to average, cross-validated on the selection rows."""

    name: str = Field(description="learned, or a simple average")
    K: int | None
    loss: float | None
    behind: float | None = Field(
        description="mean over rows of its loss minus the best option's; null: not finite"
    )
    error: float | None = Field(description="standard error of `behind`")
    chosen: bool


class ResampledGain(_Part):
    mean: float
    low: float
    high: float


class StabilityReport(_Part):
    """The choice made anew on resampled rows, and judged on the rows that were not drawn."""

    resamples: int
    gains: dict[str, ResampledGain] = Field(description="over a simple average; 95 % of resamples")
    rows: int
    rows_needed: int | None = Field(
        description="selection rows from which choosing beats the mean of all; null: none would do"
    )


class Report(_Part):
    schema_version: Literal[1] = SCHEMA_VERSION
    versions: Versions
    created: str
    config: dict[str, Any]
    task: str
    device: str
    seed: int
    K: int
    k: int
    parameters: int
    candidates: list[Candidate]
    left_out: list[LeftOut]
    selected: list[int]
    selected_steps: list[int | None]
    selected_paths: list[str]
    history: list[float | None] = Field(
        description="by iteration: mean loss over the M samples, or predicted; null: not finite"
    )
    selection_rows: int
    heldout_rows: int | None
    average: Scores
    references: dict[str, Scores]
    beaten_by: list[Better]
    written: str = Field("learned", description="learned, or the simple average that was taken")
    instead_of: str | None = Field(
        None, description="--fallback: what was chosen, where a simple average was written instead"
    )
    learned: Scores | None = Field(None, description="scores of what was chosen, in that case")
    labels: Literal["matter", "noise", "unseen"] | None = Field(
        None, description="noise: mixed-up rows fit as well; unseen: loss() ignores the batch"
    )
    gained: Gained | None = None
    guard: Guard | None = None
    linear: Linear | None = None
    budget: list[BudgetOption] | None = Field(None, description="K: auto: the options it had")
    stability: StabilityReport | None = None
    placement: Placement
    batchnorm: BatchNorm | None
    lora: Lora | None = None
    cost: Cost
    output: str | None
    recipe: Recipe
    warnings: list[str]


class RowCost(_Part):
    """What the row would have cost alone: averages it shares with other rows count in full."""

    forward_passes: int
    backward_passes: int
    bytes_read: int = Field(description="of checkpoints held in memory, by mixing and pulling back")
    seconds: float


class Row(_Part):
    """One method at one K. A method that draws several masks has the mean of their losses."""

    method: str = Field(description="as asked for, options included")
    K: int | None = Field(description="null for a method that takes none")
    size: int = Field(description="checkpoints with a weight other than zero")
    coefficients: list[list[float]] = Field(description="over the candidates, one list a draw")
    selection_loss: float | None
    predicted_loss: float | None = Field(
        None, description="selection loss that the cache of outputs predicts (--fast)"
    )
    surrogate_error: float | None = Field(
        None, description="predicted minus true selection loss, BatchNorm statistics as averaged"
    )
    heldout_loss: float | None
    interval: Interval | None = Field(description="95 % of bootstrapped held-out losses")
    spread: float | None = Field(description="standard deviation of held-out loss over the draws")
    difference: float | None = Field(description="held-out loss minus the best row's")
    difference_interval: Interval | None = Field(
        description="95 %, paired, holding for all pairs of rows at once"
    )
    mark: Literal["best", "tie", "worse"] | None
    metrics: dict[str, float | None] | None
    cost: RowCost


class Comparison(_Part):
    """The report of `sewa compare`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Literal["compare"] = "compare"
    versions: Versions
    created: str
    config: dict[str, Any]
    task: str
    device: str
    seed: int
    k: int
    parameters: int
    candidates: list[Candidate]
    left_out: list[LeftOut]
    selection_rows: int
    heldout_rows: int | None
    unit: Literal["rows", "batches"] | None = Field(description="what the bootstrap resamples")
    rows: list[Row]
    best: int | None = Field(description="index of the row with the lowest held-out loss")
    winner: str | None = Field(description="the best row, if no other ties with it")
    batchnorm: str | None = Field(description="what statistics of every row were recomputed on")
    averages_evaluated: int
    placement: Placement
    cost: Cost
    output: str | None
    recipe: Recipe | None = Field(description="of the best row, if it was written")
    warnings: list[str]


class Window(_Part):
    """Some checkpoints in a row, and what each method makes of them."""

    at: int = Field(description="training that it has seen: see `by`")
    first_step: int | None
    last_step: int | None
    candidates: list[int] = Field(description="indices; coefficients of its rows are over these")
    rows: list[Row] = Field(description="`mark`: the best of the window; no intervals")
    placement: Placement


class Level(_Part):
    """What the run's last checkpoint does: the level that averages are to reach."""

    measure: Literal["heldout_loss", "selection_loss"]
    value: float | None = Field(description="null: not finite, and nothing can be said to reach it")
    at: int
    metrics: dict[str, float | None] | None


class Reach(_Part):
    """From when on a method does as well as the run's last checkpoint."""

    method: str
    K: int | None
    window: int | None = Field(
        description="the first that is at the level or better, with all that follow; null: never"
    )
    at: int | None = Field(description="training seen by then")
    share: float | None = Field(
        description="of all the training; null if never, or if the checkpoints have no steps"
    )
    loss: float | None = Field(description="there")
    metrics: dict[str, float | None] | None = Field(description="there")
    touched: int | None = Field(
        description="the first window at the level or better, even if a later one is worse"
    )


class Windows(_Part):
    """The report of `sewa compare --windows`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Literal["windows"] = "windows"
    versions: Versions
    created: str
    config: dict[str, Any]
    task: str
    device: str
    seed: int
    size: int = Field(description="checkpoints in a window")
    stride: int = Field(description="checkpoints from one window to the next")
    parameters: int
    candidates: list[Candidate]
    left_out: list[LeftOut]
    in_no_window: int = Field(description="checkpoints, mostly the oldest, that no window holds")
    selection_rows: int
    heldout_rows: int | None
    by: Literal["step", "checkpoint"] = Field(
        description="what `at` counts: training steps; checkpoints, if they have no steps"
    )
    windows: list[Window] = Field(description="oldest first; the last ends with the run")
    level: Level
    reaches: list[Reach]
    batchnorm: str | None = Field(description="what statistics of every row were recomputed on")
    averages_evaluated: int
    cost: Cost
    warnings: list[str]


class Rebuildable(BaseModel):
    """As much of any report as `sewa apply` needs."""

    model_config = ConfigDict(defer_build=True)

    schema_version: Literal[1]
    recipe: Recipe


def to_json(report: BaseModel) -> str:
    return report.model_dump_json(indent=2) + "\n"


def schema(of: type[BaseModel] = Report) -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **of.model_json_schema(mode="serialization"),
    }
