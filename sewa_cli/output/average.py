"""An averaged checkpoint as a recipe: sources, weights, names; built, written, and built again.

`select` makes one and `apply` reads it back from a report, so both go through the same lines and
give the same bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from itertools import groupby
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np

from sewa_cli.checkpoints import (
    Checkpoint,
    Reads,
    check_agreement,
    files_of,
    open_checkpoint,
    pairs,
    stamp_of,
)
from sewa_cli.checkpoints.mapped import views
from sewa_cli.dtypes import DTYPES, WORDS, Array, as_tensor
from sewa_cli.errors import CheckpointError, OutputError
from sewa_cli.output.atomic import sha256_of, split_into_shards, write_safetensors
from sewa_cli.output.mean import Room, in_order, is_finite, pieces, thread_count, weighted_mean
from sewa_cli.report.recipe import Recipe, Source

if TYPE_CHECKING:
    from torch import Tensor

Piece = tuple[str, Array]  # a tensor's name, and some of its elements


@dataclass
class Averaged:
    """The mean of `sources` (in step order), tensor by tensor, never whole in memory."""

    sources: list[Checkpoint]
    coefficients: list[float]
    names: dict[str, str]  # name in the output → name in the checkpoints
    dtype: str | None = None  # of floating-point tensors; None: as in the checkpoints
    metadata: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, Array] = field(default_factory=dict)  # recomputed, not averaged
    state_key: str | None = None  # where PyTorch files have their weights, if the user had to say
    lora: Literal["factors", "merged"] | None = None
    facts: dict[str, str] = field(default_factory=dict)  # more that a model card should say

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All of them, whole, one by one: the very bytes that `write` writes."""
        with closing(self.pieces(list(self.names))) as stream:
            for name, parts in groupby(stream, key=lambda piece: piece[0]):
                whole = np.empty(self._shape(name), self.dtype_of(name))
                flat, filled = whole.reshape(-1), 0
                for _, piece in parts:
                    flat[filled : filled + piece.size] = piece
                    filled += piece.size
                yield name, as_tensor(whole)

    def pieces(self, names: Sequence[str]) -> Generator[Piece, None, None]:
        """These tensors in this order, in flat pieces [≤ PIECE]; a few are made ahead.

        A piece is valid until the next is asked for.
        """
        return in_order(job for name in names for job in self._jobs(name))

    def _jobs(self, name: str) -> Iterable[Callable[[Room], Piece]]:
        source = self.names[name]
        if name in self.replaced:
            whole = self.replaced[name]
        elif not self.sources[0].tensors[source].is_float:
            whole = self.sources[-1].read_array(source)  # counters are never averaged
        else:
            parts = [pieces(checkpoint.read_array(source)) for checkpoint in self.sources]
            return (partial(self._mean, name, piece) for piece in zip(*parts, strict=True))
        return (partial(_as_it_is, name, piece) for piece in pieces(whole))

    def _mean(self, name: str, parts: Sequence[Array], room: Room) -> Piece:
        try:
            return name, weighted_mean(parts, self.coefficients, self.dtype_of(name), room)
        except ValueError as error:
            for checkpoint, part in zip(self.sources, parts, strict=True):
                if not is_finite(part):
                    raise CheckpointError(
                        f"{checkpoint.path}: {self.names[name]} holds NaN or Inf; leave it out"
                    ) from error
            raise OutputError(f"{name}: {error}; choose a wider --output-dtype") from error

    def dtype_of(self, name: str) -> np.dtype[Any]:
        """What a tensor is written as."""
        return DTYPES[self._word(name)]

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.sources[0].tensors[self.names[name]].shape

    def _word(self, name: str) -> str:
        info = self.sources[0].tensors[self.names[name]]
        return WORDS[self.dtype] if info.is_float and self.dtype else info.dtype

    def sizes(self) -> dict[str, int]:
        """Bytes of each tensor of the output."""
        return {n: prod(self._shape(n)) * self.dtype_of(n).itemsize for n in self.names}

    def shards(self, limit: int | None) -> list[list[str]]:
        """The names that go into each file; None: all into one."""
        return [list(self.names)] if limit is None else split_into_shards(self.sizes(), limit)

    def write(self, file: IO[bytes], names: Sequence[str] | None = None) -> None:
        """A safetensors file of all tensors, or of one shard's."""
        sizes = self.sizes()
        entries = {
            name: (self._word(name), self._shape(name), sizes[name])
            for name in (self.names if names is None else names)
        }
        write_safetensors(file, entries, self.pieces, self.metadata)

    def check_sources(self) -> None:
        """Refuse sources that somebody wrote to; to be called when all of them was read.

        Hashes are taken between opening and this, so they too are of what was read.
        """
        for checkpoint in self.sources:
            checkpoint.check_unchanged()

    def recipe(self) -> Recipe:
        """Hashes the sources, so that a rebuild can tell whether they are still the same."""
        with ThreadPoolExecutor(thread_count()) as pool:
            hashes = list(pool.map(_digest, self.sources))
        kept = self.replaced
        if self.lora == "merged":  # what was re-factored will be again, and need not be kept
            factors = {name for pair in pairs(self.sources[0].tensors) for name in pair}
            kept = {n: array for n, array in kept.items() if self.names[n] not in factors}
        return Recipe(
            working_directory=str(Path.cwd()),
            sources=[
                Source(path=str(c.path), coefficient=weight, size=c.size, sha256=digest)
                for c, weight, digest in zip(self.sources, self.coefficients, hashes, strict=True)
            ],
            tensors=self.names,
            dtype=self.dtype,
            metadata=self.metadata,
            replaced=_packed(kept) if kept else None,
            state_key=self.state_key,
            lora=self.lora,
        )


