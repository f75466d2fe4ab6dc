"""sewa.yaml, the flags and `--set` become one frozen `Config`; every fault is told at once.

Where a key may be given three times, the strongest wins: `--set`, then a flag, then the YAML.
Paths in the YAML are relative to the YAML; paths in flags are relative to the working directory.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import ErrorDetails

from sewa_cli.errors import ConfigError

DEFAULT_FILE = "sewa.yaml"
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


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys and says nothing; a user would want to know."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def find_config(explicit: Path | None) -> Path | None:
    """The file named by --config, else ./sewa.yaml if there is one."""
    if explicit is not None:
        return explicit
    return Path(DEFAULT_FILE) if Path(DEFAULT_FILE).is_file() else None


def load_config(
    path: Path | None,
    flags: Mapping[str, object] | None = None,
    sets: Sequence[str] = (),
    dashes: str = "--",
) -> Config:
    """Read the YAML at `path` (None: defaults); `flags` (dotted key → value) and `sets` win."""
    settings: dict[str, Any] = {}
    sources: dict[str, str] = {}  # dotted key → where it came from, for the fault's first words
    faults: list[str] = []
    if path is not None:
        task = (flags or {}).get("task")
        settings = _relative_to(path.parent, _read_yaml(path), task)
    for key, value in (flags or {}).items():
        if value is not None:
            with suppress(ValueError):  # the section is no section: validation will tell
                _put(settings, key, value)
                sources[key] = dashes + key.rpartition(".")[2].replace("_", "-")
    for text in sets:
        key, equals, raw = text.partition("=")
        try:
            if not equals or not key:
                raise ValueError("must look like key=value")
            _put(settings, key, yaml.load(raw, _UniqueKeyLoader))
        except (ValueError, yaml.YAMLError) as error:
            faults.append(f"--set {text}: {_one_line(error)}")
        sources[key] = f"--set {key}"
    try:
        config = Config.model_validate(settings)
    except ValidationError as error:
        faults += [
            _describe(fault, str(path or "config"), sources)
            for fault in error.errors(include_url=False)
        ]
    if faults:
        raise ConfigError(*dict.fromkeys(faults))  # one flag may set several keys
    return config


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; check --config") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not a UTF-8 text file; check --config") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"{where}: {_one_line(error)}; mend the YAML") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines, found {_kind(content)}")
    # `args:` with nothing behind it is the same as no `args:`; an unknown key is told all the same
    known = Config.model_fields
    return {str(k): v for k, v in content.items() if v is not None or str(k) not in known}


def _one_line(error: Exception) -> str:
    text = getattr(error, "problem", None) or str(error)
    return " ".join(str(text).split())


def _relative_to(
    folder: Path, settings: dict[str, Any], task: object | None = None
) -> dict[str, Any]:
    """Resolve the paths of a YAML in `folder`.

    In `args`, what starts with ./ or ../ is one; a ready-made task (the YAML's, or the one given
    beside it) has more.
    """

    def join(value: object) -> object:
        return str(folder / Path(value).expanduser()) if isinstance(value, str) else value

    def join_dotted(value: object) -> object:
        if isinstance(value, dict):
            return {key: join_dotted(item) for key, item in value.items()}
        if isinstance(value, list):
            return [join_dotted(item) for item in value]
        is_path = isinstance(value, str) and value.startswith(("./", "../"))
        return join(value) if is_path else value

    resolved = dict(settings)
    if isinstance(own := settings.get("task"), str) and names_a_file(own):
        resolved["task"] = join(own)
    paths = READY_MADE.get(str(settings.get("task") if task is None else task), ())
    for key in ("report", "output"):
        if settings.get(key) not in (None, STDOUT):
            resolved[key] = join(settings[key])
    checkpoints = settings.get("checkpoints")
    if isinstance(checkpoints, list):
        resolved["checkpoints"] = [join(item) for item in checkpoints]
    elif checkpoints not in (None, STDOUT):
        resolved["checkpoints"] = join(checkpoints)
    if isinstance(args := settings.get("args"), dict):
        resolved["args"] = {
            key: join(value) if key in paths and _is_path(value) else join_dotted(value)
            for key, value in args.items()
        }
    compare = settings.get("compare")
    if isinstance(compare, dict) and compare.get("methods_from") is not None:
        resolved["compare"] = {**compare, "methods_from": join(compare["methods_from"])}
    return resolved


def _is_path(value: object) -> bool:
    """Of an arg that takes paths: not one is `package.net:make_net`, a function in a module."""
    module, colon, _ = str(value).rpartition(":")
    return not colon or names_a_file(module)


def names_a_file(task: str) -> bool:
    """`./task.py` is a file; `package.task` is a module."""
    return task.endswith(".py") or "/" in task or os.sep in task


def _put(settings: dict[str, Any], dotted: str, value: object) -> None:
    *parents, leaf = dotted.split(".")
    here = settings
    for name in parents:
        inner = here.get(name)
        if inner is not None and not isinstance(inner, dict):
            raise ValueError(f"{name} is a single value, it has no keys")
        here[name] = dict(inner or {})  # a copy: the caller's mapping stays as it was
        here = here[name]
    here[leaf] = value


def _describe(fault: ErrorDetails, file: str, sources: Mapping[str, str]) -> str:
    """One line: where (the file and the key, or the flag), what, and what was found."""
    key = ".".join(str(part) for part in fault["loc"] if part != "function-before[_as_paths()]")
    where = f"{file}: {key}"
    for given, source in sources.items():
        if key == given or given.startswith(f"{key}."):
            where = source
        elif key.startswith(f"{given}."):
            where = f"{source}: {key.removeprefix(given + '.')}"
    return f"{where}: {explain(fault, _known(fault['loc']))}"


def explain(fault: ErrorDetails, known: Sequence[str]) -> str:
    """What is wrong with a value, and what was found; `known`: the keys that there are."""
    found = fault["input"]
    match fault["type"]:
        case "extra_forbidden":
            near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
            return "unknown key; " + (
                f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
            )
        case "missing":
            return "is missing"
        case "int_parsing" | "int_type" | "int_from_float":
            what = "must be a whole number"
        case "float_parsing" | "float_type":
            what = "must be a number"
        case "model_type":
            what = "must be a section with keys of its own"
        case "tuple_type":
            what = "must be a path or a list of paths"
        case "value_error":
            return str(fault["ctx"]["error"])
        case _:
            what = fault["msg"].replace("Input should be", "must be")
    return f"{what}, found {found!r}"


def _known(location: tuple[int | str, ...]) -> list[str]:
    sections: dict[object, type[BaseModel]] = {
        "gumbel": GumbelConfig,
        "linear": LinearConfig,
        "compare": CompareConfig,
    }
    model = sections.get(location[0], Config) if len(location) > 1 else Config
    return list(model.model_fields)


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list) else f"the single value {str(value)[:40]!r}"
