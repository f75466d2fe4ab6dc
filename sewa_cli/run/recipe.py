"""An averaged checkpoint as a recipe: sources, weights, names; built, written, and built again.

`select` makes one and `apply` reads it back from a report, so both go through the same lines and
give the same bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from math import prod
from pathlib import Path
from typing import IO, Literal

import safetensors.torch
import torch
from torch import Tensor

from sewa_cli.average import blocks, in_order, weighted_mean
from sewa_cli.checkpoints import (
    Checkpoint,
    Reads,
    check_agreement,
    files_of,
    open_checkpoint,
    pairs,
)
from sewa_cli.errors import CheckpointError, OutputError
from sewa_cli.report import Recipe, Source
from sewa_cli.write import sha256_of, split_into_shards, write_safetensors

# safetensors' words for dtypes
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
WORDS = {str(dtype).removeprefix("torch."): word for word, dtype in DTYPES.items()}


@dataclass
class Averaged:
    """The mean of `sources` (in step order), tensor by tensor, never whole in memory."""

    sources: list[Checkpoint]
    coefficients: list[float]
    names: dict[str, str]  # name in the output → name in the checkpoints
    dtype: str | None = None  # of floating-point tensors; None: as in the checkpoints
    metadata: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, Tensor] = field(default_factory=dict)  # recomputed, not averaged
    state_key: str | None = None  # where PyTorch files have their weights, if the user had to say
    lora: Literal["factors", "merged"] | None = None
    facts: dict[str, str] = field(default_factory=dict)  # more that a model card should say

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All of them, whole, one by one: the very bytes that `write` writes."""
        with closing(self.pieces(list(self.names))) as stream:
            for name, pieces in groupby(stream, key=lambda piece: piece[0]):
                flat = [piece for _, piece in pieces]
                whole = torch.cat(flat) if len(flat) > 1 else flat[0]
                yield name, whole.reshape(self.sources[0].tensors[self.names[name]].shape)

    def pieces(self, names: Sequence[str]) -> Generator[tuple[str, Tensor], None, None]:
        """These tensors in this order, in flat pieces [≤ BLOCK]; a few are made ahead."""
        return in_order(job for name in names for job in self._jobs(name))

    def _jobs(self, name: str) -> Iterable[Callable[[], tuple[str, Tensor]]]:
        source = self.names[name]
        if name in self.replaced:
            parts = [blocks(self.replaced[name])]
        elif not self.sources[0].tensors[source].is_float:
            parts = [blocks(self.sources[-1].read(source))]  # counters are never averaged
        else:
            parts = [blocks(checkpoint.read(source)) for checkpoint in self.sources]
            return (partial(self._mean, name, block) for block in zip(*parts, strict=True))
        return (partial(_as_it_is, name, block) for block in parts[0])

    def _mean(self, name: str, parts: Sequence[Tensor]) -> tuple[str, Tensor]:
        dtype = getattr(torch, self.dtype) if self.dtype else None
        try:
            return name, weighted_mean(parts, self.coefficients, dtype)
        except ValueError as error:
            for checkpoint, part in zip(self.sources, parts, strict=True):
                if not torch.isfinite(part.double()).all():
                    raise CheckpointError(
                        f"{checkpoint.path}: {self.names[name]} holds NaN or Inf; leave it out"
                    ) from error
            raise OutputError(f"{name}: {error}; choose a wider --output-dtype") from error

    def dtype_of(self, name: str) -> torch.dtype:
        """What a tensor is written as."""
        return DTYPES[self._word(name)]

    def _word(self, name: str) -> str:
        info = self.sources[0].tensors[self.names[name]]
        return WORDS[self.dtype] if info.is_float and self.dtype else info.dtype

    def sizes(self) -> dict[str, int]:
        """Bytes of each tensor of the output."""
        shapes = {
            name: self.sources[0].tensors[source].shape for name, source in self.names.items()
        }
        return {name: prod(shapes[name]) * self.dtype_of(name).itemsize for name in self.names}

    def shards(self, limit: int | None) -> list[list[str]]:
        """The names that go into each file; None: all into one."""
        return [list(self.names)] if limit is None else split_into_shards(self.sizes(), limit)

    def write(self, file: IO[bytes], names: Sequence[str] | None = None) -> None:
        """A safetensors file of all tensors, or of one shard's."""
        sizes = self.sizes()
        entries = {
            name: (self._word(name), self.sources[0].tensors[self.names[name]].shape, sizes[name])
            for name in (self.names if names is None else names)
        }
        write_safetensors(file, entries, self.pieces, self.metadata)

    def recipe(self) -> Recipe:
        """Hashes the sources, so that a rebuild can tell whether they are still the same."""
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            hashes = list(pool.map(_digest, self.sources))
        kept = self.replaced
        if self.lora == "merged":  # what was re-factored will be again, and need not be kept
            factors = {name for pair in pairs(self.sources[0].tensors) for name in pair}
            kept = {n: tensor for n, tensor in kept.items() if self.names[n] not in factors}
        blob = base64.b64encode(safetensors.torch.save(kept)) if kept else None
        return Recipe(
            working_directory=str(Path.cwd()),
            sources=[
                Source(path=str(c.path), coefficient=weight, size=c.size, sha256=digest)
                for c, weight, digest in zip(self.sources, self.coefficients, hashes, strict=True)
            ],
            tensors=self.names,
            dtype=self.dtype,
            metadata=self.metadata,
            replaced=blob.decode() if blob else None,
            state_key=self.state_key,
            lora=self.lora,
        )


def _digest(checkpoint: Checkpoint) -> str:
    return sha256_of(checkpoint.files, checkpoint.path)


def _as_it_is(name: str, piece: Tensor) -> tuple[str, Tensor]:
    return name, piece


def from_recipe(recipe: Recipe, beside: Path) -> Averaged:
    """Open a report's sources again; `beside`: the report's folder, in case the run was moved."""
    reads = Reads()
    sources = []
    for source in recipe.sources:
        above = beside.resolve().parents[:2]  # the report may stand in a folder of its own
        folders = [beside, Path(recipe.working_directory), Path(), *above]
        path = _locate(Path(source.path), folders)
        files = files_of(path)
        if (size := sum(file.stat().st_size for file in files)) != source.size:
            raise CheckpointError(
                f"{path}: has changed since the report: expected {source.size} bytes, found {size}"
            )
        if (digest := sha256_of(files, path)) != source.sha256:
            raise CheckpointError(
                f"{path}: has changed since the report: expected SHA-256 {source.sha256[:12]}…, "
                f"found {digest[:12]}…"
            )
        sources.append(open_checkpoint(path, reads, recipe.state_key))
    check_agreement(sources)
    lost = next((s for s in recipe.tensors.values() if s not in sources[0].tensors), None)
    if lost is not None:
        raise CheckpointError(f"{sources[0].path}: {lost}: no such tensor; is the report intact?")
    replaced = base64.b64decode(recipe.replaced) if recipe.replaced else None
    return Averaged(
        sources=sources,
        coefficients=[source.coefficient for source in recipe.sources],
        names=recipe.tensors,
        dtype=recipe.dtype,
        metadata=recipe.metadata,
        replaced=safetensors.torch.load(replaced) if replaced else {},
        state_key=recipe.state_key,
        lora=recipe.lora,
    )


def _locate(path: Path, folders: list[Path]) -> Path:
    for folder in folders:
        if (folder / path).exists():  # an absolute path stays itself
            return folder / path
    raise CheckpointError(f"{path}: the report's checkpoint is gone")
