"""Every setting: its name, its type, its default, what it is for."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PrivateAttr,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from sewa_cli.direction import Goal, comparative, known_goal, split_sign
from sewa_cli.mirrors import url_of
from sewa_cli.settings import (
    AUTO,
    Bytes,
    Count,
    CountOrNone,
    Duration,
    Effort,
    Seed,
    Settings,
    Share,
    refuse_bool,
)

STDOUT = "-"
RANGE = r"(\d+)-(\d+)"  # of parts
FEW_EVALUATIONS = 20  # of a command that scores everything in one call
DEFAULT_METHODS = (
    *("aggregate", "sewa", "last", "uniform", "lawa", "latest", "swa", "ema", "random", "greedy"),
)
WITHOUT_A_LOSS = ("race", "last", "uniform", "lawa", "latest", "swa", "ema", "random")
# ready-made tasks, and those of their `args` that are paths
READY_MADE = {
    "huggingface": ("model", "tokenizer", "data", "selection", "heldout", "training"),
    "classification": ("model", "data", "selection", "heldout", "training"),
    "gymnasium": ("model", "data"),
    "stable-baselines3": (),
    "lm-eval": ("model", "tokenizer", "include_path"),
}


def _on_off(value: object) -> object:
    # YAML 1.1 reads a bare `on` and `off` as booleans
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


def _auto_or_count(value: object, count: ValidatorFunctionWrapHandler) -> object:
    return AUTO if value == "auto" else count(value)


def names_elsewhere(path: Path | str) -> bool:
    """Whether it is a URL or standard output, and so no path in a folder."""
    return str(path) == STDOUT or url_of(path) is not None


def _as_urls(paths: tuple[Path, ...]) -> list[str]:
    return [url_of(path) or str(path) for path in paths]


def _as_paths(value: object) -> object:
    return (value,) if isinstance(value, str | os.PathLike) else value


# `auto` is kept as 0: a union with a word would report every fault twice
Budget = Annotated[
    int,
    Field(ge=1),
    BeforeValidator(refuse_bool),
    WrapValidator(_auto_or_count),
    PlainSerializer(lambda K: "auto" if K == AUTO else K),
]


def _as_list(value: object) -> object:
    """`lawa, swa` and `5,10` on the command line are lists in the YAML."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return [value] if isinstance(value, int) else value


def _as_texts(value: object) -> object:
    """YAML reads `[1, 2]` as numbers."""
    if isinstance(value, list | tuple):
        return tuple(str(one) for one in value)
    return value


def _checked_regex(value: str | None) -> str | None:
    try:
        re.compile(value or "")
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from error
    return value


class CompareConfig(Settings):
    """Settings of `sewa compare`."""

    methods: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = DEFAULT_METHODS
    K: Annotated[tuple[Count, ...], BeforeValidator(_as_list)] = Field(
        (), description="numbers of checkpoints; empty: the K above, or 10 if that is auto"
    )
    methods_from: Path | None = Field(None, description="a Python file with methods of your own")
    bootstrap: Annotated[int, BeforeValidator(refuse_bool), Field(ge=100)] = Field(
        2000, description="resamples of the held-out examples"
    )
    fast: bool = Field(
        False, description="methods search by predicted losses; each row is evaluated by true ones"
    )


class ObjectiveConfig(Settings):
    """The quantity to choose by: the task's loss, or a metric."""

    metric: str | None = Field(
        None,
        description="a number that score() returns; -NAME, +NAME: lower or higher is better, "
        "where the name does not tell; null: the loss",
    )
    goal: Goal | None = Field(None, description="null: by the metric's name, or else max")
    incumbent: str | None = Field(
        None,
        description="the method to beat; it needs no loss. null: the choice by the "
        "loss, else the better of last and the best baseline",
    )
    budget: Effort = Field(500, description="evaluations of parts, or a time, 10m")
    workers: Count = Field(1, description="processes that evaluate parts")
    part_timeout: Duration | None = Field(
        None, description="a part that takes longer fails, 30s; null: no limit"
    )
    parts: Annotated[str | tuple[str, ...] | None, BeforeValidator(_as_texts)] = Field(
        None, description="score: values of {part}: a list, a range 1-20, or a file of lines"
    )
    score_regex: Annotated[str | None, AfterValidator(_checked_regex)] = Field(
        None, description="score: a pattern whose first group is the number in the output"
    )

    @model_validator(mode="before")
    @classmethod
    def _with_goal(cls, given: Any) -> Any:
        """Settle which way is better: by the metric's name, its sign or `goal`."""
        metric = given.get("metric") if isinstance(given, dict) else None
        if not isinstance(metric, str):
            return given
        (name, signed), goal = split_sign(metric), given.get("goal")
        if not name:
            raise ValueError("metric: must have a name, one of those that score() gives")
        known, asked = known_goal(name), signed or goal
        if signed and goal not in (None, signed):
            raise ValueError(f"metric: {metric} and goal: {goal} contradict each other; drop one")
        if known and asked in ("max", "min") and asked != known:
            way = f"the {metric[0]}" if signed else f"goal: {goal}"
            raise ValueError(f"metric: {comparative(known)} {name} is better; drop {way}")
        return {**given, "metric": name, "goal": asked or known}

    @property
    def direction(self) -> Goal:
        return self.goal or "max"

    @property
    def assumption(self) -> str | None:
        """The assumption about the metric's direction, for the user to confirm or turn."""
        if self.metric is None or self.goal is not None:
            return None
        name = self.metric
        return (
            f"assuming that higher {name} is better; --metric -{name} if lower is, +{name} to "
            "confirm"
        )

    @model_validator(mode="before")
    @classmethod
    def _without_metric(cls, given: Any) -> Any:
        """Refuse settings that would be ignored, unless `metric: null` is written out."""
        if not isinstance(given, dict) or "metric" in given:
            return given
        idle = [name for name in ("budget", "workers", "part_timeout") if name in given]
        if idle:
            what = f"{' and '.join(idle)} {'is' if len(idle) == 1 else 'are'}"
            raise ValueError(f"{what} for a choice by a metric; name one: --metric NAME")
        return given