def _digest(checkpoint: Checkpoint) -> str:
    return sha256_of(checkpoint.files, checkpoint.path)


def _as_it_is(name: str, piece: Array, _: Room) -> Piece:
    return name, piece


def _packed(arrays: Mapping[str, Array]) -> str:
    """A safetensors file as text."""
    file = BytesIO()
    entries = {n: (WORDS[a.dtype.name], a.shape, a.nbytes) for n, a in arrays.items()}
    write_safetensors(file, entries, lambda names: ((n, arrays[n]) for n in names), {})
    return base64.b64encode(file.getvalue()).decode()


def from_recipe(recipe: Recipe, beside: Path) -> Averaged:
    """Open a report's sources again; `beside`: the report's folder, in case the run was moved."""
    reads = Reads()
    sources = []
    for source in recipe.sources:
        above = beside.resolve().parents[:2]  # the report may stand in a folder of its own
        folders = [beside, Path(recipe.working_directory), Path(), *above]
        path = _locate(Path(source.path), folders)
        files = files_of(path)
        stamps = {file: stamp_of(file) for file in files}
        if (size := sum(stamp.size for stamp in stamps.values())) != source.size:
            raise CheckpointError(
                f"{path}: has changed since the report: expected {source.size} bytes, found {size}"
            )
        if (digest := sha256_of(files, path)) != source.sha256:
            raise CheckpointError(
                f"{path}: has changed since the report: expected SHA-256 {source.sha256[:12]}…, "
                f"found {digest[:12]}…"
            )
        checkpoint = open_checkpoint(path, reads, recipe.state_key)
        checkpoint.stamps |= stamps  # from before the hash: what is read must be what was hashed
        sources.append(checkpoint)
    check_agreement(sources)
    lost = next((s for s in recipe.tensors.values() if s not in sources[0].tensors), None)
    if lost is not None:
        raise CheckpointError(f"{sources[0].path}: {lost}: no such tensor; is the report intact?")
    try:
        replaced = views(base64.b64decode(recipe.replaced)) if recipe.replaced else {}
    except ValueError as error:
        raise CheckpointError(f"recipe.replaced: {error}; is the report intact?") from error
    return Averaged(
        sources=sources,
        coefficients=[source.coefficient for source in recipe.sources],
        names=recipe.tensors,
        dtype=recipe.dtype,
        metadata=recipe.metadata,
        replaced=replaced,
        state_key=recipe.state_key,
        lora=recipe.lora,
    )


def _locate(path: Path, folders: list[Path]) -> Path:
    for folder in folders:
        if (folder / path).exists():  # an absolute path stays itself
            return folder / path
    raise CheckpointError(f"{path}: the report's checkpoint is gone")
