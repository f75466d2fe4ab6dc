"""Every setting: its name, its type, its default, what it is for."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

STDOUT = "-"
AUTO = 0  # K: auto
DEFAULT_METHODS = ("sewa", "last", "uniform", "lawa", "latest", "swa", "ema", "random", "greedy")
# tasks of our own by their short names, and those of their `args` that are paths
READY_MADE = {
    "huggingface": ("model", "data", "selection", "heldout", "training"),
    "classification": ("model", "data", "selection", "heldout", "training"),
}


def _refuse_bool(value: object) -> object:
    # YAML's `yes` and `on` are booleans, and pydantic would read true as 1
    if isinstance(value, bool):
        raise ValueError(f"must be a number, found {str(value).lower()}")
    return value


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def _as_bytes(value: object) -> object:
    """8GiB, 500MB or plain bytes."""
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if found is None or found[2].upper() not in _UNITS:
            raise ValueError(f"must be a size such as 8GiB or 500MB, found {value!r}")
        return int(float(found[1]) * _UNITS[found[2].upper()])
    return _refuse_bool(value)


def _on_off(value: object) -> object:
    # YAML 1.1 reads a bare `on` and `off` as booleans
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


def _auto_or_count(value: object, count: ValidatorFunctionWrapHandler) -> object:
    return AUTO if value == "auto" else count(value)


def _as_paths(value: object) -> object:
    return (value,) if isinstance(value, str | os.PathLike) else value


Count = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=1)]
Step = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=0)]
# `auto` is kept as 0: a union with a word would tell every fault twice
Budget = Annotated[
    int,
    Field(ge=1),
    BeforeValidator(_refuse_bool),
    WrapValidator(_auto_or_count),
    PlainSerializer(lambda K: "auto" if K == AUTO else K),
]
Positive = Annotated[float, BeforeValidator(_refuse_bool), Field(gt=0, allow_inf_nan=False)]
Seed = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=0, lt=2**63)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GumbelConfig(_Frozen):
    """Settings of the `gumbel` solver (Algorithm 1)."""

    iterations: Count = 100
    samples: Count = Field(2, description="M, masks drawn in each iteration")
    temperature: Positive = Field(0.5, description="t of the Gumbel-softmax")
    temperature_end: Positive | None = Field(
        None, description="anneal geometrically from `temperature` to this; null: constant"
    )
    lr: Positive | None = Field(
        None, description="Adam's; null: 0.3 for logits, 0.05 for projected"
    )
    batches: Count = Field(1, description="selection batches used in each iteration")
    normalize: Literal["sum", "paper"] = Field(
        "sum", description="divide the mixed weights by the sum of the mask, or by K"
    )
    parametrization: Literal["logits", "projected"] = "logits"


class LinearConfig(_Frozen):
    """Settings of the `linear` solver."""

    h: Annotated[float, BeforeValidator(_refuse_bool), Field(gt=0, le=1)] = Field(
        0.1, description="how far towards each checkpoint the model is evaluated"
    )
    rounds: Annotated[int, BeforeValidator(_refuse_bool), Field(ge=1, le=10)] = Field(
        2, description="1: linearised at the mean of all; 2: once more at the average found"
    )
    iterations: Count = Field(100, description="of projected gradient, at most; no checkpoint read")
    swaps: Annotated[int, BeforeValidator(_refuse_bool), Field(ge=0)] = Field(
        50, description="tried in output space before it is given up"
    )
    exact_swaps: Annotated[int, BeforeValidator(_refuse_bool), Field(ge=0)] = Field(
        0, description="tried with true weights in the end; each reads two checkpoints"
    )
    bootstrap: Annotated[int, BeforeValidator(_refuse_bool), Field(ge=0)] = Field(
        20, description="resamples of the selection rows for stability; 0: none"
    )
    outputs: Count = Field(
        1_000_000, description="numbers kept for each checkpoint; more rows than that take long"
    )
    folds: Annotated[int, BeforeValidator(_refuse_bool), Field(ge=2)] = Field(
        5, description="of the selection rows, for K: auto"
    )


def _as_list(value: object) -> object:
    """`lawa, swa` and `5,10` on the command line are lists in the YAML."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return [value] if isinstance(value, int) else value


class CompareConfig(_Frozen):
    """Settings of `sewa compare`."""

    methods: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = DEFAULT_METHODS
    K: Annotated[tuple[Count, ...], BeforeValidator(_as_list)] = Field(
        (), description="budgets; empty: the K above"
    )
    methods_from: Path | None = Field(None, description="a Python file with methods of your own")
    bootstrap: Annotated[int, BeforeValidator(_refuse_bool), Field(ge=100)] = Field(
        2000, description="resamples of the held-out rows"
    )
    fast: bool = Field(
        False, description="methods search by predicted losses; each row is judged by true ones"
    )
    windows: Annotated[int, BeforeValidator(_refuse_bool), Field(ge=2)] | None = Field(
        None, description="compare in windows of so many checkpoints that move along the run"
    )
    stride: Count | None = Field(
        None, description="checkpoints from one window to the next; null: windows do not overlap"
    )


class Config(_Frozen):
    """Everything a run depends on, but for the files themselves."""

    task: str | None = Field(
        None, description="a .py file, huggingface, classification, or a module"
    )
    args: dict[str, Any] = Field({}, description="keyword arguments for the task's functions")
    checkpoints: Annotated[tuple[Path, ...], BeforeValidator(_as_paths)] = ()
    K: Budget = Field(
        10, description="how many checkpoints to average; auto: by cross-validation (linear solver)"
    )
    last: Count | None = Field(None, description="k: only the last so many take part")
    every: Count | None = Field(None, description="only every n-th, counted back from the last")
    from_step: Step | None = None
    to_step: Step | None = None
    nonfinite: Literal["skip", "error"] = "skip"
    state_key: str | None = Field(None, description="where PyTorch files have their weights")
    lora: Literal["factors", "merged"] = Field(
        "factors", description="average A and B of adapters apart, or their products"
    )
    solver: Literal["gumbel", "linear"] = "gumbel"
    gumbel: GumbelConfig = GumbelConfig()
    linear: LinearConfig = LinearConfig()
    stable: bool = Field(False, description="choose what most resamples of the data choose")
    guard: Annotated[float, BeforeValidator(_refuse_bool), Field(gt=0, lt=1)] | None = Field(
        None, description="share of the selection rows kept aside as held-out data, 0.2"
    )
    fallback: bool = Field(
        False, description="write a simple average instead if it does better on held-out data"
    )
    compare: CompareConfig = CompareConfig()
    memory: Annotated[int, BeforeValidator(_as_bytes), Field(ge=1)] | None = Field(
        None, description="cap on what sewa allocates, 8GiB; null: half of what is free"
    )
    device: str = Field("auto", description="auto: cuda, else mps, else cpu")
    seed: Seed = 0
    bn: Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_off)] = "auto"
    output: str | None = Field(None, description="a path, or - for standard output")
    output_dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None
    shard_size: Annotated[int, BeforeValidator(_as_bytes), Field(ge=1)] | None = Field(
        None, description="an output larger than this becomes a sharded set, 5GB; null: never"
    )
    report: Path | None = None
    strict: bool = False
