"""An averaged checkpoint as a recipe: sources, weights, names; built, written, and built again.

`select` makes one and `apply` reads it back from a report, so both go through the same lines and
give the same bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from itertools import groupby
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from sewa_cli import __version__, ranks
from sewa_cli.checkpoints import (
    WRITTEN_BY,
    Checkpoint,
    Reads,
    check_agreement,
    open_checkpoint,
    pairs,
)
from sewa_cli.checkpoints.checkpoint import Stamp
from sewa_cli.checkpoints.means import mean_since
from sewa_cli.checkpoints.safetensors import views
from sewa_cli.config import Config
from sewa_cli.dtypes import DTYPES, WORDS, Array, as_tensor
from sewa_cli.errors import CheckpointError, ConfigError, OutputError
from sewa_cli.events import Events
from sewa_cli.output.lora import Mode, average_factors
from sewa_cli.output.mean import (
    PIECE,
    Workspace,
    in_order,
    is_finite,
    pieces,
    thread_count,
    weighted_mean,
)
from sewa_cli.output.safetensors import sha256_of, split_into_shards, write_safetensors
from sewa_cli.output.sources import Places, check_source
from sewa_cli.report.recipe import Recipe, RecipeSource
from sewa_cli.report.shared import Lora

if TYPE_CHECKING:
    from torch import Tensor

    from sewa_cli.output.layouts import Form

DEFAULTS = Config()
Piece = tuple[str, Array]  # a tensor's name, and some of its elements


@dataclass(frozen=True)
class Average:
    """The mean of `sources` (in step order), tensor by tensor, never whole in memory."""

    sources: tuple[Checkpoint, ...]
    coefficients: tuple[float, ...]
    names: Mapping[str, str]  # name in the output → name in the checkpoints
    dtype: str | None = None  # of floating-point tensors; None: as in the checkpoints
    state_key: str | None = None  # where PyTorch files have their weights, if the user had to say
    metadata: Mapping[str, str] = field(default_factory=dict)
    replaced: Mapping[str, Array] = field(default_factory=dict)  # not averaged, but recomputed
    lora: Lora | None = None  # None: no LoRA adapters

    @classmethod
    def of(
        cls,
        checkpoints: Sequence[Checkpoint],
        coefficients: Sequence[float],
        names: Mapping[str, str] | None = None,
        *,
        config: Config = DEFAULTS,
        method: str,
        K: int | None = None,
    ) -> Average:
        """Make the average of the checkpoints whose coefficient is not zero.

        names: in the output → in the checkpoints; None: the same. method, K: for the file's
        metadata. Adapters are read, to measure how far averaging A and B apart is off.
        """
        sources, weights = taking_part(checkpoints, coefficients)
        names = names or {name: name for name in checkpoints[0].tensors}
        metadata = _metadata(sources, weights, method, K)
        average = cls(sources, weights, names, config.output_dtype, config.state_key, metadata)
        return average._with_factors(config.lora) if sources[0].kind == "adapter" else average

    @classmethod
    def from_recipe(cls, recipe: Recipe, places: Places) -> Average:
        """Open a report's sources again. Refuses those that are not what they were.

        The recipe may be a stranger's: a field that does not fit the sources is refused by name.
        """
        with ThreadPoolExecutor(thread_count()) as pool:
            found = list(pool.map(partial(_checked, places=places), recipe.sources))
        reads = Reads()
        sources = [
            _open(source, path, stamps, reads, recipe.state_key)
            for source, (path, stamps) in zip(recipe.sources, found, strict=True)
        ]
        check_agreement(sources)
        lost = next((s for s in recipe.tensors.values() if s not in sources[0].tensors), None)
        if lost is not None:
            raise CheckpointError(
                f"{sources[0].path}: {lost}: no such tensor; the report may be corrupted"
            )
        average = cls(
            sources=tuple(sources),
            coefficients=tuple(source.coefficient for source in recipe.sources),
            names=recipe.tensors,
            dtype=recipe.dtype,
            state_key=recipe.state_key,
            metadata=recipe.metadata,
            replaced=unpack(recipe),
        )
        for name, array in average.replaced.items():
            if (array.dtype, array.shape) != (average.dtype_of(name), average._shape(name)):
                raise CheckpointError(
                    f"recipe.replaced: {name}: does not have the dtype and shape of the "
                    "output; the report may be corrupted"
                )
        if recipe.lora is None:
            return average
        factors = {name for pair in pairs(sources[0].tensors) for name in pair}
        if sources[0].kind != "adapter" or not factors <= set(recipe.tensors.values()):
            raise CheckpointError(
                "recipe.lora: does not fit the sources; the report may be corrupted"
            )
        return average._with_factors(recipe.lora)

    def _with_factors(self, mode: Mode) -> Average:
        merged, lora = average_factors(self, mode)
        return replace(self, replaced={**self.replaced, **merged}, lora=lora)

    def with_statistics(self, statistics: Mapping[str, Array]) -> Average:
        """Return the average with recomputed tensors, by their names in the output."""
        return replace(self, replaced={**self.replaced, **statistics})

    def as_written(self, form: Form) -> Average:
        """A file of its own has the model's names; what a trainer loads has the trainer's."""
        if form == "file":
            return self
        return replace(
            self,
            names={name: name for name in self.sources[0].tensors},
            replaced={self.names[name]: array for name, array in self.replaced.items()},
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor, whole: the same bytes that `write` writes."""
        return self.parts(lambda _: None)

    def parts(self, part: Callable[[str], slice | None]) -> Iterator[tuple[str, Tensor]]:
        """Yield the same; where `part` gives a slice, only these numbers of the flat tensor."""
        spans = {name: part(name) for name in self.names}
        jobs = (job for name in self.names for job in self._jobs(name, spans[name]))
        with closing(in_order(jobs)) as stream:
            for name, parts in groupby(stream, key=lambda piece: piece[0]):
                span = spans[name]
                shape = self._shape(name) if span is None else (span.stop - span.start,)
                whole = np.empty(shape, self.dtype_of(name))
                flat, filled = whole.reshape(-1), 0
                for _, piece in parts:
                    flat[filled : filled + piece.size] = piece
                    filled += piece.size
                yield name, as_tensor(whole)

    def pieces(self, names: Sequence[str]) -> Generator[Piece, None, None]:
        """These tensors in this order, in flat pieces [≤ PIECE]; a few are made ahead.

        A piece is valid until the next is asked for. Of several ranks, the first has those of all:
        the others make theirs and send them, in `serve`.
        """
        if not ranks.here().several:
            return in_order(job for name in names for job in self._jobs(name))
        return self._gathered(list(ranks.here().same(names)))

    def serve(self) -> None:
        """Make this rank's part of what rank 0 writes, for as long as it asks."""
        here, nothing = ranks.here(), list[str]()
        while names := here.same(nothing):
            for _, piece in self._own_pieces(names):
                here.send(piece)

    def _own_pieces(self, names: Sequence[str]) -> Generator[Piece, None, None]:
        spans = ((name, self._span(name, ranks.here().rank)) for name in names)
        return in_order(
            job for name, span in spans if span.stop > span.start for job in self._jobs(name, span)
        )

    def _gathered(self, names: Sequence[str]) -> Generator[Piece, None, None]:
        here = ranks.here()
        with closing(self._own_pieces(names)) as own:
            for name in names:
                if prod(self._shape(name)) == 0:
                    yield name, np.empty(0, self.dtype_of(name))
                for rank in range(here.size):
                    span = self._span(name, rank)
                    for start in range(span.start, span.stop, PIECE):
                        if rank == 0:
                            yield next(own)
                            continue
                        piece = np.empty(min(PIECE, span.stop - start), self.dtype_of(name))
                        here.receive(piece, rank)
                        yield name, piece

    def _span(self, name: str, rank: int) -> slice:
        """Return the numbers of a tensor that a rank makes; rank 0 has what is not averaged."""
        shape = self._shape(name)
        is_mean = self.sources[0].tensors[self.names[name]].is_float and name not in self.replaced
        if not is_mean:
            return slice(0, prod(shape) if rank == 0 else 0)
        return ranks.here().columns(shape, rank)

    def _jobs(self, name: str, part: slice | None = None) -> Iterable[Callable[[Workspace], Piece]]:
        source = self.names[name]
        if name in self.replaced:
            whole = self.replaced[name]
        elif not self.sources[0].tensors[source].is_float:
            whole = self.sources[-1].read_array(source)  # counters are never averaged
        elif windows := [c.window for c in self.sources if c.window]:
            width = DTYPES[self.sources[0].tensors[source].dtype].itemsize
            step = min(PIECE, min(windows) // width)
            span = slice(0, prod(self._shape(name))) if part is None else part
            starts = range(span.start, max(span.stop, span.start + 1), step)
            spans = (slice(start, min(start + step, span.stop)) for start in starts)
            return (partial(self._mean_of, name, span) for span in spans)
        else:
            parts = [pieces(checkpoint.read_array(source, part)) for checkpoint in self.sources]
            return (partial(self._mean, name, piece) for piece in zip(*parts, strict=True))
        whole = whole if part is None else whole.reshape(-1)[part]
        return (partial(_as_it_is, name, piece) for piece in pieces(whole))

    def _mean_of(self, name: str, part: slice, workspace: Workspace) -> Piece:
        source = self.names[name]
        for checkpoint in self.sources:
            checkpoint.begin(source, part)
        return self._mean(name, [c.read_array(source, part) for c in self.sources], workspace)

    def _mean(self, name: str, parts: Sequence[Array], workspace: Workspace) -> Piece:
        try:
            return name, weighted_mean(parts, self.coefficients, self.dtype_of(name), workspace)
        except ValueError as error:
            for checkpoint, part in zip(self.sources, parts, strict=True):
                if not is_finite(part):
                    raise CheckpointError(
                        f"{checkpoint.path}: {self.names[name]} holds NaN or Inf; leave it out"
                    ) from error
            raise OutputError(f"{name}: {error}; choose a wider --output-dtype") from error

    def dtype_of(self, name: str) -> np.dtype[Any]:
        """Return the dtype that a tensor is written in."""
        info = self.sources[0].tensors[self.names[name]]
        return DTYPES[WORDS[self.dtype] if info.is_float and self.dtype else info.dtype]

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.sources[0].tensors[self.names[name]].shape

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each tensor of the output."""
        return {n: prod(self._shape(n)) * self.dtype_of(n).itemsize for n in self.names}

    def shards(self, limit: int | None) -> list[list[str]]:
        """Return the names that go into each file; limit None: all into one."""
        return [list(self.names)] if limit is None else split_into_shards(self.sizes(), limit)

    def write(self, file: IO[bytes], names: Sequence[str] | None = None) -> None:
        """Write a safetensors file of all tensors, or of one shard."""
        sizes = self.sizes()
        entries = {
            name: (WORDS[self.dtype_of(name).name], self._shape(name), sizes[name])
            for name in (self.names if names is None else names)
        }
        write_safetensors(file, entries, self.pieces, self.metadata)

    def recipe(self, shard_size: int | None = None, events: Events | None = None) -> Recipe:
        """Hashes the sources, so that a rebuild can tell whether they are still the same."""
        here = ranks.here()  # each hashes some of them
        own = self.sources[here.rank :: here.size]
        with ThreadPoolExecutor(thread_count()) as pool:
            found = pool.map(lambda c: sha256_of(c.files, c.path), own)
            told = (events or Events()).over("hashing the sources", found, len(own))
            parts = here.gather(list(told))
        hashes = [parts[i % here.size][i // here.size] for i in range(len(self.sources))]
        kept = self.replaced
        if self.lora and self.lora.mode == "merged":
            # what was re-factored will be again, and need not be kept
            factors = {name for pair in pairs(self.sources[0].tensors) for name in pair}
            kept = {n: array for n, array in kept.items() if self.names[n] not in factors}
        return Recipe(
            working_directory=str(Path.cwd()),
            sources=[
                RecipeSource(
                    path=c.name,
                    step=c.step,
                    mean_steps=c.mean_steps,
                    since=c.files[1].name if c.averaged and c.files[1:] else None,
                    coefficient=w,
                    size=c.size,
                    sha256=digest,
                )
                for c, w, digest in zip(self.sources, self.coefficients, hashes, strict=True)
            ],
            tensors=dict(self.names),
            dtype=self.dtype,
            metadata=dict(self.metadata),
            replaced=_packed(kept) if kept else None,
            shard_size=shard_size,
            state_key=self.state_key,
            lora=self.lora.mode if self.lora else None,
        )


def _as_it_is(name: str, piece: Array, _: Workspace) -> Piece:
    return name, piece


def _packed(arrays: Mapping[str, Array]) -> str:
    """Return a safetensors file as text."""
    file = BytesIO()
    entries = {n: (WORDS[a.dtype.name], a.shape, a.nbytes) for n, a in arrays.items()}
    write_safetensors(file, entries, lambda names: ((n, arrays[n]) for n in names), {})
    return base64.b64encode(file.getvalue()).decode()


def taking_part(
    checkpoints: Sequence[Checkpoint], coefficients: Sequence[float]
) -> tuple[tuple[Checkpoint, ...], tuple[float, ...]]:
    """Return the checkpoints with a coefficient, by step; integers come from the last."""
    chosen = [pair for pair in zip(checkpoints, coefficients, strict=True) if pair[1] != 0]
    if all(checkpoint.step is not None for checkpoint, _ in chosen):
        chosen.sort(key=lambda pair: pair[0].step or 0)
    return tuple(checkpoint for checkpoint, _ in chosen), tuple(weight for _, weight in chosen)


def _metadata(
    sources: Sequence[Checkpoint], coefficients: Sequence[float], method: str, K: int | None
) -> dict[str, str]:
    """Strings only, as safetensors wants; `format` is what transformers looks for."""
    steps = [c.step if c.step is not None else c.path.name for c in sources]
    about = {
        "format": "pt",
        WRITTEN_BY: __version__,
        "sewa_method": method,
        "sewa_steps": ",".join(map(str, steps)),
    }
    if len(set(coefficients)) > 1:
        about["sewa_coefficients"] = ",".join(map(str, coefficients))
    return about if K is None else {**about, "sewa_K": str(K)}


def unpack(recipe: Recipe) -> dict[str, Array]:
    """The tensors that were not averaged, by their names in the output."""
    try:
        replaced = recipe.replaced and views(base64.b64decode(recipe.replaced, validate=True))
        if unknown := (replaced or {}).keys() - recipe.tensors.keys():
            raise ValueError(f"{min(unknown)!r:.100} is not in recipe.tensors")
    except (ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"recipe.replaced: {error}; the report may be corrupted") from error
    return replaced or {}


def _checked(source: RecipeSource, places: Places) -> tuple[Path, dict[Path, Stamp]]:
    path = places.find(source.path)
    return path, check_source(path, source, places)


def _open(
    source: RecipeSource,
    path: Path,
    stamps: Mapping[Path, Stamp],
    reads: Reads,
    state_key: str | None,
) -> Checkpoint:
    """Open a source of a recipe; its files must stay as they were hashed."""
    try:
        checkpoint = open_checkpoint(path, reads, state_key)
        if source.mean_steps is not None and checkpoint.mean_steps is None:
            earlier = [p for p in stamps if p != path]
            before = open_checkpoint(earlier[0], reads) if earlier else None
            if (mean := mean_since(before, checkpoint)) is None:
                raise CheckpointError(f"{path}: has no interval mean; the report may be corrupted")
            checkpoint = mean
    except ConfigError as error:  # of a flag that nobody has typed
        raise CheckpointError(f"recipe.state_key: {error}") from error
    checkpoint.stamps |= stamps
    return checkpoint
