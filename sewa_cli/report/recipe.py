"""How to build an averaged file again; read from reports that anyone may have written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from sewa_cli.dtypes import RESERVED
from sewa_cli.errors import CheckpointError
from sewa_cli.files import check_values, read_bytes
from sewa_cli.report.shared import Part
from sewa_cli.text import one_line

MOST: Final = 2**26  # bytes of a report that are read
MOST_SOURCES: Final = 100_000
LONGEST: Final = 4096  # of a path, as the system has it
LARGEST: Final = 2**63 - 1  # of a file, as the system has it
SHA256: Final = "^[0-9a-f]{64}$"


class OutputFile(Part):
    """A file of what was written, as it was then."""

    path: str = Field(
        min_length=1,
        max_length=LONGEST,
        description="relative to the folder that the output stands in",
    )
    size: int = Field(ge=0, le=LARGEST)
    sha256: str = Field(pattern=SHA256)


class RecipeSource(Part):
    """An input of the averaged file, and its weight in it."""

    path: str = Field(min_length=1, max_length=LONGEST)
    step: int | None = None
    mean_steps: int | None = Field(
        None, ge=1, description="the number of steps it is the mean of; null: a snapshot"
    )
    since: str | None = Field(
        None,
        min_length=1,
        max_length=LONGEST,
        description="of icefall's running means: the earlier file in the same folder",
    )
    coefficient: float = Field(allow_inf_nan=False)
    size: int = Field(ge=0, le=LARGEST)
    sha256: str = Field(
        pattern=SHA256,
        description="of several files (a set, a folder): of what `sha256sum` lists for them",
    )


class Recipe(Part):
    """All that `sewa apply` needs to write the same bytes again."""

    working_directory: str = Field(description="what relative paths in `sources` are relative to")
    sources: list[RecipeSource] = Field(
        min_length=1,
        max_length=MOST_SOURCES,
        fail_fast=True,  # a fault is kept in memory, and there may be a million
        description="in step order; integer tensors come from the last",
    )
    tensors: dict[str, str] = Field(
        min_length=1, description="name in the output → name in the checkpoints"
    )
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = Field(
        description="of floating-point tensors; null: as in the checkpoints"
    )
    metadata: dict[str, str]
    replaced: str | None = Field(
        None, description="recomputed tensors, as base64 of a safetensors file"
    )
    shard_size: int | None = Field(
        None, ge=1, le=LARGEST, description="bytes by which the weights were split; null: one file"
    )
    state_key: str | None = Field(None, description="--state-key, with which the sources were read")
    lora: Literal["factors", "merged"] | None = Field(
        None, description="of adapters: merged if the products were averaged; null: no adapters"
    )


class Rebuildable(BaseModel):
    """The part of any report that `sewa apply` and `sewa verify` need."""

    model_config = ConfigDict(defer_build=True)

    schema_version: Literal[1, 2, 3]
    recipe: Recipe
    kind: str | None = None
    output: str | None = Field(None, min_length=1, max_length=LONGEST)
    files: list[OutputFile] | None = Field(None, fail_fast=True)


def read_report(path: Path) -> Rebuildable:
    """Read a report that describes an average; everything in it is checked."""
    try:
        report = Rebuildable.model_validate(_wanted(read_bytes(path, MOST)))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not a report of sewa: {why(error)}") from None
    if faults := list(_faults(report.recipe)):
        raise CheckpointError(
            *(f"{path}: {fault}; the report may be corrupted" for fault in faults)
        )
    return report


def why(error: ValueError) -> str:
    """Return the first fault, in one line."""
    if not isinstance(error, ValidationError):
        return one_line(error, 200)
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"])) or "the file"
    return one_line(f"{where}: {first['msg']}", 200)


def _wanted(text: bytes) -> dict[str, Any]:
    """Return the fields of `Rebuildable`; pydantic would keep a kilobyte of each wrong value."""
    check_values(text)
    content = from_json(text)
    if not isinstance(content, dict):
        raise ValueError("is not a JSON object")
    recipe = content.get("recipe")
    for name in ("tensors", "metadata"):
        part = recipe.get(name) if isinstance(recipe, dict) else None
        for key, value in part.items() if isinstance(part, dict) else ():
            if type(value) is not str:
                raise ValueError(f"recipe.{name}.{key}: Input should be a valid string")
    return {name: content[name] for name in Rebuildable.model_fields if name in content}


def _faults(recipe: Recipe) -> Iterator[str]:
    """Yield what no method, solver or user of sewa could have made it write."""
    coefficients = [source.coefficient for source in recipe.sources]
    total = sum(coefficients)
    # beyond 1e9 they would not sum to one within rounding, nor give anything but rounding
    if not abs(total - 1) <= 1e-6 or max(map(abs, coefficients)) > 1e9:
        yield f"recipe.sources: the coefficients sum to {total:.6g} instead of 1"
    named = Counter((source.path, source.mean_steps is None) for source in recipe.sources)
    (path, _), times = named.most_common(1)[0]
    if times > 1:
        yield f"recipe.sources: {one_line(path, 100)} is given {times} times"
    if RESERVED in recipe.tensors:
        yield f"recipe.tensors: a tensor cannot be called {RESERVED}"
    source, times = Counter(recipe.tensors.values()).most_common(1)[0]
    if times > 1:
        yield f"recipe.tensors: {one_line(source, 100)} is written {times} times"