class Config(Settings):
    """Everything a run depends on, except the files themselves."""

    def anchored(self, folder: Path) -> Config:
        """Make relative paths absolute, as they are seen from `folder`."""
        given = [path if names_elsewhere(path) else folder / path for path in self.checkpoints]
        found: dict[str, Any] = {"checkpoints": tuple(given)}
        for name in ("cache", "report", "output", "scratch"):
            if (path := getattr(self, name)) is not None and not names_elsewhere(path):
                found[name] = type(path)(folder / path)
        return self.model_copy(update=found)

    task: str | None = Field(
        None, description="a .py file, the name of a ready-made task, or a module"
    )
    args: dict[str, Any] = Field({}, description="keyword arguments for the task's functions")
    checkpoints: Annotated[
        tuple[Path, ...], BeforeValidator(_as_paths), PlainSerializer(_as_urls)
    ] = Field(
        (), description="folders, files or patterns (run/epoch-*.pt), where the command names none"
    )
    K: Budget = Field(
        AUTO, description="how many checkpoints to average; auto: learn coefficients for all"
    )
    sparse: bool = Field(
        False, description="with K: auto, few checkpoints equally; cross-validation finds K"
    )
    last: Count | None = Field(None, description="only the last N checkpoints")
    every: Count | None = Field(None, description="only every n-th, counted back from the last")
    source: Literal["snapshots", "means", "both"] | None = Field(
        None,
        alias="from",
        description="snapshots, interval means or both; null: means if each save has one",
    )
    from_step: CountOrNone | None = Field(None, description="the first step to include")
    to_step: CountOrNone | None = Field(None, description="the last step to include")
    exclude: Annotated[tuple[str, ...], BeforeValidator(_as_paths)] = Field(
        (), description="patterns of names to leave out"
    )
    nonfinite: Literal["skip", "error"] = Field(
        "skip", description="leave out a checkpoint with NaN or Inf, or stop with exit code 3"
    )
    state_key: str | None = Field(None, description="average only the tensors under this key")
    lora: Literal["factors", "merged"] = Field(
        "factors", description="average A and B of adapters apart, or their products"
    )
    solver: str | None = Field(None, description="`sewa solvers` lists them; null: by K")
    solver_from: Path | None = Field(None, description="a Python file with solvers of your own")
    solvers: dict[str, dict[str, Any]] = Field({}, description="settings of solvers, by name")
    guard: Share | None = Field(
        None, description="fraction of the selection examples held back, 0.2"
    )
    fallback: bool = Field(
        False, description="write a baseline instead if its held-out loss is lower"
    )
    objective: ObjectiveConfig = ObjectiveConfig()
    compare: CompareConfig = CompareConfig()
    memory: Bytes | None = Field(
        None, description="cap on what sewa allocates, 8GiB; null: half of what is free"
    )
    tier: str | None = Field(
        None, description="where the checkpoints are held; null: wherever they fit"
    )
    cache: Path | None = Field(
        None, description="a folder for results; an interrupted command resumes from it"
    )
    score: str | None = Field(
        None, description="instead of a task: a command that prints the score of {checkpoint}"
    )
    revisions: str | None = Field(
        None, description="branches and tags of hf://ORGANISATION/NAME to take: step*"
    )
    scratch: Path | None = Field(
        None,
        description="where remote files are fetched to, and averages are written for `score`; "
        "null: the system's folder, and for `score` memory if they fit",
    )
    scratch_size: Bytes | None = Field(
        None, description="the most that is fetched there, 50GB; null: half of what is free"
    )
    device: str = Field("auto", description="auto: cuda, else mps, else cpu")
    seed: Seed = Field(0, description="the same seed gives the same bytes")
    bn: Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_off)] = Field(
        "auto",
        description="recompute the statistics of BatchNorm; auto: where there are such layers",
    )
    output: str | None = Field(None, description="a path, or - for standard output")
    output_dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = Field(
        None, description="null: as the checkpoints are"
    )
    output_format: Literal["dcp"] | None = Field(
        None, description="dcp: a folder for torch.distributed.checkpoint; null: as the inputs are"
    )
    shard_size: Bytes | None = Field(
        None,
        description="write a folder with weights in files of at most this, 5GB; null: do not split",
    )
    report: Path | None = Field(None, description="null: next to the output, or inside")
    strict: bool = Field(False, description="exit with 5 if a baseline is better on held-out data")
    _file: Path | None = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _with_score(cls, given: Any) -> Any:
        """Refuse a score without a name; one evaluation of all data is dear, so they are few."""
        if not isinstance(given, dict) or given.get("score") is None:
            return given
        objective = given.get("objective") or {}
        if isinstance(objective, dict):
            if objective.get("metric") is None:
                raise ValueError("score: needs --metric, the name of what it prints: --metric -wer")
            if objective.get("parts") is None:
                return {**given, "objective": {"budget": FEW_EVALUATIONS, **objective}}
        return given

    @property
    def checkpoints_from(self) -> Path | None:
        """The YAML file that names the checkpoints; None: they were given as arguments."""
        return self._file
