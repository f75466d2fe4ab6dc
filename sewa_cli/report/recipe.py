"""How to build an averaged file again."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from sewa_cli.report.part import Part


class Source(Part):
    """An input of the averaged file, and its weight in it."""

    path: str
    coefficient: float
    size: int
    sha256: str = Field(
        description="of several files (a sharded set, a folder): of what `sha256sum` lists for them"
    )


class OutputFile(Part):
    """A file of what was written, as it was then."""

    path: str = Field(description="relative to the folder that the output stands in")
    size: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Recipe(Part):
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


class Rebuildable(BaseModel):
    """As much of any report as `sewa apply` needs."""

    model_config = ConfigDict(defer_build=True)

    schema_version: Literal[1, 2]
    recipe: Recipe
